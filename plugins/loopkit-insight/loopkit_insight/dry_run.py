"""A short fit and validation with copies, which writes nothing and leaves the learner as it was."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from loopkit.author import checks, describe, provided
from loopkit.errors import PluginError
from loopkit_insight.trial import as_before, can_begin_again, copied, own_position, refuse_sharded
from loopkit_insight.try_validation import First

if TYPE_CHECKING:
    from loopkit.learner import Learner

__all__ = ["dry_run"]

LEFT_OUT = (
    "checkpoint",
    "compile",
    "cuda_graph",
    "deadline",
    "end_of_log",
    "log",
    "observer",
    "optuna_pruning",
    "progress",
    "sync",
    "try_validation",
    "whole_step",
)
"""The names, or ``provides``, of plugins that write, show, share among processes or compile."""


def dry_run(
    learner: Learner,
    train: Any,
    val: Any = None,
    *,
    predict: Any = None,
    batches: int = 2,
    without: str | Collection[str] = (),
) -> dict[str, float]:
    """Run all phases on a few batches, to find mistakes before a long run, without a change or a file.

    It trains an epoch of so many batches, validates, and predicts, with deep copies of the models, optimizers, loss and
    plugins. Plugins that save, log, show progress or observe take no part, nor do several processes or compiling.
    Afterwards generators and positions of the data are as they were.

    Args:
        learner: Not changed.
        train: As for ``learner.fit``: data, or a mapping of a phase's name to it. Data begin again for each epoch: a
            loader of `loopkit.data`, a ``DataLoader`` over samples by index, a list, or a function of new ones.
        val: The same for the validation; a mapping may hold several sets.
        predict: Data to predict on.
        batches: How many batches of each, from 1.
        without: More plugins to leave out, by their names: one, or several.

    Returns:
        The metrics, as ``"val/loss"``: of a few batches, so only their names are of interest.

    Raises:
        PluginError: The data cannot begin again, or something cannot be copied.

    Source: ``Trainer(fast_dev_run=2)`` of Lightning.

    Example::

        dry_run(learner, train, val)
    """
    checks.whole("dry_run", batches=batches)
    without = [without] if isinstance(without, str) else without
    refuse_sharded("dry_run", learner)
    given = [*_sets(train), *_sets(val), *_sets(predict)]
    for data in given:
        _check_again(data)
    kept = {name for name, plugin in learner.plugins.items() if not _is_left_out(name, plugin, without)}
    with ExitStack() as stack:
        for data in given:
            stack.enter_context(as_before(learner, data))
        try:
            trial, _ = copied(learner, kept, None, [First(batches, kept)])
        except (TypeError, RuntimeError) as error:
            raise PluginError(
                f"dry_run: a model, the loss, a phase or a plugin cannot be copied, {error}: give its class "
                f"__deepcopy__(self, memo), or leave a plugin out by without=[...]"
            ) from error
        metrics = dict(trial.fit(_own(train), _own(val), epochs=1).metrics)
        if predict is not None:
            trial.predict(_own(predict))
    return metrics


def _check_again(data: Any) -> None:
    """Raise for data that cannot begin again.

    Raises:
        PluginError: They cannot.
    """
    makes = callable(data) and not hasattr(data, "__iter__")
    if not (can_begin_again(data) or makes):
        raise PluginError(
            f"dry_run: the data are {describe(data)}, whose place cannot be put back: give a DataLoader over samples "
            f"by index, a loader of loopkit.data, a list, or a function that returns new data"
        )


def _sets(data: Any) -> list[Any]:
    """The data in a mapping, or alone."""
    if data is None:
        return []
    return list(data.values()) if isinstance(data, Mapping) else [data]


def _own(data: Any) -> Any:
    """The same data, with a position of their own."""
    if isinstance(data, Mapping):
        return {name: own_position(each) for name, each in data.items()}
    return own_position(data)


def _is_left_out(name: str, plugin: Any, without: Collection[str]) -> bool:
    return name in without or name in LEFT_OUT or provided(plugin) in LEFT_OUT
