"""``setup_optimizer``: plugins that wrap or replace optimizers, against loops by hand that do so themselves."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import Learner, checkpoint, hookimpl
from loopkit.errors import PhaseError, PluginError
from loopkit.plugins import ClipGradNorm, Schedule

DATA = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]


class Private(torch.optim.Optimizer):
    """As Opacus's: an optimizer around another one, which has none of what the base class sets up, such as hooks."""

    def __init__(self, optimizer, noise=0.1):
        self.original_optimizer, self.noise = optimizer, noise
        self.generator = torch.Generator().manual_seed(3)

    param_groups = property(lambda self: self.original_optimizer.param_groups)
    state = property(lambda self: self.original_optimizer.state)
    defaults = property(lambda self: self.original_optimizer.defaults)

    def zero_grad(self, set_to_none=False):
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn(p.shape, generator=self.generator) * self.noise)
        return self.original_optimizer.step(closure)

    def state_dict(self):
        return {"original": self.original_optimizer.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.original_optimizer.load_state_dict(state["original"])
        self.generator.set_state(state["generator"])


class Lookahead:
    """An optimizer in all but the base class."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        self.count += 1
        if self.count % 5 == 0:
            for p, slow in zip((p for group in self.param_groups for p in group["params"]), self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        return {"count": self.count, "slow": [p.clone() for p in self.slow], "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.count, self.slow = state["count"], [p.clone() for p in state["slow"]]
        self.optimizer.load_state_dict(state["optimizer"])


def adam(optimizer):
    return torch.optim.Adam([p for group in optimizer.param_groups for p in group["params"]], lr=0.01)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Puts:
    """Puts what a function makes in the place of each optimizer."""

    def __init__(self, make, name="puts"):
        self.make, self.name, self.seen = make, name, []

    @hookimpl(updates=("optimizer",))
    def setup_optimizer(self, name, optimizer):
        self.seen.append((name, type(optimizer).__name__))
        return self.make(optimizer)


def model():
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def make(*plugins, optimizer=sgd, **options):
    return Learner(model(), mse_loss, optimizer, plugins=plugins, standard=False, **options)


WAYS = pytest.mark.parametrize("wrap", [Private, Lookahead, adam])


@WAYS
def test_optimizer_of_a_plugin_equals_a_loop_by_hand(wrap):
    hand = model()
    optimizer = wrap(sgd(hand.parameters()))
    for inputs, targets in DATA * 2:
        optimizer.zero_grad()
        mse_loss(hand(inputs), targets).backward()
        nn.utils.clip_grad_norm_(hand.parameters(), 0.5)
        optimizer.step()
    learner = make(Puts(wrap), ClipGradNorm(0.5))
    learner.fit(DATA, epochs=2)
    assert type(learner.optimizer) is type(optimizer)
    assert all(map(torch.equal, hand.parameters(), learner.model.parameters()))


@WAYS
def test_optimizer_of_a_plugin_resumes_bit_for_bit(wrap, tmp_path):
    whole = make(Puts(wrap))
    whole.fit(DATA, epochs=3)
    first = make(Puts(wrap))
    first.fit(DATA, epochs=2)
    checkpoint.save(first, tmp_path / "saved")
    second = make(Puts(wrap))
    checkpoint.load(second, tmp_path / "saved")
    second.fit(DATA, epochs=1)
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))


@WAYS
def test_schedule_sees_the_optimizer_of_a_plugin(wrap):
    learner = make(Puts(wrap), Schedule(lambda update: 0.5**update))
    first = learner.optimizer.param_groups[0]["lr"]
    learner.fit(DATA, epochs=1, max_steps=2)
    assert learner.optimizer.param_groups[0]["lr"] == first * 0.25


def test_hook_sees_every_optimizer_with_its_name_and_what_the_one_before_returned():
    both = Puts(Lookahead, "one"), Puts(copy.copy, "two")
    Learner(
        {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)},
        None,
        {"a": sgd, "b": sgd},
        plugins=both,
        order=["one", "two"],
        standard=False,
    )
    assert both[0].seen == [("a", "SGD"), ("b", "SGD")]
    assert both[1].seen == [("a", "Lookahead"), ("b", "Lookahead")]


def test_optimizer_that_is_given_is_wrapped_too():
    made = model()
    given = sgd(made.parameters())
    learner = Learner(made, mse_loss, given, plugins=[Puts(Private)], standard=False)
    assert learner.optimizer.original_optimizer is given
    assert learner.optimizers == {"optimizer": learner.optimizer}


def test_new_optimizer_of_a_learner_is_wrapped():
    learner = make(Puts(Lookahead))
    learner.fit(DATA, epochs=1)
    learner.set_optimizer(lambda params: torch.optim.Adam(params))
    assert type(learner.optimizer.optimizer) is torch.optim.Adam


def test_plugin_that_is_added_wraps_and_cannot_be_removed():
    learner = make()
    learner.add(Puts(Lookahead))
    assert type(learner.optimizer) is Lookahead
    learner.fit(DATA, epochs=1)
    with pytest.raises(PluginError, match="has changed a model or an optimizer for good"):
        learner.remove("puts")


def test_plugin_that_is_added_in_a_fit_is_refused_and_nothing_changes():
    class Adds:
        @hookimpl
        def step_end(self, learner):
            with pytest.raises(PhaseError, match="replaces an optimizer in a fit"):
                learner.add(Puts(Lookahead))

    learner = make(Adds())
    before = learner.optimizer
    learner.fit(DATA, epochs=1)
    assert learner.optimizer is before
    assert list(learner.plugins) == ["adds"]


@pytest.mark.parametrize("made", [None, 3, nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(made):
    with pytest.raises(PluginError, match=r"plugin 'puts': setup_optimizer returned .*, not an optimizer"):
        make(Puts(lambda optimizer: made))


def test_error_in_the_hook_names_the_plugin():
    def fails(optimizer):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        make(Puts(fails))
    assert caught.value.__notes__ == ["loopkit: in setup_optimizer of plugin 'puts'"]


def test_learner_without_an_optimizer_calls_nobody():
    plugin = Puts(Lookahead)
    Learner(model(), plugins=[plugin], standard=False)
    assert plugin.seen == []


def test_explain_lists_the_hook():
    rows = str(make(Puts(Lookahead)).explain(full=True))
    assert "setup_optimizer" in rows
    assert "updates optimizer" in rows
