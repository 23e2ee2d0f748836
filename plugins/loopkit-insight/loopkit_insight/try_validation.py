"""A look at the validation before the training."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from loopkit.author import (
    Shown,
    add_note,
    checks,
    concerns,
    describe,
    hook_states,
    implemented,
    provided,
    unwrapped,
)
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.plugins import Metrics
from loopkit_insight.trial import KEPT, as_before, can_begin_again, copied, own_position, refuse_sharded

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["TryValidation"]


class TryValidation(Shown):
    """Validate on some batches before a fit trains; all is then as it was.

    They are the first ones of each validation set. A mistake in the validation shows before an epoch is trained. Then
    all is restored, bit for bit. It needs a copy of the models, and of the plugins that take part: those that make
    metrics, set devices and precision, or declare that they read or change batches, inputs, outputs or targets. Each
    process only looks, at the whole data. Generators that a dataset or its functions hold are restored; their other
    changes stay. A resumed fit has no trial.

    Args:
        batches: How many batches of each set, from 1.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[TryValidation(2)])
    """

    name = "try_validation"
    provides = "try_validation"
    volatile = ("_*",)

    def __init__(self, batches: int = 2) -> None:
        checks.whole("TryValidation", batches=batches)
        self.batches = batches
        self._tried: set[str] = set()

    @hookimpl(phase="training", reads=("optimizer", "params"))
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Look at the validation, before the first epoch of a phase."""
        fit = learner.current
        if phase.name not in self._tried and fit is not None and not fit.resumed:
            for validation in fit.validations.values():
                _validate(learner, validation.source, self.batches)

    @hookimpl(phase="training")
    def epoch_end(self, phase: Phase) -> None:
        """Note that the phase was tried."""
        self._tried.add(phase.name)


class First:
    """Take only the first batches, of the data as the other plugins have set it up."""

    name = "first_batches"
    volatile = ("*",)

    def __init__(self, count: int, others: Iterable[str]) -> None:
        self.count = count
        self.after = tuple(others)

    @hookimpl
    def setup_data(self, data: Any) -> Any:
        return list(islice(data, self.count))


def _validate(learner: Learner, source: Any, count: int) -> None:
    """Validate on the first batches of a fit's source, with copies of everything."""
    name, data = source.phase.name, source.given
    if source.made or not can_begin_again(data):
        raise PluginError(
            f"TryValidation({count}): the data of phase {name!r} is {describe(data)}, whose place cannot be "
            f"put back: give a DataLoader over samples by index, a loader of loopkit.data or a list, or leave "
            f"the plugin out"
        )
    refuse_sharded(f"TryValidation({count})", learner)
    kept = [
        name
        for name, plugin in learner.plugins.items()
        if isinstance(unwrapped(plugin), Metrics)
        or (provided(plugin) not in ("observer", "sanity_check", "sync") and _takes_batches(plugin, source.phase))
    ]
    with as_before(learner, data):
        try:
            trial, _ = copied(learner, {*KEPT, *kept}, source.phase, [First(count, learner.plugins)])
        except (TypeError, RuntimeError) as error:
            raise PluginError(
                f"TryValidation({count}): a model, the loss, a phase or a plugin cannot be copied, {error}: "
                f"give its class __deepcopy__(self, memo), which returns one made anew, or leave the plugin out"
            ) from error
        try:
            trial.run(name, own_position(data))
        except Exception as error:
            add_note(error, f"loopkit: before training, TryValidation({count}) validated on phase {name!r}")
            raise


def _takes_batches(plugin: Any, phase: Phase) -> bool:
    """Whether a plugin has a hand, or an eye, in the data, the batches and the outputs of a phase, as it declares."""
    own = unwrapped(plugin)
    for hook in implemented(own):
        if concerns(getattr(own, hook).loopkit_options.phase, phase):
            names = {name.partition(".")[0] for name in hook_states(own, hook, "reads", "updates", "writes")}
            if hook in ("setup_data", "move_batch") or names & {"batch", "inputs", "outputs", "targets"}:
                return True
    return False
