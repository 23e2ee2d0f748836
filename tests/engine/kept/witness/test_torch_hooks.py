"""Hooks of torch that keep something: what they move, and no state holds, is named once at the first save."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.optim.optimizer import register_optimizer_step_post_hook

from engine.kept.witnessed import named_by
from engine.life.runs import make
from loopkit import Learner, every, hookimpl
from loopkit.plugins import Checkpoint


class Counter:
    def __init__(self):
        self.n = 0

    def __call__(self, *args):
        self.n += 1

    def bound(self, *args):
        self.n += 1


class Average:
    def __init__(self):
        self.n = torch.zeros(6)

    def __call__(self, module, inputs, outputs):
        self.n.mul_(0.9).add_(outputs.detach().mean(0))


class Draws:
    def __init__(self):
        self.n = torch.Generator()

    def __call__(self, module, inputs, outputs):
        torch.rand(1, generator=self.n)


def closing():
    n = 0

    def hook(*args):
        nonlocal n
        n += 1

    return hook


def first(learner):
    return learner.model[0]


PLACES = {
    "forward hook": lambda learner, hook: first(learner).register_forward_hook(hook),
    "forward pre-hook": lambda learner, hook: first(learner).register_forward_pre_hook(hook),
    "backward hook": lambda learner, hook: learner.model[3].register_full_backward_hook(hook),
    "backward pre-hook": lambda learner, hook: learner.model[3].register_full_backward_pre_hook(hook),
    "hook of a parameter": lambda learner, hook: first(learner).weight.register_hook(hook),
    "hook of a gradient": lambda learner, hook: first(learner).weight.register_post_accumulate_grad_hook(hook),
    "step hook": lambda learner, hook: learner.optimizer.register_step_post_hook(hook),
    "step pre-hook": lambda learner, hook: learner.optimizer.register_step_pre_hook(hook),
    "hook of all modules": lambda learner, hook: nn.modules.module.register_module_forward_hook(hook),
    "hook of all optimizers": lambda learner, hook: register_optimizer_step_post_hook(hook),
}
HOOKS = {
    "object": Counter,
    "closure": closing,
    "bound method": lambda: Counter().bound,
    "generator": Draws,
    "tensor": Average,
}


def named_with(directory, place, hook):
    learner = make(Checkpoint(directory, save=every(updates=1)))
    handle = PLACES[place](learner, hook)
    try:
        return named_by(learner)
    finally:
        handle.remove()


@pytest.mark.parametrize("place", PLACES)
def test_hook_that_counts_is_named_once_wherever_it_hangs(place, tmp_path):
    [message] = named_with(tmp_path, place, Counter())
    assert " hook 1" in message or "-hook 1" in message
    assert "(Counter) has changed its 'n' since the fit began" in message
    assert "Keep it in a plugin with state_dict and load_state_dict" in message


@pytest.mark.parametrize("kind", HOOKS)
def test_whatever_a_hook_moves_is_named(kind, tmp_path):
    [message] = named_with(tmp_path, "forward hook", HOOKS[kind]())
    assert message.startswith("forward hook 1 of '0' in model 'model' (")
    assert "'n'" in message.partition("since")[0] or "'__self__.n'" in message


class Nested(Counter):
    def __init__(self):
        super().__init__()
        self.inner = Counter()

    def deep(self, *args):
        self.inner.n += 1


def counting(counter, *args):
    counter.n += 1


def counting_by_name(*args, counter):
    counter.n += 1


def listing(seen, *args):
    seen.append(1)


CURES = {
    "bound method": (lambda: Counter().bound, "n"),
    "inner object": (lambda: Nested().deep, "inner"),
    "partial": (lambda: functools.partial(counting, Counter()), "n"),
    "partial by name": (lambda: functools.partial(counting_by_name, counter=Counter()), "n"),
    "partial of a bound method": (lambda: functools.partial(Counter().bound), "n"),
    "partial of a list": (lambda: functools.partial(listing, []), None),
}


@pytest.mark.parametrize("kind", CURES)
def test_cure_is_an_attribute_of_the_object_that_the_hook_moves(kind, tmp_path):
    hook, attribute = CURES[kind]
    [message] = named_with(tmp_path, "forward hook", hook())
    assert message.partition("volatile = ")[2] == (f"({attribute!r},)" if attribute else "")
    assert "with state_dict and load_state_dict" in message


@pytest.mark.parametrize("kind", ["bound", "partial"])
def test_cure_of_a_hook_holds(kind, tmp_path):
    hook = Cached().bound if kind == "bound" else functools.partial(counting, Cached())
    assert named_with(tmp_path, "forward hook", hook) == []


def test_hook_of_a_loss_is_named(tmp_path):
    loss = nn.MSELoss()
    loss.register_forward_hook(Counter())
    learner = make(Checkpoint(tmp_path, save=every(updates=1)))
    learner.loss_fn = loss
    [message] = named_by(learner)
    assert message.startswith("forward hook 1 in the loss function (Counter) has changed its 'n'")


class Watches:
    """A plugin whose method hangs on the model; its state holds what that counts."""

    name = "watches"

    def __init__(self):
        self.calls = 0

    @hookimpl
    def setup_model(self, learner, model):
        model[0].register_forward_hook(self.count)
        return model

    def count(self, *args):
        self.calls += 1

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Cached(Counter):
    volatile = ("n",)


def recording():
    seen, outputs = [], {}

    def hook(module, inputs, out):
        seen.append(out.shape)
        outputs[module] = out.detach()

    return hook


QUIET = {
    "nothing": lambda model: None,
    "hook without a state": lambda model: model[0].register_forward_hook(lambda *args: None),
    "declared": lambda model: model[0].register_forward_hook(Cached()),
    "records outputs": lambda model: model[0].register_forward_hook(recording()),
    "spectral norm": lambda model: spectral_norm(model[0]),
    "parametrization": lambda model: parametrizations.weight_norm(model[0]),
    "pruning": lambda model: prune.random_unstructured(model[0], "weight", 0.5),
}


@pytest.mark.parametrize("kind", QUIET)
def test_hook_that_loses_nothing_is_not_named(kind, tmp_path):
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's spectral_norm of old
        QUIET[kind](model)
    plugins = [Checkpoint(tmp_path, save=every(updates=1))]
    assert named_by(Learner(model, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.05), plugins=plugins)) == []


def test_hook_of_a_plugin_with_a_state_is_not_named(tmp_path):
    assert named_by(make(Watches(), Checkpoint(tmp_path, save=every(updates=1)))) == []
