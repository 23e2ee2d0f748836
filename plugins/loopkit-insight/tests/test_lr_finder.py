"""The range test: what it finds, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import astuple
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from distributed.processes import run
from loopkit_testing import EventLog, tiny_problem
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.data import ResumableSampler, TensorLoader
from loopkit.errors import NonFiniteError, PhaseError, PhaseInputError, ReentrancyError, WorldError
from loopkit.plugins import DDP
from loopkit.plugins.freeze import EvalMode, Freeze
from loopkit.plugins.gradients import ClipGradNorm, GradNoise
from loopkit.plugins.history import History
from loopkit.plugins.metrics import Metrics
from loopkit.plugins.mixed_precision import MixedPrecision
from loopkit.plugins.schedule import Schedule, TorchSchedule
from loopkit.schedules import linear
from loopkit_insight.lr_finder import LRFinder, LRFinderResult


def make_data():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(20, 4, generator=generator), torch.randint(3, (20,), generator=generator)


def make_learner(*plugins, make_optimizer=None, **options):
    problem = tiny_problem()
    make = make_optimizer or (lambda params: AdamW(params, lr=0.01))
    options.setdefault("standard", False)
    return Learner(problem.model, problem.loss_fn, make, plugins=plugins, **options)


LOADERS = {
    "list": lambda: tiny_problem().train,
    "tensor_loader": lambda: TensorLoader(*make_data(), batch_size=6, shuffle=True, seed=1),
    "data_loader": lambda: DataLoader(TensorDataset(*make_data()), batch_size=6, shuffle=True),
    "own_generator": lambda: DataLoader(
        TensorDataset(*make_data()), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "function": lambda: lambda: iter(tiny_problem().train),
}
loaders = pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS)


def generators():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def prints(value):
    """A value with its tensors as bytes, to compare by ``==``."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype), tuple(value.shape), bytes(np.asarray(value).tobytes())
    if isinstance(value, dict):
        return {key: prints(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [prints(part) for part in value]
    return value


def everything(learner):
    """All that a range test could change, to the bit."""
    return prints(
        {
            "model": learner.model.state_dict(),
            "modes": [module.training for module in learner.model.modules()],
            "requires_grad": [p.requires_grad for p in learner.model.parameters()],
            "grads": [p.grad for p in learner.model.parameters()],
            "optimizer": learner.optimizer.state_dict(),
            "generators": generators(),
            "progress": astuple(learner.progress),
            "metrics": dict(learner.metrics),
            "history": [] if learner.result is None else learner.result.history,
            "plugins": {n: p.state_dict() for n, p in learner.plugins.items() if hasattr(p, "state_dict")},
        }
    )


def trained(*plugins, **options):
    """A learner after an epoch, so that there is something to leave alone."""
    learner = make_learner(Metrics(), History(), *plugins, **options)
    learner.fit(tiny_problem().train, tiny_problem().val, epochs=1)
    for p in learner.model.parameters():
        p.grad = torch.ones_like(p)
    return learner


# It leaves everything as it was


@loaders
def test_run_leaves_the_learner_and_the_generators_as_they_were(make_loader):
    learner, data = trained(), make_loader()
    before = everything(learner)
    gradients = [p.grad for p in learner.model.parameters()]
    result = LRFinder(1e-4, 1.0, 9).run(learner, data)
    assert len(result.losses) > 1
    assert everything(learner) == before
    assert all(p.grad is gradient for p, gradient in zip(learner.model.parameters(), gradients, strict=True))


class Trouble(Exception):
    pass


@loaders
def test_run_leaves_everything_as_it_was_after_an_error(make_loader):
    learner, data = trained(), make_loader()

    class Raising(TrainingPhase):
        def step(self, learner, step):
            super().step(learner, step)
            random.random(), np.random.rand(), torch.rand(1)
            if learner.progress.steps == 5:
                raise Trouble

    before, batches = everything(learner), copy.deepcopy(data) if not callable(data) else data
    with pytest.raises(Trouble):
        LRFinder(1e-4, 1.0, 9).run(learner, data, Raising())
    assert everything(learner) == before
    assert_same_passes(data, batches)


def assert_same_passes(one, other):
    passes = []
    for data in (one, other):
        torch.manual_seed(7)
        passes.append([[prints(b) for b in (data() if callable(data) else data)] for _ in range(2)])
    assert passes[0] == passes[1]


@loaders
def test_the_fit_after_a_run_equals_the_fit_without_one(make_loader):
    def fit(with_test):
        learner, data = make_learner(Metrics()), make_loader()
        torch.manual_seed(5)
        if with_test:
            LRFinder(1e-4, 1.0, 9).run(learner, data)
        learner.fit(data, epochs=2)
        return everything(learner)

    assert fit(True) == fit(False)


def test_run_leaves_a_loader_in_the_middle_of_its_epoch():
    loader = TensorLoader(*make_data(), batch_size=6, shuffle=True, seed=1)
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()
    LRFinder(1e-4, 1.0, 9).run(make_learner(), loader)
    assert loader.state_dict() == before
    assert len(list(batches)) == 3


def test_run_restores_a_loader_by_its_state():
    class Counting:
        def __init__(self):
            self.passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(tiny_problem().train)

        def state_dict(self):
            return {"passes": self.passes}

        def load_state_dict(self, state):
            self.passes = state["passes"]

    data = Counting()
    LRFinder(1e-4, 1.0, 9).run(make_learner(), data)
    assert data.passes == 0


def test_run_leaves_the_workers_of_a_loader_alone():
    data = DataLoader(TensorDataset(*make_data()), batch_size=6, num_workers=1, persistent_workers=True)
    batches = iter(data)
    next(batches)
    LRFinder(1e-2, 1.0, 3).run(make_learner(), data)
    assert data._iterator is batches
    assert len(list(batches)) == 3


def test_run_leaves_a_loss_function_with_parameters_alone():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs, targets):
            return self.scale.exp() * nn.functional.cross_entropy(outputs, targets)

    problem, loss_fn = tiny_problem(), Scaled()
    optimizer = SGD([*problem.model.parameters(), *loss_fn.parameters()], lr=0.1)
    learner = Learner(problem.model, loss_fn, optimizer, standard=False)
    LRFinder(1e-4, 1.0, 9).run(learner, problem.train)
    assert loss_fn.scale.item() == 1.0
    assert loss_fn.scale.grad is None


def test_run_after_a_torch_scheduler_does_not_step_the_optimizer_of_the_learner():
    learner = trained(TorchSchedule(lambda optimizer: StepLR(optimizer, 1)))
    before = everything(learner)
    LRFinder(1e-4, 1.0, 9).run(learner, tiny_problem().train)
    assert everything(learner) == before


def test_run_after_a_torch_scheduler_trains_the_copy():
    learner = sum_learner(TorchSchedule(lambda optimizer: StepLR(optimizer, 1)), lr=0.0, standard=False)
    learner.fit(ones(), epochs=1)
    assert LRFinder(1.0, 4.0, 3, smoothing=0.0).run(learner, ones()).losses == [0.0, -1.0, -3.0]


def test_run_does_not_change_what_the_plugins_hold():
    plugins = ClipGradNorm(1.0), GradNoise(), MixedPrecision("bfloat16"), Freeze("0"), Schedule(linear(100))
    learner = trained(*plugins, order=["clip_grad_norm", "grad_noise"])
    before = everything(learner)
    LRFinder(1e-4, 1.0, 9).run(learner, tiny_problem().train)
    assert everything(learner) == before


def test_run_fires_no_event_of_the_learner():
    log = EventLog()
    LRFinder(1e-4, 1.0, 5).run(make_learner(log), tiny_problem().train)
    assert log.lines == []


# What it does


class Affine(nn.Module):
    """One parameter, whose loss is its value: the gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.weight * inputs


def ones(count=1):
    return [(torch.ones(1), torch.zeros(1))] * count


def sum_learner(*plugins, lr=1.0, **options):
    model = Affine()
    return Learner(model, lambda o, t: (o - t).sum(), SGD([model.weight], lr=lr), plugins=plugins, **options)


def test_run_trains_at_rates_that_rise_by_a_constant_factor():
    result = LRFinder(1.0, 8.0, 4, smoothing=0.0).run(sum_learner(), ones())
    assert result.rates == pytest.approx([1.0, 2.0, 4.0, 8.0], rel=1e-15)  # powers round
    assert result.losses == [0.0, -1.0, -3.0, -7.0]  # each loss comes before its update


def test_run_passes_over_the_data_as_often_as_it_takes():
    assert len(LRFinder(1.0, 8.0, 10, smoothing=0.0).run(sum_learner(), ones(3)).losses) == 10


def test_run_with_accumulation_has_one_loss_per_update():
    learner = sum_learner(accumulate=2)
    data = [(torch.full((1,), x), torch.zeros(1)) for x in (1.0, 3.0, 5.0)]
    result = LRFinder(1.0, 4.0, 3, smoothing=0.0).run(learner, data)
    # windows of (1, 3), (5), (1, 3): the means of their losses
    assert result.losses == [0.0, 5 * -2.0, (1 + 3) / 2 * (-2.0 - 2.0 * 5)]


def test_run_keeps_the_ratio_between_groups():
    model = nn.Linear(1, 1)
    optimizer = SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.5}])
    seen = []

    class Rates:
        name = "rates"

        @hookimpl
        def update_begin(self, step):
            seen.append([group["lr"] for group in step.optimizer.param_groups])

    learner = Learner(model, nn.functional.mse_loss, optimizer, plugins=[Rates()], standard=False)
    Rates.__deepcopy__ = lambda self, memo: self
    LRFinder(1e-3, 4e-3, 3, plugins=["rates"]).run(learner, [(torch.ones(1, 1), torch.ones(1, 1))])
    assert seen == [[rate, rate * 0.5] for rate in LRFinder(1e-3, 4e-3, 3).rates]


def test_smoothed_is_the_corrected_exponential_mean():
    result = LRFinder(1.0, 8.0, 4, smoothing=0.5).run(sum_learner(), ones())
    assert result.smoothed == [0.0, -0.5 / 0.75, -1.75 / 0.875, -4.375 / 0.9375]


def test_run_ends_when_the_loss_rises_above_the_best():
    data = [(torch.full((1,), x), torch.full((1,), x - 1.0)) for x in (1.0, 1.0, 1.0, 1.0)]
    losses = iter([2.0, 1.0, 3.9, 4.1, 0.0])

    class Given(TrainingPhase):
        def loss(self, learner, outputs, targets):
            return 0 * outputs.sum() + next(losses)

        def __deepcopy__(self, memo):
            return self

    result = LRFinder(1.0, 8.0, 9, smoothing=0.0, stop_factor=4).run(sum_learner(), data, Given())
    assert result.losses == torch.tensor([2.0, 1.0, 3.9, 4.1]).tolist()
    assert result.diverged


def test_run_ends_before_a_loss_that_is_not_finite():
    model = Affine()
    learner = Learner(model, nn.functional.mse_loss, SGD([model.weight], lr=1.0), standard=False)
    result = LRFinder(1.0, 1e30, 7, smoothing=0.0, stop_factor=math.inf).run(learner, [(torch.ones(1), torch.ones(1))])
    assert result.diverged
    # the weight is 0, 2, -2e5, 4e15, -8e30 at rates of 1, 1e5, 1e10, ...: the square of the last is infinite
    assert len(result.rates) == len(result.losses) == len(result.smoothed) == 4


def test_run_whose_first_loss_is_not_finite_says_so():
    learner = sum_learner()
    with pytest.raises(NonFiniteError, match="the first loss is nan, at lr 1e-07"):
        LRFinder().run(learner, [(torch.full((1,), math.nan), torch.zeros(1))])


def test_suggestion_is_where_the_smoothed_loss_falls_most_before_its_minimum():
    values = [5.0, 5.0, 4.5, 2.0, 1.0, 9.0, 1.5]
    falling = iter(values)

    class Given(TrainingPhase):
        def loss(self, learner, outputs, targets):
            return 0 * outputs.sum() + next(falling)

        def __deepcopy__(self, memo):
            return self

    finder = LRFinder(1e-6, 1.0, 7, smoothing=0.0, stop_factor=math.inf)
    result = finder.run(sum_learner(), ones(), Given())
    assert result.losses == values
    assert result.suggestion == finder.rates[3]  # (1.0 - 4.5) / 2


def test_suggestion_is_none_where_the_loss_does_not_fall():
    model = Affine()
    learner = Learner(model, lambda o, t: -(o.detach() - o).sum() + 1, SGD([model.weight], lr=1.0), standard=False)
    assert LRFinder(1e-3, 1.0, 9).run(learner, ones()).suggestion is None


def test_suggestion_trains_a_problem_well():
    torch.manual_seed(4)  # of the dropout
    learner = make_learner(make_optimizer=lambda params: SGD(params, lr=0.1))
    suggestion = LRFinder().run(learner, tiny_problem().train).suggestion
    assert 1e-3 < suggestion < 5.0  # between too small to move and where this problem diverges


def test_run_sets_a_rate_that_is_a_tensor_in_the_copy_alone():
    lr = torch.tensor(0.5)
    learner = make_learner(make_optimizer=lambda params: AdamW(params, lr=lr, foreach=False))
    LRFinder(1e-4, 1.0, 5).run(learner, tiny_problem().train)
    assert learner.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5


def test_run_copies_an_optimizer_with_attributes_of_its_own():
    class ClosurePhase(TrainingPhase):
        def step(self, learner, step):
            inputs, targets = step.batch

            def closure():
                step.loss = learner.loss_fn(learner.model(inputs), targets)
                step.backward(step.loss)
                return step.loss

            step.update(closure=closure)

    problem = tiny_problem()
    learner = make_learner(make_optimizer=lambda params: LBFGS(params, lr=0.1, max_iter=2))
    before = everything(learner)
    assert len(LRFinder(1e-4, 1e-1, 5).run(learner, problem.train, ClosurePhase()).losses) == 5
    assert everything(learner) == before


def test_run_trains_with_what_freezes_and_clips():
    problem = tiny_problem()
    plugins = [Freeze("0|1|4.weight"), EvalMode("*"), ClipGradNorm(1e-12)]
    learner = Learner(problem.model, problem.loss_fn, lambda p: SGD(p, lr=0.1), plugins=plugins, standard=False)
    losses = LRFinder(1e-3, 1.0, 8, smoothing=0.0).run(learner, problem.train[:1]).losses
    # without clipping the loss of a batch that is seen again would fall; without eval mode, dropout would change it
    assert max(losses) - min(losses) < 1e-6


def test_run_uses_the_learners_own_phase():
    class Double(TrainingPhase):
        def loss(self, learner, outputs, targets):
            return 2 * super().loss(learner, outputs, targets)

    single, double = sum_learner(), sum_learner(phases=[Double()])
    results = [LRFinder(1.0, 4.0, 3, smoothing=0.0).run(learner, ones()).losses for learner in (single, double)]
    assert results[1] == [4 * loss for loss in results[0]]  # twice the loss, and twice the way


class TwoPhase(TrainingPhase):
    name = "two"

    def step(self, learner, step):
        inputs, _ = step.batch
        for name, model in learner.model.items():
            loss = model(inputs).sum()
            setattr(step, f"{name}_loss", loss)
            step.backward(loss, name)
            step.update(name)


def test_run_raises_the_rate_of_one_of_several_optimizers():
    models = {"critic": Affine(), "generator": Affine()}
    optimizers = {name: SGD(model.parameters(), lr=1.0) for name, model in models.items()}
    learner = Learner(models, None, optimizers, phases=[TwoPhase()], standard=False)
    results = {
        name: LRFinder(2.0, 8.0, 3, smoothing=0.0, optimizer="critic", attribute=f"{name}_loss").run(learner, ones())
        for name in models
    }
    assert results["critic"].losses == [0.0, -2.0, -6.0]
    assert results["generator"].losses == [0.0, -1.0, -2.0]


# What is refused


@pytest.mark.parametrize(
    "options",
    [{"start": 0.0}, {"start": 2.0, "end": 1.0}, {"updates": 1}, {"smoothing": 1.0}, {"stop_factor": 1.0}],
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LRFinder(**options)


def test_run_on_an_iterator_is_refused():
    data = iter(tiny_problem().train)
    with pytest.raises(PhaseInputError, match="would use up"):
        LRFinder().run(make_learner(), data)
    assert len(list(data)) == len(tiny_problem().train)


def test_run_without_an_optimizer_is_refused():
    with pytest.raises(PhaseError, match="no optimizer"):
        LRFinder().run(Learner(nn.Linear(1, 1), standard=False), ones())


def test_run_during_a_fit_is_refused():
    class Inside:
        @hookimpl
        def step_end(self, learner):
            LRFinder().run(learner, ones())

    with pytest.raises(ReentrancyError, match="the learner is running"):
        sum_learner(Inside(), standard=False).fit(ones(), epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "optimiser"}, r"'optimiser' \(did you mean 'optimizer'\?\)"),
        ({"plugins": ["metrixs"]}, r"'metrixs' \(did you mean 'metrics'\?\)"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(PhaseError, match=message):
        LRFinder(**options).run(make_learner(Metrics()), tiny_problem().train)


def test_a_phase_that_makes_no_update_is_refused():
    class Idle(TrainingPhase):
        emits = ()  # else the engine refuses it

        def step(self, learner, step):
            step.loss = torch.zeros(())

    with pytest.raises(PhaseError, match="called no step"):
        LRFinder().run(make_learner(), tiny_problem().train, Idle())


def test_a_plugin_that_cannot_be_copied_is_refused_as_deepcopy_does():
    class Locked:
        name, provides = "locked", "noise"

        def __init__(self):
            self.queue = SimpleQueue()

        @hookimpl
        def step_end(self):
            pass

    learner = make_learner(Locked())
    before = everything(learner)
    with pytest.raises(TypeError, match="plugin 'locked': cannot pickle"):
        LRFinder().run(learner, tiny_problem().train)
    assert everything(learner) == before


# plot


def test_plot_draws_losses_and_suggestion():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = LRFinderResult([0.1, 0.2], [3.0, 2.0], [3.0, 2.5], 0.2, False)
    axes = result.plot()
    lines = [list(line.get_ydata()) for line in axes.lines[:2]]
    marked = list(axes.lines[2].get_xdata())
    scale = axes.get_xscale()
    plt.close("all")
    assert (lines, marked, scale) == ([[3.0, 2.0], [3.0, 2.5]], [0.2, 0.2], "log")


@pytest.mark.parametrize("suggestion", [1e-2, None])
@pytest.mark.parametrize("diverged", [False, True])
def test_result_shows_its_picture_and_suggestion_in_a_cell(suggestion, diverged):
    result = LRFinderResult([1e-3, 1e-2, 1e-1], [2.0, 1.0, 3.0], [2.0, 1.5, 2.2], suggestion, diverged)
    shown = result._repr_html_()
    assert shown.count("<polyline") == 2
    assert shown.startswith("<p>suggestion: lr 1.00e-02</p>" if suggestion else "<p>suggestion: no learning rate")
    assert (">suggestion 1.00e-02</text>" in shown) == (suggestion is not None)
    found, end = "1.00e-02" if suggestion else "none", ", diverged" if diverged else ""
    assert repr(result) == f"LRFinderResult(suggestion {found}, 3 updates{end})"


def test_place_of_a_resumable_sampler_stays():
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.ones(6, 1))
    loader = DataLoader(data, 2, sampler=ResumableSampler(data, seed=3))
    list(loader)
    before = loader.sampler.state_dict(), loader.sampler.state_dict(next_epoch=True)
    learner = Learner(nn.Linear(2, 1), nn.MSELoss(), torch.optim.SGD, standard=False)
    LRFinder(updates=4).run(learner, loader)
    assert (loader.sampler.state_dict(), loader.sampler.state_dict(next_epoch=True)) == before


def test_two_processes_are_refused():
    def each(rank):
        learner = Learner(nn.Linear(4, 1), nn.MSELoss(), SGD, plugins=[DDP()])
        with pytest.raises(WorldError, match="in one process, with 2 times the batch_size"):
            LRFinder().run(learner, TensorLoader(torch.randn(8, 4), torch.randn(8, 1), batch_size=4))
        return True

    assert run(each, 2) == [True, True]
