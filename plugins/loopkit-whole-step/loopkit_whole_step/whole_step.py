"""WholeStep: the whole training step as one compiled graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from loopkit import hookimpl
from loopkit.author import Shown, checks
from loopkit.errors import PluginError
from loopkit_whole_step.comparing import Comparing
from loopkit_whole_step.compiling import Compiling
from loopkit_whole_step.graph import Backend
from loopkit_whole_step.hooked import AFTER, BEFORE, RecordedHooks, is_idle
from loopkit_whole_step.recorder import BY_CLOCK, Recorder
from loopkit_whole_step.replay import Replay, Same, in_a_row
from loopkit_whole_step.resting import Resting
from loopkit_whole_step.result import REPLAYED
from loopkit_whole_step.shapes import COMES, UNTRAINED, Shape, Shapes, nothing

if TYPE_CHECKING:
    from loopkit import Epoch, FitResult, Learner, Phase, Step
    from loopkit.author import Target
    from loopkit_whole_step.record import Recording

OWN = "eager, because the phase updates in its own way"
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
        self._shapes = Shapes(self)
        self._hooks = RecordedHooks()
        self._compiling = Compiling(self)
        self._recorder = Recorder(self._shapes, self._hooks, self._compiling)
        self._comparing = Comparing(self, self._shapes, self._hooks)
        self._resting = Resting(self._shapes, self._compiling)
        self._recorded_ones: dict[tuple[str, str, str], bool] = {}
        """By phase, hook and plugin, whether it may be recorded."""
        self._owners: dict[str, Any] = {}
        """The plugins with hooks, by name."""
        self._replays: dict[str, Replay | Same] = {}
        """By phase that does not train, the graph of its last step, or the form of its batch if it was eager."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """The records, by phase and shape."""
        return self._shapes.by_name

    # The step

    @hookimpl(reads=("*",))
    def take_step(self, learner: Learner, phase: Phase, step: Step, default: Callable[[], None]) -> None:
        """Replay the step, or run it."""
        epoch = step.frame.epoch
        if epoch is self._resting.epochs.get(phase.name, nothing)() or phase.own_updates or not step.samples:
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
        windows = step.window_state if phase.training else UNTRAINED
        (window, *others) = windows
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
            shape = self._shapes.by_key.get(key)
        except TypeError:  # a batch of what has no hash
            default()
            return
        if shape is None:
            shape = self._shapes.new(phase, key, windows, leaves)
        recording = shape.recording
        if shape.mode == "graph" and recording is not None and epoch is shape.epoch() and shape.plan() is epoch.plan:
            tensors = recording.constants.tensors(learner)
            if tensors is not None and recording.given.samples == step.samples:
                inputs = recording.inputs.now(epoch, leaves, tensors)
                if recording.inputs.fit(inputs):
                    shape.since += self._replay(recording, inputs, step, leaves, default)
                    if not phase.training:
                        in_a_row(self._replays, shape, epoch, step, inputs)
                    return
        self._other(shape, learner, step, default, leaves)

    def _other(
        self, shape: Shape, learner: Learner, step: Step, default: Callable[[], None], leaves: Sequence[Any]
    ) -> None:
        """A step that is not just replayed."""
        epoch: Epoch = step.frame.epoch
        phase = epoch.phase
        if shape.mode == "eager" and self._resting.begins(epoch):
            self._recorder.decide_anew(learner, phase, epoch)
        if shape.mode == "eager":
            default()
            if (same := self._resting.leave(shape, learner, step)) is not None:
                self._replays[phase.name] = same
            return
        if shape.recording is not None:
            if self._waits(shape):
                shape.count += 1
                default()
                return
            if shape.recording.given.samples != step.samples:
                default()
                return
            self._recorder.look_again(shape, shape.recording, learner, phase, epoch)
        if shape.recording is None:
            resumed = shape.mode != "counted"
            shape.count += not resumed
            if shape.count <= COMES and not resumed:
                self._time_eager(shape, default)
                return
            self._recorder.record(shape, learner, phase, epoch, step)
            if self._waits(shape):
                shape.count += 1
                default()
                return
        if shape.mode == "building" and shape.recording is not None:
            self._recorder.take_over(shape, shape.recording)
        recording = shape.recording
        if recording is None:
            default()
        elif shape.mode == "compared":
            self._comparing.compare(shape, recording, learner, step, default, leaves)
        elif shape.mode == "timed" and len(shape.eager) <= len(shape.graph):
            self._time_eager(shape, default)
        elif self._comparing.is_due(shape, epoch):
            self._comparing.check(shape, recording, step, default, leaves)
        else:
            shape.epoch = ref(epoch)
            started = time.perf_counter()
            self._replay(recording, recording.inputs_now(epoch, leaves), step, leaves, default)
            if shape.mode == "timed":
                self._comparing.timed(shape, time.perf_counter() - started)

    def _waits(self, shape: Shape) -> bool:
        """Whether a shape's graph is compiled, and takes over later."""
        return shape.mode == "building" and not self._compiling.is_due(shape)

    @staticmethod
    def _time_eager(shape: Shape, default: Callable[[], None]) -> None:
        started = time.perf_counter()
        default()
        shape.eager.append(time.perf_counter() - started)

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
        recording.result.hand_over(step, outputs, leaves)
        return True

    # Around it

    @hookimpl
    def instrument_call(self, learner: Learner, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out the hooks of a step's end that were replayed; note where each hook is."""
        options = getattr(target.function, "loopkit_options", None)
        recorded = options is not None and options.traced is not None
        self._recorded_ones[target.phase, target.hook, target.plugin] = recorded or _votes(target)
        self._owners[target.plugin] = getattr(target.function, "__self__", None)
        if target.hook != "step_end":
            return call
        plugin = target.plugin
        at = target.arguments.index("step") if "step" in target.arguments else -1

        def unless_replayed(*values: Any) -> Any:
            if plugin in vars(values[at]).get(REPLAYED, ()):
                return None
            result = call(*values)
            if self._comparing.is_open:
                self._comparing.compare_metrics(plugin)
            return result

        return unless_replayed if at >= 0 and recorded else call

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """End the process that compiles."""
        for shape in self.shapes.values():
            shape.leave(goes_on=result.reason in GOES_ON)
        self._compiling.worker.close()

    def explain(self, phase: Phase, hook: str) -> str:
        """The decisions, for ``learner.explain()``."""
        if hook != "take_step":
            return ""
        if phase.own_updates:
            return OWN
        said = []
        for shape in self._shapes.of(phase):
            if shape.mode != "counted":
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
            return "in the graph" if hook == "step_end" and recorded and plugin not in self._hooks.after else "after it"
        if hook not in {event.hook for event in phase.events() if "step" in event.arguments} - BEFORE:
            return ""
        if is_idle(self._owners.get(plugin)):
            return "not called where the step is a graph: there is one process"
        return "in the graph" if recorded else "keeps the step eager, because it has to be called in it"

    def state_dict(self) -> dict[str, Any]:
        """The decisions, so that a resumed run compiles the same steps."""
        repeats = not any(shape.by_clock for shape in self.shapes.values())
        return {
            "torch": str(torch.__version__),
            "shapes": self._shapes.saved(),
            "after": sorted(self._hooks.after),
            "repeatable": repeats,
            "began": self._compiling.began,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._shapes.load(state["shapes"], state["torch"])
        self._compiling.began = state.get("began", self._compiling.began)
        self._hooks.load(state["after"])
        self._replays = {}


def _votes(target: Target) -> bool:
    """Whether a recorded step can do without a hook, by a vote."""
    plugin: Any = getattr(target.function, "__self__", None)
    return hasattr(plugin, "vote") and plugin.vote(target.hook) is not None
