"""``read_log``: whole logs, torn ones, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from loopkit import Learner
from loopkit.data import TensorLoader
from loopkit.errors import LogError
from loopkit.logs import Record, read_log
from loopkit.metrics import Accuracy
from loopkit.plugins import History, LogMetrics, LogTo, Metrics, call_on

LINE = '{"phase": "train", "epoch": 0, "step": 1, "update": 1, "time": 2.5, "values": {"a": 0.5}}\n'


def test_records_read_back(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(LINE + LINE.replace("0.5", '"-inf", "b": 2'))
    log = read_log(tmp_path)
    assert log.records == [
        Record("a", 0.5, "train", 0, 1, 1, 2.5),
        Record("a", float("-inf"), "train", 0, 1, 1, 2.5),
        Record("b", 2.0, "train", 0, 1, 1, 2.5),
    ]
    assert (log.names(), log.values("a")) == (["a", "b"], [0.5, float("-inf")])


@pytest.mark.parametrize("kept", range(1, len(LINE)))
def test_torn_last_line_is_left_out(tmp_path: Path, kept: int) -> None:
    (tmp_path / "log.jsonl").write_text(LINE + LINE[:kept])
    assert len(read_log(tmp_path / "log.jsonl").records) == 1


def test_empty_log_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    assert read_log(tmp_path).records == []


@pytest.mark.parametrize(
    "line",
    ["no json", "5", "[]", "{}", '{"values": {}}', LINE.strip().replace("0.5", '"x"'), "[" * 10_000, "\x00", "null"],
)
def test_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "log.jsonl").write_text(LINE + line + "\n" + LINE)
    with pytest.raises(LogError, match=r"log\.jsonl, line 2 is no record of a log"):
        read_log(tmp_path)


def test_missing_log_is_said(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"there is no log .*log\.jsonl"):
        read_log(tmp_path)


def test_unknown_name_is_said_with_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(LINE.replace('"a"', '"train/loss"'))
    with pytest.raises(LogError, match=r"has no 'train/los' \(did you mean 'train/loss'\?\); it has train/loss"):
        read_log(tmp_path).values("train/los")


def test_phases_that_log_one_name_can_be_told_apart(tmp_path: Path) -> None:
    lines = [LINE, LINE.replace("train", "val").replace("0.5", "9.0"), LINE.replace('"train"', '""'), LINE]
    (tmp_path / "log.jsonl").write_text("".join(lines))
    log = read_log(tmp_path)
    assert log.values("a") == [0.5, 9.0, 0.5, 0.5]
    assert (log.values("a", "train"), log.values("a", phase="val"), log.values("a", "")) == ([0.5, 0.5], [9.0], [0.5])
    assert log.of("a", "val") == [Record("a", 9.0, "val", 0, 1, 1, 2.5)]


def test_phase_that_has_not_logged_a_name_is_said_with_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(LINE)
    with pytest.raises(
        LogError, match=r"no 'a' of the phase 'trian' \(did you mean 'train'\?\); it has it for 'train'$"
    ):
        read_log(tmp_path).values("a", "trian")


def test_log_as_a_frame_has_a_row_an_epoch_and_phase(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
    own = call_on("step_end", lambda learner, phase: phase.training and learner.log("train/own", 1.0), name="own")
    plugins = [LogTo(tmp_path), LogMetrics(every=1), History(), Metrics(), Metrics(Accuracy(), phase="val"), own]
    learner = Learner(nn.Linear(4, 3), nn.CrossEntropyLoss(), torch.optim.AdamW, plugins=plugins, standard=False)
    loader = TensorLoader(inputs, targets, batch_size=3)
    learner.fit(loader, loader, epochs=2)
    log = read_log(tmp_path)
    table, history = log.frame(), learner.plugins["history"]
    assert list(table.columns) == ["phase", "epoch", "step", "update", "time", "loss", "accuracy"]
    assert table[["phase", "epoch", "step"]].to_numpy().tolist() == [
        ["train", 1, 2],
        ["val", 1, 2],
        ["train", 2, 4],
        ["val", 2, 4],
    ]
    assert table.loss.tolist() == history.frame().loss.tolist()
    for phase, names in (("train", ["loss"]), ("val", ["loss", "accuracy"])):
        for frame in (log.frame(phase), history.frame(phase)):
            assert list(frame.columns)[-len(names) :] == names
            assert len(frame) == 2
            assert not frame.isna().any().any()
    for each in (log, history):
        with pytest.raises(
            ValueError, match=r"no row is of the phase 'vall' \(did you mean 'val'\?\); there are train, val"
        ):
            each.frame("vall")
