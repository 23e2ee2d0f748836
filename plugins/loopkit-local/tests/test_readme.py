"""The README's programs run, and print what it shows; so do the examples in docstrings."""

import doctest
from pathlib import Path

import pytest
import torch
from pages import run_page

from loopkit_local import cadence, rounds


def test_readme_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")


@pytest.mark.parametrize("module", [cadence, rounds])
def test_examples_in_docstrings_are_true(module):
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed
