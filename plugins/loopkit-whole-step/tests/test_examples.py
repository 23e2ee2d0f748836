"""The project's examples with the whole step as one graph: each still reaches the quality that it asserts itself."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import loopkit
from loopkit_whole_step import WholeStep

EXAMPLES = Path(__file__).parents[3] / "examples"
GRAPH = ("autoencoder", "digits", "feedback", "hard_examples", "lenet", "residual_net", "transformer")
EITHER = ("contrastive",)
"""Its gradients were once 7e-4 of the largest from eager's, and the comparison left it eager."""
EAGER = ("cutmix", "lbfgs", "mixup")


def run(name, backend, monkeypatch):
    """Run an example whose learners have the plugin; returns the modes and reasons of all shapes that trained."""
    made = []

    class Learner(loopkit.Learner):
        def __init__(self, *given, plugins=(), **options):
            made.append(WholeStep("always", backend=backend, show=False))
            super().__init__(*given, plugins=[*plugins, made[-1]], **options)

    monkeypatch.setattr(loopkit, "Learner", Learner)
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return [(shape.mode, shape.reason) for step in made for shape in step.shapes.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GRAPH, *EITHER, *EAGER])
def test_example_reaches_its_quality(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = run(name, "inductor", monkeypatch)
    assert name in EITHER or any(mode == "graph" for mode, _ in found) == (name in GRAPH), found


PATCH = """
import atexit, loopkit
from loopkit_whole_step import WholeStep

class Learner(loopkit.Learner):
    def __init__(self, *given, plugins=(), **options):
        made = WholeStep("always", show=False)
        atexit.register(lambda: print("modes:", {shape.mode for shape in made.shapes.values()}))
        super().__init__(*given, plugins=[*plugins, made], **options)

loopkit.Learner = Learner
"""


@pytest.mark.slow
def test_example_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PATCH)  # in the process that is killed, too
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, str(EXAMPLES / "resume.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "all parameters and metrics are equal, bit for bit" in done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("modes: ")]
    assert len(said) == 2
    assert all("'graph'" in line for line in said)
