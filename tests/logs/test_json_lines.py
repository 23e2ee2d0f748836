"""``JsonLines``: what its lines say, and what is beside them."""

from __future__ import annotations

import hashlib
import json
import math
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn

from loopkit import TrainingPhase
from loopkit.logs import (
    Audio,
    Figure,
    File,
    Graph,
    Histogram,
    Hyperparameters,
    Image,
    JsonLines,
    Record,
    Run,
    Table,
    Text,
    Value,
    read_log,
)
from loopkit.logs.masking import masked_text
from loopkit.plugins import LogTo

PLACE = {"phase": "train", "epoch": 1, "step": 1, "update": 1}


def lines(directory: Path, *values: tuple[str, Any]) -> list[dict[str, Any]]:
    """The lines of a fit that logs these, without those of the fit itself."""

    def act(learner: Any, **given: Any) -> None:
        for name, value in values:
            learner.log(name, value)

    make_learner(LogTo(directory), on("step_end", act)).fit(batches(1), epochs=1)
    made = [json.loads(line) for line in (directory / "log.jsonl").read_bytes().splitlines()]
    assert [made[0]["kind"], made[-1]["kind"]] == ["run", "end"]
    return made[1:-1]


def test_line_of_numbers_that_were_logged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopkit.learner.now", lambda: 1_800_000_000.0625)
    found = lines(tmp_path, ("train/loss", 0.1), ("lr", 2))
    said = {**PLACE, "time": 1_800_000_000.062, "values": {"train/loss": 0.1, "lr": 2.0}}
    assert [list(line.items()) for line in found] == [list(said.items())]
    assert list(found[0]["values"]) == ["train/loss", "lr"]


@pytest.mark.parametrize("odd", [0.5, math.nan])
def test_number_of_the_same_name_has_another_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: float) -> None:
    monkeypatch.setattr("loopkit.learner.now", lambda: 1_800_000_000.0)
    given = [("a", 1.0), ("b", odd), ("b", 3.0), ("a", 4.0), ("text", Text("between")), ("c", 5.0), ("a", 6.0)]
    found = [line.get("values", line.get("name")) for line in lines(tmp_path, *given)]
    shown = odd if math.isfinite(odd) else "nan"
    assert found == [{"a": 1.0, "b": shown}, {"b": 3.0, "a": 4.0}, "text", {"c": 5.0}, {"a": 6.0}]
    assert [record.name for record in read_log(tmp_path).records] == [name for name, _ in given]


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 0.1, 1e-300, 5e-324, 1.7976931348623157e308, math.pi, float(np.float32(0.1)), 2.0**60]
)
def test_scalar_reads_back_bit_for_bit(tmp_path: Path, value: float) -> None:
    (line,) = lines(tmp_path, ("x", value))
    assert float(line["values"]["x"]).hex() == value.hex()


@pytest.mark.parametrize(("value", "shown"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_scalar_that_is_not_finite_is_a_string(tmp_path: Path, value: float, shown: str) -> None:
    (line,) = lines(tmp_path, ("x", value))
    assert line["values"] == {"x": shown}


@pytest.mark.parametrize(
    "name",
    ["a/b", "<b>", "\N{GRINNING FACE}", "two\nlines", "100%r%%", '"', "\\", "\u2028", "x" * 10_000, "\udc80", "\0"],
)
def test_name_reads_back(tmp_path: Path, name: str) -> None:
    lines(tmp_path, (name, 1.0))
    assert read_log(tmp_path).values(name) == [1.0]


def test_phase_may_be_a_string_of_its_own_kind(tmp_path: Path) -> None:
    phase = TrainingPhase()
    phase.name = np.str_("train")
    act = on("step_end", lambda learner, **given: learner.log("x", 1))
    make_learner(LogTo(tmp_path), act, phases=[phase]).fit(batches(1), epochs=1)
    assert [(record.name, record.phase) for record in read_log(tmp_path).records] == [("x", "train")]


def test_line_of_the_run_has_no_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "train.py": "train.py",
        "--wandb-key": "--wandb-key",
        "hidden1": "***",
        "--tokenizer": "--tokenizer",
        "--max-tokens=8": "--max-tokens=8",
        "gpt2": "gpt2",
        "--API-KEY=hidden2=": "--API-KEY=***",
        "--set=log.password=hidden3": "--set=log.password=***",
        "log.api_key=hidden4": "log.api_key=***",
        "--use-token": "--use-token",
        "--lr=0.1": "--lr=0.1",
        "schedule.key=momentum": "schedule.key=momentum",
        "--pwd=hidden7": "--pwd=***",
        "--auth": "--auth",
        "hidden8": "***",
        "-p": "-p",
        "hidden9": "***",
        "--db=postgres://me:hidden10@host:5432/x": "--db=postgres://me:***@host:5432/x",
        "https://host/data?part=1&token=hidden11": "https://host/data?part=1&token=***",
        "--author=me": "--author=me",
        "--passes=2": "--passes=2",
    }
    monkeypatch.setattr("sys.argv", list(given))
    learner = make_learner(LogTo(tmp_path))
    learner.options.config = (
        'key = "lr"\n[[loggers]]\nurl = "ftp://me:hidden12@here"\n'
        'auth = {hf_token = "hidden5"}\n[secrets]\na = ["hidden6"]\nb = 7\n'
    )
    learner.fit(batches(1), epochs=1)
    text = (tmp_path / "log.jsonl").read_text()
    assert "hidden" not in text
    run = json.loads(text.splitlines()[0])
    assert run["argv"] == list(given.values())
    assert tomllib.loads(run["config"]) == {
        "key": "lr",
        "loggers": [{"url": "ftp://me:***@here", "auth": {"hf_token": "***"}}],
        "secrets": "***",
    }


def test_last_line_has_no_passwords_of_urls(tmp_path: Path) -> None:
    def fail(**given: Any) -> None:
        error = ConnectionError("no answer from redis://:hidden1@cache:6379/0")
        error.add_note("nor from https://hidden2@host")
        raise error

    with pytest.raises(ConnectionError, match="hidden1"):
        make_learner(LogTo(tmp_path), on("step_end", fail)).fit(batches(1), epochs=1)
    assert "hidden" not in (tmp_path / "log.jsonl").read_text()
    end = read_log(tmp_path).ends[0]
    assert end["error"] == "ConnectionError: no answer from redis://:***@cache:6379/0"


def test_long_texts_are_searched_for_passwords_in_linear_time() -> None:
    for part in ("a://b:", "a", "http://", "?x=", "://"):
        begun = time.process_time()
        masked_text("://" + part * (200_000 // len(part)))
        assert time.process_time() - begun < 2.0  # quadratic, it would take minutes


def test_config_without_passwords_is_logged_as_it_is(tmp_path: Path) -> None:
    learner = make_learner(LogTo(tmp_path))
    learner.options.config = "# mine\nlr = 0.10\nbound = nan\n"
    learner.fit(batches(1), epochs=1)
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["config"] == learner.options.config


def test_lines_of_other_kinds(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        ("text", Text("a\nb")),
        ("value", Value(2)),
        ("histogram", Histogram.of_counts([1, 2], [0, 1, 2])),
        ("table", Table(["a", "b"], [[1, "x"], [math.nan, None]])),
        ("options", Hyperparameters({"lr": 0.1, "bound": math.inf})),
        ("graph", Graph(nn.Linear(2, 1))),
    )
    for line in found:
        assert {key: line.pop(key) for key in PLACE} == PLACE
        assert line.pop("time") > 0
    assert found == [
        {"name": "text", "kind": "text", "text": "a\nb"},
        {"values": {"value": 2.0}},
        {"name": "histogram", "kind": "histogram", "counts": [1.0, 2.0], "edges": [0.0, 1.0, 2.0]},
        {"name": "table", "kind": "table", "columns": ["a", "b"], "rows": [[1, "x"], ["nan", None]]},
        {"name": "options", "kind": "hyperparameters", "values": {"lr": 0.1, "bound": "inf"}},
        {
            "name": "graph",
            "kind": "graph",
            "modules": [{"name": "", "type": "Linear", "parameters": {"weight": [1, 2], "bias": [1]}}],
        },
    ]


def test_files_are_beside_the_log_under_their_digest(tmp_path: Path) -> None:
    from matplotlib.figure import Figure as Drawing

    (tmp_path / "note.txt").write_text("note")
    image, audio = Image(torch.zeros(2, 2)), Audio(torch.zeros(4), 8000)
    figure = Figure(Drawing(figsize=(1, 1), dpi=10))
    kinds = [("image", image), ("audio", audio), ("figure", figure), ("file", File(tmp_path / "note.txt"))]
    found = lines(tmp_path / "run", *kinds, ("again", image))
    contents = [image.png(), audio.wav(), figure.png(), b"note", image.png()]
    for line, content in zip(found, contents, strict=True):
        assert line["file"].startswith(f"media/{hashlib.sha256(content).hexdigest()}.")
        assert (tmp_path / "run" / line["file"]).read_bytes() == content
    assert [Path(line["file"]).suffix for line in found] == [".png", ".wav", ".png", ".txt", ".png"]
    assert (found[0]["caption"], found[1]["rate"], found[3]["path"]) == ("", 8000, "note.txt")
    assert len(list((tmp_path / "run" / "media").iterdir())) == 4


def test_lines_say_when_each_was_logged(tmp_path: Path) -> None:
    times = [5.0, 5.0004, 5.25, 4.0, 4.0]
    backend = JsonLines(tmp_path / "log.jsonl")
    learner = make_learner()
    backend.open(Run(learner, False, {}, None))
    backend.write([Record("x", 1.0, "train", 0, 1, 1, seconds) for seconds in times])
    backend.close(None)
    assert [record.time for record in read_log(tmp_path).records] == pytest.approx(times, abs=0.001)


def test_file_that_is_gone_is_left_out_alone(tmp_path: Path) -> None:
    def act(learner: Any, step: Any, **given: Any) -> None:
        (tmp_path / "note.txt").write_text("note")
        learner.log("note", File(tmp_path / "note.txt"))
        learner.log("index", step.index)
        (tmp_path / "note.txt").unlink()

    with pytest.warns(
        UserWarning, match=r"leaves out 'note', which cannot be written, .*No such file .*note\.txt"
    ) as seen:
        make_learner(LogTo(tmp_path / "run"), on("step_end", act)).fit(batches(2), epochs=1)
    assert len(seen) == 2
    assert [(record.name, record.value) for record in read_log(tmp_path / "run").records] == [
        ("index", 0.0),
        ("index", 1.0),
    ]


def test_what_cannot_be_written_is_left_out_alone(tmp_path: Path) -> None:
    def act(learner: Any, step: Any, **given: Any) -> None:
        learner.log("before", 1.0)
        learner.log("lazy", Graph(nn.LazyLinear(3)))
        learner.log("number", Table(["a"], [[10**5000]]))
        learner.log("after", 2.0)

    with pytest.warns(UserWarning, match=r"leaves out '(lazy|number)', which cannot be written") as seen:
        make_learner(LogTo(tmp_path), on("step_end", act)).fit(batches(2), epochs=1)
    assert any("'number'" in str(each.message) for each in seen)
    log = read_log(tmp_path)
    assert [record.name for record in log.records] == ["before", "after"] * 2
    assert log.ends[0]["reason"] == "epochs"


def test_first_and_last_line_are_of_the_fit(tmp_path: Path) -> None:
    make_learner(LogTo(tmp_path), seed=5).fit(batches(2), epochs=3)
    log = read_log(tmp_path)
    assert {key: log.runs[0][key] for key in ("resumed", "fit", "epoch", "step", "seed", "planned")} == {
        "resumed": False,
        "fit": 1,
        "epoch": 0,
        "step": 0,
        "seed": 5,
        "planned": {"epochs": 3, "steps": 6, "updates": 6},
    }
    assert log.runs[0]["torch"] == torch.__version__
    assert log.runs[0]["hyperparameters"]["optimizer"] == "SGD"
    assert {key: log.ends[0][key] for key in ("reason", "message", "by", "error")} == {
        "reason": "epochs",
        "message": "",
        "by": "",
        "error": None,
    }


def test_end_says_what_the_fit_failed_with(tmp_path: Path) -> None:
    def act(**given: Any) -> None:
        raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        make_learner(LogTo(tmp_path), on("step_end", act)).fit(batches(1), epochs=1)
    assert (read_log(tmp_path).ends[0]["reason"], read_log(tmp_path).ends[0]["error"]) == (
        "error",
        "ValueError: too bad",
    )
    end = read_log(tmp_path).ends[0]
    assert [note for note in end["notes"] if "in step_end of plugin" in note]
    assert 'raise ValueError("too bad")' in end["traceback"]


def test_new_run_sets_the_log_of_another_one_aside(tmp_path: Path) -> None:
    for _ in range(3):
        make_learner(LogTo(tmp_path)).fit(batches(1), epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-1.jsonl", "log-2.jsonl", "log.jsonl"]
    assert [len(read_log(path).runs) for path in tmp_path.iterdir()] == [1, 1, 1]


def test_second_fit_goes_on_in_the_same_file(tmp_path: Path) -> None:
    learner = make_learner(LogTo(tmp_path), on("step_end", lambda learner, **given: learner.log("x", 1)))
    for _ in range(2):
        learner.fit(batches(2), epochs=1)
    log = read_log(tmp_path)
    assert log.values("x") == [1.0] * 4
    assert ([run["fit"] for run in log.runs], len(log.ends)) == ([1, 2], 2)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_record_can_be_appended_after_the_end(tmp_path: Path) -> None:
    backend = JsonLines(tmp_path / "log.jsonl")
    late = Record("late", 2.0, step=1)
    backend.append([late])
    assert not list(tmp_path.iterdir())  # nothing was logged that it could follow
    learner = make_learner(LogTo(backend), on("step_end", lambda learner, **given: learner.log("x", 1)))
    learner.fit(batches(1), epochs=1)
    backend.append([late])
    said = [json.loads(line) for line in backend.path.read_text().splitlines()]
    assert [each.get("kind", each.get("values")) for each in said] == ["run", {"x": 1.0}, "end", {"late": 2.0}]
    learner.fit(batches(1), epochs=1)
    log = read_log(tmp_path)
    assert (log.values("x"), log.values("late"), len(log.ends)) == ([1.0, 1.0], [2.0], 2)


def test_relative_path_is_resolved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert JsonLines("a/log.jsonl").path == tmp_path / "a/log.jsonl"
