"""The examples reach what they promise, and go on in mid-epoch with the same bits."""

import importlib
import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers import on

EXAMPLES = Path(__file__).parent.parent / "examples"
BARS = {
    "reinforce": (r"falls: (\d+) of 100", lambda length: length > 80),
    "actor_critic": (r"moves: (\d+\.\d)", lambda falls: falls < 20),
    "gcn": (r"accuracy (\d\.\d+)", lambda accuracy: accuracy > 0.92),
}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("name", BARS)
def test_example_reaches_its_bar(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")  # some seconds: it trains
    pattern, good = BARS[name]
    printed = capsys.readouterr().out
    found = re.search(pattern, printed)
    assert found is not None, printed
    assert good(float(found[1])), printed


@pytest.mark.parametrize("name", BARS)
def test_example_goes_on_with_the_same_bits(name):
    module = importlib.import_module(name)

    def learner():
        made = module.make()
        made.remove("progress")
        return made

    def pause(learner):
        if learner.progress.steps == 3:
            learner.pause("test")

    whole = learner()
    whole.fit(module.data(), epochs=1, max_steps=6)
    first = learner()
    first.add(on("step_end", pause, "pausing"))
    first.fit(module.data(), epochs=1, max_steps=6, on_interrupt="return")
    first.remove("pausing")
    again, state = learner(), first.state_dict()
    again.load_state_dict(state)
    again.fit(module.data(), epochs=1, max_steps=6)
    assert again.progress.steps == 6
    parameters = [[p for model in each.models.values() for p in model.parameters()] for each in (whole, again)]
    assert all(map(torch.equal, *parameters))
