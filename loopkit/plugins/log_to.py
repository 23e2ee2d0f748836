"""Write what is logged: to files, or wherever a backend takes it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit.base import checks
from loopkit.base.batches import describe
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import nearest
from loopkit.criteria.directions import declared
from loopkit.errors import LoopkitError, PluginError
from loopkit.events import snake_case
from loopkit.found.discovery import log_plugin
from loopkit.hooks import hookimpl
from loopkit.logs.backend import Backend, Run
from loopkit.logs.csv_file import Csv
from loopkit.logs.json_lines import JsonLines
from loopkit.logs.kinds import Value
from loopkit.logs.masking import masked_config, masked_values
from loopkit.logs.names import Names
from loopkit.logs.record import Records
from loopkit.logs.transfer import Transfer
from loopkit.plugins.log_hyperparameters import made_with

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.logs.record import Packed, Record
    from loopkit.phases import Phase
    from loopkit.result import FitResult

MOST = 100
"""Calls of ``learner.log`` that are kept until it is written."""
ENDINGS: dict[str, Callable[[Path], Backend]] = {".jsonl": JsonLines, ".csv": Csv}


class LogTo(Shown):
    """Write everything that is logged during a fit with ``learner.log``.

    What is logged is kept as it comes, read from the device late and in one transfer, and written between two steps: at
    the end of each epoch, every few seconds or 100 calls, and before each checkpoint. Training is bitwise the same as
    without it. A backend that fails is disabled with one warning, and the fit continues; values that it cannot write
    are left out with one warning. A run that resumes from a checkpoint resumes its logs where they were then.

    Args:
        backends: A `loopkit.logs.Backend`, or a path, whose ending selects one (``.jsonl``, ``.csv``; one
            without is a directory, for a ``log.jsonl``). By default the directory ``runs/run``.
        every: Also write after every so many training steps.
        seconds: How often it is written in a long epoch, about.
        name: The plugin's name; a second one needs another.

    Of several processes the first one writes, and what the others log is left out.

    Raises:
        PluginError: Something is no backend, or ``every`` or ``seconds`` is no number above 0.
        LogError: When a fit begins: a log cannot be written there, or another run writes it.

    Example::

        learner = Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a", "runs/a/log.csv"), LogMetrics()])
        learner.fit(train, val, epochs=3)
        read_log("runs/a").values("val/loss")
    """

    provides = "log"
    shared = True
    optional = ("step_end",)
    syncs = ("step_end", "phase_end", "fit_end")
    """Writing reads what was logged."""
    volatile = ("backends",)
    """How long a log is depends on how often its run was interrupted."""

    def __init__(
        self, *backends: Backend | str | Path, every: int | None = None, seconds: float = 5.0, name: str = "log_to"
    ) -> None:
        if every is not None:
            checks.whole("LogTo", every=every)
        checks.positive("LogTo", "seconds", seconds=seconds)
        self.name = name
        self._every = every
        self._seconds = seconds
        self._sinks: dict[str, _Sink] = {}
        for given in backends or ("runs/run",):
            backend = _backend(given)
            word = plain = backend.name or snake_case(type(backend).__name__)
            number = 1
            while word in self._sinks:
                number += 1
                word = f"{plain}_{number}"
            self._sinks[word] = _Sink(word, backend)
        self._packed: list[Packed] = []
        """The logged values that are not written yet."""
        self._sent: Transfer | None = None
        """The transfer from the device."""
        self._result: FitResult | None = None
        """The result of the fit whose values were logged before the logs were opened."""
        self._open = False
        self._again = False
        """The fit resumes from a checkpoint: its first records were logged when it began first."""
        self._ended = False
        """Whether the fit had ended at the save: then its end is in the log, unless it trains more now."""
        self._loaded: tuple[int | None, bool] = None, False
        """The number of the fit in which a loaded state was saved, and whether it had ended."""
        self.unsaved = False
        """Something was written that no state knows of: a checkpoint at the end of the fit is due."""
        self._learner: weakref.ref[Learner] | None = None
        """The learner of the running or last fit."""
        self._late = False
        """There was a warning of records that came after the end."""
        self._next_time = 0.0

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends that it writes to."""
        return tuple(sink.backend for sink in self._sinks.values())

    @hookimpl(writes=("*",), after=("checkpoint",))  # after it has resumed; turned round, at the end of all else
    def fit_begin(self, learner: Learner) -> None:
        """Open the logs."""
        if learner.world.rank > 0:
            return
        self._close(None)  # an interrupt may have kept an earlier fit from it
        self._learner = weakref.ref(learner)
        (number, self._ended), self._loaded = self._loaded, (None, False)
        fit = learner.current
        self._again = number is not None and fit is not None and number == fit.position.number
        if fit is None or self._again or self._result is not fit.result:
            self._packed.clear()  # in the log already, or of an earlier fit that could not begin
        known = made_with(learner)
        try:
            for sink in self._sinks.values():
                sink.open(learner, known)
        except BaseException:
            self._close(None)
            raise
        self._open = True
        self._late = False
        if fit is not None and not self._again:
            fit.pack_log(self, self._packed)
        self._next_time = time.monotonic() + self._seconds

    @hookimpl
    def log_value(self, learner: Learner, record: Record) -> None:
        """Keep it, unless it was logged before, or comes too late. Most do not come here (``pack_log``)."""
        if learner.world.rank > 0 or (fit := learner.current) is None:
            return
        if not self._open and fit.result.reason != "running":
            self._warn_of_late(record)
            return
        if not self._open and self._result is not fit.result:
            self._result = fit.result
            self._packed.clear()
        if not (self._again and self._was_logged(learner)):
            self._packed.append(record.packed())

    def _warn_of_late(self, record: Record) -> None:
        if not self._late:
            self._late = True
            warn(
                f"plugin {self.name!r}: {record.name!r:.100} came after the logs were closed, and is in none; "
                f"log it in phase_end, or give the plugin's fit_begin after=('log',)"
            )

    def _was_logged(self, learner: Learner) -> bool:
        """Whether the run that this one resumes has logged a value of this place."""
        fit = learner.current
        assert fit is not None
        now = fit.epoch
        if now is None:
            return fit.beginning or (fit.result.reason != "running" and self._ended)
        return now.resumed and now.current is None and now.at_edge and not now.goes_on

    @hookimpl(reads=("*",))
    def step_end(self, learner: Learner, phase: Phase) -> None:
        """Write if it is due, and what was due has arrived."""
        if not self._open:
            return
        if self._again:
            self._go_on(learner)
        if self._sent is not None:
            if self._sent.arrived:
                self._write_sent()
        elif (
            (self._every is not None and phase.training and learner.progress.steps % self._every == 0)
            or time.monotonic() >= self._next_time
            or len(self._packed) >= MOST
        ):
            self._send()
            if self._sent is not None and self._sent.arrived:
                self._write_sent()

    @hookimpl(reads=("*",))
    def phase_end(self, learner: Learner) -> None:
        """Write what the epoch has logged."""
        if self._open:
            if self._again:
                self._go_on(learner)
            self._write()

    @hookimpl(writes=("*",), after=("checkpoint",))
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Write the rest and close the logs."""
        if self._open:
            try:
                self._write()
            finally:
                self._open = self._again = False
                try:
                    if learner.current is not None:
                        learner.current.pack_log(self, None)
                finally:
                    self._close(result)

    def _close(self, result: FitResult | None) -> None:
        """Close all logs, also if an interrupt is raised while one is being closed."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks.values()):
                stack.callback(sink.close, result)

    def _go_on(self, learner: Learner) -> None:
        """From here on everything is new."""
        if (fit := learner.current) is not None and not fit.resuming:
            self._again = False
            fit.pack_log(self, self._packed)

    def _send(self) -> None:
        self._next_time = time.monotonic() + self._seconds
        if packed := self._packed[:]:
            del self._packed[: len(packed)]  # a thread may have added more
            self._sent = Transfer(Records(packed))

    def _write_sent(self) -> None:
        if self._sent is not None:
            sent = self._sent
            self._sent = None
            self.unsaved = True
            records = sent.records()
            for sink in self._sinks.values():
                sink.write(records)

    def _write(self) -> None:
        """Write everything, waiting for it."""
        self._write_sent()
        self._send()
        self._write_sent()

    def state_dict(self) -> dict[str, Any]:
        """Where each log is, after everything was written and flushed, by the backend's name."""
        if self._open:
            self._write()
            for sink in self._sinks.values():
                sink.save()
        self.unsaved = False
        learner = None if self._learner is None else self._learner()
        at = None if learner is None or learner.current is None else learner.current.position
        shown = {name: dict(sink.names.shown) for name, sink in self._sinks.items() if sink.names.shown}
        return {
            **({"names": shown} if shown else {}),
            "backends": {name: dict(sink.state) for name, sink in self._sinks.items()},
            "fit": None if at is None else at.number,
            "ended": at is not None and (not self._open or (self._again and self._ended)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next fit resume with the logs from there; one that is not in the state begins."""
        self._loaded = state["fit"], state["ended"]
        for name, sink in self._sinks.items():
            sink.load(state["backends"].get(name, {}), state.get("names", {}).get(name, {}))


class _Sink:
    """A backend, and how it is doing."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self.backend = backend
        self.state: dict[str, Any] = {}
        """Its last one."""
        self.loaded = False
        """The state was loaded, and no fit has begun since."""
        self._open = False
        self._kinds = tuple(float if kind is Value else kind for kind in backend.kinds)
        self._refused: set[type] = set()
        """The kinds that it cannot write, of which there was a warning."""
        self.names = Names()

    def open(self, learner: Learner, hyperparameters: Mapping[str, Any]) -> None:
        config = learner.options.config
        known = masked_values(hyperparameters)
        text = None if config is None else masked_config(config)
        run = Run(learner, self.loaded, known, text, lambda name: declared(name, learner.plugins.values()))
        if not self.loaded:
            self.names = Names()
        self.loaded = False
        self._open = True
        try:
            self.backend.open(run)
        except LoopkitError:
            self._open = False
            raise
        except Exception as error:
            self._disable("open", error)

    def write(self, records: Records) -> None:
        if not self._open:
            return
        chosen: Sequence[Record] = records
        if others := {kind for kind in records.kinds if not issubclass(kind, self._kinds)}:
            for kind in sorted(others - self._refused, key=lambda kind: kind.__name__):
                self._refused.add(kind)
                name = next(record.name for record in records if record.value.__class__ is kind)
                shown = "a number" if kind is float else kind.__name__
                warn(f"log {self.name!r} cannot write {shown} ({name!r:.100}), and leaves out all of this kind")
            chosen = [record for record in records if record.value.__class__ not in others]
        if not chosen:
            return
        parts = [("", chosen)] if self.backend.any_names else self.names.parts(chosen)
        for name, part in parts:
            if name:
                self._try(name, part[0])
            elif self._open:
                self._call("write", self.backend.write, part)

    def _try(self, name: str, record: Record) -> None:
        """Write the first record of a name beside names below it; under another name if that fails."""
        if not self._open:
            return
        try:
            self.backend.write([record])
        except Exception as error:
            other = self.names.rename(record)
            warn(
                f"log {self.name!r} cannot write {name!r:.100} beside the names above or below it "
                f"({type(error).__name__}: {error}), and writes {other.name!r:.100}"
            )
            self._call("write", self.backend.write, [other])

    def save(self) -> None:
        """Flush it, and remember where it stands."""
        if self._open:
            self._call("flush", self.backend.flush)
        if self._open:
            self._call("state_dict", self._remember)

    def _remember(self) -> None:
        self.state = dict(self.backend.state_dict())

    def load(self, state: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.state = dict(state)
        self.loaded = bool(state)
        self.names = Names(names)
        self.backend.load_state_dict(self.state)

    def close(self, result: FitResult | None) -> None:
        if not self._open:
            return
        try:
            self.save()
            self._call("close", self.backend.close, result)
            if self._open:
                with suppress(Exception):  # it may have let go of what it would have to ask
                    self._remember()
        except BaseException:  # an interrupt: what the backend holds it lets go all the same
            with suppress(Exception):
                self.backend.close(None)
            raise
        finally:
            self._open = False

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self._disable(what, error)

    def _disable(self, what: str, error: Exception) -> None:
        if self._open:
            self._open = False
            if what == "write":  # what was written before is to be kept when the run goes on
                with suppress(Exception):
                    self.backend.flush()
                    self._remember()
            warn(
                f"log {self.name!r} is disabled for the rest of the fit: its {what} failed, "
                f"{type(error).__name__}: {error}"
            )
            if what != "close":
                with suppress(Exception):  # it was said that it fails
                    self.backend.close(None)


def _backend(given: Any) -> Backend:
    if isinstance(given, Backend):
        return given
    if isinstance(given, type) and issubclass(given, Backend):
        raise PluginError(f"LogTo: {given.__name__} is a class; give an instance, {given.__name__}(...)")
    if not isinstance(given, (str, Path)) or not str(given) or "\0" in str(given):
        raise PluginError(f"LogTo: {describe(given)} is no backend: give a path, or a loopkit.logs.Backend")
    path = Path(given)
    if isinstance(given, str) and f".{given}" in ENDINGS:
        raise PluginError(f"LogTo: {given!r} is no path, but the ending of one: write 'runs/a/log.{given}'")
    if isinstance(given, str) and given.replace("-", "_").isidentifier() and (instead := log_plugin(given)):
        raise PluginError(f"LogTo: {instead}")
    if not path.suffix or path.suffix[1].isdigit():  # a number, as in runs/lr-0.01
        return JsonLines(path / "log.jsonl")
    if path.suffix not in ENDINGS:
        hint = nearest(path.suffix, ENDINGS)
        raise PluginError(
            f"LogTo: {given!r} ends in {path.suffix!r}{hint}: known are {', '.join(ENDINGS)}, and a path without "
            f"one is a directory; to name a file otherwise, JsonLines({str(given)!r})"
        )
    return ENDINGS[path.suffix](path)
