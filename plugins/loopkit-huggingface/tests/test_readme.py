"""The README's program trains, saves and loads, and prints what the README shows; so do the examples in docstrings."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import loopkit_huggingface.loaders

README = (Path(__file__).parent.parent / "README.md").read_text()
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    program = "".join(re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path_factory.mktemp("readme"),
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_perplexity_gets_really_better(printed):
    start, end = (float(value) for value in re.findall(r"(?:at start|loaded): perplexity ([\d.]+)", printed))
    assert start > 350
    assert end < 70


def test_the_loaded_model_is_the_best_one(printed):
    values = [float(value) for value in re.findall(r"val/perplexity ([\d.]+)", printed)]
    assert f"{min(values):.1f}" == re.search(r"loaded: perplexity (\S+)", printed)[1]


def test_the_readme_shows_what_the_program_prints(printed):
    shown = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1]
    assert shown.strip()
    assert NUMBER.sub("N", shown) == NUMBER.sub("N", printed)


def test_the_examples_of_the_loaders_are_true():
    assert doctest.testmod(loopkit_huggingface.loaders).failed == 0
