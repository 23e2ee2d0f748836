"""Plugins that let a run be looked at: while it trains, and afterwards."""

from __future__ import annotations

import subprocess
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit_monitor import _core as _core  # isort: split

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.author import Shown, bundle, checks, learning_rates, masking, storage
from loopkit.checkpoint import Manifest
from loopkit.errors import CheckpointError, LogError, PluginError
from loopkit.hooks import hookimpl
from loopkit.logs import Graph, JsonLines, Record, Table, Text
from loopkit.plugins import Checkpoint, LogMetrics, LogTo, MixedPrecision
from loopkit_monitor.background import Background, running

if TYPE_CHECKING:
    from loopkit import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["Monitor", "Report"]

DIRECTORY = "runs/run"
SECONDS = 1.0
"""How often the log of a plugin of this page is written in a long epoch."""
MOST_WARNINGS = 500
"""In a fit."""
LONGEST = 10_000
"""Characters of a warning."""
PLAN = ("phase", "hook", "position", "plugin", "access", "reasons", "note")
RATE = "run/lr"
CHECKPOINT = ("path", "reason", "monitor", "mode", "value", "epoch", "step")
REMOVED = "removed"
"""The reason of a checkpoint that is not there any more."""


class Monitor(Shown):
    """Log what the monitor's page shows of a run, beside its metrics.

    While a fit runs, ``loopkit monitor runs`` shows it, ``loopkit watch runs/run`` does so in a terminal, and later
    ``loopkit report runs/run`` makes a file of it. All of them read the log, in separate processes, so they
    never touch the training. It logs, under names that begin with ``run/``:

    - when the fit begins, the plan of the plugins (``run/plan``) and the modules (``run/model``);
    - after every so many training steps ``run/throughput/steps_per_second``, ``run/throughput/samples_per_second``,
      ``run/time_left`` (seconds, where the end is known) and ``run/lr``, ``run/grad_norm`` and ``run/skipped_updates``
      where there are any; after each epoch ``run/loss_scale``;
    - each checkpoint that was saved or removed (``run/checkpoint``) and each warning (``run/warning``).

    What the learner's list lacks is added to it: a `LogTo`, if none writes JSON lines (to the directory, if one is
    given), and a `LogMetrics`. Beside a `Checkpoint` there is a plugin ``"~monitor"``, too: it adds the checkpoint
    that is saved last of all to the log, after its end.

    Args:
        directory: Where the log is. By default where a `LogTo` of the list has it, else ``runs/run``.
        every: Training steps from one figure to the next.
        serve: Also start the server of the page when a fit begins, and print its address: for the folder that holds the
            directory, or for the one that is given. All learners of a process share the one of a folder and port. It
            stays when the training has ended, until it is killed or, for an hour, had no request and no live run.
            If it cannot be started, or dies, there is a warning, and the fit continues.
        port: Where the server listens, only on this machine; 0 for any port that is free.
        name: The plugin's name.

    Raises:
        PluginError: ``every`` or ``port`` is out of range.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[Monitor("runs/a", serve=True)])
    """

    provides = "observer"
    optional = ("step_begin", "step_end", "update_end", "update_skipped")
    syncs = ("phase_end",)
    """The loss scale is read there."""
    volatile = (
        "run/throughput/steps_per_second",
        "run/throughput/samples_per_second",
        "run/time_left",
        *LogTo.volatile,  # of the one that it adds
    )

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        every: int = 10,
        serve: bool | str | Path = False,
        port: int = 0,
        name: str = "monitor",
    ) -> None:
        checks.whole("Monitor", every=every)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
            raise PluginError(f"Monitor: port is {port!r}: it is from 0 to 65535, and 0 is any that is free")
        self.name = name
        self.directory = None if directory is None else Path(directory).absolute()
        self.every = every
        self.serve = serve if isinstance(serve, bool) else Path(serve).absolute()
        self.port = port
        self._server: Background | None = None
        self._warnings: _Warnings | None = None
        self._learner: weakref.ref[Learner] | None = None
        """The learner of the running or last fit."""
        self._loaded: dict[str, Any] | None = None
        self._plan: Table | None = None
        """As it was logged last; None if it is to be logged."""
        self._known: list[str] = []
        """The plugins of the plan."""
        self._others: list[Any] = []
        """The plugins, as they were when the last epoch ended."""
        self._logs_rates = False
        """Whether to log the learning rates: no other plugin does."""
        self._rates: dict[str, Any] = {}
        """The learning rates of the step's updates, if they will be logged."""
        self._updated: set[str] = set()
        """The optimizers of the step's updates, if the step is one whose figures are logged."""
        self._norms: Any = None
        """The plugin that has norms of gradients."""
        self._model_due = False
        self._told: set[str] = set()
        """Checkpoints that were logged, or were there before."""
        self._changed: dict[str, int] = {}
        """When the directories of checkpoints were changed, as they were looked at last."""
        self._skipped = 0
        """Updates of this fit."""
        self._skipped_told = 0
        self._begin = 0.0, 0
        """When this process began to train, and the steps by then."""
        self._mark = 0.0, 0, 0
        """Time, steps and samples at the last figures."""

    @hookimpl
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Add what is lacking for a log; the model stays as it is."""
        complete(learner, self.name, self.directory, self.every)
        last = self._helper
        saves = any(getattr(plugin, "provides", "") == "checkpoint" for plugin in learner.plugins.values())
        if saves and last not in learner.plugins:
            learner.add(_AfterEnd(self, last))
        return model

    @hookimpl(after=("checkpoint", "log"))  # resumed; turned round, the end comes before the log's
    def fit_begin(self, learner: Learner) -> None:
        """Log the plan and the model, unless the fit is resumed; start the server."""
        loaded, self._loaded = self._loaded, None
        if learner.world.rank > 0:
            return
        self._learner = weakref.ref(learner)
        self._begin = time.monotonic(), learner.progress.steps
        self._move_mark(learner)
        self._look_around(learner)
        if loaded is not None and learner.current is not None and loaded["fit"] == learner.current.position.number:
            self._plan = _plan(learner) if loaded["plugins"] == self._known else None
            self._told, self._skipped = set(loaded["checkpoints"]), loaded["skipped"]
            self._model_due = loaded["model_due"]
        else:
            self._told.clear()
            self._changed.clear()
            list(self._checkpoints())  # those of earlier fits
            self._plan, self._skipped = None, 0
            self._log_plan(learner)
            self._model_due = True
            self._log_model(learner)
        self._skipped_told = self._skipped
        self._warnings = _Warnings()
        if self.serve:
            try:
                self._start(learner)
            except BaseException:  # no fit_end comes
                self._end()
                raise

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Throughput is per epoch."""
        if phase.training:
            self._move_mark(learner)

    @hookimpl(phase="training", reads=("optimizer.lr", "progress"))
    def step_begin(self, learner: Learner) -> None:
        """Keep the learning rates, which a schedule changes as soon as an update is made."""
        self._updated = set()
        if self._logs_rates and (learner.progress.steps + 1) % self.every == 0:
            for name in learner.optimizers:
                self._rates |= learning_rates(learner, name, RATE)

    @hookimpl
    def update_end(self, step: Step) -> None:
        """Note whose update it was."""
        self._updated.add(step.optimizer_name)

    @hookimpl
    def update_skipped(self, step: Step) -> None:
        """Count, and note whose update it was."""
        self._skipped += 1
        self._updated.add(step.optimizer_name)

    @hookimpl(reads=("progress", "optimizer.lr", "grads"))
    def step_end(self, learner: Learner, phase: Phase) -> None:
        """Log the figures, if they are due."""
        if learner.progress.steps % self.every or not phase.training or self._warnings is None:
            return
        self._log_figures(learner)
        self._log_news(learner)

    @hookimpl(reads=("progress",))
    def phase_end(self, learner: Learner) -> None:
        """Log what has happened in the epoch."""
        if self._warnings is None:
            return
        self._rates = {}  # of an update after the last step
        self._move_mark(learner)
        self._look_around(learner)
        self._log_model(learner)
        for plugin in self._others:
            if isinstance(plugin, MixedPrecision) and plugin.dtype is torch.float16:
                learner.log("run/loss_scale", plugin.loss_scale)
                self._skipped = max(self._skipped, plugin.skipped)
                self._log_skipped(learner)
        if self._skipped != self._skipped_told:
            self._log_skipped(learner)
        self._log_news(learner)
        if self._server is not None and (problem := self._server.death()):
            self._server = None
            warnings.warn(f"plugin {self.name!r}: {problem}; the fit continues", stacklevel=2)

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Log the rest."""
        if self._warnings is None:
            return
        try:
            if self._plan is not None and _plan(learner).rows != self._plan.rows:
                self._plan = None  # some have found out more
            self._changed.clear()
            self._log_news(learner)
        finally:
            if self._helper not in learner.plugins:
                self._end()

    def append_news(self, learner: Learner) -> None:
        """Add what has come since `fit_end` to the logs, which are closed."""
        if self._warnings is None:
            return
        self._changed.clear()
        news = list(self._news())
        self._end()
        counts, now = learner.progress, time.time()
        records = [Record(*each, "", counts.epochs, counts.steps, counts.updates, now) for each in news]
        for log in _logs(learner):
            try:
                log.append(records)
            except (OSError, LogError) as error:
                warnings.warn(
                    f"plugin {self.name!r}: the last checkpoint is not in the log {str(log.path)!r}: {error}; it is "
                    f"saved all the same",
                    stacklevel=2,
                )

    @property
    def _helper(self) -> str:
        """The name of the plugin that comes after the log's end; no identifier, so that it is known as a tool."""
        return f"~{self.name}"

    def _end(self) -> None:
        """Listen to no more warnings."""
        if self._warnings is not None:
            self._warnings.end()
            self._warnings = None

    def state_dict(self) -> dict[str, Any]:
        """Which fit is running, and what was logged of it."""
        if self._loaded is not None:
            return dict(self._loaded)
        learner = None if self._learner is None else self._learner()
        at = None if learner is None or learner.current is None else learner.current.position
        return {
            "fit": None if at is None else at.number,
            "plugins": list(self._known),
            "checkpoints": sorted(self._told),
            "skipped": self._skipped,
            "model_due": self._model_due,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._loaded = dict(state)

    @staticmethod
    def reshard(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The state of the first process, the only one that logs."""
        return states[0]

    # ------------------------------------------------------------------------------------------------------------------

    def _log_figures(self, learner: Learner) -> None:
        (then, steps, samples), now, counts = self._mark, time.monotonic(), learner.progress
        spent = max(now - then, 1e-9)
        learner.log("run/throughput/steps_per_second", (counts.steps - steps) / spent)
        learner.log("run/throughput/samples_per_second", (counts.samples - samples) / spent)
        self._mark = now, counts.steps, counts.samples
        if (fit := learner.current) is not None and (planned := fit.result.planned.steps) is not None:
            begun, before = self._begin
            left = fit.position.start.steps + planned - counts.steps
            learner.log("run/time_left", max(left, 0) * (now - begun) / max(counts.steps - before, 1))
        if self._logs_rates:
            rates, self._rates = self._rates, {}
            for optimizer in learner.optimizers:
                for name, rate in learning_rates(learner, optimizer, RATE).items():
                    learner.log(name, rates.get(name, rate))
        if self._norms is not None and self._updated:
            for name, norm in _norms(self._norms, learner.optimizers.keys() - self._updated):
                learner.log(name, norm)
        self._updated = set()
        if self._skipped != self._skipped_told:
            self._log_skipped(learner)

    def _log_skipped(self, learner: Learner) -> None:
        self._skipped_told = self._skipped
        learner.log("run/skipped_updates", float(self._skipped))

    def _log_news(self, learner: Learner) -> None:
        for name, value in self._news():
            learner.log(name, value)
        if self._plan is None:
            self._log_plan(learner)

    def _news(self) -> Iterator[tuple[str, Text | Table]]:
        assert self._warnings is not None
        for text in self._warnings.take():
            yield "run/warning", Text(masking.masked_text(text))
        for row in self._checkpoints():
            yield "run/checkpoint", Table(CHECKPOINT, [row])

    def _look_around(self, learner: Learner) -> None:
        """Find the plugins that know something."""
        plugins = learner.plugins
        if self._known != (now := sorted(plugins)):
            self._known, self._plan = now, None
        self._others = list(plugins.values())
        self._logs_rates = not any(isinstance(each, LogMetrics) and each.every for each in self._others)
        provided = {getattr(each, "provides", ""): each for each in self._others}
        self._norms = provided.get("norm", provided.get("clip"))

    def _log_plan(self, learner: Learner) -> None:
        self._plan = _plan(learner)
        learner.log("run/plan", self._plan)

    def _log_model(self, learner: Learner) -> None:
        """The modules, once all their parameters have a shape."""
        if self._model_due and not any(is_lazy(p) for model in learner.models.values() for p in model.parameters()):
            self._model_due = False
            learner.log("run/model", Graph(_whole(learner)))

    def _checkpoints(self) -> Iterator[tuple[Any, ...]]:
        """A row for each that is new, the oldest first, and for each that is gone."""
        for plugin in self._others:
            if isinstance(plugin, Checkpoint):
                try:
                    changed = plugin.directory.stat().st_mtime_ns
                    if self._changed.get(plugin.name) == changed:
                        continue
                    listed = {f"{plugin.name}/{each.path.name}": each for each in storage.listing(plugin.directory)}
                except (OSError, CheckpointError):
                    continue  # it is not there yet, or is being written
                self._changed[plugin.name] = changed
                mine = {key for key in self._told if key.rpartition("/")[0] == plugin.name}
                self._told = (self._told - mine) | set(listed)
                for key in sorted(mine - set(listed)):
                    yield (str(plugin.directory / key.rpartition("/")[2]), REMOVED, None, None, None, None, None)
                yield from (_row(each) for key, each in reversed(listed.items()) if key not in mine)

    def _move_mark(self, learner: Learner) -> None:
        self._mark = time.monotonic(), learner.progress.steps, learner.progress.samples

    def _start(self, learner: Learner) -> None:
        """Start the server, unless it runs already."""
        log = find_log(learner)
        if isinstance(self.serve, Path):
            root = self.serve
        elif log is not None:
            root = log.parent.parent
        else:
            return
        self._server = running(root, self.port)
        if self._server is not None:
            return
        try:
            self._server = Background(root, self.port)
        except (OSError, subprocess.SubprocessError) as error:
            self._server = None
            warnings.warn(
                f"plugin {self.name!r}: the server of the page was not started: {error}; the fit continues without, "
                f"and "
                f"'loopkit monitor {root}' starts one at any time",
                stacklevel=2,
            )
        else:
            print(f"loopkit monitor: {self._server.address} (kill {self._server.pid} ends it)", flush=True)


class Report(Shown):
    """Write a report when a fit ends, also after an error: one file with all that its log has, that any browser opens.

    It is what ``loopkit report`` makes of the log. A fit that is killed has none; the command makes it then. As by
    `Monitor`, a `LogTo` and a `LogMetrics` are added where the learner's list has none. If the report cannot be
    written, there is a warning.

    Args:
        path: The file, an HTML page; one that is there is replaced. The directories above it are made; a relative path
            is resolved now.
        name: The plugin's name.

    Raises:
        PluginError: The path is empty.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a"), LogMetrics(), Report("runs/a/report.html")])
    """

    provides = "observer"
    volatile = LogTo.volatile  # of the one that it adds

    def __init__(self, path: str | Path = "report.html", *, name: str = "report") -> None:
        if not str(path):
            raise PluginError("Report: the path is empty: name the file to write, such as 'report.html'")
        self.name = name
        self.path = Path(path).absolute()

    @hookimpl(after=("monitor",))
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Add what is lacking for a log; the model stays as it is."""
        complete(learner, self.name, None, 10)
        return model

    @hookimpl(before=("checkpoint", "log", "end_of_log"))  # turned round, the report comes when all is in the log
    def fit_begin(self) -> None:
        """Stand before the log."""

    @hookimpl(after=("checkpoint", "log", "end_of_log"))
    def fit_end(self, learner: Learner) -> None:
        """Write the report."""
        if learner.world.rank > 0 or (log := find_log(learner)) is None:
            return
        try:
            from loopkit_monitor.report import write_html
            from loopkit_monitor.store import Store

            write_html(Store(log), self.path)
        except Exception as error:
            warnings.warn(
                f"plugin {self.name!r}: {self.path} was not written: {type(error).__name__}: {error}; 'loopkit report "
                f"{log.parent}' tries again",
                stacklevel=2,
            )


class _AfterEnd:
    """Lets a monitor log what comes when the log is closed."""

    provides = "end_of_log"

    def __init__(self, monitor: Monitor, name: str) -> None:
        self.name = name
        self._monitor = monitor

    @hookimpl(before=("checkpoint", "log"))  # turned round, this comes after what is saved at the end
    def fit_begin(self) -> None:
        """Stand before them."""

    @hookimpl(after=("checkpoint", "log"))
    def fit_end(self, learner: Learner) -> None:
        """Log the checkpoint that was saved last."""
        self._monitor.append_news(learner)


class _Warnings:
    """Records warnings, and forwards them."""

    def __init__(self) -> None:
        self._heard: deque[str] = deque()
        self._left = MOST_WARNINGS
        self._before = warnings.showwarning
        self._mine = self._show
        warnings.showwarning = self._mine

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if self._left > 0 and file is None:
            self._left -= 1
            self._heard.append(f"{category.__name__}: {message} ({filename}:{lineno})"[:LONGEST])
        self._before(message, category, filename, lineno, file, line)

    def take(self) -> Iterator[str]:
        """Take the warnings since the last call."""
        while self._heard:
            yield self._heard.popleft()

    def end(self) -> None:
        """Listen no more."""
        self._left = 0
        if warnings.showwarning is self._mine:
            warnings.showwarning = self._before


def complete(learner: Learner, name: str, directory: Path | None, every: int) -> None:
    """Add missing plugins for the monitor: a log writer, in a directory if one is given, and the metrics."""
    plugins = learner.plugins
    if not any(directory in (None, log.path.parent) for log in _logs(learner)):
        own = "log_to" if "log_to" not in plugins else f"{name}_log"
        learner.add(LogTo(JsonLines(Path(directory or DIRECTORY) / "log.jsonl"), seconds=SECONDS, name=own))
    if not any(isinstance(plugin, LogMetrics) for plugin in plugins.values()):
        learner.add(LogMetrics(every=every))


def find_log(learner: Learner) -> Path | None:
    """The file of JSON lines that a learner's plugins write; the last one if there are several."""
    return next((log.path for log in reversed(list(_logs(learner)))), None)


def _logs(learner: Learner) -> Iterator[JsonLines]:
    for plugin in learner.plugins.values():
        if isinstance(plugin, LogTo):
            for backend in plugin.backends:
                if isinstance(backend, JsonLines):
                    yield backend


def _plan(learner: Learner) -> Table:
    rows = learner.explain().rows
    cells = [
        (r.phase, r.hook, r.position, r.plugin, r.access, "; ".join(dict.fromkeys(r.reasons)), r.note) for r in rows
    ]
    return Table(PLAN, cells)


def _row(manifest: Manifest) -> tuple[Any, ...]:
    about = manifest.about
    progress, metric = about.get("progress", {}), bundle.monitored(manifest) or (None, None, None)
    return (str(manifest.path), str(about.get("reason", "")), *metric, progress.get("epochs"), progress.get("steps"))


def _whole(learner: Learner) -> nn.Module:
    """The model; of several, a module that holds them."""
    if isinstance(learner.model, nn.Module):
        return learner.model
    whole = nn.Module()
    for name, model in learner.models.items():
        whole.add_module(name.replace(".", "_") or "_", model)
    return whole


def _norms(plugin: Any, old: Set[str]) -> Iterator[tuple[str, Tensor]]:
    """Norms of gradients that a plugin has measured for its own purpose, except old norms of optimizers."""
    last = getattr(plugin, "last", None)
    if isinstance(last, dict):
        for key, norm in last.items():
            rest = key.removeprefix(plugin.name).strip("_")
            if rest.partition("_group")[0] not in old:
                yield f"run/grad_norm/{rest}" if rest else "run/grad_norm", norm
    elif (norm := getattr(plugin, "norm", None)) is not None:
        yield "run/grad_norm", norm
