"""benchmarks/gate.py: which measures let a change through."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gate")


def made(gate, *ratios):
    """A gate whose measures give these ratios, one after the other."""
    left = iter(ratios)
    return gate.Gate(3, lambda sides, rounds: {"ours": [next(left)] * rounds, "theirs": [1.0] * rounds})


def test_a_ratio_within_the_slack_of_its_bound_holds_at_once(gate, capsys):
    it = made(gate, 1.14)
    it.ratio("a / b", None, None, 1.0, 1)
    assert it.beyond == []
    assert it.figures == {"a / b": {"ratio": 1.14, "bound": 1.0, "tries": 1, "beyond": False}}


def test_a_ratio_holds_if_one_of_three_tries_is_within(gate, capsys):
    it = made(gate, 1.3, 1.2, 1.1)
    it.ratio("a / b", None, None, 1.0, 1)
    assert it.beyond == []
    assert it.figures["a / b"]["tries"] == 3


def test_a_ratio_beyond_in_three_tries_does_not_hold(gate, capsys):
    it = made(gate, 1.3, 1.2, 1.16, 1.0)
    it.ratio("a / b", None, None, 1.0, 1)
    it.hold({"c": 0.9}, lambda: {"c": 0.9})
    assert it.beyond == ["a / b"]
    assert "BEYOND 1.150" in capsys.readouterr().out


def test_the_command_fails_beyond_and_appends_a_line(gate, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gate, "PARTS", [lambda it, batches: it.hold({"a": 1.0}, lambda: {"a": measured})])
    path = tmp_path / "gate.jsonl"
    monkeypatch.setattr("sys.argv", ["gate.py", "--results", str(path)])
    measured = 1.0
    gate.main()
    measured = 1.2
    with pytest.raises(SystemExit, match=r"beyond 1\.15 of the bound in three tries: a"):
        gate.main()
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["ratios"]["a"]["beyond"], second["ratios"]["a"]["beyond"]) == (False, True)


def test_nothing_is_written_unless_asked(gate, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gate, "PARTS", [])
    monkeypatch.setattr(gate, "append", lambda *_: pytest.fail("written"))
    monkeypatch.setattr("sys.argv", ["gate.py"])
    gate.main()


def test_the_plot_has_a_point_for_each_ratio_of_each_run(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    plot = importlib.import_module("make_gate_plot")
    runs = [{"ratios": {"a": {"ratio": 0.5, "bound": 1.0}, "b": {"ratio": 1.5, "bound": 2.0}}}] * 2
    (axes,) = plot.draw(runs).axes
    points = [tuple(map(float, point)) for each in axes.collections for point in each.get_offsets()]
    assert points == [(0.5, 0.0), (0.75, 1.0)] * 2
