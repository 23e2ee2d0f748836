"""A training in stages: one tensor predicted between them, another optimizer for the second."""

import copy

import pytest
import torch
from helpers import batches, make_learner, on

from loopkit.errors import PhaseError


def test_predict_takes_one_tensor_as_a_batch():
    learner, inputs = make_learner(), batches(1)[0][0]
    learner.model.train()
    assert torch.equal(learner.predict(inputs), learner.predict([inputs]))
    assert learner.model.training


def test_set_optimizer_between_fits_equals_the_loop_by_hand():
    learner, data = make_learner(), batches(3)
    twin = copy.deepcopy(learner.model)
    learner.fit(data, epochs=1)
    learner.set_optimizer(lambda params: torch.optim.Adam(params, lr=0.01))
    learner.fit(data, epochs=2)
    optimizers = [make_learner(model=twin).optimizer, *[torch.optim.Adam(twin.parameters(), lr=0.01)] * 2]
    for optimizer in optimizers:
        for inputs, targets in data:
            learner.loss_fn(twin(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, learner.model.parameters(), twin.parameters()))
    assert type(learner.optimizers["optimizer"]) is torch.optim.Adam


def test_run_with_another_optimizer_goes_on_from_its_state():
    def second(learner):
        learner.set_optimizer(lambda params: torch.optim.Adam(params, lr=0.01))
        return learner

    data, first = batches(4), make_learner()
    first.fit(data, epochs=1)
    second(first).fit(data, epochs=1)
    again = second(make_learner())
    again.load_state_dict(first.state_dict())
    for learner in (first, again):
        learner.fit(data, epochs=1)
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))


def test_set_optimizer_in_a_fit_is_refused():
    learner = make_learner(on("step_end", lambda learner: learner.set_optimizer(torch.optim.SGD)))
    with pytest.raises(PhaseError, match="call it after the fit"):
        learner.fit(batches(1), epochs=1)
