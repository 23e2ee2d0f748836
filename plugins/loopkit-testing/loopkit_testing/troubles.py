"""Companions and phases that make trouble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopkit import Step
from loopkit.errors import CancelStep
from loopkit.events import BackwardBegin, BackwardEnd, Event, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.phases import Phase


class Deliberate(Exception):
    """Raised on purpose."""

    def __init__(self) -> None:
        super().__init__("a deliberate error of a test")


class DeliberateExit(BaseException):
    """Raised on purpose, as Ctrl-C would."""


class Trouble:
    """Raise in one hook, once: at the first ``fit_begin`` or ``fit_end``, or when another has come before."""

    others = ("epoch_context", "step_context", "setup_data", "move_batch", "fit_end")
    """The hooks, besides the events of an epoch, in which it can raise."""
    volatile = ("*",)

    def __init__(self, last: bool) -> None:
        self.name = "~trouble" if last else "!trouble"  # last or first in the order of names
        self.optional = tuple(Event.by_hook)
        self._armed = ""
        self._quiet = 0
        self._error: Callable[[], BaseException] = Deliberate
        for hook in (*Event.by_hook, "epoch_context", "step_context"):
            setattr(self, hook, self._implementation(hook))

    def arm(self, hook: str, error: Callable[[], BaseException], quiet: int | None = None) -> None:
        """Raise this error when the hook comes; ``quiet``: how often it may come before."""
        self._armed, self._error = hook, error
        before = {"fit_begin": 0, "fit_end": 0, "setup_data": 2}  # data is set up before the fit begins, and in it
        self._quiet = before.get(hook, 1) if quiet is None else quiet

    @property
    def armed(self) -> bool:
        """Whether it has not raised yet."""
        return bool(self._armed)

    def disarm(self) -> None:
        """Stop raising."""
        self._armed = ""

    @hookimpl
    def move_batch(self, batch: Any) -> Any:
        """Raise if it is time, or return the batch."""
        self._come("move_batch")
        return batch

    @hookimpl
    def setup_data(self, data: Any) -> Any:
        """Raise if it is time, or return the data."""
        self._come("setup_data")
        return data

    def _implementation(self, hook: str) -> Callable[[], None]:
        return hookimpl(lambda: self._come(hook))

    def _come(self, hook: str) -> None:
        if hook == self._armed:
            if self._quiet:
                self._quiet -= 1
            else:
                self.disarm()
                raise self._error()


class Disturbance:
    """Vote to skip one update and cancel one step, so that the rarer events come too."""

    name = "~disturbance"
    volatile = ("*",)

    def __init__(self) -> None:
        self._updates = self._steps = 0

    @hookimpl
    def update_begin(self, step: Step) -> None:
        """Vote to skip the second update; one with a closure cannot be."""
        self._updates += 1
        if self._updates == 2 and step.closure is None:
            step.skip_update("a vote of a test")

    @hookimpl
    def step_begin(self) -> None:
        """Cancel the third step."""
        self._steps += 1
        if self._steps == 3:
            raise CancelStep("a cancel of a test")


TRAINING = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)


class Strange(Phase):
    """A phase that trains, in its own way, described by ``what``."""

    training = True
    what = ""


class NoBackward(Strange):
    """A phase without loss and backward."""

    name = "no_backward"
    what = "a phase without loss and backward"

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102
        step.inputs, step.targets = step.batch
        step.outputs = learner.model(step.inputs)  # type: ignore[operator]
        step.skip()


class Adversarial(Strange):
    """A phase with two models and optimizers (it sets critic_loss and generator_loss; no loss, no outputs)."""

    name = "adversarial"
    what = "a phase with two models and optimizers (it sets critic_loss and generator_loss; no loss, no outputs)"
    emits = TRAINING

    def step(self, learner: Learner, step: Any) -> None:  # noqa: D102
        real, _ = step.batch
        critic, generator = learner.models["critic"], learner.models["generator"]
        fake = generator(real)
        step.critic_loss = critic(fake.detach()).mean() - critic(real).mean()
        step.backward(step.critic_loss, "critic")
        step.update("critic")
        step.generator_loss = -critic(fake).mean()
        step.backward(step.generator_loss, "generator")
        step.update("generator")


class TwoBackwards(Strange):
    """A phase with two backwards for one update."""

    name = "two_backwards"
    what = "a phase with two backwards for one update"
    emits = TRAINING

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102
        step.inputs, step.targets = step.batch
        for _ in range(2):
            step.outputs = learner.model(step.inputs)  # type: ignore[operator]
            step.loss = learner.loss_fn(step.outputs, step.targets)
            step.backward(step.loss)
        step.update()


class Bare(Strange):
    """A phase that sets no attribute of its steps."""

    name = "bare"
    what = "a phase that sets no attribute of its steps"
    emits = TRAINING

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))  # type: ignore[operator]
        step.update()
