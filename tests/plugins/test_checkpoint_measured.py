"""The weights with which a metric was measured are saved beside the model, whoever put them there."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn

from loopkit import Learner, TrainingPhase, ValidationPhase, checkpoint, hookimpl
from loopkit.checkpoint import storage
from loopkit.errors import StateError
from loopkit.plugins import Checkpoint, Metrics, WeightAverage


class Halved:
    """A third party's plugin that puts other weights in place by the learner's stack."""

    owns = ("weights.val",)

    def __init__(self, factor=0.5):
        self.factor = factor

    @hookimpl(phase="val", updates=("params",))
    def epoch_context(self, learner):
        return learner.models.weights.replaced(
            lambda: self.scale(learner, self.factor), lambda: self.scale(learner, 1 / self.factor), by="halved"
        )

    @torch.no_grad()
    def scale(self, learner, factor):
        for p in learner.model.parameters():
            p.mul_(factor)


class Swapped(Halved):
    """One that changes the parameters in a context of its own."""

    owns = ()

    @hookimpl(phase="val", updates=("params",))
    def epoch_context(self, learner):
        return self.around(learner)

    @contextmanager
    def around(self, learner):
        self.scale(learner, self.factor)
        try:
            yield
        finally:
            self.scale(learner, 1 / self.factor)


PUTS = {
    "average": lambda: WeightAverage(0.5),
    "average of a name": lambda: WeightAverage(0.5, name="ema", phases=("val",)),
    "third party": Halved,
    "context": Swapped,
}


def run(tmp_path, *plugins, **options):
    """A learner after a fit of four epochs that saves the best."""
    learner = make_learner(*plugins, Metrics(), Checkpoint(tmp_path, best="val/loss", **options), lr=0.05)
    learner.fit(batches(4), batches(1, seed=3), epochs=4)
    return learner


def best_loss(learner):
    """The best loss of a validation."""
    return checkpoint.best(learner.plugins["checkpoint"].directory).about["monitored"]["value"]


def loss_of(model):
    inputs, targets = batches(1, seed=3)[0]
    return nn.functional.mse_loss(model(inputs), targets).item()


@pytest.mark.parametrize("make", PUTS.values(), ids=PUTS)
@pytest.mark.parametrize("weights_only", [False, True])
def test_best_has_the_weights_that_the_metric_measured(make, weights_only, tmp_path):
    learner = run(tmp_path, make(), weights_only=weights_only)
    best, model = best_loss(learner), nn.Linear(3, 1)
    checkpoint.load_weights(model, checkpoint.best(tmp_path))
    assert loss_of(model) == best
    other = make_learner(Metrics())
    checkpoint.load_best(other, tmp_path)
    assert other.evaluate(batches(1, seed=3))["val/loss"] == best


@pytest.mark.parametrize("make", PUTS.values(), ids=PUTS)
def test_learner_with_what_stood_there_measures_what_the_metric_measured(make, tmp_path):
    learner = run(tmp_path, make())
    best = best_loss(learner)
    if isinstance(make(), Swapped):  # nothing says that it will put them there again
        return
    for other in (learner, make_learner(make(), Metrics())):
        checkpoint.load_best(other, tmp_path)
        assert other.evaluate(batches(1, seed=3))["val/loss"] == best


@pytest.mark.parametrize("make", PUTS.values(), ids=PUTS)
def test_own_weights_are_those_that_were_trained(make, tmp_path):
    kept = []
    learner = run(tmp_path, make(), on("phase_end", lambda learner: kept.append(learner.model.weight.clone())))
    model = nn.Linear(3, 1)
    checkpoint.load_weights(model, checkpoint.best(tmp_path), weights="own")
    assert any(torch.equal(model.weight, each) for each in kept)
    assert loss_of(model) != best_loss(learner)


def test_weights_that_are_neither_are_refused(tmp_path):
    with pytest.raises(StateError, match="weights is 'mine': it is 'measured' or 'own'"):
        checkpoint.load_weights(nn.Linear(3, 1), tmp_path, weights="mine")


@pytest.mark.parametrize("make", [list, lambda: [WeightAverage(0.5, phases=())], lambda: [Halved(1.0)]])
def test_nothing_is_saved_beside_the_model_if_its_own_weights_were_measured(make, tmp_path):
    run(tmp_path, *make())
    assert not [name for manifest in storage.listing(tmp_path) for name in manifest.files if "weights." in name]


def test_several_models_have_a_file_for_each(tmp_path):
    class First(TrainingPhase):
        def forward(self, learner, inputs):
            return learner.model["a"](inputs) + learner.model["b"](inputs)

    class Measure(ValidationPhase):
        forward = First.forward

    torch.manual_seed(0)
    models = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
    plugins = [WeightAverage(0.5), Metrics(), Checkpoint(tmp_path, best="val/loss")]
    make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    learner = Learner(models, nn.MSELoss(), make, plugins=plugins, phases=[First(), Measure()], standard=False)
    learner.fit(batches(2), batches(1), epochs=2)
    files = [name for name in checkpoint.best(tmp_path).files if "weights.val" in name]
    assert sorted(files) == ["model-a.weights.val.safetensors", "model-b.weights.val.safetensors"]
    average, fresh = learner.plugins["weight_average"], nn.Linear(3, 1)
    if checkpoint.best(tmp_path).path == storage.listing(tmp_path)[0].path:
        checkpoint.load_weights(fresh, checkpoint.best(tmp_path), which="b")
        assert torch.equal(fresh.weight, average.model_state(learner, "b")["weight"])


def test_tied_weights_stay_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.two(self.one(x)))

    learner = make_learner(WeightAverage(0.5), Metrics(), Checkpoint(tmp_path, best="val/loss"), model=Tied())
    learner.fit(batches(2), batches(1, seed=3), epochs=2)
    model = Tied()
    checkpoint.load_weights(model, checkpoint.best(tmp_path))
    assert loss_of(model) == best_loss(learner)


def test_optimizer_with_two_modes_is_measured_in_the_mode_of_the_validation(tmp_path):
    class TwoFaced(torch.optim.SGD):
        """Puts other weights in place in eval mode, as schedule-free optimizers do."""

        def __init__(self, params, lr):
            super().__init__(params, lr)
            for group in self.param_groups:
                group["training"] = True

        def train(self):
            self.change(True, 2.0)

        def eval(self):
            self.change(False, 0.5)

        @torch.no_grad()
        def change(self, mode, factor):
            for group in self.param_groups:
                if group["training"] is not mode:
                    group["training"] = mode
                    torch._foreach_mul_(group["params"], factor)

    class Modes:
        @hookimpl(phase="val", reads=("metrics",))
        def epoch_begin(self, learner):
            learner.optimizer.eval()

        @hookimpl(phase="val")
        def phase_end(self, learner):
            learner.optimizer.train()

    learner = make_learner(Modes(), Metrics(), Checkpoint(tmp_path, best="val/loss"))
    learner.set_optimizer(lambda params: TwoFaced(params, lr=0.05))
    learner.fit(batches(4), batches(1, seed=3), epochs=2)
    model = nn.Linear(3, 1)
    checkpoint.load_weights(model, checkpoint.best(tmp_path))
    assert loss_of(model) == best_loss(learner)


def test_run_resumes_from_a_checkpoint_with_measured_weights(tmp_path):
    whole = run(tmp_path / "a", WeightAverage(0.5))

    def made(**options):
        saver = Checkpoint(tmp_path / "b", best="val/loss", **options)
        return make_learner(WeightAverage(0.5), Metrics(), saver, lr=0.05)

    made().fit(batches(4), batches(1, seed=3), epochs=2)
    learner = made(resume="auto")
    learner.fit(batches(4), batches(1, seed=3), epochs=4)
    assert torch.equal(learner.model.weight, whole.model.weight)
    assert best_loss(learner) == best_loss(whole)
