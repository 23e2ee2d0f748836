"""docs/migrating.md: the programs of each pair leave the same parameters behind, bitwise."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pages import blocks
from torch import Tensor

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "migrating.md").read_text()
SECTIONS = dict(re.findall(r"(?ms)^## From (.+?)$\n(.*?)(?=^## |\Z)", PAGE))
MODULES = {
    "a loop by hand": "torch",
    "Lightning": "lightning",
    "Ignite": "ignite",
    "fastai": "fastai",
    "Accelerate": "accelerate",
    "the HF Trainer": "transformers",
}
SCRIPT = """
import contextlib, io, pickle, traceback
import torch

begin, sections = pickle.load(open("sections", "rb"))
found = {}
for section, programs in sections.items():
    names, ends, printed, said = {}, [], [], ""
    try:
        exec(begin, names)
        for program in programs:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(program, names)
            ends.append([parameter.detach() for parameter in names["model"].parameters()])
            printed.append(out.getvalue())
    except Exception:
        said = traceback.format_exc()
    found[section] = ends, printed, said
torch.save(found, "found")
"""
"""All sections in one process, as its start takes longest: each in a namespace of its own."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[list[Tensor]], list[str], str]]:
    """For each section: the parameters that its programs end with, what each prints, and a traceback."""
    directory = tmp_path_factory.mktemp("migrating")
    sections = {section: programs(section) for section, module in MODULES.items() if find_spec(module) is not None}
    (directory / "sections").write_bytes(pickle.dumps((blocks(PAGE)[0].text, sections)))
    (directory / "programs.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "programs.py"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, tuple[list[list[Tensor]], list[str], str]] = torch.load(directory / "found", weights_only=True)
    return loaded


def programs(section: str) -> list[str]:
    """The programs of a section: loopkit's last, after those that load what the first one has saved."""
    there, here, *more = [block.text for block in blocks(SECTIONS[section]) if block.language == "python"]
    return [there, *more, here]


def test_each_section_is_compared() -> None:
    assert set(SECTIONS) == set(MODULES)


@pytest.mark.slow
@pytest.mark.parametrize("section", MODULES)
def test_programs_of_a_section_train_the_same_bits(
    section: str, found: dict[str, tuple[list[list[Tensor]], list[str], str]]
) -> None:
    if section not in found:
        pytest.skip(f"{MODULES[section]} is not installed")
    (expected, *others), printed, said = found[section]
    assert said == ""
    assert len(expected) == 4
    assert len(others) == len(programs(section)) - 1
    for parameters in others:
        for parameter, other in zip(parameters, expected, strict=True):
            assert torch.equal(parameter, other)
    assert printed[0].splitlines()[-1] == printed[-1].splitlines()[-1]
