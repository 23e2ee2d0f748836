"""The programs of examples/ported: by hand and with loopkit they end with the same bits, also after a kill."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import on

from loopkit import every
from loopkit.plugins import Checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples" / "ported"
NEEDS = {"sam": "loopkit_recipes", "reinforce": "loopkit_data", "actor_critic": "loopkit_data", "gcn": "loopkit_data"}
TINY = {
    "nanogpt": {"WIDTH": 16, "LAYERS": 1, "WARM": 2},
    "reinforce": {"LIMIT": 5},
    "time_series": {"LENGTH": 3, "EVALUATIONS": 3},
    "word_language_model": {"WORDS": 50, "WIDTH": 8},
}
"""What makes a program smaller than it is."""
STEPS, EPOCHS = 4, 2
DIES_IN = STEPS + 3
"""The step that is killed: the third of the second epoch."""
BARS = {
    "actor_critic": (r"moves: (.*)", lambda falls: falls < 20),
    "byol": (r"features: (.*) are", lambda right: right > 0.84),
    "dcgan": (r": (.*) from samples", lambda far: far < 4),
    "distillation": (r"distilled: .*, (.*) of the threes", lambda right: right > 0.5),
    "forward_forward": (r"right for (.*) of", lambda right: right > 0.9),
    "gcn": (r"(.*) of the other images", lambda right: right > 0.92),
    "maml": (r"learned .*, (.*) after", lambda loss: loss < 1.5),
    "nanogpt": (r"pairs, (.*) of the GPT", lambda loss: loss < 2.45),
    "reinforce": (r"falls: (.*) of", lambda length: length > 80),
    "sam": (r"SAM: .*sharpness (.*)", lambda sharpness: sharpness < 0.05),
    "siamese": (r"about (.*) of pairs", lambda right: right > 0.85),
    "super_resolution": (r"interpolation, (.*) dB", lambda ratio: ratio > 15),
    "time_series": (r"error of (.*);", lambda error: error < 0.3),
    "vae": (r"image, (.*) restored", lambda error: error < 0.04),
    "wgan_gp": (r"(.*) of the samples are near", lambda near: near > 0.6),
    "word_language_model": (r"word is, (.*) of the LSTM", lambda perplexity: perplexity < 30),
}
"""A figure that each prints as a program, and what it should be."""
programs = pytest.mark.parametrize("name", BARS)


@pytest.fixture(autouse=True)
def _beside_the_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They import what is beside them. Their random numbers are theirs alone, and one thread computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(EXAMPLES)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@functools.cache
def noise() -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of scikit-learn's digits: it takes seconds to import, and bits can be compared without it."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(1797, 64, generator=generator), torch.randint(10, (1797,), generator=generator)


def program(name: str) -> ModuleType:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = importlib.import_module(name)
    if hasattr(module, "digits"):
        module.digits = noise  # type: ignore[attr-defined]
    vars(module).update(TINY.get(name, {}))
    return module


def trained(module: ModuleType, train: Any, *plugins: Any) -> Any:
    """A model after two epochs of a few steps."""
    torch.manual_seed(0)
    model = module.make()
    train(model, module.data(STEPS), EPOCHS, *plugins)
    return model


@functools.cache
def by_hand(name: str) -> Any:
    module = program(name)
    return trained(module, module.by_hand)


def assert_same(model: Any, other: Any) -> None:
    both = importlib.import_module("both")
    assert all(tensor.isfinite().all() for tensor in both.tensors(model))
    assert both.same_bits(model, other)


@programs
def test_program_has_the_bits_of_its_loop_by_hand(name: str) -> None:
    module = program(name)
    assert_same(trained(module, module.with_loopkit), by_hand(name))


class Died(Exception):
    """The process is gone."""


@programs
def test_program_that_is_killed_goes_on_with_the_bits_of_its_loop_by_hand(name: str, tmp_path: Path) -> None:
    module, steps = program(name), iter(range(1, 1000))

    def die(phase: Any) -> None:
        if phase.training and next(steps) == DIES_IN:
            raise Died

    def run() -> Checkpoint:
        return Checkpoint(tmp_path, save=every(updates=1), resume="auto")

    with pytest.raises(Died):
        trained(module, module.with_loopkit, run(), on("step_begin", die))
    assert_same(trained(module, module.with_loopkit, run()), by_hand(name))


@pytest.mark.slow
@programs
def test_program_reaches_its_bar(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.reload(program(name))  # with scikit-learn's digits
    module.main()
    monkeypatch.delitem(sys.modules, name)
    printed = capsys.readouterr().out
    pattern, good = BARS[name]
    found = re.search(pattern, printed)
    assert "the same bits: True" in printed
    assert found is not None, printed
    assert good(float(found[1])), printed
