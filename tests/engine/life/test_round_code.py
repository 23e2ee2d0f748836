"""The code of a round is run again after a resume, and does what it did: rollouts, data that grow, labels."""

from __future__ import annotations

import os
import random
import signal
from contextlib import nullcontext, suppress
from functools import partial

import numpy
import pytest
import torch
from fixtures.scenarios import SCENARIOS, STATES
from torch import nn

from engine.life.runs import saved
from loopkit import Learner, Phase, checkpoint, every, hookimpl
from loopkit.checkpoint.encoding import decode, dumps, encode, loads
from loopkit.data import TensorLoader
from loopkit.errors import PhaseError, StateError
from loopkit.plugins import Checkpoint, History, Metrics


class PausesAt:
    """Pauses after a step, in the first process alone."""

    def __init__(self, step):
        self.step = step

    @hookimpl
    def step_end(self, learner):
        if learner.progress.steps == self.step:
            learner.pause()


class Regress(Phase):
    name, training = "train", True

    def step(self, learner, step):
        x, y = step.batch
        step.loss = nn.functional.mse_loss(learner.model(nn.functional.dropout(x, 0.2)), y)
        step.backward(step.loss)
        step.update()


class Keeps:
    """Keeps the state of a pause as a checkpoint would hold it, and resumes from one."""

    def __init__(self, state=None):
        self.state = state

    @hookimpl(writes=("*",))
    def fit_begin(self, learner):
        if self.state is not None:
            learner.load_state_dict(self.state)

    @hookimpl(reads=("*",))
    def signal_begin(self, learner):
        value, tensors = encode(learner.state_dict())
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.state = decode(loads(dumps(value)), tensors)


def learner_of(saver, *plugins, phase=Regress, model=lambda: nn.Linear(3, 1), **options):
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    if not isinstance(saver, Keeps):
        saver = Checkpoint(saver, resume="auto", **options)
    optimizer = lambda params: torch.optim.Adam(params, lr=0.05)  # noqa: E731
    plugins = [saver, Metrics(), History(), *plugins]
    return Learner(model(), None, optimizer, plugins=plugins, phases=[phase()], standard=False)


def data_of(x):
    return list(zip(x.split(4), x.sum(1, keepdim=True).split(4), strict=True))


def end_of(learner):
    return [value.clone() for value in learner.model.state_dict().values()]


def check(loop, steps, **options):
    """A run that is paused after any of its steps ends with the bits of the one that is not."""
    whole = learner_of(Keeps(), **options)
    values = loop(whole)
    assert whole.progress.steps == steps
    for step in range(1, steps + 1):
        kept = Keeps()
        with suppress(SystemExit):
            loop(learner_of(kept, PausesAt(step), **options))
        again = learner_of(Keeps(kept.state), **options)
        found = loop(again)
        assert all(map(torch.equal, end_of(whole), end_of(again))), step
        assert again.metrics == whole.metrics
        assert found == values[len(values) - len(found) :], step


# Rollouts that draw


def torch_rollout(learner):
    return torch.randn(8, 3)


def numpy_rollout(learner):
    return torch.from_numpy(numpy.random.randn(8, 3)).float()


def python_rollout(learner):
    return torch.tensor([[random.gauss(0, 1) for _ in range(3)] for _ in range(8)])


@pytest.mark.parametrize("rollout", [torch_rollout, numpy_rollout, python_rollout])
def test_round_whose_code_draws_between_two_runs_ends_as_one_that_was_not_paused(rollout):
    def loop(learner):
        seen = []
        for number in learner.rounds(epochs=2):
            for _ in range(2):
                x = rollout(learner)
                seen.append((number, x.sum().item(), learner.run("train", data_of(x))["train/loss"]))
            seen.append((number, rollout(learner).sum().item(), dict(learner.metrics)))
        return seen

    check(loop, 8)


class Environment:
    """Has a state of its own."""

    def __init__(self):
        self.at = torch.zeros(3)
        self.random = numpy.random.default_rng(0)

    def step(self):
        self.at = 0.9 * self.at + torch.from_numpy(self.random.standard_normal(3)).float()
        return self.at

    def state_dict(self):
        return {"at": self.at, "random": self.random.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.random.bit_generator.state = state["at"], state["random"]


def drawn_from(draw):
    return lambda objects: torch.stack([draw(objects) for _ in range(8)])


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (Environment, lambda env: env.step()),
        (lambda: torch.Generator().manual_seed(0), lambda own: torch.randn(3, generator=own)),
        (lambda: random.Random(0), lambda own: torch.tensor([own.random() for _ in range(3)])),
        (lambda: numpy.random.default_rng(0), lambda own: torch.from_numpy(own.random(3)).float()),
    ],
    ids=["environment", "torch", "python", "numpy"],
)
def test_state_of_the_loop_that_is_declared_is_saved(make, draw):
    def loop(learner):
        own = make()
        for _ in learner.rounds(epochs=2, state={"own": own}):
            for _ in range(2):
                learner.run("train", data_of(drawn_from(draw)(own)))
        return []

    check(loop, 8)


class Draws(Regress):
    """Has a generator that its steps draw from, and the loop."""

    def __init__(self):
        super().__init__()
        self.random = random.Random(0)

    def step(self, learner, step):
        self.random.random()
        super().step(learner, step)


def test_generator_of_a_phase_that_the_loop_draws_from_is_found():
    def loop(learner):
        own = learner.phases["train"].random
        for _ in learner.rounds(epochs=2):
            for _ in range(2):
                x = torch.tensor([[own.gauss(0, 1) for _ in range(3)] for _ in range(8)])
                learner.run("train", data_of(x))
        return []

    check(loop, 8, phase=Draws)


@pytest.mark.parametrize("state", [{"env": object()}, {"env": 3}, [1]])
def test_state_that_is_none_raises_at_once(state, tmp_path):
    with pytest.raises(PhaseError, match=r"rounds\(state="):
        learner_of(tmp_path).rounds(epochs=1, state=state)


# Code that changes what is saved


@pytest.mark.parametrize("when", ["begin", "between"])
def test_code_that_changes_weights_and_rates_is_not_applied_twice(when):
    def change(learner):
        for group in learner.optimizer.param_groups:
            group["lr"] *= 0.7
        learner.model["target"].load_state_dict(learner.model["online"].state_dict())

    def loop(learner):
        for _ in learner.rounds(epochs=2):
            if when == "begin":
                change(learner)
            learner.run("train", data_of(torch.randn(8, 3)))
            if when == "between":
                change(learner)
            learner.run("train", data_of(torch.randn(8, 3)))
        return []

    check(loop, 8, phase=Bootstrap, model=lambda: nn.ModuleDict({"online": net(), "target": net()}))


def net():
    return nn.Linear(3, 1)


class Bootstrap(Regress):
    def step(self, learner, step):
        x, y = step.batch
        with torch.no_grad():
            y = y + 0.5 * learner.model["target"](x)
        step.loss = nn.functional.mse_loss(learner.model["online"](x), y)
        step.backward(step.loss)
        step.update()


def test_what_the_code_logs_is_logged_once(tmp_path):
    class Listens:
        volatile = ("rows",)

        def __init__(self):
            self.rows = []

        @hookimpl
        def log_value(self, record):
            self.rows.append((record.name, record.value))

    def loop(learner):
        for number in learner.rounds(epochs=1):
            learner.log("own/a", number)
            learner.run("train", data_of(torch.randn(8, 3)))
            learner.log("own/b", number)
            learner.run("train", data_of(torch.randn(8, 3)))
            learner.log("own/c", number)

    first, second = Listens(), Listens()
    with suppress(SystemExit):
        loop(learner_of(tmp_path, PausesAt(3), first))
    loop(learner_of(tmp_path, second))
    assert [name for name, _ in first.rows + second.rows] == ["own/a", "own/b", "own/c"]


# What depends on the weights


def test_ppo_that_is_paused_at_any_step_ends_as_one_that_was_not():
    class Clipped(Regress):
        def step(self, learner, step):
            states, actions, before, gains = step.batch
            now = torch.distributions.Normal(learner.model(states), 1.0).log_prob(actions)
            ratio = (now - before).exp()
            step.loss = -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
            step.backward(step.loss)
            step.update()

    def rollout(learner):
        states = torch.randn(8, 3)
        with torch.no_grad():
            policy = torch.distributions.Normal(learner.model(states), 1.0)
            actions = policy.sample()
        return {"states": states, "actions": actions, "before": policy.log_prob(actions), "gains": -(actions**2)}

    def loop(learner):
        rounds = learner.rounds(epochs=2)
        for _ in rounds:
            made = rounds.once("rollout", lambda: rollout(learner))
            for _ in range(2):
                order = torch.randperm(8)
                learner.run("train", list(zip(*(each[order].split(4) for each in made.values()), strict=True)))
        return []

    check(loop, 8, phase=Clipped)


@pytest.mark.parametrize("by", ["closure", "argument"])
def test_dagger_that_is_paused_at_any_step_ends_as_one_that_was_not(by):
    def collect(learner):
        with torch.no_grad():
            return (torch.randn(4, 3) + learner.model(torch.randn(4, 3))).numpy()

    def loop(learner):
        seen: list = []
        with learner.rounds(epochs=3) as rounds:
            for _ in rounds:
                if by == "closure":
                    seen = rounds.once("seen", lambda seen=tuple(seen): [*seen, collect(learner)])
                else:
                    seen = rounds.once("seen", lambda before: [*(before or []), collect(learner)])
                learner.run("train", data_of(torch.from_numpy(numpy.concatenate(seen))))
        return []

    check(loop, 6)


@pytest.mark.parametrize("by", ["predict", "model"])
def test_self_training_that_is_paused_at_any_step_ends_as_one_that_was_not(by):
    def labels(learner, unlabelled):
        if by == "model":
            with torch.no_grad():
                return learner.model(unlabelled)
        return learner.predict(list(unlabelled.split(4)))

    def loop(learner):
        unlabelled = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        rounds = learner.rounds(epochs=2)
        losses = []
        for _ in rounds:
            learner.run("train", data_of(unlabelled))
            targets = rounds.once("labels", lambda: labels(learner, unlabelled))
            data = TensorLoader(unlabelled, targets, batch_size=4, shuffle=True)
            losses.append(learner.run("train", data)["train/loss"])
        return losses

    check(loop, 8)


def test_prediction_in_a_round_is_made_again_and_leaves_no_second_row(tmp_path):
    def loop(learner):
        for _ in learner.rounds(epochs=1):
            learner.predict([torch.ones(2, 3)])
            learner.run("train", data_of(torch.randn(8, 3)))
            learner.run("train", data_of(torch.randn(8, 3)))
        return []

    with suppress(SystemExit):
        loop(learner_of(tmp_path, PausesAt(3)))
    again = learner_of(tmp_path)
    loop(again)
    assert [row["phase"] for row in again.plugins["history"].rows] == ["predict", "train", "train"]


# Loops of other forms


def test_rounds_that_break_early_by_a_metric_that_was_passed_over():
    def loop(learner):
        seen = []
        for _ in learner.rounds(epochs=3):
            for turn in range(3):
                loss = learner.run("train", data_of(torch.randn(8, 3)))["train/loss"]
                seen.append((turn, loss, learner.progress.epochs))
                if loss < 2.0:
                    break
        return seen

    whole = loop(learner_of(Keeps()))
    assert {turn for turn, *_ in whole} != {0}
    check(loop, 2 * len(whole))


@pytest.mark.parametrize("managed", [False, True])
def test_loop_over_steps_with_code_around_it(managed):
    def loop(learner):
        rounds = learner.rounds(epochs=2)
        with rounds if managed else nullcontext():
            for _ in rounds:
                for _ in range(2):
                    data = data_of(torch.randn(8, 3))
                    with learner.epoch("train", data=data) as epoch:
                        for batch in epoch.batches():
                            epoch.step(batch)
                    torch.rand(3)
        return []

    check(loop, 8)


def test_evaluation_that_is_passed_over_returns_its_metrics():
    def loop(learner):
        seen = []
        for _ in learner.rounds(epochs=2):
            x = torch.randn(8, 3)
            learner.run("train", data_of(x))
            seen.append(learner.evaluate(data_of(x), Measure())["val/loss"])
            learner.run("train", data_of(x))
        return seen

    check(loop, 8)


class Measure(Phase):
    name = "val"

    def step(self, learner, step):
        x, y = step.batch
        step.loss = nn.functional.mse_loss(learner.model(x), y)


def test_run_that_is_killed_and_saved_at_epochs_only_ends_the_same(tmp_path):
    class Dies:
        @hookimpl
        def step_begin(self, learner):
            if learner.progress.steps == self.step:
                raise KeyboardInterrupt

    def loop(learner):
        rounds = learner.rounds(epochs=3, on_interrupt=None)
        for _ in rounds:
            x = rounds.once("x", lambda: torch.randn(8, 3) + learner.model.bias.detach())
            learner.run("train", data_of(x))
        return end_of(learner)

    whole = loop(learner_of(tmp_path / "whole"))
    for step in range(1, 6):
        death = Dies()
        death.step = step
        with suppress(KeyboardInterrupt):
            loop(learner_of(tmp_path / str(step), death))
        assert all(map(torch.equal, whole, loop(learner_of(tmp_path / str(step))))), step


def test_rounds_that_are_paused_go_on_in_the_same_process(tmp_path):
    def loop(learner):
        for _ in learner.rounds(epochs=2, on_interrupt="return"):
            for _ in range(2):
                learner.run("train", data_of(torch.randn(8, 3)))
        return end_of(learner)

    whole = loop(learner_of(tmp_path / "whole"))
    learner = learner_of(tmp_path / "paused", PausesAt(7))
    loop(learner)
    assert learner.progress.steps == 7
    assert all(map(torch.equal, whole, loop(learner)))


def test_more_rounds_begin_with_the_generators_of_the_end(tmp_path):
    def loop(learner, epochs):
        for _ in learner.rounds(epochs=epochs):
            learner.run("train", data_of(torch.randn(8, 3)))
            torch.rand(5)
        return end_of(learner)

    whole = loop(learner_of(tmp_path / "whole"), 4)
    loop(learner_of(tmp_path / "two"), 2)
    assert all(map(torch.equal, whole, loop(learner_of(tmp_path / "two"), 4)))


# What cannot be resumed


def loader_of(batches):
    return TensorLoader(*map(torch.cat, zip(*batches, strict=True)), batch_size=4)


@pytest.mark.parametrize("make", [list, tuple, loader_of])
def test_open_epoch_that_is_given_other_data_raises_and_names_once(make, tmp_path):
    def loop(learner):
        for _ in learner.rounds(epochs=2):
            x = torch.randn(8, 3) + learner.model.bias.detach()
            learner.run("train", make(data_of(x)))

    with suppress(SystemExit):
        loop(learner_of(tmp_path, PausesAt(3)))
    learner = learner_of(tmp_path)
    with pytest.raises(StateError, match=r"given other data now .* rounds\.once\('data'"):
        loop(learner)


def test_round_that_ends_without_the_epoch_that_was_open_raises(tmp_path):
    def loop(learner, runs):
        for _ in learner.rounds(epochs=2):
            for _ in range(runs):
                learner.run("train", data_of(torch.randn(8, 3)))

    with suppress(SystemExit):
        loop(learner_of(tmp_path, PausesAt(3)), 2)
    with pytest.raises(StateError, match=r"round 0 was saved when 1 of its epochs were over, and one of phase 'train'"):
        loop(learner_of(tmp_path), 1)


# Values


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3.0),
        {"a": [1, 2.5, None, True], 3: ("x", b"y")},
        {"a": {1: 2}},
        numpy.arange(6).reshape(2, 3)[:, ::2],
        numpy.float32(0.1),
        [float("nan"), float("inf"), -0.0] * 500,
        list(range(2000)),
        [2**70] * 1001,
        "long " * 1000,
        b"",
        (),
        torch.ones(2, 3).T,
        [numpy.array(True), numpy.zeros((0, 2))],
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_of_once_is_the_same_in_a_round_that_is_run_again(value, tmp_path):
    def loop(learner):
        rounds = learner.rounds(epochs=1)
        for _ in rounds:
            found.append(rounds.once("value", lambda: made.append(1) or value))
            found.append(rounds.once("value", lambda: made.append(1) or value))
            learner.run("train", data_of(torch.randn(8, 3)))

    found, made = [], []
    with suppress(SystemExit):
        loop(learner_of(tmp_path, PausesAt(1)))
    loop(learner_of(tmp_path))
    assert made == [1]
    assert {repr(each) for each in found} == {repr(value)}
    assert {type(each) for each in found} == {type(value)}


@pytest.mark.parametrize(
    "value", [object(), {1.5: 2}, [set()], numpy.array([object()]), {"a": torch.ones(2).to_sparse()}]
)
def test_value_that_no_checkpoint_holds_raises_where_it_is_made(value, tmp_path):
    rounds = learner_of(tmp_path).rounds(epochs=1)
    under_way = iter(rounds)
    next(under_way)
    with pytest.raises(StateError, match=r"what rounds\.once\('value'\) made"):
        rounds.once("value", lambda: value)
    under_way.close()


def test_once_outside_of_a_round_raises(tmp_path):
    with pytest.raises(PhaseError, match="outside of a round"):
        learner_of(tmp_path).rounds(epochs=1).once("value", list)


def test_once_makes_a_new_value_in_each_round_and_knows_the_one_before(tmp_path):
    learner = learner_of(tmp_path)
    rounds = learner.rounds(epochs=3)
    found = [rounds.once("count", lambda before: (before or 0) + 1) for _ in rounds]
    assert found == [1, 2, 3]


def test_epoch_that_once_runs_is_none_of_the_round():
    def loop(learner):
        rounds = learner.rounds(epochs=2)
        for _ in rounds:
            x = torch.randn(8, 3)
            loss = rounds.once("loss", lambda x=x: learner.run(Measure(), data_of(x))["val/loss"])
            learner.run("train", data_of(x * loss))
            learner.run("train", data_of(x))
        return []

    check(loop, 8)


def test_change_of_what_once_returned_does_not_change_what_is_saved():
    def loop(learner):
        rounds = learner.rounds(epochs=1)
        for _ in rounds:
            x = rounds.once("x", lambda: torch.ones(8, 3))
            learner.run("train", data_of(x))
            x += 1
            learner.run("train", data_of(x))
        return []

    check(loop, 4)


def big_files(directory):
    return sorted(directory.glob("*/once-*.safetensors"))


def test_large_value_is_written_once_and_each_checkpoint_is_whole(tmp_path):
    def loop(learner):
        rounds = learner.rounds(epochs=2)
        for _ in rounds:
            x = rounds.once("x", lambda: torch.randn(100_000, 3))
            small = rounds.once("small", lambda: torch.randn(2))
            learner.run("train", data_of(x[:8]))
            learner.run("train", data_of(x[:8] + small[0]))
        return end_of(learner)

    options = {"save": every(updates=1), "keep": 99}
    with suppress(SystemExit):
        loop(learner_of(tmp_path, PausesAt(3), **options))
    before = big_files(tmp_path)
    end = loop(learner_of(tmp_path, **options))
    assert all(map(torch.equal, end, loop(learner_of(Keeps()))))
    files = big_files(tmp_path)
    assert len(files) > len(before) >= 3
    assert len({path.stat().st_ino for path in files}) == 2
    assert all(any(name.startswith("once-") for name in each.files) for each in saved(tmp_path))


def test_large_value_is_written_again_where_the_file_system_has_no_links(tmp_path, monkeypatch):
    from loopkit.checkpoint import disk

    def refuse(source, target):
        raise PermissionError

    monkeypatch.setattr(disk.system, "link", refuse)
    learner = learner_of(tmp_path, save=every(updates=1), keep=99)
    rounds = learner.rounds(epochs=1)
    for _ in rounds:
        learner.run("train", data_of(rounds.once("x", lambda: torch.randn(100_000, 3))[:8]))
    assert len({path.stat().st_ino for path in big_files(tmp_path)}) == len(big_files(tmp_path)) >= 2


# Hooks, signals and processes


def test_runs_that_hooks_make_are_none_of_the_round():
    class Probes:
        @hookimpl
        def epoch_end(self, learner, phase):
            if phase.training:
                learner.run(Measure(), data_of(torch.randn(4, 3)))

    def loop(learner):
        learner.add(Probes())
        for _ in learner.rounds(epochs=2):
            for _ in range(2):
                learner.run("train", data_of(torch.randn(8, 3)))
        return []

    check(loop, 8)


@pytest.mark.parametrize("inside", ["once", "predict"])
def test_signal_inside_of_what_a_round_makes_waits_for_the_next_epoch(inside):
    class Signals(Phase):
        name = "predict"

        def step(self, learner, step):
            step.outputs = learner.model(step.batch)
            if self.armed:
                os.kill(os.getpid(), signal.SIGTERM)

    def loop(learner, armed):
        phase = Signals()
        phase.armed = armed
        rounds = learner.rounds(epochs=1)
        for _ in rounds:
            data = list(torch.randn(8, 3).split(4))
            made = partial(learner.predict, data, phase)
            outputs = rounds.once("outputs", made) if inside == "once" else made()
            learner.run("train", data_of(outputs.expand(8, 3)))
        return end_of(learner)

    whole = loop(learner_of(Keeps()), False)
    kept = Keeps()
    with pytest.raises(SystemExit):
        loop(learner_of(kept), True)
    assert kept.state["progress"]["steps"] == 0
    assert all(map(torch.equal, whole, loop(learner_of(Keeps(kept.state)), False)))


def test_state_that_did_not_count_its_rounds_is_refused_where_they_are_to_be_counted():
    scenario = SCENARIOS["own_loop_between"]
    learner = scenario.learner()
    checkpoint.load(learner, STATES / "own_loop_between" / "checkpoint")
    with pytest.raises(StateError, match=r"did not count its rounds.* with 2 training epochs done: rounds\(epochs=6\)"):
        next(iter(learner.rounds(epochs=6)))


def test_state_of_two_processes_gives_each_its_own_round_and_more_of_them_no_generators():
    moment = {"generators": {"torch": 1}, "own": {"a": 2}, "metrics": {}, "progress": {}}
    value = {"round": 0, "value": 3, "after": moment, "digest": None}
    saved = [{"begin": moment, "turns": [moment], "values": {"x": {**value, "value": rank}}} for rank in range(2)]
    part = learner_of(Keeps())._engine.round
    assert part.share(saved, 1, 2) is saved[1]
    with pytest.warns(UserWarning, match="process 3 takes the values of rounds.once that process 1 had"):
        other = part.share(saved, 3, 4)
    assert other["begin"]["generators"] == other["turns"][0]["own"] == {}
    assert other["values"]["x"]["value"] == 1


# Generators of the functions of `once`


class Env:
    """An environment that draws from a generator of its own."""

    def __init__(self, rng):
        self.rng = rng

    def collect(self):
        return torch.tensor([[self.rng.random() for _ in range(3)] for _ in range(12)])


def draw(rng, count=12):
    return torch.tensor(rng.random((count, 3)), dtype=torch.float32)


def closing_over():
    rng = numpy.random.default_rng(3)
    return lambda: draw(rng)


MAKERS = {
    "a closure": closing_over,
    "a method": lambda: Env(random.Random(3)).collect,
    "a partial": lambda: partial(draw, rng=numpy.random.default_rng(3)),
    "an object in a list": lambda: partial(lambda envs: envs[0].collect(), [Env(random.Random(3))]),
    "the value before": lambda: partial(
        lambda rng, x: (0 if x is None else x) + draw(rng), numpy.random.default_rng(3)
    ),
}


def rounds_with(make, saver, pause=None):
    learner = learner_of(saver, *([PausesAt(pause)] if pause else []))
    rounds = learner.rounds(epochs=4)
    for _ in rounds:
        learner.run("train", data_of(torch.ones(4, 3)))
        x = rounds.once("x", make)
        learner.run("train", data_of(x))
    return end_of(learner)


@pytest.mark.parametrize("kind", MAKERS)
def test_generators_that_the_function_of_a_value_holds_go_on_from_where_they_were(kind, tmp_path):
    whole = rounds_with(MAKERS[kind](), Keeps())
    for pause in (1, 2, 4, 5, 7, 9, 12):
        directory = tmp_path / str(pause)
        with suppress(SystemExit):
            rounds_with(MAKERS[kind](), directory, pause)
        assert all(map(torch.equal, rounds_with(MAKERS[kind](), directory), whole)), pause
