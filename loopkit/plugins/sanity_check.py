"""Checks before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import some, takes
from loopkit.errors import PhaseError, PhaseInputError, PluginError
from loopkit.groups import params_of
from loopkit.hooks import hookimpl, implemented
from loopkit.phases import PredictionPhase, TrainingPhase, ValidationPhase
from loopkit.plugin import declared, hook_states, unwrapped

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

STANDARD = (TrainingPhase, ValidationPhase, PredictionPhase)
"""Phases, but not their subclasses, that hand outputs and targets to the loss as they are."""
ROUNDING = 1e-2
"""The rounding of a sum of probabilities in bfloat16."""


class SanityCheck(Shown):
    """Check that training can work, before the first update, and raise otherwise.

    Before the first step of a training phase: a model without trainable parameters, optimizers that cover none of
    them (some of them: a warning), a parameter in two optimizers. Within the first step, before its backward: outputs
    and targets that a loss of torch would broadcast against each other (a warning where the phase or the loss is
    your own, which may reshape them); under torch's cross-entropy and negative log-likelihood, targets that are none
    of the classes, and, as a warning, outputs of a softmax before the cross-entropy; under autocast, weights that
    change through ``.data`` between two forwards, which autocast does not see.

    An optimizer whose rates are all 0 in the whole fit is named by a warning: in the first epoch if no plugin changes
    rates, else at the end.

    The engine itself checks the loss (a scalar that requires grad), the loader (not empty), that a training phase calls
    ``step.backward`` and ``step.update``, and that each metric which a plugin reads is made by another one. There is
    never an extra forward or batch.

    Args:
        checks: Your own functions, called with the learner before the first step of each training phase. A returned
            sentence or a raised exception becomes an error.
    """

    name = "sanity_check"
    syncs = ("loss_begin",)
    optional = ("loss_begin",)  # the standard set brings it to phases that have no such place
    provides = "sanity_check"
    volatile = ("_*", "checks")

    @takes(val_batches="TryValidation(batches) of loopkit-insight looks at the validation before training")
    def __init__(self, checks: Iterable[Callable[[Learner], str | None]] = ()) -> None:
        self.checks = tuple(checks)
        for check in self.checks:
            if not callable(check):
                raise PluginError(f"SanityCheck: {check!r} is no function: give checks=[check], check(learner)")
        self._checked: set[str] = set()
        self._still: dict[str, tuple[Tensor, Tensor]] | None = None
        """By name, the optimizers whose rates were all 0 when the fit began: their smallest parameter, and a copy."""

    @hookimpl
    def fit_begin(self) -> None:
        """Look at the rates anew."""
        self._still = None

    @hookimpl(reads=("params", "optimizer"))
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Name optimizers whose rates were all 0."""
        still = self._still or {}
        self._still = None
        if result.updates:
            for name, (p, before) in still.items():
                if _is_still(learner, name) and torch.equal(p.detach(), before):  # host sync: after a fit
                    self._say_still(learner, name)

    def _look_at_rates(self, learner: Learner) -> None:
        """Name optimizers whose rates are all 0 and stay so; remember those whose rates a plugin may change."""
        self._still = {}
        for name in learner.optimizers:
            if not _is_still(learner, name):
                continue
            if _may_change(learner, name):
                params = [p for group in learner.optimizers[name].param_groups for p in group["params"]]
                smallest = min(params, key=Tensor.numel)
                self._still[name] = smallest, smallest.detach().clone()
            else:
                self._say_still(learner, name)

    @staticmethod
    def _say_still(learner: Learner, name: str) -> None:
        if learner.world.rank == 0:
            warn(
                f"every rate of optimizer {name!r} ({type(learner.optimizers[name]).__name__}) is 0 in the whole fit, "
                f"so it does not train: give it a rate, as in learner.optimizer.param_groups[0]['lr'] = 0.01, or a new "
                f"optimizer, learner.set_optimizer(...). A schedule may have ended at 0"
            )

    @hookimpl(reads=("optimizer", "params"))
    def epoch_begin(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Check what is trained."""
        fit = learner.current
        if phase.training and self._still is None and fit is not None and not fit.resumed:  # else it saw a part only
            self._look_at_rates(learner)
        if phase.training and phase.name not in self._checked:
            epoch.compare_casts()
            if learner.optimizers:
                _check_coverage(learner)
            for check in self.checks:
                if refused := check(learner):
                    raise PhaseError(f"{getattr(check, '__name__', 'a check')}: {refused}")

    @hookimpl(reads=("outputs", "targets"))
    def loss_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Check the shapes that the loss function will see."""
        if step.index or phase.name in self._checked:
            return
        outputs = getattr(step, "outputs", None)
        targets = getattr(step, "targets", None)
        if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and targets.is_floating_point():
            if outputs.shape != targets.shape and outputs.numel() == targets.numel():
                message = (
                    f"phase {phase.name!r}: outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}: "
                    f"an elementwise loss would broadcast them to a table of all pairs; reshape one of them"
                )
                _refuse(learner, phase, message, _is_of_torch(learner.loss_fn))
        if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and (loss := _classifies(learner.loss_fn)):
            if outputs.is_floating_point() and outputs.ndim > 1 and outputs.numel():
                _check_classes(learner, phase, outputs, targets, loss)

    def vote(self, hook: str) -> Callable[[Step], Tensor] | None:
        """A recorded step needs no check: it is never the first."""
        return (lambda step: torch.ones((), dtype=torch.bool)) if hook == "loss_begin" else None

    @hookimpl
    def epoch_end(self, phase: Phase) -> None:
        """The phase is checked."""
        self._checked.add(phase.name)


def _is_still(learner: Learner, name: str) -> bool:
    """Whether an optimizer has rates, and all are 0."""
    rates = [group["lr"] for group in learner.optimizers[name].param_groups if group.get("lr") is not None]
    return bool(rates) and all(float(rate) == 0 for rate in rates)  # host sync: before a fit, where these are tensors


def _may_change(learner: Learner, name: str) -> bool:
    """Whether an optimizer's rates may change in a fit: a plugin declares that, or the optimizer is of another kind."""
    if not type(learner.optimizers[name]).__module__.startswith("torch.optim."):
        return True
    for plugin in learner.plugins.values():
        own = unwrapped(plugin)
        states = {*declared(own, "owns", getattr(own, "owns", ()))}
        for hook in implemented(own):
            states |= hook_states(own, hook, "updates", "writes")
        if any(state.split(".")[:2] in (["optimizer"], ["optimizer", "lr"]) for state in states):
            return True
    return False


def _refuse(learner: Learner, phase: Phase, message: str, certain: bool) -> None:
    """An error, or where a phase of the user's own may do something else, a warning."""
    if type(phase) in STANDARD and certain:
        raise PhaseInputError(message)
    if learner.world.rank == 0:
        warn(message)


def _classifies(loss_fn: object) -> str:
    """The name of a loss of torch that takes class indices as targets; of another loss, an empty string."""
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    for kind, plain in ((nn.CrossEntropyLoss, nn.functional.cross_entropy), (nn.NLLLoss, nn.functional.nll_loss)):
        if isinstance(function, kind) or function is plain:
            return plain.__name__
    return ""


def _check_classes(learner: Learner, phase: Phase, outputs: Tensor, targets: Tensor, loss: str) -> None:
    """Look at the values of the first batch; it waits for the device, once a phase."""
    classes = outputs.shape[1]
    loss_fn = learner.loss_fn
    if not targets.is_floating_point() and targets.shape == (outputs.shape[0], *outputs.shape[2:]):
        options = loss_fn.keywords if isinstance(loss_fn, partial) else {}
        ignored = options.get("ignore_index", getattr(loss_fn, "ignore_index", -100))
        odd = ((targets < 0) | (targets >= classes)) & (targets != ignored)
        wrong = targets[odd]  # host sync: before the first update, else the device fails with no word of why
        if len(wrong):
            _refuse(
                learner,
                phase,
                f"phase {phase.name!r}: a target is {int(wrong[0])}, and outputs of shape {tuple(outputs.shape)} have "
                f"the classes 0 to {classes - 1}: number the classes from 0, give the model as many outputs, or set "
                f"ignore_index of the loss",
                True,
            )
    if loss == "cross_entropy" and classes > 1 and phase.training:
        values = outputs.detach().float()
        if bool(values.min() >= 0) and bool((values.sum(1) - 1).abs().max() < ROUNDING):  # host syncs: the same
            if learner.world.rank == 0:
                warn(
                    f"phase {phase.name!r}: the outputs of all {len(outputs)} samples sum to 1, as after a Softmax, "
                    f"and the cross-entropy takes one itself: leave it out of the model, which else learns slowly"
                )


def _is_of_torch(function: object) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__  # an instance has that of its class
    return module.startswith("torch.")


def _check_coverage(learner: Learner) -> None:
    names = {
        p: f"{model}.{name}" if len(learner.models) > 1 else name
        for model, module in learner.models.items()
        for name, p in module.named_parameters()
    }
    trainable = [p for p in names if p.requires_grad]
    if not trainable:
        raise PhaseError(f"none of the {len(names)} parameters requires grad, so training has no effect")
    owners: dict[Tensor, str] = {}
    for name, optimizer in learner.optimizers.items():
        for p in params_of(optimizer):
            if p in owners and owners[p] != name:
                raise PhaseError(
                    f"parameter {names.get(p, tuple(p.shape))!r} is in the optimizers {owners[p]!r} and {name!r}: "
                    f"give each optimizer its own parameters"
                )
            owners[p] = name
    missing = [names[p] for p in trainable if p not in owners]
    if len(missing) == len(trainable):
        raise PhaseError(
            f"the optimizer covers 0 of {len(trainable)} trainable parameters ({some(missing, 5)}): it was made for "
            f"another model, or before the parameters were replaced; give a factory, optimizer=lambda params: ..."
        )
    if missing and learner.world.rank == 0:
        warn(
            f"the optimizer covers {len(trainable) - len(missing)} of {len(trainable)} trainable parameters; "
            f"not covered: {some(missing, 5)}. Freeze them (requires_grad=False) if that is meant"
        )
