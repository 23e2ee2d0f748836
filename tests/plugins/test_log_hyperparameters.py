"""``LogHyperparameters``: what is known of a run, logged once, and its last metrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import batches, keeps_contract, make_learner, on, raising
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Learner
from loopkit.errors import PluginError
from loopkit.logs import Hyperparameters, read_log
from loopkit.plugins import Checkpoint, ClipGradNorm, LogHyperparameters, LogTo, Metrics, Schedule
from loopkit.schedules import linear, warmup


def test_plugin_keeps_the_contract() -> None:
    keeps_contract(lambda: (LogHyperparameters({"width": 8}, data="tiny"), Metrics()), "log_hyperparameters")


def logged(learner: Learner, train: Any = None, **options: Any) -> dict[str, Any]:
    """What a fit logs, by name."""
    found: dict[str, Any] = {}
    learner.add(on("log_value", lambda record, **given: found.update({record.name: record.value}), "listen"))
    learner.fit(batches(3) if train is None else train, **{"epochs": 1, **options})
    return found


def known(*plugins: Any, train: Any = None, **options: Any) -> dict[str, Any]:
    given = logged(make_learner(*plugins, LogHyperparameters(), **options), train)["hyperparameters"]
    assert isinstance(given, Hyperparameters)
    return dict(given.values)


def test_log_hyperparameters_knows_the_learner() -> None:
    found = known(seed=5, accumulate=2)
    assert {name: found[name] for name in found if not name.startswith("optimizer.")} == {
        "seed": 5,
        "accumulate": 2,
        "loss_is_sum": False,
        "world_size": 1,
        "plugins": "listen, log_hyperparameters",
        "loss": "MSELoss",
        "batch_size": 4,
        "model": "Linear",
        "model.parameters": 4,
        "model.trained_parameters": 4,
        "optimizer": "SGD",
    }
    assert found["optimizer.lr"] == 0.1
    assert found["optimizer.nesterov"] is False


def test_log_hyperparameters_takes_values() -> None:
    found = logged(make_learner(LogHyperparameters({"width": 8, "loss": "mine"}, note=None)))["hyperparameters"].values
    assert (found["width"], found["note"], found["loss"]) == (8, None, "mine")


def test_log_hyperparameters_of_parameter_groups() -> None:
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5, "name": "bias"}]
    optimizer = torch.optim.Adam(groups, lr=0.25)
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[LogHyperparameters()], standard=False)
    found = logged(learner)["hyperparameters"].values
    assert {name: found[name] for name in found if name.endswith(("lr", "betas.1"))} == {
        "optimizer.0.lr": 0.25,
        "optimizer.0.betas.1": 0.999,
        "optimizer.bias.lr": 0.5,
        "optimizer.bias.betas.1": 0.999,
    }


def test_log_hyperparameters_has_the_learning_rate_before_its_schedule() -> None:
    assert known(Schedule(warmup(2, then=linear())))["optimizer.lr"] == 0.1


def test_log_hyperparameters_knows_the_options_of_plugins() -> None:
    found = known(ClipGradNorm(0.75))
    assert {name: found[name] for name in found if name.startswith("plugins.")} == {
        "plugins.clip_grad_norm.max_norm": 0.75,
        "plugins.clip_grad_norm.norm_type": 2.0,
        "plugins.clip_grad_norm.over": "each",
    }


def test_log_hyperparameters_leaves_out_secrets() -> None:
    class Sender:
        def __init__(self, api_key: str, url: str, password: str) -> None:
            self.api_key, self.url, self._password = api_key, url, password

        update_end = on("update_end", lambda **given: None).update_end

    found = known(Sender("abc", "http://127.0.0.1", "def"))
    assert [name for name in found if name.startswith("plugins.sender")] == ["plugins.sender.url"]
    assert not {"abc", "def"} & set(found.values())


def test_log_hyperparameters_masks_given_secrets() -> None:
    given = {"password": "abc", "db_pwd": 7, "http.auth": "me:abc", "url": "https://me:abc@host/x", "tokenizer": "gpt2"}
    plugin = LogHyperparameters(given)
    found = logged(make_learner(plugin))["hyperparameters"].values
    assert {name: found[name] for name in given} == {
        "password": "***",
        "db_pwd": "***",
        "http.auth": "***",
        "url": "https://me:***@host/x",
        "tokenizer": "gpt2",
    }
    assert plugin.values == given


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (lambda data: DataLoader(data, batch_size=5), 5),
        (lambda data: DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(range(12), 3, False)), 3),
        (lambda data: [data[:2], data[2:4]], 2),
        (lambda data: lambda: [data[:2]], None),
    ],
)
def test_log_hyperparameters_asks_the_data_for_its_batch_size(loader: Any, size: int | None) -> None:
    inputs, targets = (torch.cat(each) for each in zip(*batches(3), strict=True))
    assert known(train=loader(TensorDataset(inputs, targets))).get("batch_size") == size


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.functional.mse_loss, "mse_loss"),
        (partial(nn.functional.huber_loss, delta=2.0), "huber_loss"),
        (nn.HuberLoss(), "HuberLoss"),
        (lambda outputs, targets: outputs.mean(), None),
    ],
)
def test_log_hyperparameters_names_the_loss(loss: Any, name: str | None) -> None:
    learner = Learner(
        nn.Linear(3, 1),
        loss,
        lambda params: torch.optim.SGD(params, lr=0.1),
        plugins=[LogHyperparameters()],
        standard=False,
    )
    assert logged(learner)["hyperparameters"].values.get("loss") == name


def test_log_hyperparameters_logs_the_last_metrics_at_the_end() -> None:
    learner = make_learner(LogHyperparameters(), Metrics())
    found = logged(learner, val=batches(2), epochs=2)
    assert {name: found[name] for name in found if name.startswith("final/")} == {
        f"final/{name}": value for name, value in learner.metrics.items()
    }
    assert "final/val/loss" in found


def test_log_hyperparameters_come_into_the_log_at_both_ends(tmp_path: Path) -> None:
    learner = make_learner(LogHyperparameters(width=3), Metrics(), LogTo(tmp_path / "log.jsonl"))
    learner.fit(batches(2), epochs=1)
    log = read_log(tmp_path / "log.jsonl")
    assert [record.name for record in log.records] == ["hyperparameters", "final/train/loss"]
    assert log.records[0].value["values"]["width"] == 3
    assert log.values("final/train/loss") == [learner.metrics["train/loss"]]


def test_log_hyperparameters_logs_no_end_after_an_error() -> None:
    learner = make_learner(LogHyperparameters(), Metrics(), raising("step_end", RuntimeError("test"), at=1))
    names: list[str] = []
    learner.add(on("log_value", lambda record, **given: names.append(record.name), "listen"))
    with pytest.raises(RuntimeError, match="test"):
        learner.fit(batches(3), epochs=1)
    assert names == ["hyperparameters"]


def test_log_hyperparameters_logs_each_fit() -> None:
    learner = make_learner(LogHyperparameters())
    names: list[str] = []
    learner.add(on("log_value", lambda record, **given: names.append(record.name), "listen"))
    learner.fit(batches(1), epochs=1)
    learner.fit(batches(1), epochs=1)
    assert names == ["hyperparameters"] * 2


def test_log_hyperparameters_of_a_run_that_is_started_again_are_logged_once(tmp_path: Path) -> None:
    for epochs in (1, 1, 2):
        own = [LogHyperparameters(), Metrics(), LogTo(tmp_path / "log.jsonl")]
        make_learner(*own, Checkpoint(tmp_path / "run", resume="auto")).fit(batches(2), epochs=epochs)
    log = read_log(tmp_path / "log.jsonl")
    assert [(record.name, record.step) for record in log.records] == [
        ("hyperparameters", 0),
        ("final/train/loss", 2),
        ("final/train/loss", 4),
    ]


@pytest.mark.parametrize("value", [[1], torch.tensor(1.0), Path("a")])
def test_log_hyperparameters_refuses_other_values(value: Any) -> None:
    with pytest.raises(PluginError, match=r"LogHyperparameters: 'width' is .*; str\(\.\.\.\) makes one"):
        LogHyperparameters(width=value)


def test_log_hyperparameters_refuses_what_is_no_mapping() -> None:
    with pytest.raises(PluginError, match=r"values is list\(int\): give a dict"):
        LogHyperparameters([1])  # type: ignore[arg-type]
