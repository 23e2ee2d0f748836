"""Where the time goes: `Cost`."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from helpers import batches, on, raising
from loopkit_testing import tiny_problem
from torch import nn

from loopkit import CancelStep, Learner, PredictionPhase, hookimpl
from loopkit.logs import Backend, Table
from loopkit.plugins import ClipGradNorm, LogTo, Metrics, MixedPrecision
from loopkit_insight import Cost, FindSyncs, ModuleProfile


def rows(cost):
    return {row[:3]: row[3:] for row in cost.table().rows}


def fit(*plugins, epochs=2, **options):
    problem = tiny_problem()  # 4 training and 2 validation steps an epoch
    learner = problem.learner(plugins=plugins, standard=False, **options)
    learner.fit(problem.train, problem.val, epochs=epochs)
    return learner


class Clock:
    """Replaces the clock of `Cost`: nothing takes time but `sleep`."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, **given):
        """One second."""
        self.now += 1.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("loopkit_insight.cost.clock", lambda: clock.now)
    return clock


# Times


def test_cost_gives_each_hook_its_time(clock):
    cost = Cost(show=False)
    fit(cost, on("step_end", clock.sleep, name="sleepy"))
    assert rows(cost)["train", "step_end", "sleepy"] == (8, 8.0)
    assert rows(cost)["val", "step_end", "sleepy"] == (4, 4.0)
    assert rows(cost)["train", "step", ""] == (8, 0.0)


def test_cost_goes_by_the_clock_of_the_host():
    cost = Cost(show=False)
    begun = time.perf_counter()
    fit(cost, on("step_end", lambda **given: time.sleep(0.001), name="sleepy"))
    whole = time.perf_counter() - begun
    assert 8 * 0.001 <= rows(cost)["train", "step_end", "sleepy"][1] <= whole


def test_cost_tells_the_wait_for_data_from_the_step(clock):
    class Slow:
        def __len__(self):
            return 3

        def __iter__(self):
            for batch in tiny_problem().train[:3]:
                clock.sleep()
                yield batch

    cost = Cost(show=False)
    problem = tiny_problem()
    problem.learner(plugins=[cost], standard=False).fit(Slow(), epochs=1)
    assert rows(cost)["train", "data", ""] == (3, 3.0)
    assert rows(cost)["train", "step", ""] == (3, 0.0)


@pytest.mark.parametrize("sized", [True, False])
def test_cost_tells_the_end_of_the_data_from_the_update_of_a_window(clock, sized):
    class Ends:
        def __iter__(self):
            yield from tiny_problem().train[:3]
            clock.sleep()

    class Sized(Ends):
        def __len__(self):
            return 3

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            clock.now += 10.0
            return super().step(closure)

    cost, problem, data = Cost(show=False), tiny_problem(), Sized() if sized else Ends()
    optimizer = Slow(problem.model.parameters(), lr=0.1)
    learner = Learner(problem.model, problem.loss_fn, optimizer, plugins=[cost], standard=False, accumulate=2)
    learner.fit(data, data, epochs=1)
    # Without a length, only the end of the data says that a window is to be closed.
    assert rows(cost)["train", "data", ""] == (3, 1.0 if sized else 0.0)
    assert rows(cost)["train", "step", ""] == (3, 20.0 if sized else 21.0)
    assert rows(cost)["val", "data", ""] == (3, 1.0)
    assert rows(cost)["val", "step", ""] == (3, 0.0)


def test_cost_counts_each_moment_once(clock):
    cost = Cost(show=False)
    learner = tiny_problem().learner(plugins=[cost, Metrics(), ClipGradNorm(1.0)], standard=False)
    data = tiny_problem().train

    class Evaluates:
        @hookimpl
        def phase_end(self, learner, phase):
            if phase.training:
                learner.evaluate(data)

        @hookimpl
        def step_end(self, step, phase):
            if phase.training and step.index == 1:
                clock.sleep()

    learner.add(Evaluates(), on("step_end", clock.sleep, name="sleepy"))
    learner.fit(data, epochs=2)
    found = rows(cost)
    assert found["val", "step_end", "sleepy"] == (8, 8.0)
    assert found["train", "step_end", "evaluates"] == (8, 2.0)
    assert found["train", "phase_end", "evaluates"] == (2, 0.0)  # without the evaluation that it runs
    assert sum(seconds for _, seconds in found.values()) == clock.now == 18.0


def test_cost_takes_entering_and_leaving_a_context_together(clock):
    @contextmanager
    def slow(**given):
        clock.sleep()
        yield
        clock.sleep()

    cost = Cost(show=False)
    fit(cost, on("step_context", slow, name="slow"), epochs=1)
    assert rows(cost)["train", "step_context", "slow"] == (4, 8.0)
    assert rows(cost)["train", "step", ""] == (4, 0.0)


def test_cost_gives_the_default_of_a_verb_to_the_step(clock):
    class Takes:
        @hookimpl(updates=("params",))
        def optimizer_step(self, default):
            default()

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            clock.sleep()
            return super().step(closure)

    problem, cost = tiny_problem(), Cost(show=False)
    learner = Learner(
        problem.model,
        problem.loss_fn,
        Slow(problem.model.parameters(), lr=0.1),
        plugins=[cost, Takes()],
        standard=False,
    )
    learner.fit(problem.train, epochs=1)
    assert rows(cost)["train", "optimizer_step", "takes"] == (4, 0.0)
    assert rows(cost)["train", "step", ""] == (4, 4.0)


def test_cost_of_a_step_that_is_cancelled_is_a_step():
    cost = Cost(show=False)
    fit(cost, raising("loss_begin", CancelStep("no")))
    assert rows(cost)["train", "step", ""][0] == 8


def test_cost_forgets_the_fit_before():
    cost = Cost(show=False)
    learner = fit(cost, Metrics(), epochs=1)
    problem = tiny_problem()
    learner.fit(problem.train, epochs=1)
    assert rows(cost)["train", "step_end", "metrics"][0] == 4
    assert ("val", "step", "") not in rows(cost)


def test_cost_measures_plugins_that_come_in_mid_fit():
    cost = Cost(show=False)
    problem = tiny_problem()
    learner = problem.learner(plugins=[Metrics()], standard=False)
    learner.add(on("step_end", lambda learner, step, **_: step.index == 1 and learner.add(cost), name="adds"))
    learner.fit(problem.train, epochs=1)
    assert rows(cost)["train", "step_end", "metrics"][0] == 2


def test_cost_goes_on_after_an_error():
    cost = Cost(show=False)
    problem = tiny_problem()
    learner = problem.learner(plugins=[cost, raising("loss_begin", ValueError("no"), at=1)], standard=False)
    with pytest.raises(ValueError, match="no"):
        learner.fit(problem.train, epochs=1)
    learner.fit(problem.train, epochs=1)
    assert rows(cost)["train", "step", ""][0] == 4


def test_cost_works_outside_of_a_fit():
    cost = Cost()
    learner = tiny_problem().learner(plugins=[cost], standard=False)
    learner.predict(tiny_problem().train)
    assert rows(cost)["predict", "step", ""][0] == 4


def test_cost_is_logged_at_the_end_of_each_pass():
    class Keeps(Backend):
        kinds = (Table,)

        def __init__(self):
            self.records = []

        def write(self, records):
            self.records += records

    kept = Keeps()
    fit(Cost(show=False), LogTo(kept))
    assert [(r.name, r.phase) for r in kept.records] == [("run/cost", "train"), ("run/cost", "val")] * 2
    table = kept.records[-1].value
    assert table.columns == ("phase", "hook", "plugin", "calls", "seconds")
    assert ("train", "step", "", 8) in {row[:4] for row in table.rows}


def test_cost_prints_its_table_once(capsys, clock):
    fit(Cost(), on("step_end", clock.sleep, name="sleepy"))
    printed = capsys.readouterr().out
    assert printed.count("us a call") == 1
    assert "train  sleepy  step_end      8   8.0000" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_cost_is_silent_on_demand(capsys):
    fit(Cost(show=False))
    assert capsys.readouterr().out == ""


# Bits and the plan


def weights(*plugins):
    torch.manual_seed(0)
    learner = fit(*plugins, epochs=3, accumulate=2)
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def test_cost_changes_no_bit():
    stack = lambda: [Metrics(), ClipGradNorm(1.0), MixedPrecision("bfloat16")]  # noqa: E731
    assert torch.equal(weights(*stack()), weights(Cost(show=False), *stack()))


def test_cost_goes_with_the_other_tools():
    cost, find, profile = Cost(show=False), FindSyncs(show=False), ModuleProfile(every=1, show=False)
    assert torch.equal(weights(Metrics()), weights(cost, find, profile, Metrics()))
    assert find.found == ()
    assert rows(cost)["train", "step_context", "module_profile"][0] == 12
    assert profile.measured == list(range(12))


def calls(learner):
    """The names of the functions in the plan of training."""
    fires = learner._engine.registry.plan(learner.phases["train"]).fire.values()
    cells = [cell.cell_contents for fire in fires if fire is not None for cell in fire.__closure__]
    functions = [getattr(call, "func", call) for cell in cells if isinstance(cell, list) for _, call in cell]
    return {function.__name__ for function in functions if hasattr(function, "__name__")}


def test_plan_without_cost_is_as_before():
    learner = tiny_problem().learner(plugins=[Metrics(), Cost(show=False)], standard=False)
    assert "timed" in calls(learner)
    learner.remove("cost")
    bare = tiny_problem().learner(plugins=[Metrics()], standard=False)
    assert str(learner.explain()) == str(bare.explain())
    assert calls(learner) == calls(bare)
    assert "timed" not in calls(bare)


@pytest.mark.gpu
def test_cost_measures_the_device():
    cost = Cost(show=False)
    model = nn.Linear(3, 1).cuda()
    learner = Learner(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), plugins=[cost], standard=False)
    learner.fit([(x.cuda(), y.cuda()) for x, y in batches(5)], epochs=2)
    calls, seconds = rows(cost)["train", "device", ""]
    assert calls == 10
    assert seconds > 0


def test_prediction_has_no_events_that_cost_needs():
    cost = Cost()
    learner = tiny_problem().learner(plugins=[cost], phases=[PredictionPhase("again")], standard=False)
    learner.run("again", tiny_problem().train)
    assert rows(cost)["again", "data", ""][0] == 4


def test_cost_prints_the_sum_of_each_plugin():
    cost = Cost(show=False)
    fit(cost, Metrics(), ClipGradNorm(1.0))
    sums = {}
    for (_, _, plugin), (_, seconds) in rows(cost).items():
        sums[plugin] = sums.get(plugin, 0.0) + seconds
    shares = {plugin: f"{plugin} {seconds / sum(sums.values()):.1%}" for plugin, seconds in sums.items()}
    last = str(cost).splitlines()[-1]
    assert last.startswith("plugins, all in all: ")
    assert shares["metrics"] in last
    assert shares["clip_grad_norm"] in last
