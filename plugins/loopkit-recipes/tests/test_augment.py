"""Mixup, CutMix and label smoothing against loops written by hand."""

import itertools

import pytest
import torch
from problems import CLASSES, batches
from torch import nn
from torch.distributions import Beta

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.errors import PluginError
from loopkit.metrics import Accuracy
from loopkit.plugins import ClipGradNorm, Metrics
from loopkit_recipes import CutMix, LabelSmoothing, Mixup

PLUGINS = {
    "mixup": lambda: Mixup(CLASSES, 0.4),
    "cut_mix": lambda: CutMix(CLASSES),
    "smooth": lambda: LabelSmoothing(CLASSES),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make_learner(*plugins, **options):
    return Learner(make_model(), nn.CrossEntropyLoss(), sgd, plugins=plugins, standard=False, **options)


def mixup(x, y):
    share = Beta(0.4, 0.4).sample()
    share = torch.maximum(share, 1 - share)
    other = torch.randperm(len(x))
    return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]


def cut_mix(x, y):
    """The box in whole numbers, and put in place by slices."""
    height, width = x.shape[-2:]
    side = (1 - Beta(1.0, 1.0).sample()).sqrt()
    spans = []
    for length in (height, width):
        middle, half = torch.randint(length, ()).item(), int(length * side) // 2
        spans.append((max(middle - half, 0), min(middle + half, length)))
    (top, bottom), (left, right) = spans
    other = torch.randperm(len(x))
    mixed = x.clone()
    mixed[..., top:bottom, left:right] = x[other, ..., top:bottom, left:right]
    share = 1 - torch.tensor((bottom - top) * (right - left) / (height * width))
    return mixed, share * y + (1 - share) * y[other]


def smooth(x, y):
    return x, 0.9 * y + 0.1 / CLASSES


BY_HAND = {"mixup": mixup, "cut_mix": cut_mix, "smooth": smooth}


def by_hand(names, data):
    model = make_model()
    optimizer, loss_fn = sgd(model.parameters()), nn.CrossEntropyLoss()
    torch.manual_seed(3)
    for x, labels in data:
        y = nn.functional.one_hot(labels, CLASSES).float()
        for name in names:
            x, y = BY_HAND[name](x, y)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


CASES = [names for count in (1, 2, 3) for names in itertools.combinations(PLUGINS, count)]


@pytest.mark.parametrize("names", CASES, ids="-".join)
def test_training_is_bitwise_that_of_a_loop_by_hand(names):
    data = batches()
    kept = [(x.clone(), y.clone()) for x, y in data]
    learner = make_learner(*[PLUGINS[name]() for name in reversed(names)], ClipGradNorm(1.0))
    torch.manual_seed(3)
    learner.fit(data, epochs=2)
    expected = by_hand(names, kept * 2)
    assert [name for name, value in learner.model.state_dict().items() if not torch.equal(value, expected[name])] == []
    assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(data, kept, strict=True))


@pytest.mark.parametrize("name", PLUGINS)
def test_the_batch_may_have_any_structure(name):
    class Named(TrainingPhase):
        def unpack(self, batch):
            return batch["image"], batch["label"]

    def weights(data, **options):
        learner = make_learner(PLUGINS[name](), **options)
        torch.manual_seed(3)
        learner.fit(data, epochs=1)
        return torch.cat([p.detach().flatten() for p in learner.model.parameters()])

    data = batches()
    expected = weights(data)
    assert torch.equal(weights([{"inputs": x, "targets": y} for x, y in data]), expected)
    assert torch.equal(weights([{"image": x, "label": y} for x, y in data], phases=[Named()]), expected)


@pytest.mark.parametrize("name", PLUGINS)
def test_validation_and_metrics_see_the_batch_as_it_is(name):
    seen = {}

    class See:
        @hookimpl(reads=("targets",))
        def step_end(self, phase, step):
            seen[phase.name, step.index] = step.targets

    data = batches(2)
    learner = make_learner(PLUGINS[name](), See(), Metrics(Accuracy()))
    result = learner.fit(data, data, epochs=1)
    assert all(seen[phase, index] is y for phase in ("train", "val") for index, (_, y) in enumerate(data))
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    with torch.no_grad():
        assert result.metrics["val/loss"] == pytest.approx(nn.functional.cross_entropy(learner.model(x), y).item())


def test_label_smoothing_is_that_of_the_loss():
    learner = make_learner(LabelSmoothing(CLASSES, 0.2), ClipGradNorm(1.0))
    losses = []

    class See:
        @hookimpl(reads=("loss", "outputs", "targets"))
        def step_end(self, step):
            own = nn.functional.cross_entropy(step.outputs, step.targets, label_smoothing=0.2)
            losses.append((step.loss.detach(), own.detach()))

    learner.add(See())
    learner.fit(batches(), epochs=1)
    for ours, torchs in losses:
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=0)  # the sum is taken in another order


def test_a_box_has_the_share_that_the_targets_say():
    areas = []

    class See:
        @hookimpl(reads=("inputs", "targets"))
        def loss_begin(self, step):
            areas.append(((step.inputs == 1).float().mean(dim=(1, 2, 3)), step.targets[:, 1]))

    x = torch.zeros(6, 2, 8, 8)
    x[3:] = 1
    y = (torch.arange(6) >= 3).long()
    learner = make_learner(CutMix(CLASSES), See())
    learner.fit([(x, y)] * 20, epochs=1)
    for shown, said in areas:
        torch.testing.assert_close(shown, said)
    assert len({round(said[0].item(), 4) for _, said in areas}) > 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixup(1), r"Mixup: classes is 1: it is a whole number, from 2"),
        (lambda: CutMix(True), r"CutMix: classes is True"),
        (lambda: Mixup(3, alpha=0), r"Mixup: alpha is 0: it is a number above 0"),
        (lambda: CutMix(3, alpha=float("inf")), r"CutMix: alpha is inf"),
        (
            lambda: LabelSmoothing(3, smoothing=1.0),
            r"LabelSmoothing\(smoothing=1.0\): it is a number above 0 and below 1",
        ),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(PluginError, match=message):
        make()


@pytest.mark.parametrize(
    ("plugin", "batch", "message"),
    [
        (Mixup, (torch.zeros(4, 2, 8, 8, dtype=torch.uint8), torch.zeros(4).long()), "inputs are torch.uint8"),
        (CutMix, (torch.zeros(4, 8), torch.zeros(4).long()), r"inputs are torch.float32 \(4, 8\)"),
        (Mixup, (torch.zeros(4, 2, 8, 8), torch.zeros(4, 1).long()), r"targets are torch.int64 of shape \(4, 1\)"),
        (LabelSmoothing, (torch.zeros(4, 2, 8, 8), [0] * 4), r"targets are \[0, 0, 0, 0\]"),
    ],
)
def test_other_batches_are_refused(plugin, batch, message):
    with pytest.raises(PluginError, match=message):
        make_learner(plugin(CLASSES)).fit([batch], epochs=1)
