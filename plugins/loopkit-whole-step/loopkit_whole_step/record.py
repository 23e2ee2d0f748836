"""Recording a step: the phase's own, the plugins' hooks and the optimizer's, as one graph of tensors."""

from __future__ import annotations

import copy
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from loopkit.author import devices, generators
from loopkit_whole_step import private
from loopkit_whole_step.cells import Cells, optimizer_named
from loopkit_whole_step.python_state import PythonState
from loopkit_whole_step.sealed import Refused, SealedEpoch, SealedLearner, SealedStep, autocast_off

if TYPE_CHECKING:
    from loopkit import Epoch, Event, Learner, Phase, Step
    from loopkit.metrics import Metric

Backend = Callable[[torch.fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]
REPLAYED = "replayed"
"""The attribute of a step that was replayed: the plugins whose hooks of ``step_end`` were."""
SEQUENCE = 32
"""So many steps of a recurrent module are unrolled at most; each costs the compiler some 50 operations."""
ASKS = "it asks for the value of a tensor, by .item() or by a choice that depends on data"
STRANGER = "it uses a tensor that is in no model, phase, loss or batch, such as the scale of the loss in float16"


class Unliftable(Refused):
    """A hook of step_end that has to be called behind the graph."""

    def __init__(self, plugin: str, reason: str) -> None:
        super().__init__(reason)
        self.plugin = plugin


@dataclass(frozen=True)
class Hook:
    """A plugin's hook that is recorded."""

    plugin: str
    owner: Any
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    traced: tuple[str, ...]
    """The attributes of the plugin that it sets."""
    vote: bool = False
    """Whether it is recorded as a vote, by the plugin's own check."""


@dataclass(frozen=True)
class Hooks:
    """The recorded hooks of plugins."""

    calls: dict[type[Event], list[Hook]]
    ends: list[Hook]

    @property
    def owners(self) -> dict[str, Any]:
        """Their plugins."""
        every = [*self.ends, *(hook for hooks in self.calls.values() for hook in hooks)]
        return {hook.plugin: hook.owner for hook in every}

    @property
    def sets(self) -> dict[tuple[str, str], Any]:
        """The attributes that they set, with their plugins."""
        every = [*(hook for hooks in self.calls.values() for hook in hooks), *self.ends]
        return {(hook.plugin, name): hook.owner for hook in every for name in hook.traced}


class Places:
    """Where the tensors of a structure come from: an output of the graph, or a tensor of the batch."""

    def __init__(self, value: Any, given: dict[int, int], outputs: list[Tensor], what: str) -> None:
        leaves, self._spec = tree_flatten(value)
        self.marks: list[tuple[str, Any]] = []
        self.kind, self.only = "", 0
        """Where it comes from, if it is no more than one leaf."""
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                    raise Refused(f"{what} is a {type(leaf).__name__}, which holds tensors where they cannot be seen")
                self.marks.append(("constant", leaf))
            elif id(leaf) in given:
                self.marks.append(("batch", given[id(leaf)]))
            else:
                at = next((i for i, output in enumerate(outputs) if output is leaf), len(outputs))
                if at == len(outputs):
                    outputs.append(leaf)
                self.marks.append(("output", at))
        if len(leaves) == 1 and leaves[0] is value:
            self.kind, self.only = self.marks[0]

    def made(self, outputs: Sequence[Any], batch: Sequence[Any]) -> Any:
        """The structure, of a graph's outputs and a batch's tensors."""
        if self.kind:
            return (
                outputs[self.only] if self.kind == "output" else batch[self.only] if self.kind == "batch" else self.only
            )
        held = {"output": outputs, "batch": batch}
        return tree_unflatten([at if kind == "constant" else held[kind][at] for kind, at in self.marks], self._spec)


class Ends:
    """The values at the ends of a recorded step's updates.

    Args:
        owners: The attributes that hooks set, with their plugins.
    """

    def __init__(self, owners: Mapping[tuple[str, str], Any]) -> None:
        self.grads: dict[str, list[Tensor | None]] = {}
        """By optimizer, its parameters' gradients."""
        self._owners = owners
        self._old = self._now()
        self._then: dict[str, dict[tuple[str, str], Any]] = {}

    def _now(self) -> dict[tuple[str, str], Any]:
        """The values of the attributes, in new containers."""
        return {key: tree_map(lambda leaf: leaf, getattr(owner, key[1])) for key, owner in self._owners.items()}

    def updated(self, name: str, params: Sequence[Tensor]) -> None:
        """An optimizer has made its step."""
        self.grads[name], self._then[name] = [p.grad for p in params], self._now()
        for p in params:
            p.grad = None

    def sets(self) -> dict[str, dict[tuple[str, str], Any]]:
        """The attributes that were set, by the optimizer whose update came next; with one optimizer under ""."""
        last, then = self._now(), self._old
        found: dict[str, dict[tuple[str, str], Any]] = {}
        for name, now in self._then.items() if len(self._then) > 1 else ():
            found[name] = {key: now[key] for key in now if not _is(now[key], then[key]) and self._is_new(key, now)}
            then = now
        changed = {key: value for key, value in last.items() if not _is(value, self._old[key])}
        found[""] = {key: value for key, value in changed.items() if all(key not in each for each in found.values())}
        for key in changed:
            if not _is(last[key] if key not in found[""] else self._old[key], then[key]):
                raise Refused(f"{key[1]} of plugin {key[0]!r} is set in a part at one update, and in a part later")
        return found

    def _is_new(self, key: tuple[str, str], now: dict[tuple[str, str], Any]) -> bool:
        """Whether no tensor of an attribute is one that it held before the step."""
        old = {id(leaf) for leaf in tree_flatten(self._old[key])[0] if isinstance(leaf, Tensor)}
        return not any(id(leaf) in old for leaf in tree_flatten(now[key])[0])


@dataclass
class Recording:
    """One step of a phase for one shape of its batches, which can be recorded, replayed, and run as it is.

    Args:
        given: The learner, which it does not keep alive.
        phase: The phase.
        hooks: The recorded hooks of the plugins.
        cells: The tensors and constants.
        batch: The leaves of a batch, and how it is made of them.
        samples: Of a batch.
        windows: The optimizers' windows, as the step finds them; they differ only by their names.
    """

    given: InitVar[Learner]
    phase: Phase
    hooks: Hooks
    cells: Cells
    batch: tuple[list[Any], Any]
    samples: int
    windows: Sequence[Any]
    call: Callable[..., Any] = field(init=False)
    """The compiled graph."""
    traced: tuple[torch.fx.GraphModule, list[Tensor]] = field(init=False)
    """The recorded graph and its inputs, until it is compiled."""
    constants: list[Any] = field(init=False)
    kinds: list[Any] = field(default_factory=list)
    """The kinds of the inputs, without the batch."""
    python: PythonState = field(init=False)
    """The Python values that the step read while it was recorded."""
    values: dict[str, Places] = field(default_factory=dict)
    sets: dict[str, dict[tuple[str, str], Places]] = field(default_factory=dict)
    """The attributes that hooks set, by the optimizer whose update ends next; "": before all of them."""
    grads: dict[str, list[int | None]] = field(default_factory=dict)
    """By optimizer, the outputs that are its parameters' gradients."""
    fed: dict[str, list[int]] = field(default_factory=dict)
    """The metrics of each plugin that a step changes, by their numbers."""
    seconds: float = 0.0
    draws: bool = False
    votes: bool = False

    def __post_init__(self, given: Learner) -> None:
        self._learner = weakref.ref(given)
        self.where = [i for i, leaf in enumerate(self.batch[0]) if isinstance(leaf, Tensor)]
        self._rates = [np.zeros(()) for _ in self.cells.groups]
        self.rates = [torch.from_numpy(each) for each in self._rates]
        """The learning rates, in the memory of arrays, to which writing a number takes a tenth of the time."""
        self._without_grad = torch.no_grad()
        """One for all replays, which are never nested."""
        self.window = self.windows[0]
        self.sealed = SealedLearner(given)
        self._owners, self._ends = self.hooks.owners, {hook.plugin for hook in self.hooks.ends}
        self._devices = devices.types()
        self._epoch: Callable[[], Epoch | None] = lambda: None
        self.fed_metrics: list[Metric] = []
        self._pointers: list[int] = []
        """Where the inputs were that were found to be of their kinds."""
        self._grads = 0
        """How many of the kinds are gradients."""

    @property
    def learner(self) -> Learner:
        """The learner."""
        learner = self._learner()
        assert learner is not None
        return learner

    @property
    def _names(self) -> list[str]:
        """The names of the optimizers that the phase trains with."""
        return list(self.learner.optimizers) if self.phase.training else []

    # What the graph takes

    def metrics(self, epoch: Epoch) -> dict[str, list[Metric]]:
        """The metrics of an epoch that recorded hooks feed."""
        found = {}
        for hook in self.hooks.ends:
            plugin = hook.owner
            if hasattr(plugin, "traced_metrics"):
                metrics = plugin.traced_metrics(self.learner, epoch)
                if metrics is None:
                    raise Unliftable(hook.plugin, "one of its metrics has to be called")
                found[hook.plugin] = metrics
        return found

    def inputs(self, epoch: Epoch, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of the graph now: the learner's tensors, rates, states of metrics and windows, and the batch."""
        if epoch is not self._epoch():
            every = self.metrics(epoch)
            self._epoch, self.fed_metrics = (
                weakref.ref(epoch),
                [every[name][i] for name, at in self.fed.items() for i in at],
            )
        for rate, group in zip(self._rates, self.cells.groups, strict=True):
            rate[()] = float(group["lr"])
        sums = [value for _, value in self.tensors_of_metrics()]
        grads = [p.grad for p in self.params() if p.grad is not None] if self.window.steps else []
        return [*tensors, *self.cells.state(), *self.rates, *sums, *grads, *[leaves[i] for i in self.where]]

    def tensors_of_metrics(self) -> list[tuple[Metric, Tensor]]:
        """The tensors of the fed metrics, each with its metric."""
        return [(metric, value) for metric in self.fed_metrics for value in _tensors(metric).values()]

    def standing(self, learner: Learner) -> list[Tensor] | None:
        """The learner's tensors; None if something that the graph holds for constant has changed."""
        if learner.loss_fn is not self.sealed.loss_fn:
            return None
        try:
            tensors = self.cells.tensors()
            now = [holder[key] for holder, key in self.cells.scalars]
            now += [each.requires_grad for each in tensors]
        except (KeyError, AttributeError):  # one of them is gone
            return None
        if now != self.constants or any(self.cells.hooks) or private.have_hooks(tensors):
            return None
        return tensors

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether they are of the kinds that the graph was compiled for, which it does not look at itself.

        The batch's are in the key. Others are looked at if their memory is another than in the step before.
        """
        if len(inputs) != len(self.kinds) + len(self.where):
            return False
        grads = len(self.kinds) - self._grads
        pointers = [each.data_ptr() for each in inputs[:grads]]
        if pointers != self._pointers:
            if _kinds(inputs[:grads]) != self.kinds[:grads] or self.cells.order() != self._order:
                return False
            self._pointers = pointers
        return not self._grads or _kinds(inputs[grads : len(self.kinds)]) == self.kinds[grads:]

    def params(self) -> list[Tensor]:
        """The optimizers' parameters."""
        return [p for params in self.cells.params() for p in params]

    def changed(self, epoch: Epoch, cells: Cells, look: bool) -> str:
        """Describe a change since the graph was recorded; an empty string without one.

                Args:
                    epoch: The epoch.
        cells: The cells that were found now.
                    look: Also look at the values that functions read from outside.
        """
        if name := self.cells.replaced_by(cells) or self.cells.changed(self.constants):
            return name
        if not self.fits(self.inputs(epoch, self.batch[0], cells.tensors())):
            return "the dtype, shape, strides or device of a tensor"
        return next(self.python.changes(outside=True), "") if look else ""

    # Recording

    def record(self, epoch: Epoch, worth: Callable[[int], str]) -> None:
        """Record the step.

        Args:
            epoch: The epoch of the step.
            worth: Why a graph of so many operations is not worth compiling; empty if it is.

        Raises:
            Refused: It cannot be recorded, or is not worth compiling.
        """
        started = time.perf_counter()
        every = self.metrics(epoch)
        self.fed = {name: list(range(len(metrics))) for name, metrics in every.items()}
        tensors = [each.detach() for each in self.cells.tensors()]
        self.constants, self.python, self._order = self.cells.constants(), PythonState(self.watched), self.cells.order()
        changed: list[bool] = []
        with self.restored(epoch, changes=True):
            inputs = [each.detach() for each in self.inputs(epoch, self.batch[0], tensors)]
            try:
                with private.short_sequences(SEQUENCE, Refused):
                    graph = private.trace(lambda *flat: self.function(flat, changed), inputs)
            except Refused:
                raise
            except Exception as error:
                if private.depends_on_data(error):
                    raise Refused(ASKS) from None
                if private.meets_a_stranger(error):
                    raise Refused(STRANGER) from None
                raise Refused(f"it cannot be recorded ({_first_line(error)})") from None
        if changed and not all(changed):  # metrics that this phase does not feed stay as they are
            numbers = iter(changed)
            self.fed = {name: [i for i in at if next(numbers)] for name, at in self.fed.items()}
            self._epoch = lambda: None
            with self.restored(epoch):
                inputs = [each.detach() for each in self.inputs(epoch, self.batch[0], tensors)]
                graph = private.trace(lambda *flat: self.function(flat, []), inputs)
        if private.multiply(graph.graph):
            raise Refused(ASKS)
        if name := private.recurrent(graph.graph):
            raise Refused(f"it uses {name}, and what compiles it gave wrong numbers around recurrent operations")
        self.draws = private.draws(graph.graph)
        if reason := worth(len(graph.graph.nodes)):
            raise Refused(reason)
        graph.recompile()
        self.traced = graph, inputs
        self._epoch, self._pointers = (lambda: None), []
        self.kinds = _kinds(inputs[: len(inputs) - len(self.where)])
        self._grads = sum(p.grad is not None for p in self.params()) if self.window.steps else 0
        self.seconds = time.perf_counter() - started

    def compile(self, backend: Backend) -> None:
        """Compile the recorded graph in this process.

        Raises:
            Refused: It cannot be compiled.
        """
        started = time.perf_counter()
        graph, inputs = self.traced
        with torch.no_grad(), autocast_off(), torch.random.fork_rng(devices=[]):
            try:
                self.call = backend(graph, inputs)
                self.call(*map(copied, inputs))  # what is compiled late is compiled now
            except Exception as error:
                raise Refused(f"it cannot be compiled ({_first_line(error)})") from None
        del self.traced
        self.seconds += time.perf_counter() - started

    def called_by(self, call: Callable[..., Any], constants: Sequence[Tensor], seconds: float) -> None:
        """Take over a library of the graph, which takes constants after the inputs, and took so many seconds."""
        self.call = (lambda *inputs: call(*inputs, *constants)) if constants else call
        del self.traced
        self.seconds += seconds

    @contextmanager
    def restored(self, epoch: Epoch, changes: bool = False) -> Iterator[None]:
        """Inside, the phase's step may run: Python's state is put back, and with ``changes`` looked at before."""
        owners = self.hooks.owners
        metrics = self.metrics(epoch)
        free = {f"plugin {name!r}": owner for name, owner in owners.items()}
        free.update({f"metric {i} of {name!r}": m for name, each in metrics.items() for i, m in enumerate(each)})
        own, others = PythonState(self.watched), PythonState(free)
        drawn = generators.save()
        try:
            yield
            if changes and (change := next(own.changes(), "")):
                raise Refused(f"it changes {change}, which a graph would not")
            if changes and (name := _drawing(drawn, generators.save())):
                raise Refused(f"it draws random numbers of {name}, which a graph would not")
        finally:
            own.put_back()
            others.put_back()
            generators.restore(drawn)

    @property
    def watched(self) -> dict[str, Any]:
        """The objects whose Python a step must not change, by name."""
        learner = self.learner
        watched = {"the phase": self.phase, "the loss function": learner.loss_fn}
        watched.update({f"model {name!r}": model for name, model in learner.models.items()})
        return watched | {optimizer_named(learner, name): each for name, each in learner.optimizers.items()}

    def function(self, flat: Sequence[Tensor], changed: list[bool]) -> list[Tensor]:
        """The step, of its inputs: it changes them in place, and returns what else comes of it."""
        cells, window = self.cells, self.window
        given = iter(flat)
        live = cells.tensors()
        tensors = [next(given).detach().requires_grad_(each.requires_grad) for each in live]
        state = [next(given) for _ in cells.state()]
        rates = [next(given) for _ in self.rates]
        held = [{key: next(given) for key in _tensors(metric)} for metric in self.fed_metrics]
        grads = [next(given) if window.steps and p.grad is not None else None for p in self.params()]
        found = list(given)
        before = [(each, each._version, each.clone()) for each in flat] if self._has_votes() else []
        leaves = list(self.batch[0])
        for at, leaf in zip(self.where, found, strict=True):
            leaves[at] = leaf
        for metric, values in zip(self.fed_metrics, held, strict=True):
            metric.load_state_dict(values)
        loaded = [_tensors(metric) for metric in self.fed_metrics]
        votes: list[Tensor] = []
        ends = Ends(self.hooks.sets)
        with cells.replaced(tensors, [_wide(each) for each in state], rates):
            for p, grad in zip(self.params(), grads, strict=True):
                p.grad = grad
            step, last = self._sealed_step(tree_unflatten(leaves, self.batch[1]), votes, ends.updated)
            counts = copy.deepcopy(cells.counts())
            phase_step: Callable[..., Any] = self.phase.step
            with torch.set_grad_enabled(self.phase.training):
                if phase_step(self.sealed, step) is not None:
                    raise Refused("it returns something")
                if not step.complete:
                    raise Refused("it does not call step.backward and step.update once each")
                self._end(step, last)
            if (now_counts := cells.counts()) != counts:
                pairs = zip(counts, now_counts, strict=False)
                key = next((one[0] for one, other in pairs if one != other), "a part")
                raise Refused(f"its optimizer changes {key!r} in Python, which a graph would not")
            now = cells.state()
            if len(now) != len(state):
                raise Refused("its optimizer has made new state, which it does in its first updates")
            with torch.no_grad():
                for old, new in zip(state, now, strict=True):
                    if new is not old:
                        old.copy_(new)
                self._write_rebound(tensors)
            for name, params in zip(self._names, cells.params(), strict=True):
                ends.grads.setdefault(name, [p.grad for p in params])
        changed[:] = self._write_metrics(held, loaded)
        if votes:
            kept = torch.stack([vote.reshape(()) for vote in votes]).all()
            for each, version, old in before:
                if each._version != version:
                    each.copy_(torch.where(kept, each, old))
        return self._outputs(step, ends, found, [kept] if votes else [])

    def _has_votes(self) -> bool:
        return any(hook.vote for hooks in self.hooks.calls.values() for hook in hooks)

    def _sealed_step(
        self, batch: Any, votes: list[Tensor], updated: Callable[[str, Sequence[Tensor]], None]
    ) -> tuple[Any, Any]:
        running = self._epoch()
        assert running is not None
        epoch = SealedEpoch(running)
        given = {"learner": self.sealed, "phase": self.phase, "epoch": epoch}

        def caller(hook: Hook) -> Callable[[SealedStep], Any]:
            if hook.vote:
                return lambda step: votes.append(hook.function(step))
            return lambda step: hook.function(*({**given, "step": step}[name] for name in hook.arguments))

        ends = {hook.plugin: caller(hook) for hook in self.hooks.ends}
        calls = {event: [caller(hook) for hook in hooks] for event, hooks in self.hooks.calls.items()}
        pairs = zip(self.cells.optimizers, self.cells.params(), strict=True)
        optimizers = dict(zip(self._names, pairs, strict=True))
        return SealedStep(epoch, batch, self.samples, calls, optimizers, self.window, updated), ends

    @staticmethod
    def _end(step: SealedStep, ends: Mapping[str, Callable[[SealedStep], Any]]) -> None:
        """The recorded hooks of ``step_end``."""
        for plugin, call in ends.items():
            try:
                call(step)
            except Exception as error:
                raise Unliftable(plugin, str(error)) from error

    def _write_rebound(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that the step has put in the place of given ones."""
        for slots, old in zip(self.cells.slots, tensors, strict=True):
            now = slots[0][0].get(slots[0][1])
            if now is not old:
                if not isinstance(now, Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
                    raise Refused(f"it puts something else in the place of {slots[0][1]!r}")
                old.copy_(now)

    def _write_metrics(self, held: list[dict[str, Tensor]], loaded: list[dict[str, Tensor]]) -> list[bool]:
        """Write what metrics have come to; returns which have been fed."""
        changed = []
        for metric, old, before in zip(self.fed_metrics, held, loaded, strict=True):
            now = _tensors(metric)
            changed.append(any(now[key] is not before[key] for key in now))
            for key, value in now.items():
                if value is not before[key]:
                    old[key].copy_(value)
        return changed

    def _outputs(self, step: SealedStep, ends: Ends, found: Sequence[Tensor], first: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = list(first)
        self.votes = bool(first)
        given = {id(leaf): at for at, leaf in zip(self.where, found, strict=True)}
        self.values = {name: Places(value, given, outputs, f"step.{name}") for name, value in step.values.items()}
        self.sets = {
            optimizer: {
                (name, attribute): Places(value, given, outputs, f"{attribute} of plugin {name!r}")
                for (name, attribute), value in values.items()
            }
            for optimizer, values in ends.sets().items()
        }
        self.grads = {}
        for name, grads in ends.grads.items():
            at = Places(grads, given, outputs, "a gradient")
            self.grads[name] = [mark if kind == "output" else None for kind, mark in at.marks]
        return [output.detach() for output in outputs]

    # Replaying

    def is_cast(self) -> bool:
        """Whether autocast is on."""
        return any(map(torch.is_autocast_enabled, self._devices))

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Replay the graph."""
        if self.is_cast():
            with self._without_grad, autocast_off():
                return self.call(*inputs)  # type: ignore[no-any-return]
        with self._without_grad:
            return self.call(*inputs)  # type: ignore[no-any-return]

    def run_as_it_is(self, epoch: Epoch, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Run the step on other tensors, in the graph's place, without compiling."""
        kept = dict(vars(self))
        with self.restored(epoch), torch.enable_grad():
            outputs = self.function(inputs, [])
        for name in ("values", "sets", "grads", "votes"):
            setattr(self, name, kept[name])
        return outputs

    def hand_over(self, step: Step, outputs: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Give the step, the plugins and the engine what came of it."""
        values = {
            name: outputs[places.only] if places.kind == "output" else places.made(outputs, leaves)
            for name, places in self.values.items()
        }
        self.mark(values)
        if not self.phase.training:
            self.give(outputs, leaves)
            vars(step).update(values)
            return
        grads = {name: [None if at is None else outputs[at] for at in each] for name, each in self.grads.items()}
        self.give(outputs, leaves)
        before = partial(self.give, outputs, leaves) if len(self.windows) > 1 else None
        step.applied(values, grads, before=before)

    def mark(self, values: dict[str, Any]) -> None:
        """Note among a step's values that it was replayed."""
        values[REPLAYED] = self._ends

    def give(self, outputs: Sequence[Any], leaves: Sequence[Any], optimizer: str = "") -> None:
        """Set what hooks set of their plugins."""
        for (plugin, attribute), places in self.sets.get(optimizer, {}).items():
            setattr(self._owners[plugin], attribute, places.made(outputs, leaves))


def copied(value: Tensor) -> Tensor:
    """A copy with the same strides."""
    copy = value.detach().clone()
    if copy.stride() != value.stride():
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(copy)
    return copy


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    return [(each.dtype, each.shape, each.stride(), each.device) for each in tensors]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _drawing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The generator that has moved, other than torch's; empty without one."""
    for key, name in (("python", "Python's random"), ("numpy", "NumPy")):
        leaves = zip(tree_flatten(before[key])[0], tree_flatten(now[key])[0], strict=True)
        if not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in leaves):
            return name
    return ""


def _is(one: Any, other: Any) -> bool:
    """Whether two structures hold the same objects."""
    (left, spec), (right, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(map(operator.is_, left, right))


def _tensors(metric: Metric) -> dict[str, Tensor]:
    return metric.tensors() or {}


def _wide(value: Tensor) -> Tensor:
    """A counter in float64: in float32 a correction by a power of it has a thousand times the error."""
    return value.double() if value.ndim == 0 and value.is_floating_point() else value
