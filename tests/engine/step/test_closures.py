"""Optimizers that evaluate the loss themselves, under phases that give them no closure."""

from __future__ import annotations

import pytest
import torch
from helpers import on
from torch import nn

from loopkit import Learner, Phase, TrainingPhase
from loopkit.errors import PhaseError
from loopkit.plugins import ClipGradNorm


class Needs(torch.optim.SGD):
    """One of the user's, that cannot do without."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        super().step()


class Asserts(torch.optim.SGD):
    """One that shows in its code alone that it cannot do without."""

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("step needs a closure")
        return super().step(closure)


class Named(Phase):
    name, training = "train", True

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets), "only")
        step.update("only")


def make(optimizer, **options):
    torch.manual_seed(0)
    options.setdefault("standard", False)
    return Learner(nn.Linear(3, 1), nn.MSELoss(), optimizer, **options)


def batches(count=4):
    return [(torch.ones(2, 3), torch.ones(2, 1))] * count


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.5)


def needs(params):
    return Needs(params, lr=0.1)


MESSAGE = (
    r"(LBFGS|Needs).step takes a closure, and \w+.step calls step.update\({}\) without one.*"
    r"step.update\({}closure=closure\)"
)


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", [lbfgs, needs])
def test_optimizer_that_needs_a_closure_is_refused_with_the_line_to_write(optimizer, accumulate, standard):
    learner = make(optimizer, accumulate=accumulate, standard=standard)
    before = learner.model.weight.clone()
    with pytest.raises(PhaseError, match=MESSAGE.format("", "")):
        learner.fit(batches(), epochs=1)
    assert torch.equal(learner.model.weight, before)


def test_optimizer_of_a_mapping_is_named():
    learner = make(None)
    learner = Learner(learner.model, nn.MSELoss(), {"only": lbfgs(learner.model.parameters())}, phases=[Named()])
    with pytest.raises(PhaseError, match=MESSAGE.format("'only'", "'only', ")):
        learner.fit(batches(), epochs=1)


def test_optimizer_with_a_schedule_of_torch_is_seen_too():
    model = nn.Linear(3, 1)
    optimizer = lbfgs(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(PhaseError, match=MESSAGE.format("", "")):
        Learner(model, nn.MSELoss(), optimizer, standard=False).fit(batches(), epochs=1)


def test_optimizer_whose_code_alone_asks_for_a_closure_gets_a_hint():
    with pytest.raises(RuntimeError, match="step needs a closure") as raised:
        make(lambda params: Asserts(params, lr=0.1)).fit(batches(), epochs=1)
    assert "give step.update(closure=closure) a function" in raised.value.__notes__[0]


def test_plugin_that_gives_the_closure_itself_passes():
    def give(learner, step, optimizer, **_):
        optimizer.step(lambda: step.loss)

    assert make(lbfgs, plugins=[on("optimizer_step", give)]).fit(batches(), epochs=1).updates == 4


def test_optimizers_with_defaults_pass():
    class Further(torch.optim.SGD):
        def step(self, closure=None, *, scale=1.0):
            return super().step(closure)

    assert make(lambda params: Further(params, lr=0.1), phases=[TrainingPhase()]).fit(batches(), epochs=1).updates == 4


class Sharp(torch.optim.SGD):
    """A SAM: its step asks for gradients before the closure that it calls."""

    @torch.no_grad()
    def first_step(self):
        grads = [p.grad for p in self.param_groups[0]["params"]]
        norm = nn.utils.get_total_norm(grads) + 1e-12
        for p in self.param_groups[0]["params"]:
            self.state[p]["moved"] = p.grad * (0.1 / norm)
            p.add_(self.state[p]["moved"])

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p].pop("moved"))
        super().step()

    @torch.no_grad()
    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


class Whole(Sharp):
    """One whose step evaluates the first gradients itself."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        return super().step(closure)


class Looking(Sharp):
    """One that moves the weights in each other step alone."""

    @torch.no_grad()
    def step(self, closure):
        self.turn = not getattr(self, "turn", False)
        if self.turn:
            return super().step(closure)
        with torch.enable_grad():
            loss = closure()
        torch.optim.SGD.step(self)
        return loss


class WithClosure(TrainingPhase):
    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)

        def closure():
            step.outputs = self.forward(learner, step.inputs)
            step.loss = self.loss(learner, step.outputs, step.targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=closure)


@pytest.mark.parametrize("kind", [Sharp, Whole, Looking])
@pytest.mark.parametrize("clip", [False, True])
def test_optimizer_with_two_steps_gets_gradients_for_both(kind, clip):
    torch.manual_seed(1)
    data = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(4)]
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(3, 1), nn.MSELoss()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    for index, (x, y) in enumerate(data):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        if kind is Sharp or (kind is Looking and index % 2 == 0):
            closure()
        optimizer.step(closure)
    learner = make(
        lambda params: kind(params, lr=0.1, momentum=0.9),
        phases=[WithClosure()],
        plugins=[ClipGradNorm(0.05)] if clip else [],
    )
    learner.fit(data, epochs=1)
    assert torch.equal(learner.model.weight, model.weight)
    assert "first_step" not in vars(learner.optimizer)
    assert learner.progress.updates == 4
