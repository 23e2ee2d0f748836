"""Models and tokenizers saved as others load them, by ``from_pretrained``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from loopkit import Epoch, FitResult, Learner, Phase, hookimpl
from loopkit.author import Shown, checked_mode, checks, describe, direction, is_better, nearest, sharded
from loopkit.criteria import Mode
from loopkit.errors import PluginError

__all__ = ["SavePretrained"]

BEST, LAST = "best", "last"
MISSING: Any = object()


class SavePretrained(Shown):
    """Save the best model and its tokenizer with ``save_pretrained``.

    It is saved as safetensors, whenever a metric is the best so far. Below ``directory`` there are ``best``, if a
    metric is monitored, and ``last``, at the end of the fit (unless an error or a signal ended it). Each is what
    ``from_pretrained`` loads. They are for use, not for resuming: for that, there is ``Checkpoint``, with its own
    directory.

    A folder is written aside and takes the place of the one before when all of it is on the disk. If that fails, or the
    process is killed, the one before stays; killed between the two renames, it is put back when the next fit begins.

    Args:
        directory: Where the folders are; folders of an earlier run are replaced. A relative one is resolved now.
        tokenizer: The tokenizer or processor to save along, or None if there is none.
        monitor: The metric by which an epoch is the best, such as ``"val/loss"``. A value that is not finite never is.
        mode: ``"min"`` or ``"max"``; by default the metric's own; without one the fit raises.
        last: Save ``last``.
        averaged: Where a plugin averages the weights and validates with the average (``WeightAverage``), save the
            average; False: the weights as they are trained.
        model: The name of the model to save, if the learner has several.
        name: The plugin's name.

    ``last`` has the weights at the end of the fit, after any restored by ``EarlyStopping(restore_best=True)``. An epoch
    that ``learner.stop`` cut short is never the best. Of several processes rank 0 writes; sharded weights are gathered
    in the main memory of all.

    Raises:
        PluginError: An option is out of range; the tokenizer or, when a fit begins, the model has no
            ``save_pretrained``; the monitored metric is not made.
        OSError: A folder cannot be written.

    Example::

        SavePretrained("models/poems", tokenizer, monitor="val/perplexity")
    """

    provides = "observer"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tokenizer: Any = MISSING,
        *,
        monitor: str | None = None,
        mode: Mode | None = None,
        last: bool = True,
        averaged: bool = True,
        model: str | None = None,
        name: str = "save_pretrained",
    ) -> None:
        if tokenizer is MISSING:
            raise PluginError(
                "SavePretrained: there is no tokenizer, without which a language model is of no use where it is "
                "loaded: give SavePretrained(directory, tokenizer), or tokenizer=None for a model that needs none"
            )
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise PluginError(
                f"SavePretrained: tokenizer is {describe(tokenizer)}, which has no save_pretrained: wrap one of the "
                f"library tokenizers, PreTrainedTokenizerFast(tokenizer_object=tokenizer)"
            )
        if monitor is not None:
            checks.metric_name("SavePretrained", monitor=monitor)
        if monitor is None and not last:
            raise PluginError("SavePretrained: last=False without a monitor would never save: give a monitor")
        self.name = name
        self.directory = Path(directory).absolute()
        self.tokenizer = tokenizer
        self.monitor = monitor
        self.mode = checked_mode("SavePretrained", mode)
        self.last = last
        self.averaged = averaged
        self.model = model
        self.best: float | None = None
        """The best value so far, which ``best`` was saved with."""
        self._cut = False

    def owns(self) -> tuple[str, ...]:
        """The directory."""
        return (f"pretrained models in {self.directory}",)

    @hookimpl(after=("checkpoint", "sync"), before=("early_stopping",))  # and so, turned round, in fit_end
    def fit_begin(self, learner: Learner) -> None:
        """See that there is what to save, and put back what a kill left aside."""
        self._chosen(learner)
        if learner.world.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for label in (BEST, LAST):
                target, new, old = self._paths(label)
                _put_back(target, old)
                for left in (new, old):
                    shutil.rmtree(left, ignore_errors=True)

    @hookimpl
    def epoch_end(self, epoch: Epoch) -> None:
        """Note whether the epoch was cut short."""
        self._cut = epoch.stopped or not epoch.steps

    @hookimpl(
        reads=lambda plugin: ("params", "buffers", *([] if plugin.monitor is None else [f"metrics.{plugin.monitor}"]))
    )
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Save the best."""
        monitor = self.monitor
        if monitor is None or phase.name != monitor.partition("/")[0] or learner.current is None:
            return
        if self._cut:
            return
        if monitor not in learner.metrics:
            raise PluginError(
                f"plugin {self.name!r}: the epoch of phase {phase.name!r} made no metric {monitor!r}"
                f"{nearest(monitor, learner.metrics)}; there are: {', '.join(learner.metrics) or 'none'}"
            )
        value = learner.world.share(float(learner.metrics[monitor]))
        if is_better(value, self.best, direction(self, learner.plugins.values())):
            self._save(learner, BEST)
            self.best = value

    @hookimpl(reads=("params",))
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Save the last."""
        if self.last and result.reason not in ("error", "signal"):
            self._save(learner, LAST)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self.best = state["best"]

    def _chosen(self, learner: Learner) -> Any:
        """The model to save."""
        names = [self.model] if self.model is not None else list(learner.models)
        if len(names) > 1:
            raise PluginError(f"plugin {self.name!r}: choose the model to save, model=...: {', '.join(names)}")
        if names[0] not in learner.models:
            known = ", ".join(learner.models)
            raise PluginError(
                f"plugin {self.name!r}: no model is called {names[0]!r}{nearest(names[0], learner.models)}; there are: "
                f"{known}"
            )
        model: nn.Module = learner.models[names[0]]
        if not callable(getattr(model, "save_pretrained", None)):
            raise PluginError(
                f"plugin {self.name!r}: the model, {type(model).__name__}, has no save_pretrained: take a model of "
                f"transformers, or loopkit.save_weights, which saves the weights of any model"
            )
        return model

    def _weights(self, learner: Learner) -> AbstractContextManager[None]:
        """The weights to save, in the model."""
        for plugin in learner.plugins.values():
            if getattr(plugin, "provides", None) == "average" and hasattr(plugin, "averaged"):
                return plugin.averaged(learner) if self.averaged else learner.models.weights.own()
        return nullcontext()

    def _paths(self, label: str) -> tuple[Path, Path, Path]:
        """The folder, the one that is being written, and the one before while they change places."""
        return self.directory / label, self.directory / f".{label}.new", self.directory / f".{label}.old"

    def _save(self, learner: Learner, label: str) -> None:
        model = self._chosen(learner)
        target, new, old = self._paths(label)
        with self._weights(learner):
            shards = any(map(sharded.is_sharded, model.parameters()))
            whole = {"state_dict": sharded.weights(model)} if shards else {}
            if learner.world.rank:
                return
            try:
                with _quiet():
                    model.save_pretrained(new, **whole)
                    if self.tokenizer is not None:
                        self.tokenizer.save_pretrained(new)
                _sync(new)
                shutil.rmtree(old, ignore_errors=True)
                _replace(target, new, old)
            except BaseException as error:
                shutil.rmtree(new, ignore_errors=True)
                error.add_note(f"plugin {self.name!r} was saving {target}; the folder is unchanged")
                raise


def _replace(target: Path, new: Path, old: Path) -> None:
    """Put a folder in the place of another; there is no call that does it at once on every system."""
    try:
        if target.exists():
            target.rename(old)
        new.rename(target)
    except BaseException:
        _put_back(target, old)
        raise
    _sync_entry(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _put_back(target: Path, old: Path) -> None:
    """End a replacement that was broken off between its two renames."""
    if old.exists() and not target.exists():
        old.rename(target)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers."""
    logging = sys.modules.get("transformers.utils.logging")
    if logging is None or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _sync(folder: Path) -> None:
    """Wait until all of a folder is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
