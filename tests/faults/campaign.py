"""The campaigns that stop runs everywhere and compare what becomes of them; the tests run short forms.

``python tests/faults/campaign.py kills --trials 1000 --out counts.jsonl``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from faults.forkserver import ForkServer, Outcome
from faults.runs import CHANGING, RUNS, Run, difference, fresh
from loopkit.checkpoint import storage
from loopkit.checkpoint.manifest import CHECKPOINT_NAME

WARM = "faults.runs:warm"
RESUME = "faults.runs:resume"
CODES = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: -signal.SIGINT, signal.SIGUSR1: 0}
SMALL = Run(samples=112, epochs=2)
"""14 updates, in two epochs; the third save comes at update 12 and removes the first."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for trials; in memory if there is such, because a process that is killed loses nothing of it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


class Trials:
    """What all campaigns share: the server, where trials work, what runs give that nobody stops, and the counts."""

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.counts: Counter[str] = Counter()
        self._whole: dict[Run, tuple[Any, list[str], float]] = {}

    def whole(self, run: Run) -> tuple[Any, list[str], float]:
        """The final state, the journal and the seconds of a run that nobody stops."""
        if run not in self._whole:
            at = fresh(self.directory / f"whole-{run}")
            outcome = self.server.run(RESUME, run, str(at))
            assert outcome.code == 0, outcome.said
            self._whole[run] = outcome.value, lines(at), outcome.seconds
        return self._whole[run]

    def faster(self, run: Run, seconds: float) -> None:
        """A run has taken less than the whole one, which was measured while the machine was busy."""
        value, journal, before = self.whole(run)
        self._whole[run] = value, journal, min(before, seconds)

    def begin(self) -> Path:
        """An empty directory for a trial."""
        return fresh(self.directory / "trial")

    def check_end(self, run: Run, at: Path, what: str) -> None:
        """Run to the end, and compare everything."""
        self.check_found(run, at, what)
        before = len(lines(at))
        outcome = self.server.run(RESUME, run, str(at))
        self.server.sweep()
        assert outcome.code == 0, f"{run}, {what}: ended with {outcome.code}: {outcome.said}"
        wrong = difference(self.whole(run)[0], outcome.value)
        assert not wrong, f"{run}, {what}: {wrong}"
        if any(line.startswith("step train") for line in lines(at)[before:]):
            left = [name for name in os.listdir(at / "checkpoints") if not CHECKPOINT_NAME.fullmatch(name)]
            assert left == [], f"{run}, {what}: {left} are left"
            assert len(os.listdir(at / "checkpoints")) <= 2, f"{run}, {what}: {os.listdir(at / 'checkpoints')}"

    def check_found(self, run: Run, at: Path, what: str) -> None:
        """After a kill: every checkpoint is whole, and no more than an interval is lost."""
        if not (at / "checkpoints").is_dir():
            return
        found = storage.listing(at / "checkpoints")
        assert found.problems == {}, f"{run}, {what}: {found.problems}"
        newest = found[0].about["progress"]["updates"] if found else 0
        lost = max([0, *(int(line.split()[4]) for line in lines(at) if line.startswith("step train"))]) - newest
        self.counts[f"most lost, {'background' if run.background else 'sync'}"] = max(
            self.counts[f"most lost, {'background' if run.background else 'sync'}"], lost
        )
        if not run.background:
            assert lost <= run.every_updates, f"{run}, {what}: {lost} updates are lost"

    def check_resumed(self, at: Path, before: int, newest: int, what: str) -> None:
        """The run that came after a kill began at the newest checkpoint there was."""
        begun = [line for line in lines(at)[before:] if line.startswith("fit_begin")]
        assert not begun or int(begun[0].split()[1]) == newest, f"{what}: {begun} after a save at step {newest}"


def lines(at: Path) -> list[str]:
    """The journal of a trial so far; a line that a kill has cut is left out."""
    path = at / "journal"
    return [line for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []


def newest(at: Path) -> int:
    """The steps in the newest checkpoint."""
    found = storage.listing(at / "checkpoints")
    return found[0].about["progress"]["steps"] if found else 0


# ------------------------------------------------------------------------------------------------- SIGKILL


def kills(trials: Trials, count: int, seed: int = 0, runs: Sequence[Run] = RUNS, most: int = 5) -> None:
    """SIGKILL at random times, up to ``most`` of them one after another, then to the end."""
    generator = random.Random(seed)
    for trial in range(count):
        run = runs[trial % len(runs)]
        seconds = trials.whole(run)[2]
        at = trials.begin()
        times = [generator.uniform(0, seconds) for _ in range(generator.randint(1, most))]
        what = f"trial {trial} (seed {seed}), killed after {', '.join(f'{t:.4f}' for t in times)} s"
        for when in times:
            before, steps = len(lines(at)), newest(at)
            (at / "begun").unlink(missing_ok=True)
            outcome = trials.server.run(
                RESUME, run, str(at), signals=((when, signal.SIGKILL),), after=str(at / "begun")
            )
            trials.check_resumed(at, before, steps, what)
            if outcome.code == 0:  # it had ended before
                trials.counts["ended before"] += 1
                trials.faster(run, outcome.seconds)
                break
            assert outcome.code == -signal.SIGKILL, f"{run}, {what}: ended with {outcome.code}: {outcome.said}"
            trials.counts["kills"] += 1
            trials.counts[f"kills {_place(at, before)}"] += 1
            trials.check_found(run, at, what)
        trials.check_end(run, at, what)
        trials.counts["trials"] += 1


def _place(at: Path, before: int) -> str:
    """Where a process was killed, as far as its journal says."""
    last = lines(at)[before:][-1:]
    words = last[0].split() if last else ["before"]
    return {"before": "before the fit", "fit_end": "after the fit"}.get(words[0], f"after {' '.join(words[:2])}")


# ------------------------------------------------------------------------------------------------- every call


def calls(trials: Trials, run: Run = SMALL, update: int = 12, until: int = 16, every: bool = False) -> None:
    """SIGKILL in the calls that the saves between two updates make.

    Without ``every``, those are left out that change no file, after which all is as before them, and of the writes into
    a file all but the first and the last, and all begin from a run that was killed just before.
    """
    start = fresh(trials.directory / "start")
    if not every:
        trials.server.run("faults.runs:die_in_save", run, str(start), 0, "before", update, until)
    first = _copied(start, trials.begin())
    reached = trials.server.call("faults.runs:die_in_save", run, str(first), -1, "", update, until)[0]
    if not every:
        reached = reached[: reached.index("rmdir") + 1]  # of one save: the next makes the same calls
    for number, name in enumerate(reached):
        amid = reached[max(0, number - 1) : number + 2] == ["write"] * 3
        if every or (name in CHANGING and not amid):
            moments = ["before"] if every or number == 0 else []
            moments += ["during", "after"] if name == "write" else ["after"]
            for moment in moments:
                _die_in_call(trials, run, start, number, moment, update, until, name)


def _copied(start: Path, at: Path) -> Path:
    return Path(shutil.copytree(start, at, symlinks=True, dirs_exist_ok=True))


def _die_in_call(
    trials: Trials, run: Run, start: Path, number: int, moment: str, update: int, until: int, name: str
) -> None:
    at = _copied(start, trials.begin())
    what = f"killed {moment} call {number} ({name})"
    outcome = trials.server.run("faults.runs:die_in_save", run, str(at), number, moment, update, until)
    if outcome.code == 0 and (run.background or update == 0):  # threads do not make the same calls each time
        trials.counts["not reached"] += 1
        return
    assert outcome.code == -signal.SIGKILL, f"{run}, {what}: ended with {outcome.code}: {outcome.said}"
    before, steps = len(lines(at)), newest(at)
    trials.check_end(run, at, what)
    trials.check_resumed(at, before, steps, what)
    trials.counts["kills"] += 1
    trials.counts[f"kills {moment} {name}"] += 1


# ------------------------------------------------------------------------------------------------- signals


def signals(
    trials: Trials, count: int, seed: int = 0, runs: Sequence[Run] = RUNS, number: int = signal.SIGTERM, most: int = 3
) -> None:
    """A signal at random times, up to ``most`` times one after another: nothing is lost, nothing is done twice."""
    generator = random.Random(seed)
    for trial in range(count):
        run = runs[trial % len(runs)]
        _, journal, seconds = trials.whole(run)
        at = trials.begin()
        times = [generator.uniform(0, seconds) for _ in range(generator.randint(1, most))]
        what = f"{run}, trial {trial} (seed {seed}), signal {number} after {', '.join(f'{t:.4f}' for t in times)} s"
        for when in times:
            before = len(lines(at))
            (at / "begun").unlink(missing_ok=True)
            outcome = trials.server.run(RESUME, run, str(at), signals=((when, number),), after=str(at / "begun"))
            _check_signalled(trials, outcome, lines(at)[before:], number, what)
            if outcome.code == 0:
                trials.faster(run, outcome.seconds)
                break
        trials.check_end(run, at, what)
        assert _done(lines(at)) == _done(journal), f"{what}: {_first_other(_done(lines(at)), _done(journal))}"
        trials.counts["trials"] += 1


def events(trials: Trials, run: Run = SMALL, number: int = signal.SIGTERM, step: int = 1) -> None:
    """A signal at every event, or each ``step``-th: nothing is lost, nothing is done twice."""
    total = trials.server.call("faults.runs:signal_at", run, str(trials.begin()), -1, number)
    for event in range(0, total, step):
        at = trials.begin()
        what = f"{run}, signal {number} at event {event} of {total}"
        outcome = trials.server.run("faults.runs:signal_at", run, str(at), event, number)
        _check_signalled(trials, outcome, lines(at), number, what)
        said = "\n".join(lines(at)[-4:])
        trials.check_end(run, at, f"{what}, after\n{said}\n")
        whole = _done(trials.whole(run)[1])
        assert _done(lines(at)) == whole, f"{what}: {_first_other(_done(lines(at)), whole)}"
        trials.counts["trials"] += 1


def _check_signalled(trials: Trials, outcome: Outcome, said: list[str], number: int, what: str) -> None:
    answered = any(line.startswith("signal_begin") for line in said)
    ended = [line for line in said if line.startswith("fit_end")]
    begun = any(line.startswith("fit_begin") for line in said)
    if outcome.code == 0:
        trials.counts["answered" if answered else "ended before"] += 1
    elif answered:
        assert outcome.code == CODES[number], f"{what}: ended with {outcome.code}: {outcome.said}"
        assert ended[0].startswith("fit_end signal"), f"{what}: {ended}"
        trials.counts["answered"] += 1
    else:  # the fit had not begun, or was over
        assert outcome.code in (-number, CODES[number]), f"{what}: ended with {outcome.code}: {outcome.said}"
        assert not begun or ended, f"{what}: ended with {outcome.code} in the fit: {outcome.said}"
        trials.counts["outside of the fit"] += 1


def _done(journal: list[str]) -> list[str]:
    """What has to come exactly once."""
    return [
        line
        for line in journal
        if line.startswith(("step", "epoch_end")) or (line.startswith("epoch_begin") and line.endswith("new"))
    ]


def _first_other(one: list[str], other: list[str]) -> str:
    pairs = zip([*one, "nothing"], [*other, "nothing"], strict=False)
    return next((f"{a!r} where the whole run has {b!r}" for a, b in pairs if a != b), "")


# ------------------------------------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one campaign and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("campaign", choices=("kills", "calls", "signals", "events"))
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--step", type=int, default=1, help="events: only each so manieth")
    parser.add_argument("--data", default="", help="only runs with this data: tensors, loader0, loader2")
    parser.add_argument("--background", action="store_true", help="calls: of a run that writes in the background")
    parser.add_argument("--out", help="a file that gets a line of JSON")
    given = parser.parse_args(arguments)
    runs = [run for run in RUNS if run.data.startswith(given.data)]
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the counts so far are worth printing
    with scratch() as directory, ForkServer(WARM) as server:
        trials = Trials(server, directory)
        failure = ""
        try:
            if given.campaign == "kills":
                kills(trials, given.trials, given.seed, runs)
            elif given.campaign == "signals":
                signals(trials, given.trials, given.seed, runs, signal.Signals[given.signal])
            elif given.campaign == "events":
                for run in runs:
                    events(
                        trials,
                        replace(
                            SMALL, data=run.data, background=run.background, accumulate=run.accumulate, extra=run.extra
                        ),
                        signal.Signals[given.signal],
                        given.step,
                    )
            else:
                calls(trials, replace(SMALL, background=given.background), 0, 1 << 60, every=True)
        except (AssertionError, KeyboardInterrupt) as error:
            failure = str(error) or "interrupted"
    line = {
        "campaign": given.campaign,
        **{name: value for name, value in vars(given).items() if name not in ("campaign", "out")},
        "seconds": round(time.monotonic() - began, 1),
        "counts": dict(sorted(trials.counts.items())),
        "failure": failure,
    }
    print(json.dumps(line))
    if given.out:
        with open(given.out, "a") as file:
            file.write(json.dumps(line) + "\n")
    if failure:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
