"""Where the tensors are that a step reads and writes, and what of Python it may read."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.author import options_of
from loopkit_whole_step import private
from loopkit_whole_step.sealed import Refused

if TYPE_CHECKING:
    from loopkit import Learner, Phase

SCALARS = (bool, int, float, complex, str, type(None))
CONTAINERS = (dict, OrderedDict, list, set)
"""They are no constants of the graph: `PythonState` looks at them."""
INPUTS = ("params", "lr")
"""The options of a parameter group that are inputs of the graph."""
Slot = tuple[dict[Any, Any], Any]
"""A dict and a key of it."""


@dataclass(frozen=True)
class Cells:
    """The tensors of a learner, a phase and a loss function, as inputs of a graph."""

    slots: list[list[Slot]]
    """For each tensor where it is, which may be at several places."""
    scalars: list[Slot]
    """The attributes of modules, the phase, the loss and recorded plugins, and hyperparameters; the options of plugins
    that vote."""
    names: list[str]
    """The names of the scalars."""
    parts: list[tuple[str, Any]]
    """By name the objects that a graph was recorded with: modules, functions, the phase, the loss, the optimizer."""
    hooks: list[dict[int, Any]]
    """Where hooks on modules are kept."""
    optimizers: list[torch.optim.Optimizer]
    voted: set[int]
    """The numbers of those tensors that belong to plugins that vote."""

    @classmethod
    def of(cls, learner: Learner, phase: Phase, plugins: Mapping[str, Any]) -> Cells:
        """Find them.

        Raises:
            Refused: Something has hooks, is compiled already, or counts where it cannot be seen.
        """
        owners = {**{f"model {name!r}": model for name, model in learner.models.items()}, "the phase": phase}
        owners["the loss function"] = learner.loss_fn
        modules: dict[nn.Module, str] = {}
        for name, owner in owners.items():
            inside = [owner] if isinstance(owner, nn.Module) else [v for v in _vars(owner).values() if _is_module(v)]
            for top in inside:
                for path, module in top.named_modules():
                    modules.setdefault(module, f"{name}, {path}" if path else name)
        plain = ((name, owner) for name, owner in owners.items() if not isinstance(owner, nn.Module))
        dicts: list[tuple[str, dict[str, Any]]] = [(name, _vars(owner)) for name, owner in plain]
        for module, name in modules.items():
            _check_recurrent(name, module)
            if private.is_compiled(module):
                raise Refused(f"{name} is compiled by itself already")
            dicts += [(name, vars(module)), (name, module._parameters), (name, module._buffers)]
        parts = [*owners.items(), *((name, module) for module, name in modules.items())]
        if phase.training:
            parts += [(optimizer_named(learner, name), optimizer) for name, optimizer in learner.optimizers.items()]
        slots: dict[int, list[Slot]] = defaultdict(list)
        scalars: dict[tuple[int, Any], tuple[Slot, str]] = {}
        for name, values in dicts:
            for key, value in values.items():
                if value.__class__ in CONTAINERS:  # most of what a module has: hooks, parameters, buffers
                    continue
                if isinstance(value, Tensor):
                    slots[id(value)].append((values, key))
                elif _is_scalar(value):
                    scalars[id(values), key] = (values, key), f"{key} of {name}"
                elif callable(value):
                    parts.append((f"{key} of {name}", value))
        taken: set[int] = set()
        trained = learner.optimizers if phase.training else {}
        for of, optimizer in trained.items():
            _check_form(optimizer_named(learner, of), optimizer)
            for number, group in enumerate(optimizer.param_groups):
                name = f"parameter group {number}" + ("" if len(trained) == 1 else f" of {of!r}")
                parts.append((name, group))
                for key in group:
                    if key not in INPUTS:
                        scalars[id(group), key] = (group, key), f"{key} of {name}"
                if any(id(p) not in slots for p in group["params"]):
                    raise Refused("its optimizer has parameters that are in no model")
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if own & taken:
                raise Refused("a parameter is in two of its optimizers")
            taken |= own
        voted: set[int] = set()
        for name, plugin in plugins.items():
            votes = hasattr(plugin, "vote")
            constants = options_of(plugin) if votes else _vars(plugin)
            for key, value in _vars(plugin).items():
                if isinstance(value, Tensor) and votes:
                    slots[id(value)].append((vars(plugin), key))
                    voted.add(id(value))
                elif _is_scalar(value) and value is not None and key in constants and not key.startswith("_"):
                    scalars[id(vars(plugin)), key] = (vars(plugin), key), f"{key} of plugin {name!r}"
        found = list(scalars.values())
        hooks = [each for module in modules for each in private.hooks_of(module)]
        names = [name for _, name in found]
        optimizers = list(trained.values())
        cells = cls(
            list(slots.values()),
            [slot for slot, _ in found],
            names,
            parts,
            hooks,
            optimizers,
            {i for i, each in enumerate(slots) if each in voted},
        )
        if cells.has_hooks():
            raise Refused("there are hooks on its modules, its parameters or its optimizer")
        return cells

    def has_hooks(self) -> bool:
        """Whether there are hooks on modules, tensors or the optimizer."""
        return (
            any(self.hooks)
            or private.global_hooks() > 0
            or private.have_hooks(self.tensors())
            or any(private.step_hooks(optimizer) for optimizer in self.optimizers)
        )

    def tensors(self) -> list[Tensor]:
        """The tensors as they are now."""
        return [slots[0][0][slots[0][1]] for slots in self.slots]

    def constants(self) -> list[Any]:
        """The values that must not change: scalars, and whether each tensor requires grad."""
        return [holder[key] for holder, key in self.scalars] + [each.requires_grad for each in self.tensors()]

    def counts(self) -> list[Any]:
        """The optimizers' values in Python: of their state, and hyperparameters that are no inputs."""
        states = [values for optimizer in self.optimizers for values in optimizer.state.values()]
        kept = [(key, value) for values in states for key, value in values.items() if not isinstance(value, Tensor)]
        return kept + [(key, value) for group in self.groups for key, value in group.items() if key not in INPUTS]

    def changed(self, before: Sequence[Any]) -> str:
        """The name of a value that differs from earlier `constants`; empty without one."""
        now = self.constants()
        names = [*self.names, *("requires_grad of a parameter" for _ in self.slots)]
        return next((name for name, one, other in zip(names, before, now, strict=True) if one != other), "")

    def replaced_by(self, others: Cells) -> str:
        """The name of a part that differs in cells that were found later; empty without one."""
        pairs = zip(self.parts, others.parts, strict=False)
        if name := next((name for (name, one), (_, other) in pairs if one is not other), ""):
            return name
        sizes, names = [[len(each) for each in cells.slots] for cells in (self, others)], self.names == others.names
        return "" if len(self.parts) == len(others.parts) and sizes[0] == sizes[1] and names else "the modules"

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def params(self) -> list[list[Tensor]]:
        """The parameters of each optimizer."""
        return [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in self.optimizers]

    def state(self) -> list[Tensor]:
        """The tensors of the optimizers' states, in their own order."""
        held = [values for optimizer in self.optimizers for values in optimizer.state.values()]
        return [value for values in held for value in values.values() if isinstance(value, Tensor)]

    def order(self) -> list[Any]:
        """The owners of the tensors of `state`, in order."""
        states = [item for optimizer in self.optimizers for item in optimizer.state.items()]
        return [(id(p), key) for p, values in states for key, value in values.items() if isinstance(value, Tensor)]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor], state: Sequence[Tensor], rates: Sequence[Tensor]) -> Iterator[None]:
        """Inside, other tensors stand in their place.

        Args:
            tensors: In the place of `tensors`.
            state: In the place of `state`.
            rates: The groups' learning rates.
        """
        before, kept = self.tensors(), [optimizer.state for optimizer in self.optimizers]
        groups = [dict(group) for group in self.groups]
        places = {id(old): new for old, new in zip(before, tensors, strict=True)}
        given = iter(state)
        try:
            for optimizer in self.optimizers:
                states: defaultdict[Tensor, Any] = defaultdict(dict)
                for p, values in optimizer.state.items():
                    states[places.get(id(p), p)] = {
                        key: next(given) if isinstance(value, Tensor) else value for key, value in values.items()
                    }
                optimizer.state = states
            for group, rate in zip(self.groups, rates, strict=True):
                group.update({"params": [places[id(p)] for p in group["params"]], "lr": rate, "foreach": False})
                group.update({key: value for key, value in (("capturable", True), ("fused", None)) if key in group})
            for slots, new in zip(self.slots, tensors, strict=True):
                for holder, key in slots:
                    holder[key] = new
            yield
        finally:
            for optimizer, states_before in zip(self.optimizers, kept, strict=True):
                optimizer.state = states_before
            for group, values in zip(self.groups, groups, strict=True):
                group.clear()
                group.update(values)
            for slots, old in zip(self.slots, before, strict=True):
                for holder, key in slots:
                    holder[key] = old
            for _, part in self.parts:
                if isinstance(part, nn.RNNBase):
                    private.list_weights(part)


def _check_recurrent(name: str, module: nn.Module) -> None:
    """Raise for a recurrent module that is not unrolled."""
    if not isinstance(module, nn.RNNBase):
        return
    if isinstance(module, nn.LSTM):
        raise Refused(f"{name} is an LSTM, whose own kernel is faster than its unrolled cells")
    if not isinstance(module, (nn.GRU, nn.RNN)):
        raise Refused(f"{name} is recurrent, and neither nn.GRU nor nn.RNN")
    if module.num_layers > 1 or module.bidirectional:
        raise Refused(f"{name} is recurrent, with several layers or both directions")


def _check_form(name: str, optimizer: Any) -> None:
    """Raise for an optimizer whose rates or state are not in the form that torch's have."""
    for number, group in enumerate(optimizer.param_groups):
        if isinstance(rate := group.get("lr"), bool) or not isinstance(rate, (int, float, Tensor)):
            raise Refused(f"parameter group {number} of {name} has no learning rate that is a number")
    for values in optimizer.state.values():
        if type(values) is not dict:
            raise Refused(f"the state of {name} holds a {type(values).__name__} beside its parameters' states")


def optimizer_named(learner: Learner, name: str) -> str:
    """The name of an optimizer in messages."""
    return "the optimizer" if len(learner.optimizers) == 1 else f"optimizer {name!r}"


def _vars(owner: Any) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, SCALARS) or (isinstance(value, tuple) and all(map(_is_scalar, value)))
