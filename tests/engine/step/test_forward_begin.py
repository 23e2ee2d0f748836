"""`ForwardBegin`: what a plugin puts in the place of inputs and targets is what the phase goes on with."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn
from torch.distributions import Beta
from torch.nn.functional import cross_entropy, one_hot

from loopkit import Learner, Phase, PredictionPhase
from loopkit.errors import PluginError
from loopkit.events import ForwardBegin
from loopkit.metrics import Accuracy
from loopkit.plugins import Metrics

EXAMPLES = Path(__file__).parents[3] / "examples"
CLASSES = 3


def of_example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")


def images(count=3):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 1, 8, 8, generator=generator), torch.randint(CLASSES, (6,), generator=generator))
        for _ in range(count)
    ]


def as_dicts(pairs):
    return [{"targets": y, "weights": None, "inputs": x} for x, y in pairs]


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))


def trained(plugin, data):
    learner = Learner(
        net(),
        nn.CrossEntropyLoss(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        plugins=[plugin, Metrics(Accuracy())],
        standard=False,
    )
    torch.manual_seed(2)
    metrics = learner.fit(data, epochs=2).metrics
    assert 0 <= metrics["train/accuracy"] <= 1
    return learner.model


def by_hand(mix, data):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    for _ in range(2):
        for x, y in data:
            inputs, targets = mix(x, one_hot(y, CLASSES).float())
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model


def mixup(x, y):
    share = Beta(0.4, 0.4).sample().item()
    share = max(share, 1 - share)
    other = torch.randperm(6)
    return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]


def cutmix(x, y):
    side = (1 - Beta(1.0, 1.0).sample().item()) ** 0.5
    half = int(8 * side) // 2
    row, column = torch.randint(8, ()).item(), torch.randint(8, ()).item()
    other = torch.randperm(6)
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = True
    share = 1 - inside.sum().item() / 64
    return torch.where(inside, x[other], x), share * y + (1 - share) * y[other]


@pytest.mark.parametrize("kind", ["pairs", "dicts"])
@pytest.mark.parametrize(("name", "mix"), [("Mixup", mixup), ("CutMix", cutmix)])
def test_batch_transform_of_the_examples_is_bitwise_the_loop_by_hand(name, mix, kind):
    pairs = images()
    kept = [x.clone() for x, _ in pairs]
    made = of_example(name.lower())[name](CLASSES, 0.4 if name == "Mixup" else 1.0)
    model = trained(made, pairs if kind == "pairs" else as_dicts(pairs))
    for ours, theirs in zip(model.parameters(), by_hand(mix, pairs).parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(x, before) for (x, _), before in zip(pairs, kept, strict=True))


def test_both_transforms_are_refused_without_an_order_between_them():
    one, two = of_example("mixup")["Mixup"](CLASSES), of_example("cutmix")["CutMix"](CLASSES)
    with pytest.raises(PluginError, match=r"forward_begin: plugins 'cut_mix' and 'mixup' both"):
        make_learner(one, two)


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_replaced_inputs_are_what_the_model_takes_in_each_standard_phase(verb):
    seen, data = [], batches(1)

    def replace(step):
        step.inputs = torch.full_like(step.inputs, 2.0)

    learner = make_learner(on("forward_begin", replace, updates=("inputs",)))
    learner.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    if verb == "fit":
        learner.fit(data, epochs=1)
    else:
        getattr(learner, verb)(data)
    assert [x.unique().tolist() for x in seen] == [[2.0]]


def test_replaced_targets_are_what_the_loss_takes():
    losses = []
    learner = make_learner(
        on(
            "forward_begin", lambda step: setattr(step, "targets", torch.zeros_like(step.targets)), updates=("targets",)
        ),
        on("step_end", lambda step: losses.append((step.loss, step.outputs.square().mean())), "look"),
    )
    learner.evaluate(batches(2))
    assert all(torch.equal(loss, squares) for loss, squares in losses)


def test_prediction_has_no_targets_whatever_unpack_returns():
    class Both(PredictionPhase):
        def unpack(self, batch):
            return batch

    seen = []
    learner = make_learner(on("forward_begin", lambda step: seen.append(step.targets)), phases=[Both()])
    learner.predict(batches(1))
    assert seen == [None]


def test_steps_without_listeners_fire_nothing():
    learner = make_learner()
    with learner.epoch("train") as epoch:
        assert epoch.plan.fire[ForwardBegin] is None


# phase="training"


class Scratch(Phase):
    name = "own"
    training = True
    emits = (ForwardBegin,)

    def step(self, learner, step):
        step.inputs, step.targets = step.batch
        step.emit(ForwardBegin)
        step.backward(learner.loss_fn(learner.model(step.inputs), step.targets))
        step.update()


def test_hook_of_training_is_called_in_what_trains_whatever_its_class():
    called = []
    plugin = on("step_begin", lambda phase: called.append(phase.name), phase="training")
    learner = make_learner(plugin, phases=[Scratch()])
    learner.fit({"own": batches(2)}, batches(3), epochs=1)
    assert called == ["own", "own"]


def test_plugin_of_training_is_never_called_where_nothing_trains():
    plugin = on("step_begin", lambda: None, phase="training")
    learner = make_learner(plugin, phases=[Measuring()])
    with pytest.raises(PluginError, match=r"'acting' is never called: none of its hooks \(step_begin of training\)"):
        learner.fit({"measuring": batches(1)}, epochs=1)


class Measuring(Phase):
    name = "measuring"

    def step(self, learner, step):
        step.outputs = learner.model(step.batch[0])
