"""Checks before anything is trained."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from loopkit.errors import PhaseInputError, PluginError, StepResultError
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.step import Step

__all__ = ["SanityCheck"]


class SanityCheck:
    """Refuse, before the first update, what trains nothing or the wrong thing.

    Before the first step of a training phase: a model without trainable parameters, optimizers that cover none of
    them (some of them: a warning), a parameter in two optimizers. Within the first step, before its backward: outputs
    and targets that would be broadcast against each other. After it: a phase that never called ``step.backward``, or
    never ``step.update``, although it lists their events in ``emits``.

    The engine itself checks the loss (a scalar that requires grad), the loader (not empty) and that each metric which
    a plugin reads is made by another one. There is never an extra forward pass or batch.
    """

    name = "sanity_check"
    provides = "sanity_check"

    def __init__(self) -> None:
        self._checked: set[str] = set()

    @hookimpl(reads=("optimizer", "params"))
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Check what is trained."""
        if phase.training and phase.name not in self._checked and learner.optimizers:
            _check_coverage(learner)

    @hookimpl(reads=("outputs", "targets"))
    def loss_begin(self, phase: Phase, step: Step) -> None:
        """Check the shapes that the loss function will see."""
        if phase.name in self._checked:
            return
        outputs, targets = getattr(step, "outputs", None), getattr(step, "targets", None)
        if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and targets.is_floating_point():
            if outputs.shape != targets.shape and outputs.numel() == targets.numel():
                raise PhaseInputError(
                    f"phase {phase.name!r}: outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}: "
                    f"an elementwise loss would broadcast them to a table of all pairs; reshape one of them"
                )

    @hookimpl
    def step_end(self, phase: Phase, step: Step) -> None:
        """Check that the verbs were called."""
        if phase.name in self._checked:
            return
        self._checked.add(phase.name)
        emitted = {event.hook for event in phase.emits}
        cls = type(phase).__name__
        if phase.training and "backward_begin" in emitted and not step.had_backward:
            raise StepResultError(
                f"{cls}.step called no step.backward(loss), so nothing is learned. A training step ends with "
                f"step.backward(loss) and step.update(); a phase without them leaves BackwardBegin out of {cls}.emits"
            )
        if phase.training and "update_begin" in emitted and step.update_overdue:
            raise StepResultError(
                f"{cls}.step called step.backward(loss) but not step.update(), so no parameter changes: call it "
                f"after backward, in every step; it updates when an update is due"
            )


def _check_coverage(learner: Learner) -> None:
    names = {
        p: f"{model}.{name}" if len(learner.models) > 1 else name
        for model, module in learner.models.items()
        for name, p in module.named_parameters()
    }
    trainable = [p for p in names if p.requires_grad]
    if not trainable:
        raise PluginError(f"none of the {len(names)} parameters requires grad: there is nothing to train")
    owners: dict[Tensor, str] = {}
    for name, optimizer in learner.optimizers.items():
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in owners and owners[p] != name:
                raise PluginError(
                    f"parameter {names.get(p, tuple(p.shape))!r} is in the optimizers {owners[p]!r} and {name!r}: "
                    f"give each optimizer its own parameters"
                )
            owners[p] = name
    missing = [names[p] for p in trainable if p not in owners]
    if len(missing) == len(trainable):
        raise PluginError(
            f"the optimizer covers 0 of {len(trainable)} trainable parameters ({_some(missing)}): it was made for "
            f"another model, or before the parameters were replaced; give a factory, optimizer=lambda params: ..."
        )
    if missing:
        warnings.warn(
            f"the optimizer covers {len(trainable) - len(missing)} of {len(trainable)} trainable parameters; "
            f"not covered: {_some(missing)}. Freeze them (requires_grad=False) if that is meant",
            stacklevel=2,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
