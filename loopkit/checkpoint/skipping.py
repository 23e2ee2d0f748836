"""Parts of a saved state that a load leaves out: weights and moments by patterns of names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
"""Patterns of names to leave out, for both parts or for each."""


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
    patterns = [*weights, *moments]
    _check_patterns(patterns, _names(learner, state))
    made = dict(state)
    if weights:
        made.update(_without_weights(learner, state, weights))
    made["optimizers"] = {
        name: _without_moments(learner, name, each, moments) for name, each in state["optimizers"].items()
    }
    made["epochs"] = [_without_gradients(learner, each, patterns) for each in state["epochs"]]
    return made


def _check_patterns(patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise for a pattern that covers none of the names."""
    for pattern in dict.fromkeys(patterns):
        if not any(covers(pattern, name) for name in names):
            raise StateError(f"skip: pattern {nothing_matches(pattern, names)}")


def _without_weights(learner: Learner, state: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """The parts of a state that hold weights, with the learner's own in the place of those that are covered."""
    own = learner.state_dict(positions=False)
    made: dict[str, Any] = {}
    for part in ("models", "buffers"):
        made[part] = {}
        for name, values in state[part].items():
            made[part][name] = _kept(values, own[part].get(name, {}), _prefix(learner, name), patterns)

    if state.get("extras"):
        own_extras = own.get("extras") or {}
        made["extras"] = {
            owner: _kept_extras(each, own_extras.get(owner) or {}, f"{owner}.", patterns)
            for owner, each in state["extras"].items()
        }

    here = {}
    for name, values in own["models"].items():
        prefix = _prefix(learner, name)
        here.update({f"{prefix}{key}": value for key, value in values.items()})
    made["plugins"] = {
        name: _walked(each, own["plugins"].get(name), patterns, here) for name, each in state["plugins"].items()
    }
    return made


def _by_part(skip: Any) -> list[list[str]]:
    """The patterns of weights, and of moments."""
    if not isinstance(skip, Mapping):
        both = _patterns(skip, "skip")
        return [both] * len(PARTS)
    for part in skip:
        if part not in PARTS:
            name = str(part)
            raise StateError(f"skip names {name!r}{nearest(name, PARTS)}: the parts are weights and moments")
    return [_patterns(skip.get(part, ()), f"skip[{part!r}]") for part in PARTS]


def _patterns(given: Any, where: str) -> list[str]:
    """One pattern, or the patterns of an iterable, which is read once."""
    if isinstance(given, str):
        return [given]
    found: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        if not isinstance(each, str):
            raise ArgumentError(
                f"{where} is {given!r}: {describe(each)} is no pattern. Give names or patterns of parameters, such as "
                f"skip='head', skip=['head', '*.bias'] or skip={{'moments': 'head'}}"
            )
    return found


def _prefix(learner: Learner, model: str) -> str:
    return f"{model}." if len(learner.models) > 1 else ""


def _names(learner: Learner, state: Mapping[str, Any]) -> list[str]:
    """The names of all weights, here and in the state."""
    names: list[str] = []
    here = {name: model.state_dict() for name, model in learner.models.items()}
    for models in (here, state["models"]):
        for model, values in models.items():
            prefix = _prefix(learner, model)
            names += [f"{prefix}{key}" for key in values]
    names += [name for name, _ in learner.models.named_parameters()]
    names += [name for name, _ in learner.models.named_buffers()]
    for owner, each in (state.get("extras") or {}).items():
        names += [f"{owner}.{key}" for key in each["tensors"]]
    return list(dict.fromkeys(names))


def _is_covered(name: str, patterns: Sequence[str]) -> bool:
    return any(covers(pattern, name) for pattern in patterns)


def _kept(saved: Mapping[str, Any], own: Mapping[str, Any], prefix: str, patterns: Sequence[str]) -> dict[str, Any]:
    """The saved tensors of a model, with its own in the place of those that are covered."""
    made = {key: value for key, value in saved.items() if not _is_covered(f"{prefix}{key}", patterns)}
    covered = {key: value for key, value in own.items() if _is_covered(f"{prefix}{key}", patterns)}
    return made | covered


def _kept_extras(
    saved: Mapping[str, Any], own: Mapping[str, Any], prefix: str, patterns: Sequence[str]
) -> dict[str, Any]:
    """The saved tensors of a loss function, phase or plugin, with its own in the place of covered ones."""
    return {part: _kept(values, own.get(part, {}), prefix, patterns) for part, values in saved.items()}


def _walked(saved: Any, own: Any, patterns: Sequence[str], weights: Mapping[str, Any]) -> Any:
    """A plugin's state, with its own tensors, or else the weights, in the place of those with a covered name."""
    if not isinstance(saved, Mapping):
        return saved
    others = own if isinstance(own, Mapping) else {}
    made = {}
    for key, value in saved.items():
        is_named_tensor = isinstance(value, Tensor) and isinstance(key, str)
        if not is_named_tensor or not _is_covered(key, patterns):
            made[key] = _walked(value, others.get(key), patterns, weights)
            continue
        kept = others.get(key, weights.get(key))
        if isinstance(kept, Tensor):
            made[key] = kept.detach().clone()
    return made


def _covered_numbers(learner: Learner, optimizer: str, patterns: Sequence[str]) -> set[int]:
    """The numbers of an optimizer's parameters that patterns cover."""
    named = itertools.chain(named_parameters(learner.models), learner.models.named_parameters())
    covered = {id(p) for name, p in named if _is_covered(name, patterns)}
    parameters = params_of(learner.optimizers[optimizer])
    return {number for number, p in enumerate(parameters) if id(p) in covered}


def _without_moments(learner: Learner, name: str, saved: Any, patterns: Sequence[str]) -> Any:
    """An optimizer's saved state, with its own moments in the place of those of covered parameters."""
    if not patterns or name not in learner.optimizers:
        return saved
    moments = saved.get("state")
    if not isinstance(moments, Mapping):
        return saved
    covered = _covered_numbers(learner, name, patterns)
    own = learner.optimizers[name].state_dict()["state"]
    made = {number: value for number, value in moments.items() if number not in covered}
    made.update({number: own[number] for number in covered if number in own})
    return {**saved, "state": made}


def _without_gradients(learner: Learner, epoch: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """An open epoch whose windows hold no gradients of covered parameters."""
    windows = {}
    for name, window in epoch["windows"].items():
        covered: set[int] = set()
        if name in learner.optimizers:
            covered = _covered_numbers(learner, name, patterns)
        grads = [None if number in covered else grad for number, grad in enumerate(window["grads"])]
        windows[name] = {**window, "grads": grads}
    return {**epoch, "windows": windows}
