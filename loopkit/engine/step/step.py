"""Step: one batch on its way through a phase, and the methods a phase calls; StepContext: its view of its epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base import devices
from loopkit.base.batches import describe
from loopkit.base.notes import line_with
from loopkit.base.words import nearest
from loopkit.engine.step.autocast_cache import AutocastCache, autocast_is_on, autocast_off
from loopkit.errors import EventError, LossError, PhaseError, StepStateError
from loopkit.events import BackwardBegin, BackwardEnd, Event, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.phases import TRAINING_EVENTS

if TYPE_CHECKING:
    from loopkit.engine.compile.plan import Fire, Plan
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.logbook import Logbook
    from loopkit.engine.step.window import Window, WindowState
    from loopkit.phases import Phase
    from loopkit.progress import Progress

ones_like = torch.ones_like
run_backward = torch.autograd.Variable._execution_engine.run_backward
"""The function below ``Tensor.backward``: ``(tensors, gradients, keep_graph, create_graph, inputs, allow_unreachable,
accumulate_grad)``. Its checks, made here once and more cheaply, are a tenth of a small step's time."""
SET_BEFORE = {"inputs": "ForwardBegin", "targets": "ForwardBegin", "outputs": "LossBegin", "loss": "BackwardBegin"}


class StepContext:
    """The parts of an epoch that its steps use."""

    epoch: Epoch
    phase: Phase
    plan: Plan
    fire: dict[type[Event], Fire | None]
    """The call of the plugins, for every event that may fire; None without listeners."""
    optimizer_step: Callable[..., Any] | None
    """A plugin's replacement of the optimizer's step."""
    windows: tuple[Window, ...]
    optimizers: dict[str, torch.optim.Optimizer]
    """The learner's optimizers, also in a phase with ``own_updates``, which has no windows."""
    current: Step | None
    plain_backward: Window | None
    """The only window, if no plugin listens to a backward's end, and it is no more than clearing gradients and calling
    torch."""
    plain_update: Window | None
    """The only window, if each step is an update, and clearing a gradient is setting it to None."""
    quiet: bool
    """Whether no plugin listens to an update, and it is no more than calling the optimizer."""
    last_index: int
    """The index of the last step, where the length of the data is known; else -1."""
    progress: Progress
    logbook: Logbook
    casts: AutocastCache

    def window(self, name: str) -> Window:
        """The window of an optimizer."""
        for window in self.windows:
            if window.name == name:
                return window
        names = ", ".join(repr(window.name) for window in self.windows)
        raise PhaseError(f"no optimizer is called {name!r}; there are: {names or 'none'}")

    def only_window(self, name: str | None) -> Window:
        """The window of an update that is given a closure."""
        if self.current is not None:
            _check_not_own(self.current, "update")
        windows: Sequence[Window] = self.windows if name is None else (self.window(name),)
        if len(windows) != 1 or windows[0].size != 1:
            raise PhaseError("step.update(closure=...): in a training phase, name one optimizer, and do not accumulate")
        return windows[0]

    def own_optimizers(self, name: str | None) -> dict[str, torch.optim.Optimizer]:
        """The optimizers of an update that the phase has made in its own way."""
        optimizers = self.optimizers
        if name is None:
            return optimizers
        if name not in optimizers:
            names = ", ".join(map(repr, optimizers))
            raise PhaseError(
                f"no optimizer is called {name!r}{nearest(name, optimizers)}; there are: {names or 'none'}"
            )
        return {name: optimizers[name]}

    def reason_to_skip(self, window: Window) -> str | None:
        """Why the update of a window is skipped from the outset; None if it is not."""
        raise NotImplementedError

    def count_skip(self, reason: str) -> None:
        """An update was skipped."""
        raise NotImplementedError

    def note_idle(self) -> None:
        """Note a step that does not train by intent."""
        raise NotImplementedError

    def leave_steps(self) -> None:
        """Leave the rest of the epoch's steps to the phase, without the plugin that takes them."""
        raise NotImplementedError

    def count_update(self) -> None:
        """The parameters were updated."""
        self.progress.updates += 1
        self.logbook.place = None


class Step:
    """One batch's state. Any attribute can be put on it; these have a meaning:

    ``batch`` is what the loader yielded; the phase adds ``inputs``, ``targets``, ``outputs`` and ``loss``, a
    scalar. ``samples`` is the length of the batch's first tensor. During an update, ``optimizer_name``,
    ``optimizer`` and ``params`` are the updated ones.
    """

    batch: Any
    inputs: Any
    targets: Any
    outputs: Any
    loss: Tensor
    total_loss: Tensor
    """The loss that the last backward started from: the phase's, or a plugin's replacement."""
    backward_name: str | None = None
    """During a backward: the optimizer that the phase named for it; None: all of them."""
    index: int
    """Position in the epoch, from 0."""
    samples: int
    indices: Tensor
    """The batch's samples, on the CPU, of a `TensorLoader`, an unshuffled ``DataLoader``, or a `ResumableSampler`."""
    weight: float | Tensor
    """The step's share in its window: its number of samples unless the phase sets it before ``backward``. An update is
    skipped if the weights of its steps sum to 0."""
    seed: float | Tensor
    """The gradient that backward starts from. Plugins multiply it at ``backward_begin``."""
    optimizer_name: str
    optimizer: torch.optim.Optimizer
    params: Sequence[Tensor]
    closure: Callable[[], Any] | None = None
    """The closure, during an update that has one."""

    _replaced_loss: Tensor | None = None
    """The phase's loss, if a plugin has put another one in its place."""
    ended: bool = False
    """Whether the phase's part is over, be it cancelled; plugins may still be at ``step_end``."""
    had_backward: bool = False
    """Whether the phase has called `backward` on this step."""
    idle: bool = False
    """Whether the phase has called `skip` on this step."""
    skip_reason: str | None = None
    """Why the last update of this step was skipped; None if it was applied."""

    def __init__(self, frame: StepContext, index: int, batch: Any, samples: int) -> None:
        self.frame = frame  # for the engine alone
        self.index = index
        self.batch = batch
        self.samples = self.weight = samples

    def __repr__(self) -> str:
        at, has = self.frame.epoch, ", ".join(name for name in vars(self) if name in SET_BEFORE)
        return f"Step({at.name!r}, epoch {at.number}, index {self.index}, {self.samples} samples; {has or 'a batch'})"

    if not TYPE_CHECKING:  # else every misspelt attribute would type-check

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            phase = self.frame.phase
            if name == "indices":
                when = self.frame.epoch.indices(self)
                if isinstance(when, Tensor):
                    self.indices = when
                    return when
            elif name in SET_BEFORE:
                when = f"the phase sets it in its step, before {SET_BEFORE[name]}; listen to that event or a later one"
            elif name == "seed":
                when = "it exists from backward_begin on"
            elif name == "total_loss":
                when = "it exists from backward_end on"
            elif name in ("optimizer_name", "optimizer", "params"):
                when = "it exists from the step's first update_begin on"
            else:
                when = f"{type(phase).__name__}.step has not set it by now"
            raise StepStateError(f"step.{name} is not set: {when} (phase {phase.name!r}, step {self.index})")

    @property
    def epoch(self) -> Epoch:
        """The epoch that it is a step of."""
        return self.frame.epoch

    @property
    def store(self) -> dict[str, Any]:
        """The phase's store for this epoch: saved with it, and restored when the epoch is resumed."""
        return self.frame.epoch.store(self.frame.phase)

    @property
    def last(self) -> bool:
        """Whether this is the epoch's last step by ``len(data)``."""
        return self.index == self.frame.last_index

    @property
    def update_overdue(self) -> bool:
        """Whether windows are full although the phase had its chance to call `update`: all, or one for many steps.

        A phase may update several optimizers in turn.
        """
        windows = self.frame.windows
        late = any(window.count > window.size * len(windows) for window in windows)
        return late or (bool(windows) and all(window.count >= window.size for window in windows))

    @property
    def window_state(self) -> tuple[WindowState, ...]:
        """Each optimizer's window as this step finds it, before its backward."""
        last = self.index == self.frame.last_index
        return tuple([window.state(self.weight, last) for window in self.frame.windows])

    def emit(self, event: type[Event]) -> None:
        """Fire an event: call the plugins that listen to it.

        Raises:
            EventError: The phase does not list the event in ``emits``.
        """
        try:
            fire = self.frame.fire[event]
        except KeyError:
            again = [known for known in self.frame.fire if known.hook == event.hook]
            if again:  # the class was defined again, as by a notebook's cell that is run twice
                self.emit(again[0])
                return
            phase = type(self.frame.phase).__name__
            if event in TRAINING_EVENTS and self.frame.phase.training:
                raise EventError(
                    f"{phase}.step emits {event.__name__}, and {phase}.own_updates is True: in such a phase no event "
                    f"of an update comes but UpdateEnd, by step.updated()"
                ) from None
            raise EventError(
                f"{phase}.step emits {event.__name__}, which {phase}.emits does not list: add it there, so that "
                f"plugins which wait for it can be told whether it comes"
            ) from None
        if fire is not None:
            fire(self)

    def backward(
        self, loss: Tensor, name: str | None = None, *, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Fire ``BackwardBegin``, run backward from ``loss``, fire ``BackwardEnd``.

        During the two events ``step.loss`` is this loss, whatever the phase keeps there. A plugin may put another one
        there at ``backward_begin``, from which backward then starts; it is ``step.total_loss`` from then on.

        Args:
            loss: A scalar that requires grad.
            name: Add gradients only to the parameters of this optimizer; to all by default.
            retain_graph: Keep the graph for another backward; adding the losses is faster.
            create_graph: Make a graph of the gradients, too, which keeps both.

        Raises:
            LossError: The loss is no tensor, no scalar, or does not require grad.
        """
        frame = self.frame
        window = frame.plain_backward
        begin = frame.fire.get(BackwardBegin)
        retain_graph = retain_graph or create_graph
        has_own_weight = self.weight is not self.samples
        is_plain = name is None and not has_own_weight and is_plain_scalar(loss) and not autocast_is_on()
        if is_plain and begin is not None:  # plugins find this loss on the step, where the phase has put it
            is_plain = vars(self).get("loss") is loss and loss.requires_grad
        if window is None or not is_plain:
            self._backward(loss, name, retain_graph, create_graph)
            return
        if begin is not None:
            self.seed, self.backward_name = 1.0, None
            try:
                begin(self)
                if self.loss is not loss or self.seed.__class__ is not float or self.seed != 1.0:
                    self._run(loss, (window,), None, retain_graph, create_graph)
                    return
            finally:
                self.loss = loss
        window.enter(self, self.weight)
        try:
            run_backward((loss,), (ones_like(loss),), retain_graph, create_graph, (), True, True)
        except RuntimeError:
            _check_loss(self, loss)
            raise
        self.total_loss = loss
        self.had_backward = True

    def _backward(self, loss: Tensor, name: str | None, retain: bool, create: bool) -> None:
        """Run a `backward` that takes more than clearing gradients and calling torch."""
        _check_loss(self, loss)
        frame = self.frame
        windows = frame.windows if name is None else (frame.window(name),)
        if windows[0].weighted and isinstance(self.weight, Tensor):  # counts of tokens, say: as exact as the loss
            self.weight = self.weight.to(torch.promote_types(loss.dtype, torch.float32))
        self.seed = windows[0].seed(self, self.weight)
        if len(windows) > 1 and windows[0].size > 1:
            _check_shared_seed(windows)
        own = vars(self).get("loss")
        self.loss, self.backward_name = loss, name
        try:
            if (begin := frame.fire[BackwardBegin]) is not None:
                begin(self)
            self._run(loss, windows, name, retain, create)
        finally:
            self.backward_name = None
            if own is None:
                vars(self).pop("loss", None)
            else:
                self.loss = own
        for window in windows:
            if window.size > 1:
                window.leave()

    def _run(self, loss: Tensor, windows: Sequence[Window], name: str | None, retain: bool, create: bool) -> None:
        """The backward, once its begin has fired, and its end."""
        frame = self.frame
        if (total := self.loss) is not loss:
            _check_loss(self, total, " that a plugin put on the step at backward_begin")
            self._replaced_loss = loss
        for window in windows:
            if window.size > 1 and window.asked_in == self.index:
                raise _chunked(frame.phase, self, window)
            if window.size > 1 and window.has_lost(self):
                raise _lost_gradients(frame.phase, self, window)
            window.enter(self, self.weight)
        inputs = None if name is None else tuple(p for p in windows[0].params if p.requires_grad)
        if autocast_is_on():
            with autocast_off():
                _differentiate(total, self.seed, inputs, retain, create)
            frame.casts.clear()
        else:
            _differentiate(total, self.seed, inputs, retain, create)
        self.had_backward, self.total_loss = True, total
        if (end := frame.fire[BackwardEnd]) is not None:
            end(self)

    def update(self, name: str | None = None, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters if the window is full: ``UpdateBegin``, optimizer step, ``UpdateEnd``.

        Args:
            name: The optimizer; each in the mapping's order by default.
            closure: For optimizers that evaluate the loss themselves (LBFGS, SAM): computes it, calls
                ``step.backward`` and returns it. ``UpdateBegin`` fires after each evaluation. One with ``first_step``
                and ``second_step``, as SAM, gets its first gradients from it, too.

        Raises:
            PhaseError: There was no ``step.backward`` for this optimizer, or a closure meets accumulation.
        """
        frame = self.frame
        window = frame.plain_update
        if closure is not None or autocast_is_on():
            self._update_without_autocast(name, closure)
        elif window is None or name is not None or not window.count or self.weight is not self.samples:
            self._update_due(name)
        elif frame.quiet:
            window.optimizer.step()
            frame.count_update()
            window.drop()
        else:
            self.apply(window)

    def _update_without_autocast(self, name: str | None, closure: Callable[[], Any] | None) -> None:
        try:
            with autocast_off() as ambient:
                if closure is None:
                    self._update_due(name)
                else:
                    window = self.frame.only_window(name)
                    self.apply(window, Closure(self, window, closure, ambient))
        finally:
            self.frame.casts.clear()  # else the next forward of this step would see the old weights

    def _update_due(self, name: str | None) -> None:
        frame = self.frame
        windows: Sequence[Window] = frame.windows if name is None else (frame.window(name),)
        opened = [window for window in windows if window.count]
        if not opened:
            raise _nothing_to_update(frame.phase, self)
        for window in opened:
            if window.needs_closure and frame.optimizer_step is None:
                raise _lacks_closure(frame.phase, window)
            window.ask(self.index)
            if window.count >= window.size or self.index == frame.last_index:
                self.apply(window, skip=frame.reason_to_skip(window))

    def apply(self, window: Window, closure: Closure | None = None, skip: str | None = None) -> None:
        """Update the parameters of a window now (the engine's part of `update`), or skip that for a reason."""
        frame, optimizer = self.frame, window.optimizer
        begin = frame.fire[UpdateBegin]
        self.optimizer_name, self.optimizer, self.params = window.name, optimizer, window.params
        self.skip_reason = skip
        self.closure = closure
        try:
            if closure is None:
                window.rescale()
                if begin is not None:
                    begin(self)
            if self.skip_reason is None:
                default = optimizer.step if closure is None else partial(closure.take, optimizer)
                if frame.optimizer_step is None:
                    default()
                else:
                    frame.optimizer_step(self, optimizer, closure, default)
            self._end_update(window)
        finally:
            self.closure = None  # which holds the step, and so its graph

    def _end_update(self, window: Window) -> None:
        """The parameters have moved, or the update was skipped."""
        frame = self.frame
        if self.skip_reason is None:
            frame.count_update()
            if (end := frame.fire[UpdateEnd]) is not None:
                end(self)
        else:
            if (skipped := frame.fire[UpdateSkipped]) is not None:
                skipped(self)
            frame.count_skip(self.skip_reason)
        window.drop()

    def applied(
        self,
        values: Mapping[str, Any],
        grads: Mapping[str, Sequence[Tensor | None]],
        updated: bool = True,
        before: Callable[[str], None] | None = None,
    ) -> None:
        """Take over what a plugin has done in the place of the phase's step, in ``take_step``.

        That is one backward, and the updates that were due. Windows and counts are then as after `backward` and
        `update`, and ``UpdateEnd`` fires, or ``UpdateSkipped``; the events before them do not.

        Args:
            values: The attributes that the phase would have put on the step.
            grads: By optimizer, the gradients of its window so far, in the order of its parameters. Without them,
                parameters have none.
            updated: False: an update was due, and the parameters were left as they are; `skip_update` says why.
            before: Is called before the end of each update, with the name of its optimizer.
        """
        vars(self).update(values)
        windows, casts = self.frame.windows, autocast_is_on()
        with autocast_off() if casts else nullcontext():
            for window in windows:
                window.enter(self, self.weight)
                if window.name in grads:
                    for p, grad in zip(window.params, grads[window.name], strict=True):
                        p.grad = grad
                if window.size > 1:
                    window.leave()
                window.ask(self.index)
            self.had_backward = True
            for window in windows:
                if window.count >= window.size or self.index == self.frame.last_index:
                    self.optimizer_name, self.optimizer, self.params = window.name, window.optimizer, window.params
                    self.skip_reason = None if updated else "the parameters were left as they are"
                    if before is not None:
                        before(window.name)
                    self._end_update(window)
        if casts:
            self.frame.casts.clear()

    def skip(self) -> None:
        """Mark a step that does not train by intent, such as while a replay buffer fills; then end it by ``return``.

        The step counts, and ``StepEnd`` fires. To leave a step out of the counts raise `CancelStep` instead.

        Raises:
            PhaseError: The phase does not train, or the step has called `backward` before.
        """
        phase = self.frame.phase
        if not phase.training:
            raise PhaseError(f"step.skip in phase {phase.name!r}: only a phase with training = True has it")
        if self.had_backward:
            raise PhaseError(
                f"step.skip after step.backward in phase {phase.name!r}, step {self.index}: this step trains; call "
                f"skip before, or raise CancelStep, which drops its gradients"
            )
        self.idle = True
        self.frame.note_idle()

    def updated(self, name: str | None = None) -> None:
        """Report an update that a phase with ``own_updates`` has made: count it, and fire ``UpdateEnd``.

        Args:
            name: The optimizer; each in the mapping's order by default.

        Raises:
            PhaseError: The phase updates through the engine, or no optimizer has this name.
        """
        frame = self.frame
        if not (frame.phase.training and frame.phase.own_updates):
            raise PhaseError(
                f"step.updated in phase {frame.phase.name!r}: it is for a phase that trains with own_updates = True; "
                f"elsewhere step.update() counts the updates that it makes"
            )
        end = frame.fire[UpdateEnd]
        if autocast_is_on():
            frame.casts.clear()  # else the next forward of this step would see the old weights
        optimizers = frame.own_optimizers(name)
        for each, optimizer in optimizers.items():
            self.optimizer_name = each
            self.optimizer = optimizer
            self.params = [p for group in optimizer.param_groups for p in group["params"]]
            frame.count_update()
            if end is not None:
                end(self)
        if not optimizers:
            frame.count_update()
            if end is not None:
                end(self)

    def _start_over(self, window: Window) -> None:
        """The optimizer has moved the weights since the last evaluation of its closure, and asks for another."""
        window.drop()
        self._replaced_loss = None
        self.frame.casts.clear()

    def skip_update(self, reason: str) -> None:
        """Vote, at ``update_begin`` or in ``optimizer_step``, that this update is not applied."""
        self.skip_reason = self.skip_reason or reason


class Closure:
    """A closure for an optimizer that evaluates the loss itself: a forward and a backward with the current weights.

    Args:
        step: The step that makes the update.
        window: The only window.
        given: The phase's closure, as given to `Step.update`.
        ambient: The device types and dtypes that autocast is on for in the phase's step.
    """

    def __init__(
        self, step: Step, window: Window, given: Callable[[], Any], ambient: Sequence[tuple[str, torch.dtype]]
    ) -> None:
        self._step = step
        self._window = window
        self._phase_closure = given
        self._ambient = ambient
        self._evaluated = False

    def take(self, optimizer: Any) -> Any:
        """Let an optimizer take its step with this closure.

        One that moves the weights along their gradients before it evaluates the loss, as SAM in its ``first_step``,
        finds the gradients at the weights as they are.
        """
        kind = type(optimizer)
        if not (hasattr(kind, "first_step") and hasattr(kind, "second_step")):
            return optimizer.step(self)
        own = vars(optimizer).get("first_step")
        first = optimizer.first_step

        def first_step(*args: Any, **kwargs: Any) -> Any:
            if not self._evaluated:
                self()
            return first(*args, **kwargs)

        optimizer.first_step = first_step
        try:
            return optimizer.step(self)
        finally:
            if own is None:
                del optimizer.first_step
            else:
                optimizer.first_step = own

    def __call__(self) -> Any:
        """Clear the gradients, make new ones, and return the loss that backward started from."""
        self._evaluated = True
        step = self._step
        step._start_over(self._window)
        with ExitStack() as stack:
            for device, dtype in self._ambient:
                stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(torch.enable_grad())
            loss = self._phase_closure()
        if not self._window.count:
            raise PhaseError("the closure given to step.update did not call step.backward")
        if (fire := step.frame.fire[UpdateBegin]) is not None:
            fire(step)
        if step._replaced_loss is not None:
            if loss is not step._replaced_loss:
                raise PhaseError(
                    "the closure given to step.update returned another loss than it gave to step.backward, which a "
                    "plugin has replaced: return the same tensor, so that the optimizer gets what backward used"
                )
            loss = step.total_loss
        if step.skip_reason is not None:
            raise PhaseError(f"an update with a closure cannot be skipped ({step.skip_reason})")
        return loss


def _check_shared_seed(windows: Sequence[Window]) -> None:
    """One backward has one seed; windows that began at different steps would need several."""
    if any(window.count != windows[0].count or window.first is not windows[0].first for window in windows):
        raise PhaseError("step.backward(loss) would add to windows that are out of step: give it a name")


def _check_loss(step: Step, loss: Any, whose: str = "") -> None:
    """Raise for a loss that no backward can start from."""
    frame = step.frame
    where = f"phase {frame.phase.name!r}, step {step.index}"
    _check_not_own(step, "backward")
    if not frame.phase.training:
        raise PhaseError(f"step.backward in {where}: only a phase with training = True has it")
    if not frame.windows:
        raise PhaseError(f"step.backward in {where}: the learner has no optimizer; give Learner(optimizer=...)")
    what = f"the loss{whose}"
    if not isinstance(loss, Tensor):
        raise LossError(f"{what} is {describe(loss)} {str(loss)[:40]} ({where}); it must be a scalar tensor")
    if loss.numel() != 1:  # torch takes shape (1,) too
        raise LossError(f"{what} has shape {tuple(loss.shape)} ({where}): reduce it, with .mean() or .sum()")
    if not loss.requires_grad:
        raise LossError(
            f"{what} does not require grad ({where}): was it made under no_grad, or detached, or by .item(); or "
            f"are all parameters frozen (requires_grad=False)?"
        )


def _check_not_own(step: Step, call: str) -> None:
    """Raise for a call that a phase with ``own_updates`` does not have."""
    phase = step.frame.phase
    if phase.training and phase.own_updates:
        own = "loss.backward()" if call == "backward" else "optimizer.step(), and then step.updated()"
        raise PhaseError(
            f"step.{call} in phase {phase.name!r}, step {step.index}, which declares own_updates = True: it calls "
            f"{own}. To update through the engine, leave own_updates out"
        )


def _chunked(phase: Phase, step: Step, window: Window) -> PhaseError:
    """The error for a step that updates in several parts while windows span several steps."""
    return PhaseError(
        f"phase {phase.name!r}, step {step.index}: step.backward after step.update in one step, and accumulate is "
        f"{window.size}: an update is made of {window.size} whole steps, so a step has one step.update for each "
        f"optimizer. Give Learner(accumulate=1), where each step.update updates, or make a step of each part"
    )


def _lacks_closure(phase: Phase, window: Window) -> PhaseError:
    """The error for an optimizer that evaluates the loss itself, without a closure."""
    cls = type(phase).__name__
    name = "" if window.name == "optimizer" else f"{window.name!r}, "
    call = f"step.update({name.rstrip(', ')})"
    closure = (
        "def closure(): step.loss = learner.loss_fn(learner.model(inputs), targets); step.backward(step.loss); "
        f"return step.loss; then step.update({name}closure=closure)"
    )
    return PhaseError(
        f"{type(window.optimizer).__name__}.step takes a closure, and {cls}.step calls {call} without one. Write a "
        f"phase whose step gives it: {closure}"
    )


def _nothing_to_update(phase: Phase, step: Step) -> PhaseError:
    """The error for an update without a backward before it."""
    _check_not_own(step, "update")
    if not phase.training:
        return PhaseError(f"step.update in phase {phase.name!r}: only a phase with training = True has it")
    return PhaseError(
        f"step.update before step.backward in phase {phase.name!r}, step {step.index}: call step.backward(loss), which "
        f"takes the place of loss.backward(), first"
    )


def _lost_gradients(phase: Phase, step: Step, window: Window) -> PhaseError:
    """The error for a window whose earlier steps lost their gradients."""
    steps = "step" if window.count == 1 else "steps"
    return PhaseError(
        f"phase {phase.name!r}, step {step.index}: the gradients of the {window.count} {steps} before it are gone, of "
        f"an update that takes {window.size}. A zero_grad() in a phase throws them away: delete "
        f"{line_with(phase, 'zero_grad(') or 'it'}; the engine clears gradients when an update has been made"
    )


def _differentiate(
    loss: Tensor, seed: float | Tensor, inputs: tuple[Tensor, ...] | None, retain: bool, create: bool
) -> None:
    """Backward from a loss, which starts from ``seed``, to these parameters, or to all."""
    if isinstance(seed, Tensor):
        gradient = devices.to_device(seed, loss.device).to(loss.dtype).reshape(loss.shape)
    else:
        gradient = torch.full_like(loss, seed)
    if is_plain_scalar(loss) and (inputs or inputs is None):
        run_backward((loss,), (gradient,), retain, create, inputs or (), True, True)
    else:
        loss.backward(gradient, retain, create, inputs=inputs)  # type: ignore[no-untyped-call]


def is_plain_scalar(loss: Any) -> bool:
    """Whether a loss needs no special case of ``Tensor.backward``: subclasses, complex numbers and other shapes."""
    return loss.__class__ is Tensor and not loss.ndim and loss.is_floating_point()
