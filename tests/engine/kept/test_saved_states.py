"""States that were saved before the engine was rebuilt load, and go on exactly to the end that they came to then.

``fixtures/make_states.py`` wrote the states and the ends, with the code of that time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from distributed.processes import run
from fixtures.scenarios import SCENARIOS, STATES, arithmetic, end_of
from safetensors.torch import load_file

from loopkit import checkpoint
from loopkit.plugins import Checkpoint

ALONE = [name for name, scenario in SCENARIOS.items() if scenario.processes == 1]
pytestmark = pytest.mark.filterwarnings("ignore:.*was saved with other versions of plugins")


@pytest.fixture(autouse=True)
def one_thread():
    """Several would sum in other orders."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def is_exact() -> bool:
    """Whether this machine computes the same bits as the one where the states were made; in one thread."""
    then, now = load_file(STATES / "arithmetic.safetensors"), arithmetic()
    return all(torch.equal(value, now[name]) for name, value in then.items())


def differences(expected: Any, found: Any, tolerance: float, where: str = "") -> list[str]:
    """Where two ends differ; in their bits, if this machine has those of the other."""
    if isinstance(expected, torch.Tensor) or type(expected) is float:
        one, other = torch.as_tensor(expected).double(), torch.as_tensor(found).double()
        limit = 0.0 if is_exact() else tolerance
        same = one.shape == other.shape and torch.allclose(one, other, rtol=limit, atol=limit, equal_nan=True)
        return [] if same else [f"{where}: {one.flatten()[:3].tolist()} and {other.flatten()[:3].tolist()}"]
    if isinstance(expected, Mapping) and isinstance(found, Mapping) and expected.keys() == found.keys():
        return [
            each for key in expected for each in differences(expected[key], found[key], tolerance, f"{where}.{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [each for i, (a, b) in pairs for each in differences(a, b, tolerance, f"{where}[{i}]")]
    return [] if expected == found else [f"{where}: {expected} and {found}"]


def check_end(name: str, found: Any, end: str = "end") -> None:
    expected = load_file(STATES / name / f"{end}.safetensors"), json.loads((STATES / name / f"{end}.json").read_text())
    tolerance = SCENARIOS[name].tolerance
    assert differences(list(expected), list(found), tolerance) == []


def resumed(rank: int, name: str, directory: Any) -> Any:
    scenario = SCENARIOS[name]
    learner = scenario.learner(Checkpoint(directory, resume=STATES / name / "checkpoint"), seed=99)
    return end_of(learner, scenario.fit(learner))


@pytest.mark.parametrize("name", ALONE)
def test_saved_state_resumed_by_the_plugin_goes_on_to_its_end(name, tmp_path):
    check_end(name, resumed(0, name, tmp_path))


@pytest.mark.parametrize("name", ALONE)
def test_saved_state_that_is_loaded_goes_on_to_its_end(name):
    scenario = SCENARIOS[name]
    learner = scenario.learner(seed=99)
    checkpoint.load(learner, STATES / name / "checkpoint")
    check_end(name, end_of(learner, scenario.fit(learner)))


def test_saved_state_of_two_processes_goes_on_in_two(tmp_path):
    for found in run(resumed, 2, "two_processes", tmp_path):
        check_end("two_processes", found)


def test_saved_state_of_two_processes_goes_on_in_one(tmp_path):
    check_end("two_processes", resumed(0, "two_processes", tmp_path), "end_alone")


@pytest.mark.parametrize("name", ALONE)
def test_run_that_is_not_interrupted_comes_to_the_same_end(name):
    scenario = SCENARIOS[name]
    learner = scenario.learner()
    if scenario.before is not None:
        scenario.before(learner)
    check_end(name, end_of(learner, scenario.fit(learner)))
