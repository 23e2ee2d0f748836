"""OptimizerPart: the entry of a state for an optimizer, of torch or of any other package, and its way back."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from loopkit.base import generators, sharded
from loopkit.base.kinds import COUNTS, LIST, MAPPING, TEXT, is_number, shown, wrong
from loopkit.base.notes import warn
from loopkit.base.raw import raw
from loopkit.engine.kept import objects
from loopkit.engine.kept.differences import first
from loopkit.errors import StateError
from loopkit.groups import params_of

FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize")
"""Options of torch's optimizers that are true, false or None."""
METHODS = ("step", "zero_grad", "state_dict", "load_state_dict")
"""The methods of an optimizer, also of wrappers without torch's base class."""
GENERATORS = ".generators"
"""The key of the states of an optimizer's own random generators in its saved form, by where it holds them."""
MISSING = object()


class OptimizerPart:
    """The state of one optimizer: its ``state_dict()``, and the name of its class.

    The random generators that it holds in attributes are saved as well, and those of an optimizer that it wraps, as
    private training and noisy rounding have them.

    ``state_dict`` may return more than ``state`` and ``param_groups``; all of it goes to ``load_state_dict``. torch's
    ``load_state_dict`` casts values to the parameter's dtype and makes others of some containers, so values that came
    back in another type are put back as they were saved.

    Args:
        name: Its name among the learner's optimizers.
        optimizer: The optimizer.
    """

    version = 1

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer

    def saved(self) -> dict[str, Any]:
        """Return its saved form; tensors are those in use.

        Raises:
            StateError: It holds a key that is an address or id of a parameter, which no other process has.
        """
        own = dict(self.optimizer.state_dict())
        state: dict[str, Any] = objects.taken_apart(own, _package(self.optimizer))
        self._check_keys(state)
        saved = {"class": type(self.optimizer).__name__, **state}
        drawn = self._drawn()
        if drawn:
            saved[GENERATORS] = drawn
        return saved

    def _drawn(self) -> dict[str, Any]:
        """Return the states of its own random generators."""
        return {path: generators.state_of(each) for path, each in own_generators(self.optimizer)}

    def _check_keys(self, state: Mapping[str, Any]) -> None:
        of_this_process = set()
        for param in params_of(self.optimizer):
            if is_lazy(param):
                continue
            of_this_process.add(id(param))
            if not sharded.is_sharded(param):
                of_this_process.add(param.data_ptr())
        of_this_process.discard(0)
        for path, key in _keys(state, f"optimizers.{self.name}"):
            if type(key) is int and key in of_this_process:
                raise StateError(
                    f"{path} has the key {key}, the id or address of a parameter ({_class(self.optimizer)}): another "
                    f"process has another one, so the state could not be loaded. Save the weights only, "
                    f"Checkpoint(weights_only=True), or let state_dict() number the parameters"
                )

    def problems(self, saved: Mapping[str, Any]) -> list[str]:
        """Compare a saved form, which is well-formed, with the optimizer."""
        here = type(self.optimizer).__name__
        if saved["class"] != here:
            return [f"optimizer {self.name!r}: {saved['class']} in the state, {here} here"]
        unknown = objects.problems(saved, _package(self.optimizer))
        if unknown:
            return [f"optimizer {self.name!r}: {each}" for each in unknown]
        if "param_groups" not in saved:
            return []  # of a wrapper with a form of its own
        before = _sizes(saved["param_groups"])
        now = _sizes(self.optimizer.param_groups)
        if before != now:
            return [f"optimizer {self.name!r}: parameters per group {before} in the state, {now} here"]
        return first(f"entries of optimizer {self.name!r} that do not fit", self._entries(saved))

    def _entries(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the problems in an optimizer's groups and state that it could not resume with."""
        problems = []
        groups = zip(self._own_groups(), saved["param_groups"], strict=True)
        for index, (own, group) in enumerate(groups):
            problems += _group_entries(index, own, group)
        kind = type(self.optimizer).__name__
        if not is_of_torch(self.optimizer) or kind == "LBFGS":
            return problems
        shaped = kind != "Adafactor"
        params = params_of(self.optimizer)
        for index, values in saved["state"].items():
            problems += _state_entries(index, values, params[index], shaped)
        return problems

    def _own_groups(self) -> Sequence[Mapping[str, Any]]:
        """Return its groups, with the options that its ``state_dict`` has: some packages leave some out."""
        groups: Sequence[Mapping[str, Any]] = self.optimizer.param_groups
        if is_of_torch(self.optimizer):
            return groups
        own: Sequence[Mapping[str, Any]] = self.optimizer.state_dict().get("param_groups", groups)
        if _sizes(own) != _sizes(groups):
            return groups
        return own

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Put a saved form back, with the types that it was saved with; return the undo.

        A value that ``load_state_dict`` changes for good is named once.
        """
        undo = self._undo()
        own = self._to_load(saved)
        try:
            self.optimizer.load_state_dict(copy.copy(own))
            self._put_generators(saved.get(GENERATORS, {}))
        except BaseException:
            undo()
            raise
        if type(getattr(self.optimizer, "state", None)) in (dict, defaultdict):
            self._restore_types(own)
        if not is_of_torch(self.optimizer):
            self._compare(own)
        return undo

    def _to_load(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the argument of ``load_state_dict`` for a saved form."""
        apart = ("class", "state", GENERATORS)
        own = {key: self._made(value) for key, value in saved.items() if key not in apart}
        if "param_groups" in own:
            groups = zip(own["param_groups"], self.optimizer.param_groups, strict=True)
            own["param_groups"] = [_with_members(*each) for each in groups]
        if "state" not in saved:
            return own
        state = saved["state"]
        if isinstance(state, Mapping):
            state = {key: self._sharded(key, self._made(each, key)) for key, each in state.items()}
        own["state"] = state
        return own

    def _put_generators(self, states: Mapping[str, Any]) -> None:
        for path, generator in own_generators(self.optimizer):
            if path in states:
                generators.put_state(generator, states[path])

    def _restore_types(self, saved: Mapping[str, Any]) -> None:
        state = self.optimizer.state
        params = params_of(self.optimizer)
        for key, values in saved.get("state", {}).items():
            param = _numbered(params, key)
            place = key if param is None else param
            if place in state:
                device = place.device if isinstance(place, Tensor) else None
                state[place] = _restored(state[place], values, device)

    def _made(self, saved: Any, key: Any = None) -> Any:
        """Make the objects in a saved form again; their tensors are where the parameter of this number is."""
        param = _numbered(params_of(self.optimizer), key)

        def place(tensor: Tensor) -> Tensor:
            return tensor if param is None else tensor.to(param.device)

        return objects.put_together(saved, _package(self.optimizer), place)

    def _sharded(self, key: Any, values: Any) -> Any:
        param = _numbered(params_of(self.optimizer), key)
        if param is None or not isinstance(values, Mapping):
            return values
        return {name: sharded.like_parameter(value, param) for name, value in values.items()}

    def _compare(self, saved: Mapping[str, Any]) -> None:
        """Name what an optimizer of another package has not taken back as it was saved."""
        found = list(_differences("", saved, dict(self.optimizer.state_dict())))
        if found:
            listed = "; ".join(first("values", found, most=3))
            warn(
                f"optimizer {self.name!r} ({_class(self.optimizer)}) does not load its own state as it was saved: "
                f"{listed}. A resumed run may end with other numbers than one that was not stopped"
            )

    def _undo(self) -> Callable[[], None]:
        """Return a function that restores the optimizer's current attributes and options."""
        optimizer = self.optimizer
        drawn = self._drawn()
        attributes = dict(vars(optimizer))
        groups = [dict(group) for group in optimizer.param_groups]

        def undo() -> None:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
            self._put_generators(drawn)

        return undo


def _numbered(params: Sequence[Tensor], key: Any) -> Tensor | None:
    """The parameter of this number; None if the key is none."""
    if type(key) is not int or not 0 <= key < len(params):
        return None
    return params[key]


def malformed(where: str, saved: Mapping[str, Any]) -> list[str]:
    """List what in a saved form is not as `OptimizerPart.saved` makes it, whatever the optimizer."""
    problems = wrong(where, saved, {"class": TEXT})
    if problems or not {"state", "param_groups"} & saved.keys():
        return problems
    problems = wrong(where, saved, {"state": MAPPING, "param_groups": LIST})
    if problems:
        return problems
    known: list[int] = []
    for index, group in enumerate(saved["param_groups"]):
        of_group = wrong(f"{where}.param_groups[{index}]", group, {"params": COUNTS})
        problems += of_group
        if not of_group:
            known += group["params"]
    if problems:
        return problems
    if known != list(range(len(known))):
        problems.append(f"{where}.param_groups do not number the parameters from 0 on")
    for index, values in saved["state"].items():
        if isinstance(index, str):
            continue  # of all parameters together, as some optimizers count their steps
        is_known = type(index) is int and 0 <= index < len(known)
        if not is_known or not isinstance(values, Mapping):
            problems.append(f"{where}.state[{shown(index)}] is {shown(values)}, not a mapping for a parameter")
    return problems


def is_optimizer(value: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Whether an object is an optimizer, by torch's base class or by the methods of its own class."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    kind = type(value)
    methods = all(callable(getattr(kind, name, None)) for name in METHODS)
    return methods and not isinstance(value, torch.nn.Module) and hasattr(value, "param_groups")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of ``torch.optim`` itself."""
    return type(optimizer).__module__.startswith("torch.optim.")


def own_generators(optimizer: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the random generators that an optimizer, or one that it wraps, has as attributes; not the global ones."""
    if isinstance(optimizer, torch.optim.Optimizer) and is_of_torch(optimizer):
        return
    for name, value in vars(optimizer).items():
        if generators.is_generator(value) and not generators.is_global(value):
            yield f"{path}{name}", value
        elif is_optimizer(value) and value is not optimizer:
            yield from own_generators(value, f"{path}{name}.")


def _package(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


def _class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _group_entries(index: int, own: Mapping[str, Any], group: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, value in own.items():
        if key == "params":
            continue
        if key not in group:
            if value is not None and value is not False:  # else a newer torch added it, and defaults to that
                problems.append(f"param_groups[{index}] lacks {key!r}")
        elif not _alike(key, value, group[key]):
            problems.append(f"param_groups[{index}][{key!r}] is {shown(group[key])}, {shown(value)} here")
    return problems


def _state_entries(index: int, values: Mapping[str, Any], param: Tensor, shaped: bool) -> list[str]:
    """Return the problems in a parameter's state that torch's optimizers could not resume with."""
    if is_lazy(param):
        return []
    problems = []
    for key, value in values.items():
        where = f"state[{index}][{key!r}]"
        if isinstance(value, Tensor):
            problems += _tensor_of_state(where, value, param, shaped)
        elif value is None and key == "momentum_buffer":
            continue
        elif not is_number(value):
            problems.append(f"{where} is {shown(value)}, not a tensor or a number")
    return problems


def _tensor_of_state(where: str, value: Tensor, param: Tensor, shaped: bool) -> list[str]:
    is_scalar = value.numel() == 1
    if is_scalar and param.numel() != 1:
        return []
    if shaped and not is_scalar and value.shape != param.shape:
        return [f"{where} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}"]
    if value.is_floating_point() != param.is_floating_point() or value.is_complex() != param.is_complex():
        return [f"{where} is of {value.dtype}, the parameter of {param.dtype}"]
    return []


def _alike(key: str, own: Any, saved: Any) -> bool:
    """Whether a saved option of an optimizer is of the kind of its own; None may stand for any but the flags."""
    if key in FLAGS or isinstance(own, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(own, (tuple, list)) and isinstance(saved, (tuple, list)):
        if len(own) != len(saved):
            return False
        return all(_alike(key, *each) for each in zip(own, saved, strict=True))
    if own is None or saved is None:
        return not isinstance(saved, (Mapping, list))
    if is_number(own):
        return is_number(saved)
    return isinstance(saved, type(own))


def _with_members(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group, in which an option that is a member of an enum here is one again: it is saved as its value."""
    made = dict(saved)
    for key, value in saved.items():
        now = own.get(key)
        if isinstance(value, Enum) or not isinstance(now, Enum):
            continue
        if isinstance(now, type(value)):
            made[key] = type(now)(value)
    return made


def _keys(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    """Yield every key of every mapping and member of every set within, with where it is."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield path, key
            yield from _keys(each, f"{path}[{key!r}]")
    elif isinstance(value, (set, frozenset)):
        for each in value:
            yield path, each
    elif isinstance(value, (list, tuple, deque)):
        for index, each in enumerate(value):
            yield from _keys(each, f"{path}[{index}]")


def _restored(now: Any, saved: Any, device: torch.device | None) -> Any:
    """A value as it was saved; the one that was loaded, where it is the same in type and dtype."""
    if isinstance(saved, Tensor):
        if isinstance(now, Tensor) and now.dtype == saved.dtype:
            return now
        place = now.device if isinstance(now, Tensor) else device
        return saved if place is None else saved.to(place)
    if isinstance(saved, Mapping):
        if not isinstance(now, dict) or now.keys() != saved.keys():
            return _placed(saved, device)
        for key, each in saved.items():
            now[key] = _restored(now[key], each, device)
        return now
    if type(saved) in (list, tuple, deque):
        if type(now) is not type(saved) or len(now) != len(saved):
            return _placed(saved, device)
        items = [_restored(*each, device) for each in zip(now, saved, strict=True)]
        if isinstance(saved, deque):
            return deque(items, saved.maxlen)
        return type(saved)(items)
    return saved


def _placed(saved: Any, device: torch.device | None) -> Any:
    """A copy of a saved value whose tensors are on a device."""
    if isinstance(saved, Tensor):
        return saved if device is None else saved.to(device)
    if isinstance(saved, Mapping):
        return {key: _placed(each, device) for key, each in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_placed(each, device) for each in saved)
    return copy.deepcopy(saved)


def _differences(path: str, saved: Any, now: Any) -> Iterable[str]:
    """Yield where a state differs from the one that was saved, in values or types."""
    if sharded.is_sharded(saved) or sharded.is_sharded(now):
        return
    if isinstance(saved, Tensor) and isinstance(now, Tensor):
        if not same_bits(saved, now):
            yield f"{path} was {_shown(saved)}, and is {_shown(now)}"
    elif isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in {**saved, **now}:
            name = f"{path}[{key!r}]" if path else str(key)
            yield from _differences(name, saved.get(key, MISSING), now.get(key, MISSING))
    elif _are_lists(saved, now):
        for index, (before, after) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{path}[{index}]", before, after)
    elif _numbers_differ(saved, now):
        yield f"{path} was {_shown(saved)}, and is {_shown(now)}"


def _are_lists(one: Any, other: Any) -> bool:
    kinds = (list, tuple, deque)
    return isinstance(one, kinds) and isinstance(other, kinds) and len(one) == len(other)


def _numbers_differ(saved: Any, now: Any) -> bool:
    if saved is MISSING or now is MISSING or isinstance(saved, Tensor) or isinstance(now, Tensor):
        return saved is not now
    both_nan = saved != saved and now != now
    return not both_nan and bool(saved != now)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; they may be on two devices."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    within = objects.tensors_within(one)
    if within:
        others = objects.tensors_within(other)
        if within.keys() != others.keys():
            return False
        return all(same_bits(within[name], others[name]) for name in within)
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return True
    return torch.equal(raw(one.detach().cpu()), raw(other.detach().cpu()))


def _shown(value: Any) -> str:
    if value is MISSING:
        return "missing"
    if not isinstance(value, Tensor):
        return shown(value)
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() == 1 and not objects.tensors_within(value):
        return f"{dtype} {value.item()}"
    return f"a tensor of {dtype} {tuple(value.shape)}"
