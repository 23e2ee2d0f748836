"""LeftOut: frozen weights that a state leaves out, and knows by their fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from loopkit.base.fingerprint import fingerprint, told, without, without_same
from loopkit.base.kinds import NAMED
from loopkit.base.sharded import is_sharded
from loopkit.groups import covers


class LeftOut:
    """The parameters that plugins leave out of states while they are frozen.

    A state has a fingerprint of each, and a learner that loads it must have the same values. A fingerprint is made
    once, and again where the version of the tensor or its place in memory has changed.

    Args:
        models: The modules by name.
        patterns: Returns the patterns of the parameters that plugins leave out.
    """

    name = "left_out"
    version = 1

    def __init__(self, models: Mapping[str, nn.Module], patterns: Callable[[], Collection[str]]) -> None:
        self._models = models
        self._patterns = patterns
        self._made: dict[tuple[str, str], tuple[tuple[int, int], str | None]] = {}

    def taken(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a collected state without these weights, and with their fingerprints."""
        left: dict[str, dict[str, str]] = {}
        for name, key, parameter in self._chosen():
            if key not in state["models"][name]:
                continue
            made = self._fingerprint(name, key, parameter)
            if made is not None:
                left.setdefault(name, {})[key] = made
        if not left:
            return state
        taken = dict(state)
        taken["models"] = without(state["models"], left)
        taken[self.name] = left
        if "weights" in state:
            measured = state["weights"]
            taken["weights"] = {phase: without_same(models, left) for phase, models in measured.items()}
        return taken

    def filled(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with the own weights of this learner in the place of those that it leaves out."""
        if not NAMED[1](state.get("models")) or malformed(state.get(self.name, {})):
            return dict(state)
        models = dict(state["models"])
        for name, keys in state.get(self.name, {}).items():
            if name in self._models and name in models:
                own = self._parameters(name)
                left = {key: own[key].detach() for key in keys if key in own}
                models[name] = {**left, **models[name]}
        return {**state, "models": models}

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """List the weights that a state leaves out and that are others here."""
        others = []
        for name, keys in state.get(self.name, {}).items():
            own = self._parameters(name)
            for key, made in keys.items():
                if key in own and self._fingerprint(name, key, own[key]) != made:
                    others.append(key)
        return [told(others)] if others else []

    def _parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of a model, all names of each; empty without such a model."""
        if name not in self._models:
            return {}
        return dict(self._models[name].named_parameters(remove_duplicate=False))

    def _chosen(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """The frozen parameters that plugins leave out, by model and name."""
        patterns = self._patterns()
        if not patterns:
            return
        for name, model in self._models.items():
            for key, parameter in model.named_parameters(remove_duplicate=False):
                if parameter.requires_grad or is_lazy(parameter) or is_sharded(parameter):
                    continue
                path = f"{name}.{key}" if len(self._models) > 1 else key
                if any(covers(pattern, path) for pattern in patterns):
                    yield name, key, parameter

    def _fingerprint(self, name: str, key: str, parameter: nn.Parameter) -> str | None:
        if is_lazy(parameter) or is_sharded(parameter):
            return None
        try:
            now = parameter._version, parameter.data_ptr()
        except RuntimeError:  # a class of tensors without a memory of its own
            now = parameter._version, id(parameter)
        known = self._made.get((name, key))
        if known is None or known[0] != now:
            known = now, fingerprint(parameter)
            self._made[name, key] = known
        return known[1]


def malformed(saved: Any) -> list[str]:
    """List what in a saved form is not as `LeftOut.taken` makes it."""
    if NAMED[1](saved) and all(map(_are_fingerprints, saved.values())):
        return []
    return ["left_out holds no fingerprints by model and name"]


def _are_fingerprints(made: Mapping[Any, Any]) -> bool:
    return all(type(key) is str and type(each) is str for key, each in made.items())
