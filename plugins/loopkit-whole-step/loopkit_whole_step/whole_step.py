"""WholeStep: the whole training step as one compiled graph."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from loopkit import Event, hookimpl
from loopkit.author import Shown, checks, say
from loopkit.errors import PluginError
from loopkit.events import StepEnd, UpdateEnd
from loopkit_whole_step.cells import SCALARS, Cells
from loopkit_whole_step.compiling import Compiling, steps_left
from loopkit_whole_step.record import REPLAYED, Backend, Hook, Hooks, Recording, Unliftable
from loopkit_whole_step.replay import Replay, Same, in_a_row
from loopkit_whole_step.sealed import Refused
from loopkit_whole_step.shapes import UNTRAINED, Shape, nothing
from loopkit_whole_step.verify import Comparison

if TYPE_CHECKING:
    from loopkit import Epoch, FitResult, Learner, Phase, Step
    from loopkit.author import Target

COMES = 3
"""A shape is compiled when it has come so many times."""
SHAPES = 4
"""So many shapes are compiled at most."""
KNOWN, KEYS = 64, 4096
"""So many are counted at most, and so many forms of batches are found again at once."""
CHANGES = 4
"""So many times a shape is compiled anew, since a constant of it has changed."""
CHECKS = 2
"""So many steps in a row are compared first."""
LOOKS, APART = 3, 1000
"""One more is compared when an epoch begins: the first times in any case, then so many steps after the last."""
TURNS = 10
"""So many steps of either kind are timed."""
KEPT = 0.97
"""A graph is kept that takes at most so much of the eager step's time."""
AFTER = {"update_end", "update_skipped", "step_end"}
"""Hooks that come after the phase's own step, or may."""
BEFORE = {"step_begin", "step_cancelled"}
"""Hooks that are no part of it."""


OWN = "eager, because the phase updates in its own way"


BY_CLOCK = "the graph took over as it came, so the run cannot be repeated bit for bit"
AT_ONCE = "its library was kept, so it took over at once; eager_steps= gives the same step without a library"
GOES_ON = ("pause", "signal")
"""How a fit ends that a later one continues."""


class WholeStep(Shown):
    """Run the training step, with hooks and optimizer, as one compiled graph.

    A step is recorded when a shape of batches has come three times. Inductor compiles it in another process, while the
    training runs eager steps, and the graph takes over between two steps. Two steps are then compared with eager ones,
    on copies; eager and compiled steps take turns until it is known which is faster, and the graph is kept if it takes
    at most 0.97 of the time. At the begin of each epoch one step is compared again. A step that cannot be recorded
    stays eager, with one line that gives the reason, also in `learner.explain()`.

    Args:
        when: ``"auto"``: only where the steps that are left repay the compiling, and if the graph is faster.
            ``"always"``: wherever it can be done.
        backend: The compiler: ``"inductor"``; ``"none"`` runs the recorded graph as it is, for tests; or a function
            ``(graph, inputs) -> callable``.
        eager_steps: Steps of a shape between its recording and the step at which the graph takes over. By default
            as many as are taken to pass while the graph is compiled, counted by its operations, and at most half of
            the steps that are left; none if the library was kept before the run began. With ``when="always"`` it is
            0: the training waits.
        wait: Wait at that step for a graph that is late. Without it the graph takes over when it is there, so that the
            same run has other bits the next time.
        show: Print a line for each shape that was compiled, or why it was not.

    Raises:
        PluginError: An option is none of these.

    Validation and prediction are compiled in the same way.

    What it does not promise: the bits of eager steps. A run that resumes from a checkpoint is bitwise the one that was
    not interrupted, once it is decided which steps are compiled: the decision is saved. Not compiled are: most
    recurrent modules, ``.item()`` and choices that depend on data, several backwards, closures, modules with hooks,
    windows of uneven weights, several processes, optimizers that count in Python.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[WholeStep()])
    """

    name = "whole_step"
    provides = "whole_step"
    own_updates = "whole_step leaves its steps eager"
    syncs = ("take_step",)
    """A step waits for votes, and for the compared tensors while it compares."""
    volatile = ("seconds", "eager", "graph", "began")

    def __init__(
        self,
        when: str = "auto",
        *,
        backend: str | Backend = "inductor",
        eager_steps: int | None = None,
        wait: bool = True,
        show: bool = True,
    ) -> None:
        checks.one_of("WholeStep", ("auto", "always"), when=when)
        if not callable(backend) and backend not in ("inductor", "none"):
            raise PluginError(f"WholeStep(backend={backend!r}): it is 'inductor', 'none' or a function")
        if eager_steps is not None:
            checks.whole("WholeStep", 0, eager_steps=eager_steps)
        self.when, self.backend, self.show = when, backend, show
        self.eager_steps, self.wait = eager_steps, wait
        self._compiling = Compiling(self)
        self.shapes: dict[str, Shape] = {}
        """The records, by phase and shape."""
        self._keys: dict[Any, Shape] = {}
        self._hooks: tuple[Any, Hooks, str] | None = None
        """The plan that they belong to, its recorded hooks, and the reason if none can be recorded."""
        self._after: set[str] = set()
        """Plugins whose hook of ``step_end`` cannot be recorded."""
        self._recorded_ones: dict[tuple[str, str, str], bool] = {}
        """By phase, hook and plugin, whether it may be recorded."""
        self._comparison: Comparison | None = None
        self._looked: dict[str, Callable[[], Any]] = {}
        """By phase, the epoch in which it was last looked whether the rest of it stays eager."""
        self._rests: dict[str, Callable[[], Any]] = {}
        """By phase, the epoch whose remaining steps stay eager."""
        self._replays: dict[str, Replay | Same] = {}
        """By phase that does not train, the graph of its last step, or the form of its batch if it was eager."""

    # The step

    @hookimpl(reads=("*",))
    def take_step(self, learner: Learner, phase: Phase, step: Step, default: Callable[[], None]) -> None:
        """Replay the step, or run it."""
        epoch = step.frame.epoch
        if epoch is self._rests.get(phase.name, nothing)() or phase.own_updates or not step.samples:
            default()
            return
        last = self._replays.get(phase.name)
        if last is not None and last.takes(learner, step, default):
            return
        batch = step.batch
        if batch.__class__ is tuple or batch.__class__ is list:
            leaves = batch
            if {*map(type, leaves)} != {Tensor}:
                leaves = tree_flatten(batch)[0]
        else:
            leaves = [batch] if batch.__class__ is Tensor else tree_flatten(batch)[0]
        (window, *others) = step.window_state if phase.training else UNTRAINED
        key = (
            phase,
            window.steps > 0,
            window.due,
            window.seed,
            torch.is_autocast_enabled("cpu"),
            *[(leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            *[(other.steps > 0, other.due, other.seed) for other in others],
        )
        try:
            shape = self._keys.get(key)
        except TypeError:  # a batch of what has no hash
            default()
            return
        if shape is None:
            shape = self._shape(phase, key, window, others, leaves)
        recording = shape.recording
        if shape.mode == "graph" and recording is not None and epoch is shape.epoch() and shape.plan() is epoch.plan:
            tensors = recording.standing(learner)
            if tensors is not None and recording.samples == step.samples:
                inputs = recording.inputs(epoch, leaves, tensors)
                if recording.fits(inputs):
                    shape.since += self._replay(recording, inputs, step, leaves, default)
                    if not phase.training:
                        in_a_row(self._replays, shape, epoch, step, inputs)
                    return
        self._other(shape, learner, phase, epoch, step, default, leaves)

    def _shape(self, phase: Phase, key: Any, window: Any, others: Any, leaves: Sequence[Any]) -> Shape:
        """A shape that has not come before in this process."""
        looks = [
            (tuple(leaf.shape), str(leaf.dtype), *(() if leaf.is_contiguous() else leaf.stride()))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        name = f"{phase.name} {looks} {key[1:5]}"
        if name not in self.shapes and len(self.shapes) >= KNOWN:
            name = f"{phase.name} others"
            if name not in self.shapes:
                self.shapes[name] = Shape(name)
                self._refuse(self.shapes[name], f"{KNOWN} other shapes came before it")
        shape = self.shapes.setdefault(name, Shape(name))
        if len(self._keys) < KEYS:
            self._keys[key] = shape
        if shape.mode == "eager":
            return shape
        if any((each.steps, each.due, each.seed) != (window.steps, window.due, window.seed) for each in others):
            self._refuse(shape, "its optimizers are at different steps of their updates")
        elif window.seed is None:
            self._refuse(
                shape, "the weights of a window's steps differ, so that its gradients are rescaled", quiet=True
            )
        elif not all(isinstance(leaf, (Tensor, *SCALARS)) for leaf in leaves):
            self._refuse(shape, "its batch holds more than tensors and numbers")
        elif any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            self._refuse(shape, "its batch requires grad")
        return shape

    def _other(
        self,
        shape: Shape,
        learner: Learner,
        phase: Phase,
        epoch: Epoch,
        step: Step,
        default: Callable[[], None],
        leaves: Sequence[Any],
    ) -> None:
        """A step that is not just replayed."""
        if shape.mode == "eager" and self._looked.get(phase.name, nothing)() is not epoch:
            self._looked[phase.name] = ref(epoch)
            self._rests.pop(phase.name, None)
            self._decide_anew(learner, phase, epoch)
        if shape.mode == "eager":
            default()
            self._leave(shape, learner, epoch, step)
            return
        if shape.mode == "building" and shape.recording is not None and not self._compiling.is_due(shape):
            shape.count += 1
            default()
            return
        if shape.recording is not None and shape.recording.samples != step.samples:
            default()
            return
        if shape.recording is not None:
            self._look_again(shape, learner, phase, epoch)
        if shape.recording is None:
            resumed = shape.mode != "counted"
            shape.count += not resumed
            if shape.count <= COMES and not resumed:
                started = time.perf_counter()
                default()
                shape.eager.append(time.perf_counter() - started)
                return
            self._record(shape, learner, phase, epoch, step)
            if shape.mode == "building" and not self._compiling.is_due(shape):
                shape.count += 1
                default()
                return
        if shape.mode == "building" and shape.recording is not None:
            self._take_over(shape, shape.recording)
        recording = shape.recording
        if recording is None:
            default()
        elif shape.mode == "compared":
            self._compare(shape, recording, learner, epoch, step, default, leaves)
        elif shape.mode == "timed" and len(shape.eager) <= len(shape.graph):
            started = time.perf_counter()
            default()
            shape.eager.append(time.perf_counter() - started)
        elif shape.epoch() is not epoch and (shape.looks < LOOKS or shape.since >= APART):
            self._check(shape, recording, epoch, step, default, leaves)
        else:
            shape.epoch = ref(epoch)
            started = time.perf_counter()
            inputs = recording.inputs(epoch, leaves, recording.cells.tensors())
            self._replay(recording, inputs, step, leaves, default)
            if shape.mode == "timed":
                shape.graph.append(time.perf_counter() - started)
                if len(shape.graph) >= TURNS:
                    self._decide(shape)

    @staticmethod
    def _replay(
        recording: Recording,
        inputs: Sequence[Tensor],
        step: Step,
        leaves: Sequence[Any],
        default: Callable[[], None],
    ) -> bool:
        """Replay a step; where a vote is against it, take it anew. Returns whether it stands."""
        random = torch.get_rng_state() if recording.votes and recording.draws else None
        outputs = recording.run(inputs)
        if recording.votes and not outputs[0].item():  # host sync: whether the update was made
            if random is not None:
                torch.set_rng_state(random)
            default()
            return False
        recording.hand_over(step, outputs, leaves)
        return True

    def _decide_anew(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Count the eager shapes whose reason is gone, such as a plugin, as new ones: an epoch begins."""
        eager = [each for each in self._of(phase) if each.mode == "eager"]
        hindered = any(each.everywhere for each in eager) and bool(self._hindrance(learner, phase, epoch))
        left = steps_left(learner, epoch)
        for shape in eager:
            more = shape.left is not None and (self.when == "always" or left > shape.left)
            if more or (shape.everywhere and not hindered):
                shape.reason, shape.everywhere, shape.left = "", False, None
                shape.begin_anew(max(shape.count, COMES + 1))

    def _hindrance(self, learner: Learner, phase: Phase, epoch: Epoch) -> str:
        """Why no step of a phase can be recorded; empty if no reason is known."""
        try:
            if learner.world.size > 1:
                raise Refused("several processes train together")
            if phase.grad_mode != "no_grad" and not phase.training:
                raise Refused(f"its grad_mode is {phase.grad_mode!r}")
            Cells.of(learner, phase, self._recorded(learner, phase, epoch).owners)
        except Refused as refused:
            return str(refused)
        return ""

    def _leave(self, shape: Shape, learner: Learner, epoch: Epoch, step: Step) -> None:
        """Leave the other steps of an epoch to its phase, or the like ones, after an eager step."""
        phase = epoch.phase
        if phase.name not in self._rests:
            self._rests[phase.name] = ref(epoch) if self._may_rest(shape, learner, epoch) else nothing
        if self._rests[phase.name]() is epoch:
            step.frame.leave_steps()
        elif not phase.training:
            self._replays[phase.name] = Same(epoch, step, not self._is_compiled(phase))

    def _may_rest(self, shape: Shape, learner: Learner, epoch: Epoch) -> bool:
        """Whether no step of this epoch will be compiled, judged by an eager shape."""
        if self._is_compiled(epoch.phase):
            return False
        mine = self._of(epoch.phase)
        slowest = max((min(each.eager) for each in mine if each.eager), default=math.inf)
        return shape.everywhere or self._compiling.too_few(steps_left(learner, epoch), slowest)

    def _is_compiled(self, phase: Phase) -> bool:
        """Whether a step of a phase is compiled, or about to be."""
        return any(each.mode in ("building", "compared", "timed", "graph") for each in self._of(phase))

    def _of(self, phase: Phase) -> list[Shape]:
        """The shapes of a phase."""
        return [each for each in self.shapes.values() if each.name.startswith(f"{phase.name} ")]

    def _decide(self, shape: Shape) -> None:
        """Eager and graph have been timed."""
        ratio = shape.ratio
        assert ratio is not None
        if ratio > KEPT:
            self._refuse(shape, f"compiled it takes {ratio:.2f} of the time")
        else:
            shape.mode = "graph"
            self._say(f"{shape.short}: compiled in {shape.seconds:.1f} s, takes {ratio:.2f} of the time")

    # Recording

    def _look_again(self, shape: Shape, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Drop a recording that no longer holds."""
        recording = shape.recording
        assert recording is not None
        try:
            changed = "" if shape.plan() is epoch.plan else "the list of plugins"
            if not changed:
                cells = Cells.of(learner, phase, recording.hooks.owners)
                changed = recording.changed(epoch, cells, look=shape.epoch() is not epoch)
        except Refused as refused:
            self._refuse(shape, str(refused))
            return
        if changed:
            shape.begin_anew(0)
            shape.changes += 1
            if shape.changes > CHANGES:
                self._refuse(shape, f"{changed} changes from time to time")

    def _record(self, shape: Shape, learner: Learner, phase: Phase, epoch: Epoch, step: Step) -> None:
        """Record and compile a shape, or give the reason."""
        if reason := self._hindrance(learner, phase, epoch):
            shape.everywhere = True
            self._refuse(shape, reason)
            return
        others = sum(each.mode not in ("counted", "eager") for each in self.shapes.values() if each is not shape)
        if others >= SHAPES:
            self._refuse(shape, f"{SHAPES} other shapes are compiled already")
            return
        try:
            while True:
                hooks = self._recorded(learner, phase, epoch)
                if reason := self._worth(shape, learner, epoch, 0):
                    raise Refused(reason)
                cells = Cells.of(learner, phase, hooks.owners)
                batch = tree_flatten(step.batch)
                self._compiling.expect(shape, learner)
                windows = step.window_state if phase.training else UNTRAINED
                made = Recording(learner, phase, hooks, cells, batch, step.samples, windows)
                try:
                    made.record(epoch, lambda nodes: self._worth(shape, learner, epoch, nodes))
                    break
                except Unliftable as hook:
                    if hook.plugin in self._after:
                        raise
                    self._after.add(hook.plugin)
                    self._hooks = None
            has_graph = self._compiling.start(shape, made, learner, epoch)
        except Refused as refused:
            self._refuse(shape, str(refused))
            return
        finally:
            self._compiling.rest(self.shapes.values())
        shape.recording, shape.plan = made, ref(epoch.plan)
        if shape.mode not in ("building", "compared"):
            self._say(f"{shape.short}: compiled again in {made.seconds:.1f} s")
        elif not has_graph and (more := shape.takes - shape.count) > 0:
            self._say(f"{shape.short} is compiled beside the training, and takes over after {more} more steps")

    def _recorded(self, learner: Learner, phase: Phase, epoch: Epoch) -> Hooks:
        """The recorded hooks of plugins, in the plan's order.

        Raises:
            Refused: A hook in the step has to be called.
        """
        plan = epoch.plan
        if self._hooks is None or self._hooks[0]() is not plan:
            hooks, reasons = _sorted(learner, phase, plan.order, self._after)
            self._hooks = ref(plan), hooks, "; ".join(reasons)
        if self._hooks[2]:
            raise Refused(self._hooks[2])
        return self._hooks[1]

    # Compiling

    def _worth(self, shape: Shape, learner: Learner, epoch: Epoch, nodes: int) -> str:
        seen = sum(each.count for each in self._of(epoch.phase))
        return self._compiling.worth(shape, learner, steps_left(learner, epoch) * shape.count / max(seen, 1), nodes)

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """End the process that compiles."""
        for shape in self.shapes.values():
            shape.leave(goes_on=result.reason in GOES_ON)
        self._compiling.worker.close()

    def _take_over(self, shape: Shape, recording: Recording) -> None:
        """The compiled graph takes over, after it has been compared."""
        try:
            self._compiling.wait_for(shape, recording)
        except Refused as refused:
            self._refuse(shape, str(refused))
            return
        self._compiling.rest(self.shapes.values())
        if shape.by_clock:
            self._say(f"{shape.short}: {BY_CLOCK}")

    # Trust, but verify

    def _compare(
        self,
        shape: Shape,
        recording: Recording,
        learner: Learner,
        epoch: Epoch,
        step: Step,
        default: Callable[[], None],
        leaves: Sequence[Any],
    ) -> None:
        """An eager step, and the graph on copies."""
        comparison = Comparison(recording, epoch, leaves, len(recording.where))
        before = learner.progress.updates
        with comparison.watching():
            default()
        if recording.votes and not comparison.kept:
            return  # a plugin had something to say: nothing to compare
        updated = learner.progress.updates != before
        if difference := comparison.difference(step, updated):
            if shape.misses_again(comparison.gross):
                self._refuse(shape, f"compared, it is not the same: {difference}")
            return
        shape.misses = 0
        self._comparison = comparison
        shape.checks += 1
        if shape.checks >= CHECKS:
            shape.mode = "graph" if self.when == "always" else "timed"
            shape.epoch, shape.eager, shape.graph = ref(epoch), [], []
            if self.when == "always":
                self._say(f"{shape.short}: compiled in {shape.seconds:.1f} s")

    def _check(
        self,
        shape: Shape,
        recording: Recording,
        epoch: Epoch,
        step: Step,
        default: Callable[[], None],
        leaves: Sequence[Any],
    ) -> None:
        """A compiled step, and the same as it is on copies: an epoch begins, or resumes."""
        shape.epoch, shape.looks, shape.since = ref(epoch), shape.looks + 1, 0
        comparison = Comparison(recording, epoch, leaves, len(recording.where), live=True)
        if recording.votes and not comparison.kept:
            comparison.draw_again()
            default()
            return
        if difference := comparison.difference_from_plain(epoch):
            if comparison.gross:
                comparison.take_plain()
            if shape.misses_again(comparison.gross):
                self._refuse(shape, f"compared at the begin of an epoch, it is not the same any more: {difference}")
            else:
                shape.epoch = nothing  # the next step is compared, too
        else:
            shape.misses = 0
        recording.hand_over(step, comparison.outputs, leaves)

    # Around it

    @hookimpl
    def instrument_call(self, learner: Learner, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out the hooks of a step's end that were replayed; note where each hook is."""
        options = getattr(target.function, "loopkit_options", None)
        recorded = options is not None and options.traced is not None
        self._recorded_ones[target.phase, target.hook, target.plugin] = recorded or _votes(target)
        if target.hook != "step_end":
            return call
        plugin = target.plugin
        at = target.arguments.index("step") if "step" in target.arguments else -1

        def unless_replayed(*values: Any) -> Any:
            if plugin in vars(values[at]).get(REPLAYED, ()):
                return None
            result = call(*values)
            if self._comparison is not None:
                self._compare_metrics(plugin)
            return result

        return unless_replayed if at >= 0 and recorded else call

    def _compare_metrics(self, plugin: str) -> None:
        comparison = self._comparison
        assert comparison is not None
        if plugin in comparison.recording.fed:
            self._comparison = None
            if difference := comparison.difference_of_metrics():
                self._after.add(plugin)
                self._hooks = None
                for shape in self.shapes.values():
                    if shape.recording is comparison.recording:
                        shape.begin_anew(COMES)
                self._say(f"{plugin} is updated after the compiled step: {difference}")

    def _refuse(self, shape: Shape, reason: str, quiet: bool = False) -> None:
        shape.mode, shape.reason, shape.recording = "eager", reason, None
        if not quiet and sum(each.reason == reason for each in self.shapes.values()) == 1:
            self._say(f"{shape.short} stays eager, because {reason}")

    def _say(self, text: str) -> None:
        if self.show:
            say(f"whole_step: {text}")

    def explain(self, phase: Phase, hook: str) -> str:
        """The decisions, for ``learner.explain()``."""
        if hook != "take_step":
            return ""
        if phase.own_updates:
            return OWN
        said = []
        for shape in self.shapes.values():
            if shape.name.startswith(f"{phase.name} ") and shape.mode != "counted":
                ratio = "" if shape.ratio is None else f", {shape.ratio:.2f} of the time"
                is_graph = f"a graph, compiled in {shape.seconds:.1f} s{ratio}"
                if shape.mode == "building":
                    is_graph = "eager while another process compiles it"
                elif shape.by_clock:
                    is_graph += f"; {BY_CLOCK}"
                elif shape.known and self._compiling.is_estimated:
                    is_graph += f"; {AT_ONCE}"
                said.append(f"{shape.short}: {is_graph if shape.mode != 'eager' else f'eager, because {shape.reason}'}")
        return "; ".join(said)

    def remark(self, phase: Phase, hook: str, plugin: str) -> str:
        """Where each plugin's hook is, for ``learner.explain()``."""
        if not phase.training or plugin == self.name:
            return ""
        if hook == "optimizer_step":
            return "keeps the step eager, because it takes the optimizer's step"
        recorded = self._recorded_ones.get((phase.name, hook, plugin), False)
        if hook in AFTER:
            return "in the graph" if hook == "step_end" and recorded and plugin not in self._after else "after it"
        if hook not in {event.hook for event in phase.events() if "step" in event.arguments} - BEFORE:
            return ""
        return "in the graph" if recorded else "keeps the step eager, because it has to be called in it"

    def state_dict(self) -> dict[str, Any]:
        """The decisions, so that a resumed run compiles the same steps."""
        shapes = {
            name: {key: copy.copy(getattr(shape, key)) for key in Shape.SAVED} for name, shape in self.shapes.items()
        }
        repeats = not any(shape.by_clock for shape in self.shapes.values())
        return {
            "torch": str(torch.__version__),
            "shapes": shapes,
            "after": sorted(self._after),
            "repeatable": repeats,
            "began": self._compiling.began,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self.shapes = {name: Shape(name, **copy.deepcopy(values)) for name, values in state["shapes"].items()}
        if state["torch"] != str(torch.__version__):
            for shape in self.shapes.values():
                if shape.mode in ("timed", "graph"):  # what another torch compiles is compared anew
                    shape.mode, shape.checks = "compared", 0
        self._compiling.began = state.get("began", self._compiling.began)
        self._keys, self._hooks, self._replays = {}, None, {}
        self._after = set(state["after"])


def _sorted(learner: Learner, phase: Phase, order: Any, after: set[str]) -> tuple[Hooks, list[str]]:
    """The recorded hooks in the plan's order, without those of plugins that come after; and why there are none."""
    plugins: Any = learner.plugins
    calls: dict[type[Event], list[Hook]] = {}
    ends: list[Hook] = []
    reasons = [
        f"plugin {placed.entry.plugin!r} takes the optimizer's step"
        for placed in (order.get("optimizer_step", ()) if phase.training else ())
    ]
    for placed in order.get("update_end", ()) if len(learner.optimizers) > 1 else ():
        if read := (*placed.entry.reads, *placed.entry.updates):
            plugin = f"update_end of plugin {placed.entry.plugin!r}"
            reasons.append(f"{plugin} reads {', '.join(read)} between the updates of two optimizers")
    for event in dict.fromkeys(phase.events()):
        if "step" not in event.arguments or event.hook in (BEFORE | AFTER) - {"step_end"}:
            continue
        if event is not StepEnd:
            calls[event] = []
        for placed in order[event.hook]:
            name = placed.entry.plugin
            hook = _hook(name, plugins[name], event.hook)
            if event is StepEnd:
                if hook is not None and not hook.vote and name not in after:
                    ends.append(hook)
            elif hook is None:
                reasons.append(f"{event.hook} of plugin {name!r} has to be called in it")
            else:
                calls[event].append(hook)
    calls.setdefault(UpdateEnd, [])
    return Hooks(calls, ends), reasons


def _hook(name: str, plugin: Any, hook: str) -> Hook | None:
    """The recorded form of a plugin's hook; None if it has to be called."""
    function = getattr(plugin, hook)
    options = function.loopkit_options
    if options.traced is not None:
        return Hook(name, plugin, function, tuple(inspect.signature(function).parameters), options.traced)
    if hasattr(plugin, "vote") and (voting := plugin.vote(hook)) is not None:
        return Hook(name, plugin, voting, (), (), vote=True)
    return None


def _votes(target: Target) -> bool:
    """Whether a recorded step can do without a hook, by a vote."""
    plugin: Any = getattr(target.function, "__self__", None)
    return hasattr(plugin, "vote") and plugin.vote(target.hook) is not None
