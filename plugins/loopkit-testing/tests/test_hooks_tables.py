"""``loopkit hooks``."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from loopkit import cli
from loopkit.hooks import STATES


def run(capsys, *words):
    """The exit code, and the lines of standard output and of standard error."""
    code = cli.main(list(words))
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
    assert run(capsys, "hooks", "reads")[1][0] == "words: reads, hook, class, to look on"
    assert run(capsys, "hooks", "no_graph_kept")[1][1].startswith("    A step's graphs are freed before")
    code, out, (line,) = run(capsys, "hooks", "grad")
    assert (code, out) == (2, [])
    assert "there is no hook, state, word or check 'grad' (did you mean 'grads'?): `loopkit hooks` lists them" in line
