"""Prove that a run, with its plugins, resumes exactly: kill it for real, resume it, and compare every bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loopkit
import loopkit_testing
from loopkit.author import bundle, encoding, tensors
from loopkit.commands import ScriptError, made, split
from loopkit.errors import LoopkitError
from loopkit.every import every
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.plugins import Checkpoint
from loopkit_testing.diff import Difference, count, differences, part

if TYPE_CHECKING:
    from loopkit.phases import Phase

SPREAD = 3
"""How many steps are chosen to kill at, if none is given."""
COMPARABLE = ("models", "buffers", "optimizers", "progress", "metrics", "plugins", "generators")
"""Parts that must be equal before a save and right after the load; data restart with their epoch."""
OUTPUT = 20_000
"""Characters shown of the output of a process that failed."""
CHANGED = "saving the state changes the run: a state_dict() has side effects"
RECORDS = ("plugins.metrics", "plugins.history")
"""They write down what was trained; when that differs, too, they are not the cause."""
SUSPECTS = "Look for what is kept from step to step and not saved, first in plugins that are not loopkit's own: "
OTHER_DATA = "differ from the saved ones: batch"
"""A part of the error message of a run over other data."""
DATA = "the data are the cause, which give other batches in the resumed process than before: "
UNSEEDED = "the script itself is not reproducible: seed it. Two uninterrupted runs differ"


@dataclass(frozen=True)
class Outcome:
    """The result of one comparison; print it."""

    what: str
    """The name of the comparison."""
    problem: str = ""
    """Why it failed, in lines; empty if every bit is the same."""

    def __str__(self) -> str:
        if not self.problem:
            return f"{self.what}: the same in every bit"
        return f"{self.what}: " + self.problem.replace("\n", "\n    ")


@dataclass(frozen=True)
class Run:
    """The task of a process."""

    target: str
    out: str
    """An existing directory for this run."""
    epochs: int | None = None
    checkpoints: str = ""
    """Where to save every update, and to resume from; empty: no checkpoint is saved."""
    kill_at: int = 0
    """The step at which it kills itself; 0: not at all."""
    signal: str = "KILL"
    ignore: list[str] = field(default_factory=list)


Launch = Callable[[Run, float], int]


def verify_resume(
    target: str,
    *,
    kill_at: Sequence[int] = (),
    signal_name: str = "KILL",
    epochs: int | None = None,
    ignore: Collection[str] = ("seconds",),
    timeout: float = 600.0,
    launch: Launch | None = None,
) -> Iterator[Outcome]:
    """Run a fit whole, and killed and resumed, each in its own process, and compare the final states.

    The function that ``target`` names takes no arguments and returns ``partial(learner.fit, train, val, epochs=3)`` of
    a new `Learner`, or ``(learner, fit)`` with the arguments of its ``fit`` as a dict::

        def make_learner():
            learner = Learner(model(), nn.MSELoss(), sgd, plugins=[MyPlugin()], seed=0)
            return learner, {"train": train, "val": val, "epochs": 3}

    A plugin that saves checkpoints is replaced by one that saves every update in a temporary directory. The first
    comparison is of two uninterrupted runs, one without and one with such a plugin. A killed process dies
    at the end of the step, right after it was saved.

    Args:
        target: ``"path/to/script.py:make_learner"``. The script is run as by ``python script.py``, but is not
            ``__main__``.
        kill_at: Training steps of the fit, from 1; by default a few that are spread over it.
        signal_name: ``"KILL"``, or ``"TERM"``, after which the process may save and end by itself.
        epochs: In place of the ones in ``fit``.
        ignore: Keys in states whose values may differ, at any depth: measured times.
        timeout: Seconds that a process may take.
        launch: Runs a process, within some seconds, and returns its exit code; `fresh_process` by default.

    Returns:
        An iterator over the comparisons, as they are made; one with a problem of the script itself is the last.

    Raises:
        LoopkitError: The script or the function is not what it must be, the run fails by itself, or ``kill_at`` is
            not within it.
    """
    file, _ = split(target)
    if signal_name not in ("KILL", "TERM"):
        raise LoopkitError(f"signal_name is {signal_name!r}: it is 'KILL' or 'TERM'")
    target = f"{os.path.abspath(file)}:{split(target)[1]}"
    with tempfile.TemporaryDirectory(prefix="loopkit-verify-") as directory:
        base = Run(target, directory, epochs, signal=signal_name, ignore=sorted(ignore))
        yield from _Verification(base, kill_at, timeout, launch or fresh_process).outcomes()


class _Verification:
    """One call of `verify_resume`."""

    def __init__(self, base: Run, kill_at: Sequence[int], timeout: float, launch: Launch) -> None:
        self.base, self.kill_at, self.timeout, self.launch = base, kill_at, timeout, launch
        self.unseeded: set[str] = set()
        """Random generators, as parts of the state, that are unseeded, without any effect."""

    def outcomes(self) -> Iterator[Outcome]:
        code, first = self.run("whole")
        if code:
            raise _with_output(f"the run fails by itself (exit code {code}): see its output", first)
        reference = bundle.read_state(bundle.find(first / "final"))
        steps = int(json.loads((first / "steps.json").read_text()))
        for at in self.kill_at:
            if not 0 < at <= steps:
                raise LoopkitError(f"kill_at is {at}: the run has {steps} steps, so give a number from 1 to {steps}")
        code, saving = self.run("saving", checkpoints="checkpoints")
        what = f"two runs of {steps} steps, the second one saving every update"
        if code:
            yield Outcome(what, f"the second one failed (exit code {code}), see its output:\n{_output(saving)}")
            return
        found = self.compare(reference, saving)
        if all(map(_of_generators, found)):
            self.unseeded = {difference.part for difference in found}
        else:
            _, second = self.run("again")
            again = self.compare(reference, second)
            by_itself = {difference.part for difference in again}
            if all(map(_of_generators, again)):
                title, found = CHANGED, [difference for difference in found if difference.part not in by_itself]
            else:
                title, found = UNSEEDED, again
            yield Outcome(what, f"DIFFERENT. {_lines(title, found, (), found)}")
            return
        if self.unseeded:
            what += f" (left out, as the result does not depend on them: {', '.join(sorted(self.unseeded))})"
        yield Outcome(what)
        expected = _trace(saving)
        for at in self.kill_at or _spread(steps):
            yield self.interrupted(at, reference, expected)

    def interrupted(self, at: int, reference: Any, expected: list[_Traced]) -> Outcome:
        name = f"SIG{self.base.signal}"
        what = f"killed by {name} at step {at}"
        code, killed = self.run(f"killed-{at}", checkpoints=f"checkpoints-{at}", kill_at=at)
        if code not in ((-signal.SIGKILL,) if self.base.signal == "KILL" else (-signal.SIGTERM, 128 + signal.SIGTERM)):
            return Outcome(what, f"it did not end by {name} (exit code {code}), see its output:\n{_output(killed)}")
        code, resumed = self.run(f"resumed-{at}", checkpoints=f"checkpoints-{at}")
        if code:
            output = _output(resumed)
            cause = DATA if OTHER_DATA in output else ""
            return Outcome(what, f"{cause}it could not be resumed (exit code {code}), see its output:\n{output}")
        traced = _trace(resumed)
        begun = traced[0].steps if traced and traced[0].loaded else 0
        what += f", resumed at step {begun}" if begun else ", started again as no state was saved yet"
        found = self.compare(reference, resumed)
        for each in (*expected, *traced):
            for name in self.unseeded & each.parts.keys():
                del each.parts[name]
        if not found:
            return Outcome(what)
        plugins, phases = (json.loads((resumed / f"{name}.json").read_text()) for name in ("plugins", "phases"))
        return Outcome(what, f"DIFFERENT. {_diagnose(found, expected, traced, plugins, phases)}")

    def run(self, name: str, checkpoints: str = "", kill_at: int = 0) -> tuple[int, Path]:
        """Run one process; returns its exit code and its directory."""
        base = Path(self.base.out)
        out = base / name
        out.mkdir()
        where = str(base / checkpoints) if checkpoints else ""
        given = {**asdict(self.base), "out": str(out), "checkpoints": where, "kill_at": kill_at}
        code = self.launch(Run(**given), self.timeout)
        if (out / "refused").exists():
            raise LoopkitError((out / "refused").read_text())
        return code, out

    def compare(self, reference: Any, out: Path) -> list[Difference]:
        found = differences(reference, bundle.read_state(bundle.find(out / "final")), ignore=self.base.ignore)
        return [difference for difference in found if difference.part not in self.unseeded]


def fresh_process(run: Run, timeout: float) -> int:
    """Run a new Python; its output goes to a file of its directory. It and its children are dead at the end.

    Raises:
        LoopkitError: It takes longer than ``timeout`` seconds.
    """
    folder = os.path.dirname(os.path.realpath(split(run.target)[0]))
    roots = [os.path.dirname(each.__path__[0]) for each in (loopkit, loopkit_testing)]
    path = f"sys.path = [{folder!r}, *filter(None, sys.path), *{roots!r}]"
    code = f"import sys; {path}; from loopkit_testing.verify_resume import child; child(sys.argv[1])"
    with open(Path(run.out) / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(asdict(run))],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout
    try:
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                raise _with_output(f"a process took longer than {timeout:g} s: give it more time", Path(run.out))
            time.sleep(0.02)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # workers of loaders outlive a killed process
        except (ProcessLookupError, PermissionError):
            pass
        code_of_exit = process.wait()
    return code_of_exit


def child(argument: str) -> None:
    """Run the fit in a child process, and save its final state."""
    run = Run(**json.loads(argument))
    out = Path(run.out)
    try:
        learner, fit = made(run.target)
        if fit is None:
            raise ScriptError(
                f"{run.target} returned only a Learner, without the arguments of its fit: return "
                f"partial(learner.fit, train, val, epochs=3)"
            )
    except ScriptError as error:
        (out / "refused").write_text(str(error))
        raise SystemExit(2) from None
    if run.epochs is not None:
        fit = {**fit, "epochs": run.epochs}
    if run.signal == "TERM":
        fit = {**fit, "on_interrupt": "raise"}
    for name in [name for name, plugin in learner.plugins.items() if getattr(plugin, "provides", "") == "checkpoint"]:
        learner.remove(name)
    if run.checkpoints:
        learner.add(Checkpoint(run.checkpoints, save=every(updates=1), resume="auto"), _Watch(run))
    result = learner.fit(**fit)
    bundle.save(learner, out / "final")
    (out / "steps.json").write_text(json.dumps(result.steps))
    own = [n for n, p in learner.plugins.items() if not type(p).__module__.startswith(("loopkit.", "loopkit_testing."))]
    (out / "plugins.json").write_text(json.dumps(own))


# ----------------------------------------------------------------------------------------- what came first


@dataclass(frozen=True)
class _Traced:
    """The state at one place of a run: a digest of each part."""

    steps: int
    """Training steps of the fit until then."""
    loaded: bool
    """Right after a state was loaded."""
    parts: dict[str, str]


class _Watch:
    """Writes down digests of the state after every step, and kills the process at one."""

    name = "verify_resume"
    volatile = ("*",)

    def __init__(self, run: Run) -> None:
        self._run = run
        self._file = Path(run.out) / "trace"

    @hookimpl(writes=("*",), after=("checkpoint",))
    def fit_begin(self, learner: Learner) -> None:
        """Note what was loaded."""
        if self._steps(learner):
            self._note(learner, loaded=True)

    @hookimpl(reads=("*",), after=("checkpoint",))
    def step_end(self, learner: Learner, phase: Phase) -> None:
        """Note the step, or die."""
        if phase.training and learner.current is not None and learner.current.can_save:
            if self._steps(learner) == self._run.kill_at:
                os.kill(os.getpid(), signal.Signals[f"SIG{self._run.signal}"])
            self._note(learner)

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Note what of phases no state holds."""
        missing = {} if learner.current is None else learner.current.missing_states
        (Path(self._run.out) / "phases.json").write_text(json.dumps([*missing.values()]))

    @staticmethod
    def _steps(learner: Learner) -> int:
        assert learner.current is not None
        return learner.progress.steps - learner.current.position.start.steps

    def _note(self, learner: Learner, loaded: bool = False) -> None:
        traced = _Traced(self._steps(learner), loaded, _digests(learner.state_dict(), self._run.ignore))
        with open(self._file, "a") as file:
            file.write(json.dumps(asdict(traced)) + "\n")


def _digests(state: Mapping[str, Any], ignore: Collection[str]) -> dict[str, str]:
    """A digest of each part of a state, without the keys to ignore."""
    found: dict[str, str] = {}
    for key, value in state.items():
        named = isinstance(value, Mapping) and part((key, "x")) != part((key,))
        for path, each in [((key, name), item) for name, item in value.items()] if named else [((key,), value)]:
            encoded, packed = encoding.encode(_without(each, ignore))
            digest = hashlib.sha256(encoding.dumps(encoded))
            for buffer in tensors.pack(packed):
                digest.update(buffer)
            found[part(path)] = digest.hexdigest()
    return found


def _without(value: Any, ignore: Collection[str]) -> Any:
    """A copy of nested containers without some keys, the others in one order."""
    if isinstance(value, Mapping):
        keys = sorted((key for key in value if key not in ignore), key=lambda key: (str(type(key)), key))
        return {key: _without(value[key], ignore) for key in keys}
    if isinstance(value, (list, tuple)):
        return type(value)(_without(item, ignore) for item in value) if type(value) in (list, tuple) else value
    return value


def _trace(out: Path) -> list[_Traced]:
    file = out / "trace"
    return [_Traced(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _diagnose(
    found: list[Difference], expected: list[_Traced], resumed: list[_Traced], own: list[str], phases: list[str]
) -> str:
    """Name the plugin that differed first, and its state; or the part that differed before any plugin.

    Args:
        found: The differences at the end.
        expected: The whole run at each step.
        resumed: The resumed run at each step.
        own: The plugins from outside of loopkit.
        phases: Notes on phases whose changes no state holds.
    """
    whole = {traced.steps: traced.parts for traced in expected}
    for traced in resumed:
        parts = whole.get(traced.steps, {})
        names = [n for n in traced.parts if n in parts and (not traced.loaded or n.startswith(COMPARABLE))]
        differ = [name for name in names if traced.parts[name] != parts[name]]
        if not differ:
            continue
        when = "right after it was loaded" if traced.loaded else f"after step {traced.steps}"
        plugins = [name for name in differ if name.startswith("plugins.")]
        if any(name.startswith(("models.", "optimizers.")) for name in differ):
            plugins = [name for name in plugins if name not in RECORDS]
        plugins.sort(key=lambda name: (name.partition(".")[2] not in own, name))
        first = [difference for difference in found if difference.part == (plugins or differ)[0]]
        also = f"What else differs then: {', '.join(name for name in differ if name not in plugins[:1]) or 'nothing'}"
        if plugins:
            name = plugins[0].partition(".")[2]
            return _lines(f"The first plugin whose state differs is {name!r}, {when}", first, [also, *phases], found)
        title = f"Before the state of any plugin, {differ[0]} differs, {when}: the cause is in no state"
        suspects = phases or [SUSPECTS + (", ".join(own) or "none is there")]
        return _lines(title, first or found, [also, *suspects], found)
    of_plugins = [difference for difference in found if difference.path[0] == "plugins"]
    name = f"the state of plugin {str(of_plugins[0].path[1])!r}" if of_plugins else found[0].part
    return _lines(f"After all steps were the same, {name} differs", of_plugins or found, phases, found)


def _lines(title: str, first: Sequence[Difference], more: Sequence[str], found: Sequence[Difference]) -> str:
    counts = ", ".join(f"{name} {number}" for name, number in count(found).items())
    items = [f"{each}" for each in first[:1]]
    return "\n".join([title, *items, *more, f"Items that differ at the end: {counts}"])


def _of_generators(difference: Difference) -> bool:
    return difference.path[0] == "generators"


def _spread(steps: int) -> list[int]:
    return sorted({max(1, steps * k // (SPREAD + 1)) for k in range(1, SPREAD + 1)})


def _with_output(message: str, out: Path) -> LoopkitError:
    error = LoopkitError(message)
    error.add_note(_output(out))
    return error


def _output(out: Path) -> str:
    try:
        text = (out / "output").read_text("utf-8", "replace")
    except OSError:
        return "(none)"
    return text[-OUTPUT:].strip() or "(none)"
