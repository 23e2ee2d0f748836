"""Metrics of two processes: those of all batches, in both of them."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from helpers import Late, on
from torch import nn

from distributed.processes import run
from loopkit import CancelEpoch, Learner, Phase, every, hookimpl
from loopkit.distributed import join
from loopkit.errors import PluginError, WorldError
from loopkit.metrics import F1, Accuracy, Mean
from loopkit.plugins import History, Metrics, Progress

torchmetrics = Late("torchmetrics")
SIZES = [8, 12, 8, 16, 5, 1]


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    assert torchmetrics.Metric  # and not in each process that a test forks


def mae(outputs, targets):
    return (outputs - targets).abs()


def wrong(outputs, targets):
    return outputs.argmax(1).ne(targets)


def classified():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(sum(SIZES), 4, generator=generator)
    targets = torch.randint(4, (sum(SIZES),), generator=generator)
    return list(zip(outputs.split(SIZES), targets.split(SIZES), strict=True))


def regressions(sizes=(4, 4, 4, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 3, generator=generator).double(), torch.randn(n, 1, generator=generator).double())
        for n in sizes
    ]


def shared(data, rank):
    """Every second batch."""
    return data[rank::2]


class Joins:
    """Lets the learner know the other processes; nothing is synced."""

    name = "joins"

    def __init__(self):
        join("gloo", timeout=60)

    @hookimpl
    def setup_model(self, learner, model):
        learner.world = join()
        return model


class Given(Phase):
    """Outputs are given."""

    name = "val"

    def step(self, learner, step):
        step.outputs, step.targets = step.batch
        step.number = step.targets.sum()


def total():
    """Reduced twice, it would be too large."""

    class Total(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

        def update(self, outputs, targets):
            self.total += targets.sum()

        def compute(self):
            return self.total

    return Total()


def everything():
    return Metrics(
        Accuracy(),
        F1("weighted"),
        Mean("number"),
        wrong,
        total(),
        torch_accuracy=torchmetrics.Accuracy(task="multiclass", num_classes=4),
        auroc=torchmetrics.AUROC(task="multiclass", num_classes=4),
        pair=torchmetrics.MetricCollection(
            {
                "p": torchmetrics.Precision(task="multiclass", num_classes=4),
                "r": torchmetrics.Recall(task="multiclass", num_classes=4),
            }
        ),
    )


def evaluating(*plugins, phase=Given):
    return Learner(nn.Identity(), plugins=plugins, phases=[phase()], standard=False)


def fitting(*plugins, lr=0.0, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    options.setdefault("standard", False)
    return Learner(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=lr), plugins=plugins, **options)


def close(values):
    return {name: pytest.approx(value, rel=1e-12) for name, value in values.items()}  # order of the sums


def test_metrics_of_uneven_shards_are_those_of_all_batches():
    def evaluate(rank):
        learner = evaluating(Joins(), everything())
        return learner.evaluate(shared(classified(), rank)), dict(learner.metrics)

    expected = evaluating(everything()).evaluate(classified())
    assert len(expected) == 9
    results = run(evaluate, 2)
    assert results[0][0] == results[1][0] == results[0][1] == results[1][1]  # to the bit
    assert results[0][0] == close(expected)
    for name in ("accuracy", "f1", "total", "torch_accuracy", "p", "r"):
        assert results[0][0][f"val/{name}"] == expected[f"val/{name}"]


def test_metrics_of_a_fit_are_those_of_all_batches():
    def fit(rank):
        learner = fitting(Joins(), Metrics(mae), History())
        result = learner.fit(shared(regressions((4, 4, 4, 1)), rank), shared(regressions((6, 2), 1), rank), epochs=2)
        return result.metrics, [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]

    alone = fitting(Metrics(mae))  # the rate is 0: all see the same model
    expected = alone.fit(regressions((4, 4, 4, 1)), regressions((6, 2), 1), epochs=2).metrics
    results = run(fit, 2)
    assert results[0][0] == results[1][0]
    assert results[0][0] == close(expected)
    assert expected.keys() == {"train/loss", "train/mae", "val/loss", "val/mae"}
    assert len(results[0][1]) == len(results[1][1]) == 4
    assert all(row[name] == value for row in results[1][1] for name, value in results[0][0].items() if name in row)


def test_metrics_of_a_validation_inside_a_pass_are_those_of_all_batches():
    def fit(rank):
        learner = fitting(Joins(), Metrics(mae))
        train, val = shared(regressions(), rank), shared(regressions((6, 2), 1), rank)
        return learner.fit(train, val, epochs=1, validate=every(updates=1)).metrics

    alone = fitting(Metrics(mae)).fit(regressions(), regressions((6, 2), 1), epochs=1, validate=every(updates=1))
    results = run(fit, 2)
    assert results[0] == results[1] == close(alone.metrics)


def test_metrics_of_a_rank_that_has_nothing_to_add_are_those_of_the_other():
    class Sometimes(Given):
        def step(self, learner, step):
            if learner.world.rank == 1:
                super().step(learner, step)

    def evaluate(rank):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            learner = evaluating(Joins(), everything(), phase=Sometimes)
            return learner.evaluate(shared(classified(), rank))

    results = run(evaluate, 2)
    expected = evaluating(everything()).evaluate(shared(classified(), 1))
    assert results == [expected, expected]


def test_metrics_of_a_phase_without_outputs_are_none():
    def predict(rank):
        learner = fitting(Joins(), Metrics(mae, Accuracy(), torchmetrics.MeanMetric()))
        learner.predict(shared(regressions(), rank))
        return learner.metrics

    assert run(predict, 2) == [{}, {}]


def test_metrics_of_a_cancelled_pass_are_those_of_its_steps():
    def cancel(step, **_):
        if step.index == 1:
            raise CancelEpoch("enough")

    def evaluate(rank):
        return evaluating(Joins(), everything(), on("step_begin", cancel)).evaluate(shared(classified(), rank))

    results = run(evaluate, 2)
    assert results[0] == results[1] == close(evaluating(everything()).evaluate(classified()[:2]))


def test_metrics_of_a_pass_take_one_exchange():
    def evaluate(rank, metrics):
        learner = evaluating(Joins(), metrics)
        sent = []
        gather = learner.world.gather
        learner.world.gather = lambda value: sent.append(value) or gather(value)
        learner.evaluate(shared(classified(), rank))
        return sum(isinstance(value, dict) and "metrics" in value for value in sent), len(sent)

    (one, all_of_one), _ = run(evaluate, 2, Metrics())
    (many, all_of_many), _ = run(evaluate, 2, everything())
    assert one == many == 1
    assert all_of_one == all_of_many


def test_metrics_of_a_pass_that_fails_send_nothing():
    def evaluate(rank):
        def fail(step, **_):
            raise RuntimeError("deliberate")

        learner = evaluating(Joins(), everything(), on("step_end", fail))
        gather, sent = learner.world.gather, []
        learner.world.gather = lambda value: sent.append(value) or gather(value)
        with pytest.raises(RuntimeError, match="deliberate"):
            learner.evaluate(shared(classified(), rank))
        return any(isinstance(value, dict) and "metrics" in value for value in sent)

    assert run(evaluate, 2) == [False, False]


class Largest:
    """A metric of one's own, which cannot be merged."""

    def reset(self):
        self.value = torch.tensor(-torch.inf)

    def update(self, outputs, targets):
        self.value = torch.maximum(self.value, outputs.max())

    def compute(self):
        return self.value


class MergedLargest(Largest):
    def state_dict(self):
        return {"value": self.value}

    def merge(self, states):
        self.value = torch.stack([state["value"] for state in states]).amax()


def test_metric_of_ones_own_is_merged_by_itself():
    def evaluate(rank):
        return evaluating(Joins(), Metrics(MergedLargest())).evaluate(shared(classified(), rank))

    largest = max(outputs.max().item() for outputs, _ in classified())
    assert run(evaluate, 2) == [{"val/mergedlargest": largest}] * 2


def test_metric_that_cannot_be_merged_is_refused_before_the_first_step():
    def evaluate(rank):
        steps = []
        learner = evaluating(Joins(), Metrics(Largest()), on("step_begin", lambda **_: steps.append(1)))
        with pytest.raises(PluginError) as caught:
            learner.evaluate(shared(classified(), rank))
        return str(caught.value), steps

    results = run(evaluate, 2)
    assert results[0] == results[1]
    assert results[0][0].startswith(
        "metric 'largest' (Largest) cannot be merged, and each of 2 processes sees a part of"
    )
    assert results[0][1] == []


def test_metric_that_cannot_be_merged_serves_a_process_alone():
    largest = max(outputs.max().item() for outputs, _ in classified())
    assert evaluating(Metrics(Largest())).evaluate(classified()) == {"val/largest": largest}


def test_different_metrics_are_refused():
    def evaluate(rank):
        learner = evaluating(Joins(), Metrics(Accuracy(), F1()) if rank else Metrics(Accuracy()))
        with pytest.raises(WorldError) as caught:
            learner.evaluate(shared(classified(), rank))
        return str(caught.value)

    results = run(evaluate, 2)
    assert results[0].startswith(
        "rank 0 ends an epoch of phase 'val' with the metrics loss, accuracy; rank 1 one of 'val' with "
        "loss, accuracy, f1"
    )
    assert results[1].startswith(
        "rank 1 ends an epoch of phase 'val' with the metrics loss, accuracy, f1; rank 0 one of"
    )


def test_merged_value_that_fails_names_the_metric():
    class Fails(MergedLargest):
        def merge(self, states):
            raise ZeroDivisionError("deliberate")

    def evaluate(rank):
        with pytest.raises(ZeroDivisionError) as caught:
            evaluating(Joins(), Metrics(Fails())).evaluate(shared(classified(), rank))
        return caught.value.__notes__

    assert all("metric 'fails' raised this" in notes for notes in run(evaluate, 2))


def test_sums_are_merged_by_rank_in_every_process():
    def evaluate(rank):
        value = [1e16, 1.0, -1e16][rank]
        data = [(torch.zeros(1, 4), torch.tensor([value], dtype=torch.float64))]
        return evaluating(Joins(), Metrics(Mean("number"))).evaluate(data)["val/number"]

    assert run(evaluate, 3) == [0.0, 0.0, 0.0]  # and 1 / 3 if the first two are not added first


# Displays


def test_displays_are_those_of_the_first_rank():
    def fit(rank):
        out = io.StringIO()
        learner = fitting(Joins(), Progress(bar=True, file=out), standard=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner.fit(shared(regressions(), rank), epochs=1)
        return out.getvalue(), learner.metrics, [str(each.message) for each in caught if "plugin" in str(each.message)]

    (shown, metrics, warned), (hidden, same, silent) = run(fit, 2)
    assert f"{metrics['train/loss']:.4f}" in shown.splitlines()[-1]
    assert "epoch 1/1 train" in shown
    assert metrics == same
    assert hidden == ""
    assert warned == silent == []
