"""Checkpoints in parts become ones in one piece, and back, by the command."""

from __future__ import annotations

import pytest
from distributed.processes import run
from loopkit_testing.diff import differences
from small import LIMIT, differing, loader, make, whole

from loopkit import checkpoint
from loopkit.checkpoint.bundle import find, read_state
from loopkit.commands.cli import main
from loopkit_sharded import load, save


def saves(rank, directory):
    learner = make()
    learner.fit(loader(2), epochs=1)
    save(learner, directory)
    return whole(learner)


def test_command_joins_parts_and_cuts_a_whole_with_the_same_bits(tmp_path):
    parts, piece, cut, again = (tmp_path / name for name in ("parts", "piece", "cut", "again"))
    expected = run(saves, 2, parts, timeout=LIMIT)[0]
    assert main(["sharded", "export", str(parts), str(piece)]) == 0
    learner = make()
    checkpoint.load(learner, piece)
    assert differing(whole(learner), expected) == []
    assert main(["sharded", "import", str(piece), str(cut), "--parts", "3"]) == 0
    learner = make()
    load(learner, cut)
    assert differing(whole(learner), expected) == []
    assert main(["sharded", "export", str(cut), str(again)]) == 0
    assert differences(*(read_state(find(path)) for path in (piece, again)), ignore=()) == []


@pytest.mark.parametrize(("act", "message"), [("export", "is in one piece"), ("import", "give at least 2")])
def test_command_says_what_cannot_be_done(tmp_path, capsys, act, message):
    learner = make()
    learner.fit(loader(), epochs=1)
    checkpoint.save(learner, tmp_path)
    assert main(["sharded", act, str(tmp_path), str(tmp_path / "out"), "--parts", "1"]) == 2
    assert message in capsys.readouterr().err
