"""Phases that keep state from step to step: a run that is killed goes on with it, bit for bit."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn

from engine.life.runs import STEPS, at, end, kill, killed, make, rows, same, sigterm, train, val
from loopkit import Learner, TrainingPhase, ValidationPhase, every
from loopkit.data import from_function
from loopkit.errors import LoopkitError, PhaseError
from loopkit.plugins import Checkpoint, History, Metrics

PLACES = random.Random(0).sample([(epochs, index) for epochs in range(2) for index in range(STEPS)], 4)


class Recurrent(nn.Module):
    """Takes a state and returns the next one."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs, state):
        hidden, state = self.gru(inputs, state)
        return self.head(hidden), state


class Carries(TrainingPhase):
    """The hidden state of a recurrent network goes on where the step before ended."""

    saved = ("state",)
    state = None

    def step(self, learner, step):
        if step.index == 0:
            self.state = None
        super().step(learner, step)

    def forward(self, learner, inputs):
        outputs, state = learner.model(inputs, self.state)
        self.state = state.detach()
        return outputs


class Reinforces(TrainingPhase):
    """A running baseline, as of rewards, scales the loss."""

    saved = ("baseline",)

    def __init__(self):
        super().__init__()
        self.baseline = 0.0

    def loss(self, learner, outputs, targets):
        reward = float(outputs.detach().mean())
        self.baseline = 0.9 * self.baseline + 0.1 * reward
        return (reward - self.baseline) * outputs.mean() + learner.loss_fn(outputs, targets)


class Environment:
    """Moves with each observation, by random numbers of its own."""

    def __init__(self):
        self.position = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)

    def observe(self):
        self.position = self.position + 0.1 * torch.randn(3, generator=self.generator)
        return self.position

    def state_dict(self):
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class Explores(TrainingPhase):
    """Its inputs come from an environment."""

    def __init__(self):
        super().__init__()
        self.environment = Environment()

    def unpack(self, batch):
        return batch[0] + self.environment.observe(), batch[1]

    def state_dict(self):
        return {"environment": self.environment.state_dict()}

    def load_state_dict(self, state):
        self.environment.load_state_dict(state["environment"])


class Remembers(TrainingPhase):
    """A bank of earlier outputs, which is changed in place."""

    saved = ("bank", "place")

    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(6)
        self.place = 0

    def loss(self, learner, outputs, targets):
        loss = learner.loss_fn(outputs, targets) + 0.1 * (outputs.mean() - self.bank.mean()) ** 2
        self.bank[self.place % 6] = outputs.detach().mean()
        self.place += 1
        return loss


def with_methods(phase):
    """The same phase, which saves and loads by itself what it named."""

    class WithMethods(phase):
        saved = ()

        def state_dict(self):
            return {name: getattr(self, name) for name in phase.saved}

        def load_state_dict(self, state):
            vars(self).update(state)

    return WithMethods


def sequences():
    def batch(index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 5, 3, generator=generator), torch.randn(2, 5, 1, generator=generator)

    return from_function(STEPS, batch)


def recurrent(phase, *plugins, seed):
    torch.manual_seed(seed)
    adam = torch.optim.Adam
    return Learner(
        Recurrent(),
        nn.MSELoss(),
        lambda params: adam(params, lr=0.05),
        phases=[phase],
        plugins=[Metrics(), History(), *plugins],
        standard=False,
    )


def learner_of(phase, *plugins, seed=1):
    if isinstance(phase, Carries):
        return recurrent(phase, *plugins, seed=seed)
    return make(*plugins, seed=seed, phases=[phase])


def data_of(phase):
    return sequences() if isinstance(phase, Carries) else train()


@pytest.mark.parametrize(
    "make_phase",
    [Carries, Reinforces, Explores, Remembers, *map(with_methods, (Carries, Reinforces, Remembers))],
    ids=[
        "carries",
        "reinforces",
        "explores",
        "remembers",
        "carries_by_methods",
        "reinforces_by_methods",
        "remembers_by_methods",
    ],
)
def test_run_with_a_phase_that_keeps_state_is_killed_and_goes_on(make_phase, tmp_path):
    straight = learner_of(make_phase())
    straight.fit(data_of(make_phase()), epochs=2)
    for epochs, index in PLACES:
        directory = tmp_path / f"{epochs}-{index}"
        phase = make_phase()
        death = at(kill, "step_begin", epochs=epochs, index=index)
        with killed():
            saver = Checkpoint(directory, save=every(updates=1), resume="auto")
            learner_of(phase, saver, death).fit(data_of(phase), epochs=2)
        phase = make_phase()
        again = learner_of(phase, Checkpoint(directory, resume="auto"), seed=1 if (epochs, index) == (0, 0) else 99)
        again.fit(data_of(phase), epochs=2)
        same(end(straight), end(again))


class Drifts(ValidationPhase):
    """What it measures depends on the steps before."""

    saved = ("seen",)

    def __init__(self, name="val"):
        super().__init__(name)
        self.seen = torch.zeros(())

    def loss(self, learner, outputs, targets):
        self.seen = self.seen + outputs.mean()
        return learner.loss_fn(outputs, targets) + self.seen


def test_validation_whose_phase_keeps_state_goes_on(tmp_path):
    straight = make(phases=[Drifts()])
    straight.fit(train(), val(), epochs=2)
    interrupted = make(Checkpoint(tmp_path), at(sigterm, phase="val", epochs=1, index=1), phases=[Drifts()])
    with pytest.raises(SystemExit):
        interrupted.fit(train(), val(), epochs=2)
    again = make(Checkpoint(tmp_path, resume="auto"), phases=[Drifts()], seed=99)
    again.fit(train(), val(), epochs=2)
    assert rows(straight) == rows(again)
    same(end(straight), end(again))


def test_state_of_a_phase_is_a_part_of_the_learners_state():
    learner = make(phases=[Reinforces()])
    learner.fit(train(), epochs=1)
    assert "train" in learner.state_dict()["phases"]
    other = make(phases=[Reinforces()], seed=2)
    other.load_state_dict(learner.state_dict())
    assert other.phases["train"].baseline == learner.phases["train"].baseline != 0.0


def test_two_phases_of_one_name_with_state_are_refused():
    learner = make()
    with pytest.raises(LoopkitError, match="'drifts'"):  # noqa: PT012 - be it by the second run, or by the save
        learner.run(Drifts("drifts"), val())
        learner.run(Drifts("drifts"), val())
        learner.state_dict()


# State that is not saved


class Forgets(TrainingPhase):
    """Changes attributes that nobody saves: another object, a longer list, a tensor in place."""

    def __init__(self):
        super().__init__()
        self.count, self.losses, self.table = 0, [], torch.zeros(3)
        self.kept, self.layer = (1, 2), nn.Linear(1, 1)

    def step(self, learner, step):
        self.count += 1
        self.table += 1
        super().step(learner, step)
        self.losses.append(0.5)


class Careless(Forgets):
    volatile = ("count", "losses", "table")


def warned(phase, directory):
    """What is warned of in a run that saves often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(Checkpoint(directory, save=every(updates=1)), phases=[phase]).fit(train(), epochs=2)
    return [str(warning.message) for warning in caught]


def test_phase_whose_state_is_not_saved_is_warned_of_once(tmp_path):
    [message] = warned(Forgets(), tmp_path)
    assert "'train'" in message
    for name in ("count", "losses", "table", "saved"):
        assert name in message
    for name in ("kept", "layer", "skip_none"):
        assert name not in message


def test_attributes_that_are_volatile_are_not_warned_of(tmp_path):
    assert warned(Careless(), tmp_path) == []


def test_phase_that_changes_nothing_is_not_warned_of(tmp_path):
    assert warned(TrainingPhase(), tmp_path) == []


class Counting(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


def test_optimizer_whose_attributes_are_not_saved_is_warned_of_once(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counting = Checkpoint(tmp_path, save=every(updates=1))
        learner = make(counting)
        learner.set_optimizer(lambda params: Counting(params, lr=0.1))
        learner.fit(train(), epochs=2)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("optimizer 'optimizer' (Counting) has changed its 'calls' since the fit began")
    assert "Keep it in its param_groups, or in its state" in message


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adafactor", "Rprop"])
def test_optimizers_of_torch_are_not_warned_of(kind, tmp_path):
    saving = Checkpoint(tmp_path, save=every(updates=1))
    learner = make(saving)
    learner.set_optimizer(type("Own", (getattr(torch.optim, kind),), {}))
    learner.fit(train(), epochs=2)  # a warning is an error


def test_string_in_the_place_of_names_is_refused_with_the_comma():
    with pytest.raises(PhaseError, match=r"Forgot.saved is the string 'baseline': write \('baseline',\), with a comma"):

        class Forgot(TrainingPhase):
            saved = "baseline"


def test_saved_name_that_the_phase_lacks_is_named():
    class Lacks(TrainingPhase):
        saved = ("baseline",)

    learner = make(phases=[Lacks()])
    with pytest.raises(PhaseError, match="saved names 'baseline', which the phase does not have: set it in __init__"):
        learner.state_dict()


@pytest.mark.parametrize("has", ["state_dict", "load_state_dict"])
def test_phase_with_half_a_state_is_refused(has):
    kind = type("Half", (TrainingPhase,), {has: lambda self, state=None: {}})
    message = rf"phase 'half' \(Half\) has {has}, but no "
    with pytest.raises(PhaseError, match=message):
        make(phases=[kind("half")])
    learner = make()
    with pytest.raises(PhaseError, match=message):
        learner.run(kind("half"), train())
    assert learner.progress.steps == 0
    make(phases=[type("Named", (kind,), {"saved": ("name",)})("half")])  # what is saved of it brings both
