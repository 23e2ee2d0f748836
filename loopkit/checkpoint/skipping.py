"""Parts of a saved state that a load leaves out: weights and moments by patterns of names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.base.batches import describe
from loopkit.base.words import nearest
from loopkit.errors import ArgumentError, StateError
from loopkit.groups import covers, named_parameters, nothing_matches, params_of

if TYPE_CHECKING:
    from loopkit.learner import Learner

PARTS = ("weights", "moments")
Skip = str | Iterable[str] | Mapping[str, str | Iterable[str]]
"""Patterns of what is left out, for both parts or for each."""


def skipped(learner: Learner, state: Mapping[str, Any], skip: Skip) -> dict[str, Any]:
    """Return a state in which what patterns cover is as the learner has it now.

    Args:
        learner: It will load the state.
        state: Not changed.
        skip: Patterns of parameters; or a mapping of ``"weights"`` and ``"moments"`` to them.

    Raises:
        ArgumentError: It is neither patterns nor a mapping to them.
        StateError: A pattern matches nothing, or a part is neither of the two.
    """
    weights, moments = _by_part(skip)
    names = _names(learner, state)
    for pattern in dict.fromkeys([*weights, *moments]):
        if not any(covers(pattern, name) for name in names):
            raise StateError(f"skip: pattern {nothing_matches(pattern, names)}")
    made = dict(state)
    if weights:
        own = learner.state_dict(positions=False)
        for part in ("models", "buffers"):
            made[part] = {
                name: _kept(values, own[part].get(name, {}), _prefix(learner, name), weights)
                for name, values in state[part].items()
            }
        if state.get("extras"):
            made["extras"] = {
                owner: _kept_extras(each, (own.get("extras") or {}).get(owner), f"{owner}.", weights)
                for owner, each in state["extras"].items()
            }
        here = {
            f"{_prefix(learner, name)}{key}": each
            for name, values in own["models"].items()
            for key, each in values.items()
        }
        made["plugins"] = {
            name: _walked(each, own["plugins"].get(name), weights, here) for name, each in state["plugins"].items()
        }
    made["optimizers"] = {
        name: _without_moments(learner, name, each, moments) for name, each in state["optimizers"].items()
    }
    made["epochs"] = [_without_gradients(learner, each, [*weights, *moments]) for each in state["epochs"]]
    return made


def _by_part(skip: Any) -> list[list[str]]:
    """The patterns of weights, and of moments."""
    if not isinstance(skip, Mapping):
        return [_patterns(skip, "skip")] * len(PARTS)
    if unknown := [name for name in skip if name not in PARTS]:
        name = str(unknown[0])
        raise StateError(f"skip names {name!r}{nearest(name, PARTS)}: the parts are weights and moments")
    return [_patterns(skip.get(part, ()), f"skip[{part!r}]") for part in PARTS]


def _patterns(given: Any, where: str) -> list[str]:
    """One pattern, or the patterns of an iterable, which is read once."""
    found: list[Any] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if wrong := [each for each in found if not isinstance(each, str)]:
        raise ArgumentError(
            f"{where} is {given!r}: {describe(wrong[0])} is no pattern. Give names or patterns of parameters, such as "
            f"skip='head', skip=['head', '*.bias'] or skip={{'moments': 'head'}}"
        )
    return found


def _prefix(learner: Learner, model: str) -> str:
    return f"{model}." if len(learner.models) > 1 else ""


def _names(learner: Learner, state: Mapping[str, Any]) -> list[str]:
    """The names of all weights, here and in the state."""
    here = [(name, model.state_dict()) for name, model in learner.models.items()]
    both = [*here, *state["models"].items()]
    names = [f"{_prefix(learner, name)}{key}" for name, values in both for key in values]
    names += [name for name, _ in (*learner.models.named_parameters(), *learner.models.named_buffers())]
    names += [f"{owner}.{key}" for owner, each in (state.get("extras") or {}).items() for key in each["tensors"]]
    return list(dict.fromkeys(names))


def _is_covered(name: str, patterns: Sequence[str]) -> bool:
    return any(covers(pattern, name) for pattern in patterns)


def _kept(saved: Mapping[str, Any], own: Mapping[str, Any], prefix: str, patterns: Sequence[str]) -> dict[str, Any]:
    """The saved tensors of a model, with its own in the place of those that are covered."""
    made = {key: value for key, value in saved.items() if not _is_covered(f"{prefix}{key}", patterns)}
    return made | {key: value for key, value in own.items() if _is_covered(f"{prefix}{key}", patterns)}


def _kept_extras(saved: Mapping[str, Any], own: Any, prefix: str, patterns: Sequence[str]) -> dict[str, Any]:
    """The saved tensors of a loss function, phase or plugin, with its own in the place of covered ones."""
    return {
        part: _kept(values, {} if own is None else own.get(part, {}), prefix, patterns)
        for part, values in saved.items()
    }


def _walked(saved: Any, own: Any, patterns: Sequence[str], weights: Mapping[str, Any]) -> Any:
    """A plugin's state, with its own tensors, or else the weights, in the place of those with a covered name."""
    if not isinstance(saved, Mapping):
        return saved
    others = own if isinstance(own, Mapping) else {}
    made = {}
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(key, str) and _is_covered(key, patterns):
            if isinstance(kept := others.get(key, weights.get(key)), Tensor):
                made[key] = kept.detach().clone()
        else:
            made[key] = _walked(value, others.get(key), patterns, weights)
    return made


def _covered_numbers(learner: Learner, optimizer: str, patterns: Sequence[str]) -> Iterator[int]:
    """The numbers of an optimizer's parameters that patterns cover."""
    named = itertools.chain(named_parameters(learner.models), learner.models.named_parameters())
    covered = {id(p) for name, p in named if _is_covered(name, patterns)}
    for number, p in enumerate(params_of(learner.optimizers[optimizer])):
        if id(p) in covered:
            yield number


def _without_moments(learner: Learner, name: str, saved: Any, patterns: Sequence[str]) -> Any:
    if not patterns or name not in learner.optimizers or not isinstance(saved.get("state"), Mapping):
        return saved
    gone = set(_covered_numbers(learner, name, patterns))
    own = learner.optimizers[name].state_dict()["state"]
    values = {key: value for key, value in saved["state"].items() if key not in gone}
    return {**saved, "state": {**values, **{key: own[key] for key in gone if key in own}}}


def _without_gradients(learner: Learner, epoch: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """An open epoch whose windows hold no gradients of covered parameters."""
    windows = {}
    for name, window in epoch["windows"].items():
        gone = set(_covered_numbers(learner, name, patterns)) if name in learner.optimizers else set()
        grads = [None if number in gone else grad for number, grad in enumerate(window["grads"])]
        windows[name] = {**window, "grads": grads}
    return {**epoch, "windows": windows}
