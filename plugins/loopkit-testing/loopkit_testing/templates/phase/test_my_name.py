from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from my_name import MyNamePhase

from loopkit import hookimpl
from loopkit_testing import EventLog, tiny_problem
from torch.nn.functional import cross_entropy


class DoublePenalty:
    @hookimpl(updates=("step.penalty",))
    def my_name_begin(self, step: Any) -> None:
        step.penalty = step.penalty * 2


def trained(phase: MyNamePhase, *plugins: Any) -> list[torch.Tensor]:
    problem = tiny_problem()
    learner = problem.learner(phases=[phase], plugins=plugins, standard=False, seed=0)
    learner.fit(problem.train, epochs=2)
    return [p.detach() for p in learner.models["model"].parameters()]


def by_hand(weight: float) -> list[torch.Tensor]:
    problem = tiny_problem()
    model: Any = problem.model
    optimizer = problem.optimizer(model.parameters())
    torch.manual_seed(0)
    for _ in range(2):
        for inputs, targets in problem.train:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = cross_entropy(outputs, targets)
            (loss + weight * outputs.square().mean()).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_my_name_phase_equals_the_loop_by_hand() -> None:
    assert all(map(torch.equal, trained(MyNamePhase(0.5)), by_hand(0.5)))


def test_my_name_begin_comes_in_every_step_before_the_backward() -> None:
    problem, log = tiny_problem(), EventLog()
    learner = problem.learner(phases=[MyNamePhase()], plugins=[log], standard=False)
    learner.fit(problem.train, epochs=1)
    pairs = list(pairwise(log.lines))
    expected = ("train my_name_begin", "train backward_begin")
    assert pairs.count(expected) == len(problem.train)


def test_my_name_begin_lets_a_plugin_change_the_penalty() -> None:
    doubled = trained(MyNamePhase(0.25), DoublePenalty())
    assert all(map(torch.equal, doubled, trained(MyNamePhase(0.5))))
