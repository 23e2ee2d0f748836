"""The arguments of a phase and hooks while a step is recorded; reading what changes from step to step raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit import Step
from loopkit.author import devices
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin
from loopkit_whole_step import private

if TYPE_CHECKING:
    from loopkit import Epoch, Event, Learner

LEARNER = ("model", "models", "loss_fn", "optimizer", "optimizers")
"""Attributes of a learner that stay the same from step to step, or are recorded with it."""
LATER = {"inputs", "targets", "outputs", "loss", "seed", "optimizer_name", "optimizer", "params", "batch", "weight"}
"""Attributes that a step has from some point on."""
OF_STEP = {name for name in (*dir(Step), *Step.__annotations__) if not name.startswith("_")} - LATER


class Refused(Exception):
    """The step cannot be recorded, and why; it reads "keeps the step eager, because ..."."""


class SealedLearner:
    """The parts of a learner that a recorded step may use."""

    def __init__(self, learner: Learner) -> None:
        vars(self).update({name: getattr(learner, name) for name in LEARNER})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(f"it uses learner.{name}, which is not the same in each step")

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"it sets learner.{name}")


class SealedEpoch:
    """The part of an epoch that recorded hooks may use."""

    def __init__(self, epoch: Epoch) -> None:
        self.name, self.phase, self.trains = epoch.name, epoch.phase, epoch.trains
        self.keep = epoch.keep

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(f"it uses epoch.{name}, which is not the same in each step")


class SealedStep:
    """A step that records one backward, and one update of each optimizer if they are due.

    Args:
        epoch: The step's.
        batch: The loader's batch, made of tensors that are recorded.
        samples: Its number of samples.
        calls: By event, the plugins' hooks.
        optimizers: By name, each with the parameters that it has while the step is recorded.
        window: The windows' state, which is the same for all.
        updated: Called when an optimizer has made its step, with its name and parameters.
    """

    closure = backward_name = skip_reason = None
    ended = False

    def __init__(
        self,
        epoch: SealedEpoch,
        batch: Any,
        samples: int,
        calls: Mapping[type[Event], Sequence[Callable[[SealedStep], Any]]],
        optimizers: Mapping[str, tuple[torch.optim.Optimizer, Sequence[Tensor]]],
        window: Any,
        updated: Callable[[str, Sequence[Tensor]], None],
    ) -> None:
        own = {"_calls": calls, "_optimizers": optimizers, "_window": window, "_updated": updated}
        vars(self).update(own, _left=list(optimizers), epoch=epoch)
        vars(self).update(batch=batch, samples=samples, weight=samples, had_backward=False)

    def __getattr__(self, name: str) -> Any:
        if name in OF_STEP:
            raise Refused(f"it uses step.{name}, which is not the same in each step")
        raise AttributeError(f"step.{name} is not set")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_STEP and name not in ("samples",):
            raise Refused(f"it sets step.{name}")
        if name == "weight" and self._window.size > 1:
            raise Refused("it weights the steps of an update, and uneven windows are rescaled")
        if name == "weight" and (value.device.type == "cpu" if isinstance(value, Tensor) else not value):
            raise Refused("it weights its steps, and an update whose weights sum to 0 is skipped")
        object.__setattr__(self, name, value)

    @property
    def values(self) -> dict[str, Any]:
        """The attributes that the phase has set."""
        own = ("samples", "batch", "epoch", "had_backward", "optimizer", "optimizer_name", "params", "seed")
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name not in own}

    def emit(self, event: type[Event]) -> None:
        """Record the hooks of an event."""
        if event not in self._calls:
            raise Refused(f"it emits {event.__name__}, which its emits does not list")
        for call in self._calls[event]:
            call(self)

    def backward(
        self, loss: Tensor, name: str | None = None, *, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Record a backward."""
        if not self._optimizers:
            raise Refused("it calls backward without training")
        if self.had_backward or retain_graph or create_graph:
            raise Refused("it has several backwards")
        if name is not None and [name] != list(self._optimizers):
            raise Refused(f"it calls backward only for {name!r}")
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise Refused("its loss is no scalar tensor that requires grad")
        own = vars(self).get("loss")
        vars(self).update(seed=self._window.seed, loss=loss)
        self.emit(BackwardBegin)
        if isinstance(self.weight, Tensor):
            counts = self.weight.ne(0).to(loss.dtype)
            vars(self)["seed"] = vars(self)["seed"] * counts
        given, total = self.seed, self.loss  # a plugin may have put another loss there
        gradient = given.to(total) if isinstance(given, Tensor) else torch.full_like(total, given)
        with autocast_off():
            torch.autograd.backward(total, gradient)
        vars(self).update(had_backward=True, total_loss=total)
        self.emit(BackwardEnd)
        if own is None:
            del vars(self)["loss"]
        else:
            object.__setattr__(self, "loss", own)

    def update(self, name: str | None = None, closure: Any = None) -> None:
        """Record the updates that are due."""
        if closure is not None:
            raise Refused("its optimizer evaluates the loss itself, by a closure")
        wanted = list(self._left) if name is None else [name]
        if not wanted or wanted != self._left[: len(wanted)] or not self.had_backward:
            raise Refused("it updates in another way than each optimizer once and in turn, after its backward")
        del self._left[: len(wanted)]
        for each in wanted if self._window.due else ():
            optimizer, params = self._optimizers[each]
            vars(self).update(optimizer_name=each, optimizer=optimizer, params=params)
            with autocast_off():
                self.emit(UpdateBegin)
                private.step_of(optimizer)
            self._updated(each, params)

    def skip(self) -> None:
        """Whether a step trains is a choice of Python's."""
        raise Refused("it decides whether to train (step.skip)")

    def skip_update(self, reason: str) -> None:
        """Votes are Python's."""
        raise Refused(f"it decides whether to update ({reason})")

    @property
    def complete(self) -> bool:
        """Whether the phase has called both, if it trains."""
        return not self._optimizers or bool(self.had_backward and not self._left)


@contextmanager
def autocast_off() -> Iterator[None]:
    """Inside, autocast is off."""
    with ExitStack() as stack:
        for device in devices.types():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
