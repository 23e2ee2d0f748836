"""The README's program runs, and its example prints what the README shows."""

import re
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def example():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "digits.py"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prunes_some_trials_and_finds_a_good_one(example):
    assert 0 < len(re.findall("pruned", example)) < 12
    assert float(re.search(r"best: (\S+)", example)[1]) > 0.96


def test_the_readme_shows_what_the_example_prints(example):
    shown = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1]
    numbers = re.compile(r"\d[\d.]*")
    printed = {numbers.sub("N", line) for line in example.splitlines()}
    assert {numbers.sub("N", line) for line in shown.splitlines()} <= printed | {"..."}


def test_the_program_of_the_readme_runs(capsys):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (program,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    exec(compile(program, "README.md", "exec"), {"__name__": "program"})
    assert "COMPLETE" in capsys.readouterr().out
