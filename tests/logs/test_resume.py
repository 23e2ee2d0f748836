"""A log of a run that is killed, wherever that is, and goes on, is that of a run that nobody stopped."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.campaign import scratch
from faults.forkserver import ForkServer
from faults.runs import fresh

from logs.runs import make, said, table, train
from loopkit.logs import read_log
from loopkit.plugins import Checkpoint

TRAIN = "logs.runs:train"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer("logs.runs:warm") as started:
        yield started


@pytest.fixture(scope="module")
def whole(server: ForkServer) -> Iterator[tuple[Any, Any, float, Path]]:
    """What a run says that nobody stops, how long it takes, and a directory for others."""
    with scratch() as directory:
        at = fresh(directory / "whole")
        outcome = server.run(TRAIN, str(at))
        assert outcome.code == 0, outcome.said
        yield said(at), table(at), outcome.seconds, directory


def trial(server: ForkServer, whole: tuple[Any, Any, float, Path], seed: int, number: int, most: int) -> int:
    """Stop a run up to ``most`` times, let it end, and compare its logs; returns how often it was stopped."""
    records, rows, seconds, directory = whole
    generator = random.Random(seed)
    at, kills = fresh(directory / "trial"), 0
    times = [generator.uniform(0, seconds) for _ in range(generator.randint(1, most))]
    for when in times:
        (at / "begun").unlink(missing_ok=True)
        outcome = server.run(TRAIN, str(at), signals=((when, number),), after=str(at / "begun"))
        assert outcome.code in (0, -number, 128 + number), outcome.said
        kills += outcome.code != 0
        if (at / "log.jsonl").exists():
            read_log(at / "log.jsonl")  # it can be read whatever happened
    outcome = server.run(TRAIN, str(at))
    what = f"seed {seed}, signal {number} after {times} s"
    assert outcome.code == 0, f"{what}: {outcome.said}"
    assert said(at) == records, what
    assert table(at) == rows, what
    return kills


@pytest.mark.clock  # a stop between the begin of a pass and its first step splits a row of the table
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("seed", [0, 1])
def test_log_of_a_stopped_run_is_that_of_a_whole_one(server, whole, seed: int, number: int) -> None:
    trial(server, whole, seed, number, 4)


@pytest.mark.slow
def test_log_after_fifty_kills_is_that_of_a_whole_run(server, whole) -> None:
    kills, seed = 0, 100
    while kills < 50:
        kills += trial(server, whole, seed, signal.SIGKILL, 6)
        seed += 1


@pytest.mark.slow
def test_log_after_many_signals_is_that_of_a_whole_run(server, whole) -> None:
    for seed in range(200, 220):
        trial(server, whole, seed, signal.SIGTERM, 4)


def test_whole_run_logs_everything_once(whole) -> None:
    records, rows, *_ = whole
    names = [record[0] for record in records]
    assert {name: names.count(name) for name in ("fit/begin", "fit/end", "outside")} == {
        "fit/begin": 2,
        "fit/end": 2,
        "outside": 0,
    }
    assert names.count("train/index") == 24
    assert names.count("train/begin") == 4
    assert sum(row["train/loss"] != "" for row in rows) == 4


def test_run_again_after_its_end_leaves_the_log_as_it_is(tmp_path: Path) -> None:
    train(str(tmp_path))
    before = (tmp_path / "log.jsonl").read_bytes(), (tmp_path / "log.csv").read_bytes()
    train(str(tmp_path))
    assert ((tmp_path / "log.jsonl").read_bytes(), (tmp_path / "log.csv").read_bytes()) == before


@pytest.mark.filterwarnings("ignore:log 'csv' cannot write")
def test_fit_that_was_over_keeps_what_the_next_one_logged(tmp_path: Path) -> None:
    for _ in range(2):
        learner, data, val = make(tmp_path, Checkpoint(tmp_path / "one", resume="auto"))
        learner.fit(data, val, epochs=1)
        learner.replace("checkpoint", Checkpoint(tmp_path / "two", resume="auto"))
        learner.fit(data, val, epochs=1)
        assert [r[0] for r in said(tmp_path)].count("fit/end") == 2
        assert [r[0] for r in said(tmp_path)].count("train/index") == 12


@pytest.mark.filterwarnings("ignore:log 'csv' cannot write")
def test_longer_fit_goes_on_with_the_log(tmp_path: Path) -> None:
    for epochs in (2, 3):
        learner, data, val = make(tmp_path / "parts", Checkpoint(tmp_path / "checkpoints", resume="auto"))
        learner.fit(data, val, epochs=epochs)
    learner, data, val = make(tmp_path / "whole")
    learner.fit(data, val, epochs=3)
    ends = [record for record in said(tmp_path / "parts") if record[0] == "fit/end"]
    assert len(ends) == 2
    assert [r for r in said(tmp_path / "parts") if r[0] != "fit/end"] == [
        r for r in said(tmp_path / "whole") if r[0] != "fit/end"
    ]


@pytest.mark.filterwarnings("ignore:log 'csv' cannot write")
def test_state_saved_outside_of_a_fit_begins_a_new_one(tmp_path: Path) -> None:
    learner, data, val = make(tmp_path)
    learner.fit(data, val, epochs=1)
    state = learner.state_dict()
    again, data, val = make(tmp_path)
    again.load_state_dict(state)
    again.fit(data, val, epochs=1)
    assert [r[0] for r in said(tmp_path)].count("fit/begin") == 2
    assert [run["resumed"] for run in read_log(tmp_path / "log.jsonl").runs] == [False, True]


@pytest.mark.filterwarnings("ignore:log 'csv' cannot write")
def test_log_elsewhere_begins_where_the_run_goes_on(tmp_path: Path) -> None:
    learner, data, val = make(tmp_path / "old", Checkpoint(tmp_path / "checkpoints"))
    learner.fit(data, val, epochs=1)
    learner, data, val = make(tmp_path / "new", Checkpoint(tmp_path / "checkpoints", resume="auto"))
    learner.fit(data, val, epochs=2)
    log = read_log(tmp_path / "new" / "log.jsonl")
    assert (log.runs[0]["resumed"], log.runs[0]["step"]) == (True, 6)
    assert log.of("train/index")[0].step == 7
    assert table(tmp_path / "new")[0]["step"] == "6"


@pytest.mark.filterwarnings("ignore:log 'csv' cannot write")
@pytest.mark.parametrize("content", [b"", b"something else\n", b"phase,epoch\ntrain,1\n" * 500])
def test_other_log_in_its_place_is_set_aside(tmp_path: Path, content: bytes) -> None:
    learner, data, val = make(tmp_path, Checkpoint(tmp_path / "checkpoints"))
    learner.fit(data, val, epochs=1)
    for name in ("log.jsonl", "log.csv"):
        (tmp_path / name).write_bytes(content)
    learner, data, val = make(tmp_path, Checkpoint(tmp_path / "checkpoints", resume="auto"))
    if content:
        with pytest.warns(
            UserWarning, match=r"is not what it was when the checkpoint was saved: it is log-1\."
        ) as seen:
            learner.fit(data, val, epochs=2)
        assert len([w for w in seen if "is not what it was" in str(w.message)]) == 2, [str(w.message) for w in seen]
        assert [(tmp_path / name).read_bytes() for name in ("log-1.jsonl", "log-1.csv")] == [content] * 2
    else:
        learner.fit(data, val, epochs=2)
        assert not (tmp_path / "log-1.jsonl").exists()
    assert read_log(tmp_path / "log.jsonl").of("train/index")[0].step == 7
