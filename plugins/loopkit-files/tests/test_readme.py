"""The README's code runs, and its commands print what it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from project.test_docs import ROOT, SHAPE, agrees, blocks, run_page

from loopkit.commands import cli

README = Path(__file__).parent.parent / "README.md"
TEXTS = [
    pytest.param(block, match[1], id=match[1].partition(" --set")[0])
    for block in blocks(README.read_text())
    if (match := re.fullmatch(r"output of: loopkit (.*)", block.comment))
]


def test_code_runs_and_prints_what_the_page_shows(isolated):
    run_page(README)


@pytest.mark.parametrize(("block", "words"), TEXTS)
def test_page_shows_what_the_command_prints(block, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = cli.main(words.split())
    captured = capsys.readouterr()
    printed = captured.err if code else captured.out
    assert agrees(block.text, printed, SHAPE), printed
    if words == "run examples/digits.toml":
        assert code == 0
        assert float(re.findall(r"val/accuracy (\S+)", printed)[-1]) >= 0.95


def test_page_shows_the_example():
    shown = [block.text for block in blocks(README.read_text()) if block.language == "toml"]
    assert (ROOT / "examples" / "digits.toml").read_text() == shown[0]
