"""Modes of modules: which are in eval mode in training, and modules that work in ``train`` and ``eval``."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batches, on
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loopkit import Learner, TrainingPhase
from loopkit.checkpoint import load_best
from loopkit.plugins import Checkpoint, EarlyStopping, EvalMode, Metrics, WeightAverage


class Adapted(nn.Linear):
    """Merges its adapter into its weight in eval mode, and takes it out in train mode; each call counts."""

    volatile = ("calls", "kept")

    def __init__(self, inputs=3, outputs=1):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(1, inputs))
        self.up = nn.Parameter(torch.randn(outputs, 1) * 0.3)
        self.merged = False
        self.calls = []

    def train(self, mode=True):
        self.calls.append(mode)
        super().train(mode)
        if mode:
            self.weight.data -= self.up.data @ self.down.data
        else:
            self.weight.data += self.up.data @ self.down.data
        self.merged = not mode
        return self

    def forward(self, inputs):
        if self.merged:
            return nn.functional.linear(inputs, self.weight, self.bias)
        return super().forward(inputs) + inputs @ self.down.T @ self.up.T


class Replaces(Adapted):
    """Puts another parameter in the place of its weight, and makes a buffer, in eval mode."""

    def train(self, mode=True):
        self.calls.append(mode)
        nn.Module.train(self, mode)
        if not mode:
            self.kept = [self.weight]
            self.weight = nn.Parameter(self.weight.detach() + self.up.detach() @ self.down.detach(), False)
            self.register_buffer("filter", self.weight.detach() * 2)
        elif not self.weight.requires_grad and hasattr(self, "kept"):
            self.weight = self.kept[0]
            del self.filter
        self.merged = not mode
        return self


class Outer(nn.Module):
    """Has an adapted part, and a ``train`` of its own."""

    volatile = ("calls",)

    def __init__(self):
        super().__init__()
        self.inner = Adapted()
        self.calls = []

    def train(self, mode=True):
        self.calls.append(mode)
        return super().train(mode)

    def forward(self, inputs):
        return self.inner(inputs)


KINDS = {
    "alone": Adapted,
    "inside": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), Adapted()),
    "twice": lambda: nn.Sequential(Adapted(3, 3), nn.Sequential(Adapted())),
    "outer": Outer,
    "replaces": Replaces,
}


def adapted(model):
    return [each for each in model.modules() if isinstance(each, Adapted)]


def make(kind):
    torch.manual_seed(0)
    return KINDS[kind]()


def sgd(params):
    return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)


def build(model, *plugins, **options):
    return Learner(model, nn.MSELoss(), sgd, plugins=[Metrics(), *plugins], standard=False, **options)


VAL = batches(2, seed=5)


def by_hand(kind, epochs=3, decay=None):
    model = make(kind)
    optimizer = sgd(model.parameters())
    average = None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    torch.manual_seed(1)
    losses = []
    for _ in range(epochs):
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if average is not None:
                average.update_parameters(model)
        measured = model if average is None else average
        measured.eval()
        losses.append(sum(nn.functional.mse_loss(measured(inputs), targets).item() for inputs, targets in VAL) / 2)
        measured.train()
    return model, losses


def fitted(learner, epochs=3):
    torch.manual_seed(1)
    losses = []
    learner.add(on("phase_end", lambda learner, phase: _take(learner, phase, losses), name="takes"))
    learner.fit(batches(3), VAL, epochs=epochs)
    return losses


def _take(learner, phase, losses):
    if phase.name == "val":
        losses.append(learner.metrics["val/loss"])


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_work_in_eval_train_as_by_hand(kind):
    model, losses = by_hand(kind)
    learner = build(make(kind))
    assert fitted(learner) == pytest.approx(losses, rel=1e-6)
    same(learner.model.state_dict(), model.state_dict())
    assert all(each.calls == [False, True] * 3 for each in adapted(learner.model))
    assert not any(each.merged for each in adapted(learner.model))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replaces"])
def test_average_is_in_place_before_modules_work_in_eval(kind):
    model, losses = by_hand(kind, decay=0.5)
    learner = build(make(kind), WeightAverage(0.5))
    assert fitted(learner) == pytest.approx(losses, rel=1e-6)
    for (name, one), other in zip(learner.model.named_parameters(), model.parameters(), strict=True):
        if "weight" not in name:
            assert torch.equal(one, other), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["step_end", "phase_end", "epoch_end"])
def test_save_in_a_validation_holds_the_training_form_and_adds_no_switch(kind, place):
    states = []

    def save(learner, phase):
        if phase.name == "val" and not states and learner.current.can_save:
            states.append(copy.deepcopy(learner.state_dict()))

    learner = build(make(kind), on(place, save))
    losses = fitted(learner)
    assert all(each.calls == [False, True] * 3 for each in adapted(learner.model))
    if not states:
        return  # the place cannot be saved
    again = build(make(kind))
    again.load_state_dict(states[0])
    assert fitted(again)[-2:] == losses[-2:]
    same(again.model.state_dict(), learner.model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_between_fits_changes_no_bit(kind):
    learner = build(make(kind))
    learner.fit(batches(3), epochs=1)
    before = copy.deepcopy(learner.model.state_dict())
    first = learner.evaluate(VAL)
    assert learner.evaluate(VAL) == first
    learner.predict(torch.randn(2, 3))
    list(learner.predict_batches(VAL))
    same(learner.model.state_dict(), before)
    assert not any(each.merged for each in adapted(learner.model))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replaces"])
def test_best_weights_are_restored_in_the_training_form(kind, average, tmp_path):
    plugins = [EarlyStopping("val/loss", patience=9, mode="max", restore_best=True)]
    learner = build(
        make(kind),
        *plugins,
        *([WeightAverage(0.5)] if average else []),
        Checkpoint(tmp_path, best="val/loss", mode="max"),
    )
    if average:
        learner.remove("early_stopping")
    losses = fitted(learner)
    other = build(make(kind))
    if average:
        load_best(other, tmp_path)
    measured = (other if average else learner).evaluate(VAL)["val/loss"]
    assert measured == pytest.approx(max(losses), rel=1e-5)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replaces"])
def test_state_loads_into_modules_in_any_form(kind, mode):
    first = build(make(kind))
    first.fit(batches(3), epochs=1)
    again = build(make(kind))
    again.model.train(mode) if not mode else None
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    assert again.evaluate(VAL) == pytest.approx(first.evaluate(VAL), rel=1e-6)


def test_frozen_merged_adapter_stays_merged():
    model = nn.Sequential(Adapted(3, 3), nn.Linear(3, 1))
    model[0].eval().requires_grad_(False)
    learner = build(model)
    weight = model[0].weight.clone()
    learner.fit(batches(3), VAL, epochs=2)
    assert model[0].calls == [False]
    assert torch.equal(model[0].weight, weight)


def test_eval_mode_calls_each_module_once_an_epoch():
    model = nn.Sequential(nn.Sequential(Adapted(3, 3)), nn.Linear(3, 1))
    build(model, EvalMode("0")).fit(batches(2), epochs=2)
    assert model[0][0].calls == [False, True] * 2


class KeepsNorm(nn.Sequential):
    """Keeps its norm in eval mode, as many backbones do."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def test_norm_that_train_keeps_in_eval_mode_is_kept_from_the_first_epoch():
    model = KeepsNorm(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    learner = build(model)
    learner.fit(batches(3), VAL, epochs=2)
    assert torch.equal(model[1].running_mean, torch.zeros(3))
    assert [each.training for each in model] == [True, False, True]


# Models in eval mode


class Distils(TrainingPhase):
    def step(self, learner, step):
        inputs, _ = step.batch
        learner.model["teacher"](inputs)
        step.loss = learner.model["student"](inputs).square().mean()
        step.backward(step.loss)
        step.update()


def norm():
    return nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1), nn.Dropout(0.1))


@pytest.mark.parametrize("part", [None, 1, 2])
def test_teacher_keeps_its_eval_mode(part, capsys):
    student = norm()
    teacher = norm()
    (teacher if part is None else teacher[part]).eval()
    modes = [each.training for each in teacher.modules()]
    learner = Learner(
        {"student": student, "teacher": teacher}, None, {"student": sgd}, phases=[Distils()], standard=False
    )
    seen = []
    learner.add(on("step_end", lambda: seen.append([each.training for each in teacher.modules()])))
    learner.fit(batches(2), epochs=1)
    assert seen == [modes] * 2
    assert torch.equal(teacher[1].running_mean, torch.zeros(1)) == (part != 2)
    assert "eval mode" not in capsys.readouterr().err


def test_teacher_that_is_trained_in_a_second_stage_is_put_into_train_mode(capsys):
    student, teacher = norm(), norm().eval()
    models = {"student": student, "teacher": teacher}
    learner = Learner(models, None, {"student": sgd}, phases=[Distils()], standard=False)
    learner.fit(batches(1), epochs=1)
    learner.set_optimizer({"student": sgd, "teacher": sgd})
    learner.fit(batches(1), epochs=1)
    assert all(each.training for each in teacher.modules())
    assert capsys.readouterr().err.count("model 'teacher' was in eval mode when the learner was made") == 1


@pytest.mark.parametrize("inside", [False, True])
def test_part_in_train_mode_below_a_top_in_eval_mode_trains_alone(inside):
    model = nn.Sequential(norm(), nn.Linear(1, 1))
    model.eval()
    (model[0][2] if inside else model[1]).train()
    modes = [each.training for each in model.modules()]
    learner = Learner(model, nn.MSELoss(), sgd, standard=False)
    seen = []
    learner.add(on("step_end", lambda: seen.append([each.training for each in model.modules()])))
    learner.fit(batches(1), epochs=1)
    assert seen == [modes]


@pytest.mark.parametrize("average", [False, True], ids=["own weights", "average"])
@pytest.mark.parametrize("kind", KINDS)
def test_inference_in_a_hook_is_in_the_evaluation_form_and_leaves_training_bitwise_alone(kind, average):
    def trained(*hooks):
        torch.manual_seed(1)
        model = make(kind)
        learner = build(model, *([WeightAverage(0.5)] if average else []), *hooks)
        learner.fit(batches(3), epochs=2)
        return model

    def look(learner, phase):
        if phase.training:
            with learner.inference():
                seen.append((any(each.training for each in learner.model.modules()), adapted(learner.model)[0].merged))
            seen.append((adapted(learner.model)[0].training, not adapted(learner.model)[0].merged))

    seen = []
    watched = trained(on("step_end", look))
    assert seen == [(False, True), (True, True)] * 6
    alone = trained()
    assert all(torch.equal(one, other) for one, other in zip(watched.parameters(), alone.parameters(), strict=True))
