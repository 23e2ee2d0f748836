"""What is ejected trains as loopkit does: parameters, buffers, the optimizer's state and metrics, bit for bit."""

from __future__ import annotations

import ast
import copy
import itertools
import random
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import pytest
import torch
from running import compare, lint, loaders, network, sgd
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from loopkit import Learner, ValidationPhase, every, metrics, schedules
from loopkit.criteria import Patience, Threshold
from loopkit.plugins import (
    ChannelsLast,
    ClipGradNorm,
    ClipGradValue,
    EarlyStopping,
    EvalMode,
    Freeze,
    GradNoise,
    GradNorm,
    History,
    Metrics,
    MixedPrecision,
    Plateau,
    Schedule,
    StopOnNonFinite,
    ToDevice,
    TorchSchedule,
    WeightAverage,
)
from loopkit.schedules import cosine, linear, warmup
from loopkit_files import eject
from loopkit_files.plain.code import is_taken


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def double() -> nn.Module:
    return network().double()


def double_loaders() -> Any:
    torch.manual_seed(0)
    train, val = loaders()
    return [(x.double(), y) for x, y in train], [(x.double(), y) for x, y in val]


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs()


ALONE: dict[str, list[Any]] = {
    "nothing": [],
    "clip_norm": [ClipGradNorm(0.1)],
    "clip_norm_1": [ClipGradNorm(0.1, norm_type=1.0)],
    "clip_norm_inf": [ClipGradNorm(0.01, norm_type=float("inf"))],
    "clip_value": [ClipGradValue(0.01)],
    "noise": [GradNoise(0.1)],
    "grad_norm": [GradNorm()],
    "bfloat16": [MixedPrecision("bfloat16")],
    "float16": [MixedPrecision("float16", growth_interval=3)],
    "float16_min_scale": [MixedPrecision("float16", init_scale=2.0**40, min_scale=2.0**39, growth_interval=2)],
    "bfloat16_scaled": [MixedPrecision("bfloat16", scaling=True, init_scale=16.0)],
    "schedule": [Schedule(warmup(3, then=cosine()))],
    "schedule_of_epochs": [Schedule(linear(), every="epoch")],
    "schedule_later": [Schedule(cosine(), start=5)],
    "schedule_absolute": [Schedule(schedules.constant(0.05), absolute=True)],
    "schedule_momentum": [Schedule(linear(start=0.95, end=0.5), "momentum", absolute=True), Schedule(linear())],
    "schedule_imported": [Schedule(schedules.one_cycle(max_lr=2.0))],
    "torch_schedule": [TorchSchedule(partial(StepLR, step_size=2, gamma=0.7))],
    "torch_schedule_of_epochs": [TorchSchedule(partial(StepLR, step_size=1, gamma=0.7), every="epoch")],
    "one_cycle": [TorchSchedule(partial(OneCycleLR, max_lr=0.2, total_steps=40))],
    "plateau": [Plateau(patience=0, factor=0.5)],
    "plateau_train": [Plateau("train/loss", patience=0, threshold=0.5)],
    "average": [WeightAverage(0.9)],
    "average_warmup": [WeightAverage(0.9, warmup=True)],
    "average_equal": [WeightAverage(None)],
    "average_later": [WeightAverage(0.9, start_update=3, every=2)],
    "average_epochs": [WeightAverage(None, every="epoch", start_epoch=1)],
    "average_epochs_later": [WeightAverage(None, every="epoch", start_update=10)],
    "early_stopping": [EarlyStopping(patience=1)],
    "early_stopping_best": [EarlyStopping(patience=1, restore_best=True)],
    "early_stopping_max": [EarlyStopping("val/accuracy", 1, "max", restore_best=True), Metrics(metrics.Accuracy())],
    "early_stopping_delta": [EarlyStopping(patience=1, min_delta=0.1, restore_best=True)],
    "early_stopping_train": [EarlyStopping("train/loss", 1, "max", restore_best=True)],
    "early_stopping_threshold": [EarlyStopping(criterion=Threshold(1.08), restore_best=True)],
    "early_stopping_patience": [EarlyStopping(criterion=Patience(1))],
    "freeze": [Freeze("0")],
    "freeze_norm": [Freeze("1", "0.bias")],
    "thaw": [Freeze("4.bias", {"0": 1, "1": 2})],
    "eval_mode": [EvalMode("3", "1")],
    "to_device": [ToDevice("cpu")],
    "channels_last": [ChannelsLast()],
    "non_finite_late": [StopOnNonFinite(late=True)],
    "non_finite_gradients": [StopOnNonFinite(gradients=True)],
    "accuracy": [Metrics(metrics.Accuracy())],
    "accuracy_ignore": [Metrics(metrics.Accuracy(ignore_index=1, axis=1))],
    "f1": [Metrics(metrics.F1(average="weighted"), recall=metrics.Recall(), precision=metrics.Precision("micro"))],
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ALONE)
def test_one_plugin_alone(name: str, accumulate: int) -> None:
    compare(*copy.deepcopy(ALONE[name]), fit={"epochs": 3}, accumulate=accumulate)


@pytest.mark.parametrize(
    "fit",
    [
        {"epochs": 2},
        {"max_steps": 13},
        {"max_updates": 7},
        {"epochs": 3, "max_steps": 13},
        {"epochs": 5, "max_updates": 4},
        {"epochs": float("inf"), "max_steps": 9, "max_updates": 9},
        {"epochs": 3, "validate": every(epochs=2)},
        {"max_steps": 17, "validate": every(epochs=2)},
        {"epochs": 2, "validate": every(updates=2)},
        {"max_updates": 9, "validate": every(updates=3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("val", [True, False])
def test_limits(fit: dict[str, Any], accumulate: int, val: bool) -> None:
    plugins = [Schedule(cosine()), WeightAverage(0.9)] + ([EarlyStopping(patience=1)] if val else [])
    given = fit if val else {name: value for name, value in fit.items() if name != "validate"}
    compare(*plugins, fit=given, accumulate=accumulate, val=val)


def test_sum_reduction() -> None:
    compare(fit={"epochs": 2}, accumulate=3, loss_fn=nn.CrossEntropyLoss(reduction="sum"))


def test_without_the_standard_plugins() -> None:
    source, _ = compare(History(), Metrics(), fit={"epochs": 2}, standard=False)
    assert "isfinite" not in source
    compare(History(), fit={"epochs": 2}, standard=False)


def test_double_precision() -> None:
    compare(fit={"epochs": 2}, model=double, data=double_loaders, accumulate=3)


def test_regression_with_a_function_as_metric() -> None:
    compare(Metrics(absolute_error), fit={"epochs": 2}, loss_fn=nn.MSELoss(), data=lambda: loaders(classes=False))


def test_binary_targets() -> None:
    def data() -> Any:
        torch.manual_seed(0)
        train, val = loaders(classes=False)
        return [(x, (y > 0).float()) for x, y in train], [(x, (y > 0).float()) for x, y in val]

    accuracy = metrics.BinaryAccuracy(from_logits=True, threshold=0.4)
    compare(Metrics(accuracy), fit={"epochs": 2}, loss_fn=nn.BCEWithLogitsLoss(), data=data)


def test_validation_in_inference_mode() -> None:
    phase = ValidationPhase()
    phase.grad_mode = "inference_mode"
    source, _ = compare(WeightAverage(0.9), fit={"epochs": 2}, phases=[phase])
    assert "with torch.inference_mode():" in source


def test_several_parameter_groups() -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [{"params": params[:2], "lr": 0.2, "name": "body"}, {"params": params[2:], "name": "head"}]
        return torch.optim.Adam(groups, lr=0.01)

    plugins = [Schedule(cosine(), groups="head"), Schedule(linear(start=0.9, end=0.5), "betas[0]", absolute=True)]
    compare(*plugins, fit={"epochs": 2}, optimizer=optimizer)


def test_two_clippers_in_the_order_that_was_given() -> None:
    for order in itertools.permutations(["clip_grad_norm", "clip_grad_value", "grad_noise"]):
        plugins = [ClipGradNorm(0.1), ClipGradValue(0.02), GradNoise(0.01)]
        compare(*plugins, fit={"epochs": 1}, order=list(order))


@dataclass(frozen=True)
class Cell:
    """One combination."""

    accumulate: int
    clip: str
    schedule: str
    dtype: str
    average: bool
    stopping: bool
    val: bool
    limit: str
    optimizer: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, each.name)) for each in fields(self))

    @property
    def plugins(self) -> list[Any]:
        found: list[Any] = [GradNorm(), Metrics(metrics.Accuracy())]
        if self.clip != "none":
            found.append(ClipGradNorm(0.1) if self.clip == "norm" else ClipGradValue(0.01))
        if self.schedule == "cosine":
            found.append(Schedule(warmup(2, then=cosine(end=0.1))))
        elif self.schedule == "torch":
            found.append(TorchSchedule(partial(StepLR, step_size=2, gamma=0.7)))
        if self.dtype != "float32":
            found.append(MixedPrecision(self.dtype, growth_interval=3))
        if self.average:
            found.append(WeightAverage(0.9, warmup=True))
        if self.stopping:
            found.append(EarlyStopping("val/loss" if self.val else "train/loss", 1, restore_best=True))
        return found

    @property
    def fit(self) -> dict[str, Any]:
        return {"epochs": {"epochs": 3}, "steps": {"epochs": 4, "max_steps": 20}, "updates": {"max_updates": 11}}[
            self.limit
        ]


CELLS = [
    Cell(*values)
    for values in itertools.product(
        (1, 3),
        ("none", "norm", "value"),
        ("none", "cosine", "torch"),
        ("float32", "bfloat16", "float16"),
        (False, True),
        (False, True),
        (False, True),
        ("epochs", "steps", "updates"),
        ("sgd", "adamw"),
    )
]
SAMPLE = random.Random(0).sample(CELLS, 40)
MANY = random.Random(1).sample(CELLS, 300)


def check(cell: Cell) -> str:
    optimizer = {"sgd": sgd, "adamw": adamw}[cell.optimizer]
    return compare(*cell.plugins, fit=cell.fit, val=cell.val, accumulate=cell.accumulate, optimizer=optimizer)[0]


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_sampled_combination(cell: Cell) -> None:
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", MANY, ids=str)
def test_combination(cell: Cell) -> None:
    check(cell)


@cache
def scripts() -> list[str]:
    """Scripts of all kinds."""
    made = []
    for cell in SAMPLE:
        learner = Learner(network(), nn.CrossEntropyLoss(), sgd, plugins=cell.plugins, accumulate=cell.accumulate)
        made.append(eject(learner, cell.fit, val=cell.val))
    for plugins in ALONE.values():
        learner = Learner(network(), nn.MSELoss(), sgd, plugins=copy.deepcopy(plugins))
        made.append(eject(learner, {"epochs": 3, "max_steps": 100, "validate": every(updates=5)}))
    return made


def test_scripts_are_formatted_and_without_lint(tmp_path: Any) -> None:
    assert lint(scripts(), tmp_path) == ""


def test_words_of_scripts_are_kept_from_imports() -> None:
    for source in scripts():
        nodes = list(ast.walk(ast.parse(source)))
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        given = {argument.arg for node in nodes if isinstance(node, ast.FunctionDef) for argument in node.args.args}
        imported = {
            name.asname or name.name
            for node in nodes
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "loopkit" not in ast.unparse(node)
            for name in node.names
        }
        own = imported - {"StepLR", "OneCycleLR"}
        assert [word for word in stored | given | own if not is_taken(word)] == []
