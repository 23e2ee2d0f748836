"""Every event of the loop: when it fires and what the step holds by then.

One epoch of a phase, and where each event stands in it::

    FitBegin
    for each epoch, for each phase:
        EpochBegin
        for each batch:
            StepBegin                    step.batch
                ForwardBegin             + inputs, targets
                LossBegin                + outputs
                BackwardBegin            + loss                      training phases
                BackwardEnd              gradients of this step added
                UpdateBegin              gradients final             when an update is due
                UpdateEnd                parameters changed
                or UpdateSkipped         parameters unchanged
            StepEnd                      everything
            or StepCancelled             instead of StepEnd
        EpochEnd
        PhaseEnd
    CycleEnd                             after a training epoch and its validations
    FitEnd                               always

An event is a class, its hook is the class's name in snake case: plugins listen to ``LossBegin`` with
``def loss_begin(self, step)``. A new event is a new subclass::

    class CriticBegin(Event):
        \"\"\"The critic is about to score real and generated images.\"\"\"

    step.emit(CriticBegin)  # calls every plugin's ``critic_begin``
"""

from __future__ import annotations

import re
from typing import ClassVar

from loopkit.errors import EventError

__all__ = [
    "BackwardBegin",
    "BackwardEnd",
    "CycleEnd",
    "EpochBegin",
    "EpochEnd",
    "Event",
    "FitBegin",
    "FitEnd",
    "ForwardBegin",
    "LossBegin",
    "PhaseEnd",
    "StepBegin",
    "StepCancelled",
    "StepEnd",
    "UpdateBegin",
    "UpdateEnd",
    "UpdateSkipped",
]
__dir__ = __all__.copy


def snake_case(name: str) -> str:
    """``LossBegin`` -> ``loss_begin``, ``GANBegin`` -> ``gan_begin``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Event:
    """A point of the loop where plugins are called. Subclass it to add one.

    The name of a subclass ends in ``Begin`` or ``End``. Defining a class of the same name again in the
    same module (a notebook cell run twice) replaces it; in another module it raises, since both
    would have the same hook.

    Raises:
        EventError: The name does not end in ``Begin`` or ``End``, or another event has the hook.
    """

    hook: ClassVar[str]
    """The hook's name, made from the class's."""
    arguments: ClassVar[tuple[str, ...]] = ("learner", "phase", "epoch", "step")
    """The arguments that the hook's implementations can take, by name."""
    by_hook: ClassVar[dict[str, type[Event]]] = {}
    """Every event by its hook's name, in the order of definition."""

    def __init_subclass__(cls) -> None:
        cls.hook = snake_case(cls.__name__)
        endings = ("Begin", "End", "Skipped", "Cancelled") if cls.__module__ == __name__ else ("Begin", "End")
        if not cls.__name__.endswith(endings):
            raise EventError(
                f"event class {cls.__name__!r}: an event's name ends in Begin or End, "
                f"such as {cls.__name__}Begin, so that its hook's name shows when it fires"
            )
        known = Event.by_hook.get(cls.hook)
        if known is not None and (known.__module__, known.__name__) != (cls.__module__, cls.__name__):
            raise EventError(
                f"event class {cls.__module__}.{cls.__name__}: its hook {cls.hook!r} belongs to "
                f"{known.__module__}.{known.__name__}; give the event another name"
            )
        Event.by_hook[cls.hook] = cls


class FitBegin(Event):
    """``fit`` starts. Models and optimizers are set up; no step has run."""

    arguments = ("learner",)


class EpochBegin(Event):
    """An epoch of a phase starts. Its contexts are entered and the mode is set."""

    arguments = ("learner", "phase", "epoch")


class StepBegin(Event):
    """A step starts. ``step.batch`` is the batch of the loader, after ``move_batch``."""


class ForwardBegin(Event):
    """The batch is unpacked: ``step.inputs`` and ``step.targets`` (None in prediction) exist and can be replaced."""


class LossBegin(Event):
    """The forward is done: ``step.inputs``, ``step.targets`` and ``step.outputs`` exist."""


class BackwardBegin(Event):
    """``step.loss`` exists, and backward comes next: you can replace the loss and multiply ``step.seed``."""


class BackwardEnd(Event):
    """The gradients of this step are added to the window."""


class UpdateBegin(Event):
    """An update is due and its gradients are final: sync, unscale, clip, inspect, or vote to skip it.

    ``step.optimizer_name``, ``step.optimizer`` and ``step.params`` belong to the update. With a closure
    it fires after each evaluation of the closure.
    """


class UpdateEnd(Event):
    """The optimizer has changed the parameters; ``learner.progress.updates`` counts this update."""


class UpdateSkipped(Event):
    """Instead of ``UpdateEnd``: a plugin voted to skip, parameters and counters are unchanged."""


class StepEnd(Event):
    """The step is done and counted; it has all attributes that the phase set."""


class StepCancelled(Event):
    """Instead of ``StepEnd``: the step was cancelled. It has the attributes set by then."""


class EpochEnd(Event):
    """The epoch is over, complete, stopped or cancelled (not after an error). Contexts are still entered."""

    arguments = ("learner", "phase", "epoch")


class PhaseEnd(Event):
    """All contexts are exited: own weights and modes are restored, ``learner.metrics`` has this epoch's values."""

    arguments = ("learner", "phase", "epoch")


class CycleEnd(Event):
    """A training epoch and all validations due after it are over; in `Learner.rounds`, a round is over.

    ``learner.metrics`` has the values of all of them, and no epoch is open.
    """

    arguments = ("learner",)


class SignalBegin(Event):
    """A signal was caught, and the current step is done: save here.

    ``learner.current.signal`` is the signal. After SIGTERM and SIGINT the fit ends, without ``epoch_end``; after
    SIGUSR1 it continues.
    """

    arguments = ("learner",)


class FitEnd(Event):
    """``fit`` has ended in any way. Runs in the reverse order of ``fit_begin``, once per plugin."""

    arguments = ("learner", "result")
