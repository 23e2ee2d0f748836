"""``loopkit api``, ``loopkit diff`` and ``loopkit hooks``."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from helpers import batches, make_learner

from loopkit.commands import cli
from loopkit.hooks import STATES
from loopkit.plugins import Checkpoint
from loopkit_testing.reference import public_modules


def run(capsys, *words):
    """The exit code, and the lines of standard output and of standard error."""
    code = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def test_hooks_prints_a_table_of_each_kind_of_name(capsys):
    code, lines, _ = run(capsys, "hooks")
    assert code == 0
    heads = [line for line, below in pairwise(lines) if set(below) == {"="}]
    assert heads == ["hooks", "states", "words", "provides", "checks"]
    shown = [re.sub(" +", " ", line) for line in lines]
    assert any(line.startswith("update_end The optimizer has changed the parameters;") for line in shown)
    one = run(capsys, "hooks", "states")[1]
    assert (one[0], len(one) > len(STATES)) == ("states", True)
    assert json.loads("\n".join(run(capsys, "hooks", "grads", "--json")[1])) == {
        "states": [{"state": "grads", "what it is": STATES["grads"], "doc": STATES["grads"]}]
    }


def test_hooks_of_one_name_prints_all_that_is_said_of_it(capsys):
    code, lines, _ = run(capsys, "hooks", "update_begin")
    assert (code, lines[0]) == (0, "hooks: update_begin, event, learner, phase, epoch, step")
    assert "    it fires after each evaluation of the closure." in lines
    assert [line for line in run(capsys, "hooks", "progress")[1] if line[0] != " "] == [
        "states: progress",
        "provides: progress",
    ]
    assert run(capsys, "hooks", "reads")[1][0] == "words: reads, hook, class, to observe"
    assert run(capsys, "hooks", "no_graph_kept")[1][1].startswith("    A step's graphs are freed before")
    code, out, (line,) = run(capsys, "hooks", "grad")
    assert (code, out) == (2, [])
    assert "there is no hook, state, word or check 'grad' (did you mean 'grads'?): `loopkit hooks` lists them" in line


def test_api_prints_signatures_and_first_lines(capsys):
    code, lines, _ = run(capsys, "api")
    assert code == 0
    at = lines.index("        .stop(reason: 'str' = '', by: 'str' = '') -> 'StopRequest'")
    assert (
        lines[at + 1].strip()
        == "Ask for the end of the run: the current step ends, then the epoch with its events, then the fit."
    )
    assert lines.index("loopkit") < at < lines.index("loopkit.plugins")
    assert sum(line.startswith("    Learner(") for line in lines) == 1  # loopkit, and not loopkit.learner as well
    assert not [line for line in lines if " at 0x" in line]
    modules = [line for line in lines if line.startswith("loopkit")]
    assert modules == [name for name, module in public_modules().items() if module.__all__]


def test_api_of_one_name_prints_the_docstring(capsys):
    code, lines, _ = run(capsys, "api", "ClipGradNorm")
    assert (code, lines[0].split("(")[0]) == (0, "    ClipGradNorm")
    assert "        Raises:" in lines
    assert any(line.startswith("        .update_begin(") for line in lines)
    assert run(capsys, "api", "Learner.fit")[1][0].startswith("        .fit(train: ")
    assert run(capsys, "api", "loopkit.plugins")[1][0] == "loopkit.plugins"
    code, out, (line,) = run(capsys, "api", "ClipGradNrom")
    assert (code, out) == (2, [])
    assert "no public name is 'ClipGradNrom' (did you mean 'ClipGradNorm'?)" in line


def test_api_of_a_class_has_what_it_inherits(capsys):
    code, lines, _ = run(capsys, "api", "ValidationPhase")
    assert code == 0
    assert any(line.startswith("        .unpack(") for line in lines)
    assert run(capsys, "api", "ValidationPhase.unpack")[1][0].startswith("        .unpack(batch: ")
    everything = run(capsys, "api")[1]
    assert sum(line.startswith("        .unpack(batch: ") for line in everything) == 1


def test_api_finds_a_name_whose_case_differs(capsys):
    code, lines, _ = run(capsys, "api", "Checkpoint.best")
    assert (code, lines[0].split("(")[0]) == (0, "    best")
    assert run(capsys, "api", "logto")[1][0].startswith("    LogTo(")


@pytest.fixture
def saved(tmp_path):
    """A directory with three checkpoints of a run."""
    learner = make_learner(Checkpoint(tmp_path / "run", keep=9))
    learner.fit(batches(4), epochs=3)
    return tmp_path / "run"


def test_diff_of_equal_states(saved, capsys):
    assert run(capsys, "diff", saved, saved / "000003-step-12")[:2] == (0, ["equal in every bit"])


def test_diff_names_the_first_difference_and_counts_parts(saved, capsys):
    code, lines, _ = run(capsys, "diff", saved / "000001-step-4", saved / "000002-step-8")
    assert code == 1
    assert len(lines) == 2
    assert lines[0].startswith("models.model.bias: 1 of 1 values differ, first at [0]: ")
    assert "models.model 2" in lines[1]
    assert "progress 4" in lines[1]
    code, every, _ = run(capsys, "diff", "--all", saved / "000001-step-4", saved / "000002-step-8")
    assert (code, every[0], every[-1]) == (1, *lines)
    assert len(every) - 1 == int(lines[1].split()[0])
    assert "progress.steps: 4 / 8" in every
    ignored = run(capsys, "diff", saved, saved / "000002-step-8", "--all", "--ignore", "steps")[1]
    assert not any(line.startswith("progress.steps:") for line in ignored)


def test_diff_of_a_damaged_state_exits_with_2(saved, capsys):
    weights = saved / "000002-step-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    code, out, err = run(capsys, "diff", saved, saved / "000002-step-8")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("loopkit: error: ")
