"""Windows whose length follows a schedule: bitwise the loop by hand, also from the middle."""

import pytest
import torch
from helpers import on
from loopkit_testing import check_plugin, tiny_problem
from torch import nn

from loopkit import Learner
from loopkit.data import TensorLoader
from loopkit.errors import PluginConflict, PluginError
from loopkit.plugin import has_a_say
from loopkit_recipes import Accumulate

INPUTS = torch.randn(44, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)
SCHEDULE = {0: 1, 3: 2, 6: 4}


def data():
    return TensorLoader(INPUTS, TARGETS, batch_size=2)


def bits(learner):
    """Parameters and momentum."""
    momentum = [state["momentum_buffer"] for state in learner.optimizer.state.values()]
    return [tensor.tolist() for tensor in (*learner.model.parameters(), *momentum)], learner.progress.updates


def made(*plugins, accumulate=1):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    learner = Learner(model, nn.functional.mse_loss, optimizer, plugins=plugins, accumulate=accumulate)
    learner.remove("progress")
    return learner


def test_windows_follow_the_schedule_as_by_hand():
    learner = made(Accumulate(SCHEDULE))
    learner.fit(data(), epochs=1)
    by_hand = made()
    updates, window = 0, []
    model, optimizer = by_hand.model, by_hand.optimizer
    for batch in data():
        window.append(batch)
        steps = 1 if updates < 3 else 2 if updates < 6 else 4
        if len(window) == steps:
            for inputs, targets in window:
                (nn.functional.mse_loss(model(inputs), targets) / steps).backward()
            optimizer.step()
            optimizer.zero_grad()
            updates, window = updates + 1, []
    if window:
        parts = [nn.functional.mse_loss(model(inputs), targets) / len(window) for inputs, targets in window]
        torch.stack(parts).sum().backward()
        optimizer.step()
        updates += 1
    assert learner.progress.updates == updates
    assert torch.allclose(learner.model.weight, model.weight, rtol=1e-5)  # a short window is rounded otherwise


@pytest.mark.parametrize("at", [2, 4, 5, 11, 12, 21, 23])
def test_run_goes_on_in_the_middle_of_a_window(at):
    whole = made(Accumulate(SCHEDULE))
    whole.fit(data(), epochs=2)
    first = made(Accumulate(SCHEDULE))
    first.add(on("step_end", lambda learner: learner.progress.steps == at and learner.pause("test"), "pausing"))
    first.fit(data(), epochs=2, on_interrupt="return")
    first.remove("pausing")
    again = made(Accumulate(SCHEDULE))
    again.load_state_dict(first.state_dict())
    again.fit(data(), epochs=2)
    assert bits(whole) == bits(again)


def test_windows_follow_the_schedule_on_data_without_a_length():
    whole, stream = made(Accumulate(SCHEDULE)), made(Accumulate(SCHEDULE))
    whole.fit(data(), epochs=1)
    stream.fit((batch for batch in data()), epochs=1)
    assert bits(whole) == bits(stream)


def test_no_other_plugin_sets_it_and_processes_compare_it():
    assert has_a_say(Accumulate(SCHEDULE))
    with pytest.raises(PluginConflict, match='both own "accumulate"'):
        made(Accumulate(SCHEDULE), Accumulate({0: 2}, name="other"))


@pytest.mark.parametrize("schedule", [{}, {1: 2}, {0: 0}, {0: True}, {-1: 2, 0: 1}])
def test_schedule_is_refused(schedule):
    with pytest.raises(PluginError, match=r"Accumulate\("):
        Accumulate(schedule)


def test_plugin_keeps_the_contract():
    check_plugin(lambda: Accumulate({0: 1, 1000: 2}))  # to change a learner's accumulate is what it is for


def test_removed_accumulate_puts_the_learners_own_number_back():
    problem = tiny_problem()
    learner = problem.learner(plugins=[Accumulate({0: 1, 2: 4})], accumulate=2, standard=False)
    learner.fit(problem.train, epochs=2)
    assert learner.accumulate == 4
    learner.remove("accumulate")
    assert learner.accumulate == 2
