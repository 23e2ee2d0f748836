"""``LogGradients``: norms of gradients and sizes of updates, by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.processes import run
from helpers import batches, keeps_contract, on, raising
from loopkit_sharded import FSDP
from torch import nn
from torch.utils.data import DataLoader

from loopkit import Learner, Phase
from loopkit.errors import PluginError
from loopkit.events import UpdateBegin, UpdateEnd
from loopkit.logs import Histogram
from loopkit.plugins import ClipGradNorm, LogTo, MixedPrecision
from loopkit_insight import LogGradients, LogHistograms


def test_plugin_keeps_the_contract() -> None:
    keeps_contract(LogGradients, "log_gradients")
    keeps_contract(lambda: LogGradients(every=2, depth=1, ratio=True))


class Tree(nn.Module):
    """Two levels of modules, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"one": nn.Linear(3, 4), "two": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder["two"](self.encoder["one"](x).tanh())) * self.scale


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def logged(*plugins: Any, optimizer: Any = sgd, steps: int = 4, model: Any = None) -> list[dict[str, Any]]:
    """What each update logs, by name; the norms by hand of what the optimizer gets are under ``by hand``."""
    rows: list[dict[str, Any]] = []

    def note(record: Any, **given: Any) -> None:
        while len(rows) < record.update:
            rows.append({})
        rows[record.update - 1][record.name] = record.value

    torch.manual_seed(0)
    learner = Learner(
        model or Tree(), nn.MSELoss(), optimizer, plugins=[*plugins, on("log_value", note)], standard=False
    )
    learner.fit(batches(steps), epochs=1)
    return rows


def by_hand(steps: int = 4) -> list[dict[str, torch.Tensor]]:
    """The gradients of each update by name, and the parameters before and after it."""
    torch.manual_seed(0)
    model = Tree()
    optimizer = sgd(model.parameters())
    found = []
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        found.append({name: (p.grad.clone(), before[name], p.detach().clone()) for name, p in model.named_parameters()})
    return found


def norm(tensors: Any) -> float:
    return torch.nn.utils.get_total_norm(list(tensors)).item()


def test_log_gradients_is_the_norm_of_torch() -> None:
    expected = [{"grad_norm": norm(g for g, _, _ in each.values())} for each in by_hand()]
    assert logged(LogGradients()) == expected


def test_log_gradients_logs_modules_by_depth() -> None:
    expected = [
        {
            "grad_norm": norm(g for g, _, _ in each.values()),
            "grad_norm/encoder.one": norm(each[f"encoder.one.{kind}"][0] for kind in ("weight", "bias")),
            "grad_norm/encoder.two": norm(each[f"encoder.two.{kind}"][0] for kind in ("weight", "bias")),
            "grad_norm/head": norm(each[f"head.{kind}"][0] for kind in ("weight", "bias")),
            "grad_norm/model": norm([each["scale"][0]]),
        }
        for each in by_hand()
    ]
    assert logged(LogGradients(depth=2)) == expected
    assert {name for row in logged(LogGradients(depth=1)) for name in row} == {
        "grad_norm",
        "grad_norm/encoder",
        "grad_norm/head",
        "grad_norm/model",
    }


def test_log_gradients_logs_the_size_of_updates() -> None:
    rows = logged(LogGradients(depth=1, ratio=True))
    for row, each in zip(rows, by_hand(), strict=True):
        head = [each[f"head.{kind}"] for kind in ("weight", "bias")]
        sizes = norm(after - before for _, before, after in head), norm(before for _, before, _ in head)
        assert row["update_ratio/head"] == (torch.tensor(sizes[0]) / torch.tensor(sizes[1])).item()
        assert row["update_ratio"] > 0


def test_log_gradients_logs_parameter_groups() -> None:
    def groups(params: Any) -> torch.optim.Optimizer:
        *body, weight, bias = params
        return torch.optim.SGD([{"params": body}, {"params": [weight, bias], "name": "last"}], lr=0.1)

    assert set(logged(LogGradients(), optimizer=groups)[0]) == {"grad_norm", "grad_norm/group0", "grad_norm/last"}


def test_log_gradients_logs_every_so_many_updates() -> None:
    rows = logged(LogGradients(every=3), steps=7)
    assert [bool(row) for row in rows] == [False, False, True, False, False, True]
    assert rows[2] == logged(LogGradients(), steps=7)[2]


@pytest.mark.parametrize(("clipped", "bound"), [(False, False), (True, True)])
def test_log_gradients_measures_before_or_after_clipping(clipped: bool, bound: bool) -> None:
    rows = logged(LogGradients(clipped=clipped), ClipGradNorm(1e-3))
    assert [row["grad_norm"] < 1.1e-3 for row in rows] == [bound] * 4


def test_log_gradients_leaves_out_skipped_updates() -> None:
    skip = on("update_begin", lambda step, **given: step.skip_update("test") if step.index == 1 else None, "skip")
    plugin = LogGradients(ratio=True)
    assert len(logged(plugin, skip)) == 3
    assert plugin._copies == []


def test_log_gradients_of_half_precision_does_not_overflow() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(torch.float16)
    values: list[Any] = []
    listen = on("log_value", lambda record, **given: values.append(record.value))
    large = on("update_begin", lambda step, **given: [p.grad.fill_(6e4) for p in step.params], "a", updates=("grads",))
    learner = Learner(model, nn.MSELoss(), sgd, plugins=[LogGradients(), listen, large], standard=False)
    learner.fit([(x.half(), y.half()) for x, y in batches(1)], epochs=1)
    assert values == [torch.full((4,), 6e4, dtype=torch.float16).float().norm().item()]


def test_log_gradients_of_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).double()).float()

    row = logged(LogGradients(depth=1), model=Mixed())[0]
    parts = row["grad_norm/first"] ** 2 + row["grad_norm/second"] ** 2
    assert row["grad_norm"] ** 2 == pytest.approx(parts, rel=1e-6)  # sums of squares in another order


def test_log_gradients_of_several_optimizers_under_their_names() -> None:
    class Rivals(Phase):
        name, training = "train", True
        emits = (UpdateBegin, UpdateEnd)

        def step(self, learner: Any, step: Any) -> None:
            for name, model in learner.models.items():
                step.backward(model(step.batch[0]).square().mean(), name)
                step.update(name)

    names: list[tuple[str, int]] = []
    listen = on("log_value", lambda record, **given: names.append((record.name, record.step)))
    models = {"critic": nn.Linear(3, 1), "generator": nn.Linear(3, 1)}
    learner = Learner(
        models,
        None,
        dict.fromkeys(models, sgd),
        plugins=[LogGradients(every=2, depth=1), listen],
        phases=[Rivals()],
        standard=False,
    )
    learner.fit(batches(4), epochs=1)
    each = ["grad_norm/critic", "grad_norm/critic/critic", "grad_norm/generator", "grad_norm/generator/generator"]
    assert names == [(name, step) for step in (2, 4) for name in each]


def test_log_gradients_with_mixed_precision_are_unscaled() -> None:
    rows = logged(LogGradients(), MixedPrecision("bfloat16"))
    plain = logged(LogGradients())
    assert rows[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=0.05)  # bfloat16 has 8 bits


def test_log_gradients_after_an_error_lets_go(tmp_path: Any) -> None:
    plugin = LogGradients(ratio=True)
    learner = Learner(
        Tree(), nn.MSELoss(), sgd, plugins=[plugin, raising("update_end", RuntimeError(), at=1)], standard=False
    )
    with pytest.raises(RuntimeError):
        learner.fit(batches(3), epochs=1)
    learner.add(LogTo(tmp_path / "log.jsonl"))
    learner.fit(batches(3), epochs=1)
    assert plugin._copies == []


@pytest.mark.parametrize("options", [{"every": 0}, {"every": True}, {"every": 1.5}, {"depth": 0}, {"depth": "1"}])
def test_log_gradients_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match=rf"LogGradients: {next(iter(options))} is .*from 1"):
        LogGradients(**options)


def sharded(rank: int) -> list[dict[str, float]]:
    """What is logged in one of two processes that hold a part of each parameter."""
    found: list[tuple[str, int, float]] = []
    torch.manual_seed(0)
    learner = Learner(
        Tree(),
        nn.MSELoss(),
        sgd,
        plugins=[
            FSDP(),
            LogGradients(depth=1, ratio=True),
            LogHistograms(every=1, gradients=True),
            on("log_value", lambda record, **given: found.append((record.name, record.update, record.value))),
        ],
        standard=False,
    )
    learner.fit(DataLoader([(x[:2], y[:2]) for x, y in batches(4)], batch_size=None), epochs=1)
    rows: list[dict[str, float]] = [{}, {}]
    for name, update, value in found:
        rows[update - 1 if update else 0][name] = sum(value.counts) if isinstance(value, Histogram) else float(value)
    return rows


@pytest.mark.two_processes
def test_log_gradients_of_sharded_parameters_are_those_of_the_whole() -> None:
    one, other = run(sharded, 2, timeout=60)
    norms = [{name: value for name, value in row.items() if "/" not in name or "norm/" in name} for row in one]
    assert norms == [{name: row[name] for name in kept} for row, kept in zip(other, norms, strict=True)]
    parts = [row["grad_norm/encoder"] ** 2 + row["grad_norm/head"] ** 2 + row["grad_norm/model"] ** 2 for row in one]
    assert [row["grad_norm"] ** 2 for row in one] == pytest.approx(parts, rel=1e-6)  # sums in another order
    assert one[0]["update_ratio"] > 0
    both = {name: value + other[0][name] for name, value in one[0].items() if name.startswith("parameters/")}
    assert both == {f"parameters/{name}": p.numel() for name, p in Tree().named_parameters()}
