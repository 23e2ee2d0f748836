"""Views of learners and steps that record a plugin's reads and changes."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from fnmatch import fnmatchcase
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from loopkit_insight.syncs import OPTIMIZERS, is_torch, tensors
from torch import Tensor
from torch.overrides import TorchFunctionMode

import loopkit.engine
from loopkit import Step
from loopkit.author import EVERYTHING, Entry, Target, registry_of
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit_testing.bits import Bits, tensors_in
from loopkit_testing.ends import watched_ends


class AccessWatch:
    """Hands guarded views to one plugin, and compares before and after its calls."""

    name = "~access_watch"
    volatile = ("*",)

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.broken: dict[tuple[str, str, str], str] = {}
        """A message for each hook, kind of access and state."""
        self._calls: list[Entry] = []
        self._hooks: list[str] = []
        self._learner_view: _LearnerView | None = None

    @hookimpl
    def instrument_call(self, learner: Learner, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        """Watch the call, if it is the plugin's, and give it views."""
        self.learner, hook = learner, target.hook
        if target.plugin != self.plugin:
            return call

        def watched(*values: Any) -> Any:
            step = next((value for value in values if isinstance(value, Step)), None)
            batch = [value for value in values if value is not learner] if hook == "move_batch" else []
            with self.during(hook, step, batch):
                result = call(*map(self.view, values))
            if result is not None and hook in ("step_context", "epoch_context"):
                return watched_ends(result, lambda: self.during(hook, step))
            if hook in REPLACED and not any(result is value for value in values):
                with self.entered(hook):
                    self.change(REPLACED[hook])
            return result

        return watched

    def watch_groups(self) -> None:
        """Record reads of the optimizers' hyperparameters."""
        for name, optimizer in self.learner.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                optimizer.param_groups[number] = _Group(group, self, name, number)

    @contextmanager
    def entered(self, hook: str) -> Iterator[None]:
        """Charge to this hook what happens inside."""
        entries = [impl.entry for impl in registry_of(self.learner).implementations(hook)]
        self._hooks.append(hook)
        self._calls.append(next(entry for entry in entries if entry.plugin == self.plugin))
        try:
            yield
        finally:
            self._calls.pop()
            self._hooks.pop()

    @contextmanager
    def during(self, hook: str, step: Step | None, batch: Any = ()) -> Iterator[None]:
        """Charge to this hook what happens inside, and compare before and after."""
        before = _snapshot(self.learner)
        tensors: list[_Seen] = [(tensor, _print(tensor), ("batch",)) for tensor in tensors_in(batch)]
        tensors += [] if step is None else _step_tensors(step)
        with self.entered(hook):
            with nullcontext() if hook in UNREAD or hook.endswith("_context") else _ValueReads(self):
                yield
            after = _snapshot(self.learner)
            for key in (before.keys() | after.keys()) - {
                k for k in before.keys() & after.keys() if before[k] == after[k]
            }:
                self.change(*key[0])
            for tensor, seen, states in tensors:
                if _print(tensor) != seen:
                    self.change(*states)

    def view(self, value: Any) -> Any:
        """Return the object that the plugin gets in place of a learner or a step."""
        if value is self.learner:
            self._learner_view = self._learner_view or _LearnerView(self)
            return self._learner_view
        if isinstance(value, Step):
            return vars(value).setdefault("_view", _StepView(value, self))
        return value

    def read(self, state: str, *more: str) -> None:
        """The plugin reads state that has these names now; one of them must be declared."""
        if self._calls:
            entry = self._calls[-1]
            declared = (*entry.reads, *entry.updates, *entry.writes)
            if not any(_covered(each, declared) for each in (state, *more)):
                self._break("reads", state, f'reads=("{state}",)')

    def read_metrics(self) -> None:
        """The plugin goes over all metrics."""
        entry = self._calls[-1] if self._calls else None
        if entry and not any(
            s.split(".")[0] in ("metrics", "*") for s in (*entry.reads, *entry.updates, *entry.writes)
        ):
            self.read("metrics")

    def change(self, *states: str) -> None:
        """The plugin changes state that has these names now; one of them must be declared."""
        if not self._calls:
            return
        entry, hook = self._calls[-1], self._hooks[-1]
        declared = (*entry.updates, *entry.writes)
        if hook == "optimizer_step":
            declared += ("params", "optimizer.state")
        elif hook == "take_step":
            declared += ("params", "optimizer.state", "buffers", "grads", "rng", "progress", "step")
        elif hook == "setup_model" and "model" in declared:
            declared += ("params", "buffers", "optimizer.state")
        if not any(_covered(state, declared) for state in states):
            how = "writes" if states[0].startswith("metrics.") else "updates"
            self._break("changes", states[0], f'{how}=("{states[0]}",)')

    def set_on_learner(self, name: str) -> None:
        """The plugin sets an attribute of the learner now."""
        state = {"models": "model", "optimizers": "optimizer"}.get(name, name)
        if state in ("model", "optimizer", "metrics", "progress"):
            self.change(state)
        elif self._calls and (name, self._calls[-1].provides) != ("world", "sync"):
            self._break("changes", f"learner.{name}", "an attribute of the plugin itself instead")

    def _break(self, access: str, state: str, remedy: str) -> None:
        hook = self._hooks[-1]
        message = f"{hook} of plugin {self.plugin!r} {access} {state!r}, which it does not declare: add {remedy}"
        self.broken.setdefault((hook, access, state), message)


def _covered(state: str, names: Iterable[str]) -> bool:
    """Whether one of the names is this state, or above it."""
    have = state.split(".")
    for name in names:
        want = name.split(".")
        if name == EVERYTHING:
            return True
        if len(want) <= len(have) and all(fnmatchcase(a, b) for a, b in zip(have, want, strict=False)):
            return True
    return False


DOCUMENTED = ("batch", "inputs", "targets", "outputs", "loss")

HANDLES = ("index", "samples", "weight", "seed", "optimizer_name", "optimizer", "params", "_epoch")


def _state_of(attribute: str) -> str:
    return attribute if attribute in DOCUMENTED else f"step.{attribute}"


class _StepView(Step):
    """A step that reports its reads and writes to the watch."""

    def __init__(self, step: Step, watch: AccessWatch) -> None:
        object.__setattr__(self, "_seen", (step, watch))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name != "__dict__":
            return object.__getattribute__(self, name)
        step, watch = object.__getattribute__(self, "_seen")
        if name == "__dict__":
            return _Entries(vars(step), watch, _state_of)
        if name not in HANDLES and not hasattr(Step, name):
            watch.read(_state_of(name))
        return getattr(step, name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "_seen")[0], name)  # raises again, with the step's message

    def __setattr__(self, name: str, value: Any) -> None:
        step, watch = object.__getattribute__(self, "_seen")
        if name != "seed":
            watch.change(_state_of(name))
        setattr(step, name, value)

    def __delattr__(self, name: str) -> None:
        step, watch = object.__getattribute__(self, "_seen")
        watch.change(_state_of(name))
        delattr(step, name)


class _LearnerView(Learner):
    """A learner that reports reads of its metrics and its set attributes to the watch."""

    def __init__(self, watch: AccessWatch) -> None:
        entries = _Entries(watch.learner.metrics, watch, lambda key: f"metrics.{key}")
        object.__setattr__(self, "_seen", (watch, entries))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        watch, entries = object.__getattribute__(self, "_seen")
        if name == "metrics":
            entries.data = watch.learner.metrics
            return entries
        return getattr(watch.learner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        watch = object.__getattribute__(self, "_seen")[0]
        watch.set_on_learner(name)
        setattr(watch.learner, name, value)


class _Entries(UserDict[str, Any]):
    """A mapping that reports its reads and writes to the watch."""

    def __init__(self, data: dict[str, Any], watch: AccessWatch, state: Callable[[str], str]) -> None:
        self.data = data
        self._watch = watch
        self._state = state

    def __contains__(self, key: object) -> bool:
        self._watch.read(self._state(str(key)))
        return key in self.data

    def __getitem__(self, key: str) -> Any:
        self._watch.read(self._state(key))
        return self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._watch.change(self._state(key))
        self.data[key] = value

    def __delitem__(self, key: str) -> None:
        self._watch.change(self._state(key))
        del self.data[key]

    def __iter__(self) -> Iterator[str]:
        if self.data is self._watch.learner.metrics:
            self._watch.read_metrics()
        return iter(self.data)

    def copy(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.items())


class _Group(dict[str, Any]):
    """Hyperparameters that report reads to the watch."""

    def __init__(self, group: dict[str, Any], watch: AccessWatch, optimizer: str, number: int) -> None:
        super().__init__(group)
        self._seen = (watch, optimizer, str(group.get("name", number)).replace(".", "_"))

    def __getitem__(self, key: str) -> Any:
        self._read(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read(key)
        return super().get(key, default)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _read(self, key: str) -> None:
        watch, optimizer, label = self._seen
        if key not in ("params", "name") and not _by_another(sys._getframe(2)):
            watch.read(f"optimizer.{key}", f"optimizer.{key}.{optimizer}.{label}")


REPLACED = {"setup_model": "model", "setup_optimizer": "optimizer", "move_batch": "batch", "setup_data": "data"}
"""The state that a transform changes which returns something else than it was given."""
UNREAD = ("setup_model", "setup_optimizer", "optimizer_step")
"""Hooks in which values may be read: the model that was given, or what the update needs. A context may enter a mode
of torch, which would have to be left before the one that watches; there they are not observed."""
MODULE = ("_call_impl", "_wrapped_call_impl")
ENGINE = os.path.join(os.path.dirname(loopkit.engine.__file__), "")
LOOKS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "data_ptr", "storage_offset"),
    *("type", "get_device", "is_floating_point", "is_complex", "is_contiguous", "untyped_storage", "is_inference"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "randn_like", "rand_like", "new_zeros", "new_empty"),
    *("new_full", "new_ones", "new_tensor", "requires_grad_", "register_hook", "zero_", "grad", "backward"),
    *("register_post_accumulate_grad_hook", "__len__", "__hash__", "__format__", "__repr__", "broadcast_tensors"),
)
"""Operations and attributes that do not depend on a tensor's values."""
VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""The attributes of a tensor that are its values."""


class _ValueReads(TorchFunctionMode):
    """Reports to the watch the parameters, buffers and gradients that a plugin computes with."""

    def __init__(self, watch: AccessWatch) -> None:
        super().__init__()
        self._watch = watch
        self._states: dict[int, tuple[Tensor, str]] = {}
        for model in watch.learner.models.values():
            for buffer in model.buffers():
                self._states[id(buffer)] = buffer, "buffers"
            for p in model.parameters():
                self._states[id(p)] = p, "params"
                if p.grad is not None:
                    self._states[id(p.grad)] = p.grad, "grads"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            looks = name != "__get__" or getattr(func.__self__, "__name__", "") not in VALUES
        else:
            looks = name in LOOKS
        if not looks:
            found = (self._states.get(id(tensor)) for tensor in tensors((*args, *kwargs.values())))
            states = {state for _, state in filter(None, found)}
            if states and not _by_another(sys._getframe(1)):
                for state in states:
                    self._watch.read(state, *(("model",) if state != "grads" else ()))
        return func(*args, **kwargs)


def _by_another(frame: FrameType | None) -> bool:
    """Whether it is a module's forward that computes, an optimizer, or the engine: not the plugin itself."""
    while frame is not None and frame.f_code.co_filename != __file__:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if (name in MODULE and is_torch(file)) or file.startswith((OPTIMIZERS, ENGINE)):
            return True
        frame = frame.f_back
    return False


Key = tuple[tuple[str, ...], str]


def _print(tensor: Tensor) -> Any:
    """Return a value that changes when the tensor is changed or replaced."""
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.layout is not torch.strided:
        return (id(tensor), version)
    return (id(tensor), tensor.data_ptr(), version, Bits(tensor))


@torch.no_grad()
def _snapshot(learner: Learner) -> dict[Key, Any]:
    """The state that is compared, by the names under which a change of it may be declared."""
    found: dict[Key, Any] = {}
    params: dict[str, Tensor] = {}
    for name, module in learner.models.items():
        params.update({f"{name}.{key}": p for key, p in module.named_parameters()})
        for key, buffer in module.named_buffers():
            found[("buffers",), f"{name}.{key}"] = _print(buffer)
        found[("model",), name] = [(id(m), m.training) for m in module.modules()]
    for name, optimizer in learner.optimizers.items():
        found[("optimizer",), f"{name} groups"] = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    label = str(group.get("name", number)).replace(".", "_")
                    states = (f"optimizer.{key}", f"optimizer.{key}.{name}.{label}")
                    for i, item in enumerate(value if isinstance(value, (tuple, list)) else [value]):
                        item = Bits(item) if isinstance(item, Tensor) else copy.deepcopy(item)
                        found[(*states, f"{states[1]}.{i}"), f"{name} {number}"] = item
            params.update({f"{name} {number} {i}": p for i, p in enumerate(group["params"])})
        for index, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                value = Bits(value) if isinstance(value, Tensor) and value.layout is torch.strided else id(value)
                found[("optimizer.state",), f"{name} {index} {key}"] = value
    seen: set[int] = set()
    for name, p in params.items():
        if id(p) not in seen:
            seen.add(id(p))
            found[("params",), name] = _print(p)
            found[("trainable", "params", "model"), name] = p.requires_grad
            if p.grad is not None:  # so that a new parameter changes no gradients
                found[("grads",), name] = _print(p.grad)
    found[("progress",), ""] = astuple(learner.progress)
    found[("rng",), "torch"] = Bits(torch.get_rng_state())
    found[("rng",), "python"] = random.getstate()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found[("rng",), "numpy"] = (kind, keys.tobytes(), *rest)
    return found


_Seen = tuple[Tensor, Any, tuple[str, ...]]
"""A tensor, its former value, and the states that it belongs to, the most special name first."""


def _step_tensors(step: Step) -> list[_Seen]:
    """The tensors on a step."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    names = [name for name in vars(step) if name not in HANDLES and not name.startswith("_")]
    for name in sorted(names, key=lambda name: name == "batch"):
        for tensor in tensors_in(vars(step)[name]):
            found.setdefault(id(tensor), (tensor, []))[1].append(_state_of(name))
    return [(tensor, _print(tensor), tuple(states)) for tensor, states in found.values()]
