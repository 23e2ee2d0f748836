"""The contract of log backends, as one call and as a pytest suite."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from loopkit.author import bundle, nearest, snake_case
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.logs import Audio, Backend, File, Graph, Histogram, Hyperparameters, Image, Kind, Table, Text, Value
from loopkit.phases import TrainingPhase
from loopkit.plugins import LogTo
from loopkit_testing.case import alone, described, seed_all
from loopkit_testing.contract import ContractError
from loopkit_testing.leftovers import Running, open_files
from loopkit_testing.problems import tiny_problem

Row = tuple[str, int, float]
"""A number of a log: its name, the step, and the value."""

SECONDS = 60.0
"""How long a run may take."""


@dataclass(frozen=True)
class BackendCase:
    """A backend to check, and how its log is read."""

    make: Callable[[Path], Backend]
    read: Callable[[Path], Iterable[Sequence[Any]]]

    def rows(self, folder: Path) -> list[Row]:
        """The numbers in the log, in the form in which they are compared."""
        return [(str(name), int(step), float(value)) for name, step, value in self.read(folder)]


class _Numbers:
    """Logs numbers in each training step and epoch, and writes them down."""

    name = "numbers"
    volatile = ("*",)

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    @hookimpl(phase=TrainingPhase)
    def step_end(self, learner: Learner) -> None:
        step = learner.progress.steps
        self._log(learner, {"train/loss": step / 8, "train/lr": 0.1})
        self._log(learner, {"train/odd": [float("nan"), float("inf"), -1e-300][step % 3]})

    @hookimpl
    def phase_end(self, learner: Learner, phase: Any) -> None:
        self._log(learner, {f"{phase.name}/accuracy": learner.progress.epochs / 4})

    def _log(self, learner: Learner, values: dict[str, float]) -> None:
        self.rows += [(name, learner.progress.steps, value) for name, value in values.items()]
        learner.log(values)


class _Ends:
    """Saves after one training step, and ends the run some steps later."""

    name = "~~ends"
    volatile = ("*",)

    def __init__(self, saved: int, ended: int, folder: Path, end: Callable[[], None]) -> None:
        self.saved, self.ended, self.folder, self.end = saved, ended, folder, end

    @hookimpl(phase=TrainingPhase, reads=("*",))
    def step_end(self, learner: Learner) -> None:
        if learner.progress.steps == self.saved:
            bundle.save(learner, self.folder)
        if learner.progress.steps == self.ended:
            self.end()


def _learner(backend: Backend, *plugins: Any) -> Learner:
    problem = tiny_problem()
    return problem.learner(plugins=[LogTo(backend, every=3), *plugins], standard=False)


def _fit(learner: Learner, epochs: int = 3) -> None:
    problem = tiny_problem()
    seed_all()
    learner.fit(problem.train, problem.val, epochs=epochs)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loopkit-testing-") as directory:
        yield Path(directory)


def _compared(expected: Sequence[Row], found: Sequence[Row]) -> list[str]:
    """One message for each way in which rows differ from the logged ones; only within a name the order counts."""

    def by_name(rows: Sequence[Row]) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for name, step, value in rows:
            grouped.setdefault(name, []).append(f"{name} = {value!r} at step {step}")
        return grouped

    wanted, there = by_name(expected), by_name(found)
    for name in [*wanted, *there]:
        rows, others = wanted.get(name, []), there.get(name, [])
        if rows == others:
            continue
        count = f"there are {len(found)} rows for {len(expected)}"
        if lost := [row for row in dict.fromkeys(rows) if others.count(row) < rows.count(row)]:
            return [f"{count}: {len(lost)} of {name!r} are lost, the first is {lost[0]}"]
        if twice := [row for row in dict.fromkeys(others) if others.count(row) > rows.count(row)]:
            return [f"{count}: {twice[0]} is there {others.count(twice[0])} times: it is repeated, not there once"]
        at = next(i for i, (row, other) in enumerate(zip(rows, others, strict=False)) if row != other)
        return [f"the rows of {name!r} are not in the order in which they were logged: {others[at]} before {rows[at]}"]
    return []


def every_row(case: BackendCase) -> list[str]:
    """After the fit, each logged value is in the log once and in order, infinite and undefined numbers included."""
    with _folder() as folder:
        rows: list[Row] = []
        _fit(_learner(case.make(folder), _Numbers(rows)))
        return _compared(rows, case.rows(folder))


class _Nested(_Numbers):
    """Logs a name that is also the folder of another one, as ``LogMetrics(every=...)`` does."""

    @hookimpl(phase=TrainingPhase)
    def step_end(self, learner: Learner) -> None:
        self._log(learner, {"train/loss/step": learner.progress.steps / 8})

    @hookimpl
    def phase_end(self, learner: Learner, phase: Any) -> None:
        self._log(learner, {f"{phase.name}/loss": learner.progress.epochs / 4})


def nested_names(case: BackendCase) -> list[str]:
    """Each value of ``train/loss`` is in the log beside those of ``train/loss/step``, in which order they may come.

    A name may be another one in the log, such as ``train/loss_step``, if no other name becomes the same.
    """
    with _folder() as folder:
        rows: list[Row] = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _fit(_learner(case.make(folder), _Nested(rows)))
        told = [str(warning.message) for warning in seen if "is disabled" in str(warning.message)]
        broken = told or _compared(rows, _renamed(rows, case.rows(folder)))
    return [f"where 'train/loss/step' is logged beside 'train/loss', {each}. A name is no folder" for each in broken]


def _renamed(expected: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """The rows that were found; where a name is missing, those of a new name with its values have it."""
    wanted, there = _grouped(expected), _grouped(found)
    names = {}
    for name in wanted.keys() - there.keys():
        other = next((each for each in there.keys() - wanted.keys() if there[each] == wanted[name]), None)
        if other is not None:
            names[other] = name
    return [(names.get(name, name), step, value) for name, step, value in found]


def _grouped(rows: Iterable[Row]) -> dict[str, list[tuple[int, float]]]:
    grouped: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in rows:
        grouped.setdefault(name, []).append((step, value))
    return grouped


def every_kind(case: BackendCase) -> list[str]:
    """The backend writes a value of each of its ``kinds`` without an error."""
    with _folder() as folder:
        backend = case.make(folder)
        made = {kind: _made(kind, folder) for kind in backend.kinds}

        class Kinds:
            name = "kinds"

            @hookimpl
            def fit_begin(self, learner: Learner) -> None:
                for kind, value in made.items():
                    if value is not None:
                        learner.log(f"kinds/{snake_case(kind.__name__)}", value)

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _fit(_learner(backend, Kinds()), epochs=1)
        names = ", ".join(kind.__name__ for kind in backend.kinds)
        return [f"its kinds are {names}, and it cannot write all of them: {warning.message}" for warning in seen]


def _made(kind: type, folder: Path) -> Any:
    """A thing of this kind; None if there is no small one."""
    file = folder.parent / f"{folder.name}.txt"
    ways: dict[type, Callable[[], Any]] = {
        Value: lambda: 1.5,
        Kind: lambda: 1.5,
        Text: lambda: Text("some\ntext, and more"),
        Image: lambda: Image(torch.zeros(3, 4, 4)),
        Histogram: lambda: Histogram.counted(torch.arange(8.0), bins=4),
        Table: lambda: Table(["a", "b"], [[1, "x"], [2, "y"]]),
        Audio: lambda: Audio(torch.zeros(80), 8000),
        File: lambda: File(_written(file)),
        Hyperparameters: lambda: Hyperparameters({"lr": 0.1, "name": "x"}),
        Graph: lambda: Graph(torch.nn.Linear(2, 2)),
    }
    return ways[kind]() if kind in ways else None


def _written(file: Path) -> Path:
    file.write_text("some text")
    return file


PLACES = ((2, 4), (4, 5), (7, 7))
"""After which training step a checkpoint is saved, and after which the run ends."""


def killed_and_resumed(case: BackendCase) -> list[str]:
    """A run that is killed, or fails, and resumes from its checkpoint has the rows of an uninterrupted run."""
    whole: list[Row] = []
    with _folder() as folder:
        _fit(_learner(case.make(folder), _Numbers(whole)))
    for saved, ended in PLACES:
        for how, run in (("killed", _killed), ("ended by an error", _failed)):
            with _folder() as folder, _folder() as checkpoint:
                log = folder / "log"
                log.mkdir()
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    run(case, log, checkpoint, saved, ended)
                    learner = _learner(case.make(log), _Numbers([]))
                    bundle.load(learner, checkpoint)
                    _fit(learner)
                where = f"{how} after step {ended}, and resumed from a checkpoint of step {saved}"
                told = [str(warning.message) for warning in seen if "is disabled" in str(warning.message)]
                if broken := told or _compared(whole, case.rows(log)):
                    return [
                        f"{where}: {broken[0]}. flush makes all rows durable, state_dict then returns the log's "
                        f"length, and the open after load_state_dict cuts off later rows"
                    ]
    return []


class _Failure(Exception):
    """On purpose."""


def _failed(case: BackendCase, log: Path, checkpoint: Path, saved: int, ended: int) -> None:
    def end() -> None:
        raise _Failure

    with suppress(_Failure):
        _fit(_learner(case.make(log), _Numbers([]), _Ends(saved, ended, checkpoint, end)))


def _killed(case: BackendCase, log: Path, checkpoint: Path, saved: int, ended: int) -> None:
    """In a forked process, which ends on the spot."""
    if not hasattr(os, "fork"):
        return _failed(case, log, checkpoint, saved, ended)
    child = os.fork()
    if not child:
        try:
            _fit(_learner(case.make(log), _Numbers([]), _Ends(saved, ended, checkpoint, lambda: os._exit(9))))
        finally:
            os._exit(1)
    until = time.monotonic() + SECONDS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise PluginError(f"a run with the backend took longer than {SECONDS:.0f} seconds")
        time.sleep(0.005)
    if os.waitstatus_to_exitcode(status) != 9:
        raise PluginError("a run with the backend in a forked process failed; run in this one for the reason")
    return None


def failing_write(case: BackendCase) -> list[str]:
    """After a write that failed, the fit continues without another failure, and earlier rows are there."""
    with _folder() as folder:
        backend, rows = case.make(folder), list[Row]()
        write, calls = backend.write, 0

        def fails(records: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise OSError("a deliberate error of a test")
            write(records)

        backend.write = fails  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _fit(_learner(backend, _Numbers(rows)))
        told = [str(warning.message) for warning in seen]
        if more := [message for message in told if "a deliberate error" not in message]:
            return [f"after a write that failed, closing it failed, too: {more[0]}"]
        found = case.rows(folder)
        lost = rows[0] not in found
        return ["after a write that failed, earlier values are lost"] if lost else []


def close_twice(case: BackendCase) -> list[str]:
    """``close`` a second time has no effect."""
    with _folder() as folder:
        backend, rows = case.make(folder), list[Row]()
        _fit(_learner(backend, _Numbers(rows)), epochs=1)
        try:
            backend.close(None)
        except Exception as error:
            return [f"close, called a second time, {described(error)}: it must have no effect when all is closed"]
        return _compared(rows, case.rows(folder))


def two_runs(case: BackendCase) -> list[str]:
    """A second run at the same place leaves the first one's rows: before its own, or in files that it has renamed."""
    with _folder() as folder:
        first, second = list[Row](), list[Row]()
        _fit(_learner(case.make(folder), _Numbers(first)), epochs=1)
        before = _files(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may say that it has renamed them
            _fit(_learner(case.make(folder), _Numbers(second)), epochs=2)
        found = case.rows(folder)
        kept = all(data in _files(folder).values() for data in before.values())
        if kept and not _compared(second, found):
            return []
        if broken := _compared([*first, *second], found):
            return [f"after a second run at the same place, which is no resume, {broken[0]}; keep the first run's log"]
    return []


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def nothing_left(case: BackendCase) -> list[str]:
    """After the fit no file, thread or process of it is left, also after an error."""
    with _folder() as folder:
        _fit(_learner(case.make(folder)), epochs=1)  # what serves all fits of the process is there
    for how, steps in (("a fit", 99), ("a fit that failed", 2)):
        gc.collect()
        files, running = set(open_files().items()), Running()
        with _folder() as folder, _folder() as checkpoint:
            kept = case.make(folder)
            _with_end(kept, checkpoint, steps)
            left = sorted({path for _, path in set(open_files().items()) - files})
            broken = [f"a file is left open: {path!r}; close it in close" for path in left]
            broken += [message.replace("fit_end", "close") for message in running.more()]
            del kept
        if broken:
            return [f"after {how} {message}" for message in broken]
    return []


def _with_end(backend: Backend, checkpoint: Path, step: int) -> None:
    def end() -> None:
        raise _Failure

    with suppress(_Failure):
        _fit(_learner(backend, _Numbers([]), _Ends(99, step, checkpoint, end)), epochs=1)


BACKEND_CHECKS: dict[str, Callable[[BackendCase], list[str]]] = {
    check.__name__: check
    for check in (
        every_row,
        nested_names,
        close_twice,
        every_kind,
        two_runs,
        failing_write,
        nothing_left,
        killed_and_resumed,
    )
}
"""Every check of a backend by name, the cheap ones first."""


def check_backend(
    make: Callable[[Path], Backend],
    read: Callable[[Path], Iterable[Sequence[Any]]],
    *,
    checks: Iterable[str] | None = None,
    skip: Iterable[str] = (),
) -> None:
    """Run a log backend through its contract, and report every promise that it breaks.

    Args:
        make: Makes a fresh backend that writes into this folder.
        read: Reads the log there: the name, the step and the value of each number, in the order of the log.
        checks: Names of `BACKEND_CHECKS` to run; all by default.
        skip: Names of those not to run.

    Raises:
        ContractError: The backend breaks promises; there is one message for each.
        PluginError: A check has another name.

    Example::

        check_backend(lambda folder: JsonLines(folder / "log.jsonl"), lambda folder: rows_of(folder / "log.jsonl"))
    """
    names, left_out = list(BACKEND_CHECKS if checks is None else checks), list(skip)
    _known([*names, *left_out])
    case, broken, cause = BackendCase(make, read), list[str](), None
    for name in names:
        if name in left_out:
            continue
        with alone(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            try:
                broken += [f"{name}: {message}" for message in BACKEND_CHECKS[name](case)]
            except Exception as error:
                broken.append(f"{name}: {described(error)}")
                cause = cause or error
    if broken:
        with _folder() as folder:
            backend = make(folder)
        raise ContractError(backend.name or snake_case(type(backend).__name__), broken, "backend") from cause


def backend_contract(
    make: Callable[[Path], Backend],
    read: Callable[[Path], Iterable[Sequence[Any]]],
    *,
    skip: Mapping[str, str] | None = None,
) -> Callable[..., None]:
    """A pytest suite of the contract of log backends: one test for each promise.

    Args:
        make: As for `check_backend`.
        read: Likewise.
        skip: Promises that the backend cannot keep, and for each the reason.

    Returns:
        The test. Give it a name that begins with ``test``, in a module of tests.

    Raises:
        PluginError: A promise to skip has another name, or no reason.

    Example::

        test_backend = backend_contract(lambda folder: Sqlite(folder / "log.db"), read_rows)
    """
    import pytest

    left_out = dict(skip or {})
    _known(left_out)
    if silent := [promise for promise, reason in left_out.items() if not reason]:
        raise PluginError(f"backend_contract(skip=...): {silent[0]!r} has no reason; give one")
    marks = {name: [pytest.mark.skip(reason=reason)] for name, reason in left_out.items()}

    @pytest.mark.parametrize("promise", [pytest.param(n, id=n, marks=marks.get(n, [])) for n in BACKEND_CHECKS])
    def test_contract(promise: str) -> None:
        __tracebackhide__ = True
        check_backend(make, read, checks=[promise])

    return cast("Callable[..., None]", test_contract)


def _known(names: Iterable[str]) -> None:
    for name in names:
        if name not in BACKEND_CHECKS:
            known = ", ".join(BACKEND_CHECKS)
            raise PluginError(f"no check is called {name!r}{nearest(name, BACKEND_CHECKS)}; there are: {known}")
