"""Phases: kinds of epochs. Subclass one and write its ``step``, or only the part that differs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from loopkit.base.batches import count_samples, describe
from loopkit.base.generators import is_generator, put_state, state_of
from loopkit.base.sharded import like
from loopkit.errors import PhaseError, PhaseInputError
from loopkit.events import (
    BackwardBegin,
    BackwardEnd,
    EpochBegin,
    EpochEnd,
    Event,
    ForwardBegin,
    LossBegin,
    PhaseEnd,
    StepBegin,
    StepCancelled,
    StepEnd,
    UpdateBegin,
    UpdateEnd,
    UpdateSkipped,
)

if TYPE_CHECKING:
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner

BRACKETS = (EpochBegin, StepBegin, StepEnd, StepCancelled, EpochEnd, PhaseEnd)
TRAINING_EVENTS = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)


class Phase:
    """A kind of epoch: training, validation, or your own.

    Args:
        name: Replaces the class's ``name``, so that one class can serve two phases of a learner.
        skip_none: Leave out batches that are None instead of handing them to ``step``.
    """

    name: str = "phase"
    """Prefix of its metrics, as in ``"train/loss"``."""
    training: ClassVar[bool] = False
    """True: modules in train mode, gradients on, ``backward`` and ``update`` allowed, progress counted."""
    emits: ClassVar[tuple[type[Event], ...]] = ()
    """The events that ``step`` emits itself; ``backward`` and ``update`` add their own."""
    own_updates: bool = False
    """True: ``step`` differentiates and updates in its own way, and reports each update by ``step.updated()``. The
    engine then clears no gradients and makes no updates, and plugins that change gradients raise when a fit begins."""
    grad_mode: Literal["no_grad", "inference_mode", "grad"] = "no_grad"
    """How steps that do not train run: ``"inference_mode"`` is faster, but what modules cache there is unusable
    for training; ``"grad"`` is for steps that differentiate without training."""
    takes_empty: bool = False
    """True: batches without samples go to ``step``, such as Poisson sampling makes in private training. Then
    ``step.samples`` is 0, the update is made, and the step's loss counts in no metric. A plugin can declare it, too."""
    batchless: ClassVar[bool] = False
    """True: ``step.batch`` may be None, as data of only steps gives it; ``step`` makes its own."""
    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes that are the phase's state, such as ``("hidden", "baseline")``: saved with every checkpoint, and put
    back when the run resumes. Each is of a kind that a state can hold, a random generator, a dataclass, or has
    ``state_dict`` and ``load_state_dict``; so are the items of lists, tuples and dicts.
    """
    volatile: ClassVar[tuple[str, ...]] = ()
    """Attributes that may change and need no saving, such as caches."""

    def __init_subclass__(cls) -> None:
        for attribute, given in (("saved", cls.saved), ("volatile", cls.volatile)):
            if isinstance(given, str):
                what = f"{cls.__name__}.{attribute}"
                raise PhaseError(f"{what} is the string {given!r}: write ({given!r},), with a comma")

    def __init__(self, name: str | None = None, *, skip_none: bool = False) -> None:
        if name is not None:
            self.name = name
        self.skip_none = skip_none

    def step(self, learner: Learner, step: Step) -> None:
        """Process one batch. The engine fires ``StepBegin`` before and ``StepEnd`` after it."""
        raise NotImplementedError(f"{type(self).__name__} has no step(self, learner, step)")

    def samples(self, batch: Any) -> int:
        """Count the samples of a batch: the weight of its step in metrics and windows, and in ``progress.samples``.

        By default it is the length of the first tensor, from 1 without a tensor. Override it where the samples are not
        the first dimension.

        Example::

            class TimeFirst(TrainingPhase):
                def samples(self, batch):
                    return batch[0].shape[1]  # (time, samples, features)
        """
        return count_samples(batch)

    @property
    def has_state(self) -> bool:
        """Whether it has anything to save: attributes in ``saved``, or its own ``state_dict``."""
        return bool(self.saved) or not self.saves_names

    @property
    def saves_names(self) -> bool:
        """Whether its state is the attributes in ``saved``, be it none: the class has no ``state_dict``."""
        return type(self).state_dict is Phase.state_dict

    def state_dict(self) -> dict[str, Any]:
        """The saved attributes, those in ``saved``. Override it, and `load_state_dict`, for anything else."""
        if lacking := [name for name in self.saved if not hasattr(self, name)]:
            raise PhaseError(f"{self!r}: saved names {lacking[0]!r}, which the phase does not have: set it in __init__")
        return {name: _state_of(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned.

        A tensor that is trained is put back in place, so that its optimizer keeps it; another one goes to the device
        of the one in its place.
        """
        for name, value in state.items():
            now = getattr(self, name, None)
            put = _put_back(now, value, name in vars(self))
            if put is not now:
                setattr(self, name, put)

    def events(self) -> tuple[type[Event], ...]:
        """Every event that can fire during this phase."""
        if not self.training:
            return (*BRACKETS, *self.emits)
        if not self.own_updates:
            return (*BRACKETS, *self.emits, *TRAINING_EVENTS)
        return (*BRACKETS, *[event for event in self.emits if event not in TRAINING_EVENTS], UpdateEnd)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _state_of(value: Any) -> Any:
    if is_generator(value):
        return state_of(value)
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
        return value.detach()
    if (names := _field_names(value)) is not None:
        return {name: _state_of(getattr(value, name)) for name in names}
    if type(value) is dict:
        return {key: _state_of(each) for key, each in value.items()}
    return type(value)(_state_of(each) for each in value) if type(value) in (list, tuple) else value


def _field_names(value: Any) -> list[str] | None:
    """The names of the fields of a dataclass, or of the attributes of a namespace; None of any other value."""
    if isinstance(value, SimpleNamespace):
        return list(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in fields(value) if hasattr(value, field.name)]
    return None


def _put_back(now: Any, value: Any, own: bool) -> Any:
    """Return the value of an attribute after a load: itself, if the value could be put into it.

    Args:
        now: The present value.
        value: The saved value.
        own: Whether it is the phase's own, and not its class's, which others share.
    """
    if is_generator(now):
        put_state(now, value)
        return now
    if callable(getattr(now, "load_state_dict", None)):
        now.load_state_dict(value)
        return now
    if isinstance(value, Tensor):
        return _put_tensor_back(now, value, own)
    if _field_names(now) is not None and isinstance(value, Mapping):
        return _put_fields_back(now, value, own)
    if own and type(now) is type(value) is dict:
        return _put_items_back(now, value)
    if own and type(now) is type(value) is list:
        return _put_entries_back(now, value)
    if type(now) is type(value) is tuple and len(now) == len(value):
        return tuple(_put_back(*each, own) for each in zip(now, value, strict=True))
    return value.to(now.device) if hasattr(value, "to") and hasattr(now, "device") else value


def _put_items_back(now: dict[Any, Any], value: dict[Any, Any]) -> dict[Any, Any]:
    put = {key: _put_back(now.get(key), each, True) for key, each in value.items()}
    now.clear()
    now.update(put)
    return now


def _put_entries_back(now: list[Any], value: list[Any]) -> list[Any]:
    there = [*now, *[None] * len(value)]
    now[:] = [_put_back(*each, True) for each in zip(there, value, strict=False)]
    return now


def _put_fields_back(now: Any, value: Mapping[str, Any], own: bool) -> Any:
    """Put values into the fields of an object, or of a copy of one that is frozen or not the phase's own."""
    frozen = getattr(getattr(type(now), "__dataclass_params__", None), "frozen", False)
    put = now if own and not frozen else copy(now)
    for name, each in value.items():
        object.__setattr__(put, name, _put_back(getattr(put, name, None), each, own))
    return put


def _put_tensor_back(now: Any, value: Tensor, own: bool) -> Any:
    if not isinstance(now, Tensor):
        return value
    if own and now.is_leaf and now.requires_grad and now.shape == value.shape and now.dtype == value.dtype:
        with torch.no_grad():
            now.copy_(like(value, now))
        return now
    return value.to(now.device)


class SupervisedPhase(Phase):
    """The base of the three standard phases: how a batch becomes inputs, targets, outputs and a loss."""

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into ``(inputs, targets)``.

        It can be a tuple or list of the two, or a mapping or dataclass with those names. Anything else:
        override this method.

        Raises:
            PhaseInputError: The batch is none of these.
        """
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch  # type: ignore[return-value]
        if isinstance(batch, Mapping) and "inputs" in batch and "targets" in batch:
            return batch["inputs"], batch["targets"]
        if is_dataclass(batch) and hasattr(batch, "inputs") and hasattr(batch, "targets"):
            return batch.inputs, batch.targets
        if isinstance(batch, Mapping) and not {"input_ids", "labels", "pixel_values"}.isdisjoint(batch):
            raise PhaseInputError(
                f"{type(self).__name__} takes (inputs, targets), and this batch is one of Hugging Face, "
                f"{describe(batch)}: give the phase for models that return their loss, "
                f"phases=[loopkit_huggingface.{type(self).__name__}()] (of the distribution loopkit-huggingface)"
            )
        raise PhaseInputError(
            f"{type(self).__name__} takes (inputs, targets), or a mapping or dataclass with these names; "
            f"this batch is {describe(batch)}. Override {type(self).__name__}.unpack(batch) to split it"
        )

    def forward(self, learner: Learner, inputs: Any) -> Any:
        """``learner.model(inputs)``; override it for a model that takes something else."""
        return learner.model(inputs)  # type: ignore[operator]

    def loss(self, learner: Learner, outputs: Any, targets: Any) -> Tensor:
        """``learner.loss_fn(outputs, targets)``, a scalar."""
        return learner.loss_fn(outputs, targets)  # type: ignore[no-any-return]


class TrainingPhase(SupervisedPhase):
    """Supervised training: forward, loss, backward, update.

    Events of a step: StepBegin, ForwardBegin, LossBegin, BackwardBegin, BackwardEnd, and, when due, UpdateBegin and
    UpdateEnd (or UpdateSkipped); then StepEnd.
    """

    name = "train"
    training = True
    emits: ClassVar[tuple[type[Event], ...]] = (
        ForwardBegin,
        LossBegin,
        BackwardBegin,
        BackwardEnd,
        UpdateBegin,
        UpdateEnd,
        UpdateSkipped,
    )

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102 - the class's docstring says it
        step.inputs, step.targets = self.unpack(step.batch)
        step.emit(ForwardBegin)
        step.outputs = self.forward(learner, step.inputs)
        step.emit(LossBegin)
        step.loss = self.loss(learner, step.outputs, step.targets)
        step.backward(step.loss)
        step.update()


class ValidationPhase(SupervisedPhase):
    """Forward and loss in eval mode without gradients.

    Events of a step: StepBegin, ForwardBegin, LossBegin, StepEnd.
    """

    name = "val"
    emits: ClassVar[tuple[type[Event], ...]] = (ForwardBegin, LossBegin)

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102 - the class's docstring says it
        step.inputs, step.targets = self.unpack(step.batch)
        step.emit(ForwardBegin)
        step.outputs = self.forward(learner, step.inputs)
        step.emit(LossBegin)
        step.loss = self.loss(learner, step.outputs, step.targets)


class PredictionPhase(SupervisedPhase):
    """Only the forward, in eval mode without gradients. Events of a step: StepBegin, ForwardBegin, StepEnd.

    The inputs are the first of a tuple or list, ``inputs`` of a mapping or dataclass, else the batch itself; so
    the data that a model was trained on can be given as it is. ``step.targets`` is None.
    """

    name = "predict"
    emits: ClassVar[tuple[type[Event], ...]] = (ForwardBegin,)

    def unpack(self, batch: Any) -> tuple[Any, Any]:  # noqa: D102 - the class's docstring says it
        if isinstance(batch, Tensor):
            return batch, None
        if isinstance(batch, (tuple, list)) and batch:
            return batch[0], None
        if isinstance(batch, Mapping) and "inputs" in batch:
            return batch["inputs"], None
        if is_dataclass(batch) and hasattr(batch, "inputs"):
            return batch.inputs, None
        return batch, None

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102 - the class's docstring says it
        step.inputs = self.unpack(step.batch)[0]
        step.targets = None
        step.emit(ForwardBegin)
        step.outputs = self.forward(learner, step.inputs)


def is_standard(phase: Phase) -> bool:
    """Whether a phase is one that every learner has by itself, and not one of the user's own."""
    return type(phase) in (TrainingPhase, ValidationPhase, PredictionPhase) and phase.name == type(phase).name
