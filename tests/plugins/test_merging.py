"""Merging what is accumulated: which metrics can, torchmetrics objects, and the way to the host."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import Late
from torch import nn

from loopkit.errors import PluginError
from loopkit.metrics import F1, Accuracy, BinaryAccuracy, FunctionMetric, Loss, Mean, Metric, added
from loopkit.plugins.merging import accumulated, can_merge, merge, packed, to_host, unpacked

torchmetrics = Late("torchmetrics")


class Plain:
    def update(self, outputs, targets):
        pass

    def compute(self):
        return 0.0

    def reset(self):
        pass


class Mergeable(Plain):
    def state_dict(self):
        return {}

    def merge(self, states):
        pass


class OwnState(Metric):
    def reset(self):
        self.largest = 0.0


class Merged(OwnState):
    def merge(self, states):
        self.largest = max(state["largest"] for state in states)


class AnotherState(Merged):
    def reset(self):
        self.largest = self.lowest = 0.0


class Renamed(Accuracy):
    name = "top"


class Counts(Accuracy):
    def reset(self):
        super().reset()
        self.lowest = 0.0


class InModule(nn.Module):
    update = compute = reset = lambda self, *given: None


ABLE = [Loss(), Mean("x"), Accuracy(), BinaryAccuracy(from_logits=True), F1(), FunctionMetric(len), Renamed()]


@pytest.mark.parametrize("metric", [*ABLE, Merged(), Mergeable()], ids=lambda m: type(m))
def test_can_merge(metric):
    assert can_merge(metric)


@pytest.mark.parametrize("metric", [Plain(), OwnState(), AnotherState(), Counts(), InModule()], ids=lambda m: type(m))
def test_cannot_merge_a_state_that_no_merge_knows(metric):
    assert not can_merge(metric)


# torchmetrics


def largest():
    """As others write them: nothing is said of full_state_update."""

    class Largest(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("largest", default=torch.tensor(0.0), dist_reduce_fx="max")

        def update(self, outputs, targets):
            self.largest = torch.maximum(self.largest, outputs.max())

        def compute(self):
            return self.largest

    return Largest()


def pair():
    return torchmetrics.MetricCollection(
        {
            "precision": torchmetrics.Precision(task="multiclass", num_classes=4, average="macro"),
            "recall": torchmetrics.Recall(task="multiclass", num_classes=4, average="macro"),
        }
    )


FOREIGN = {
    "accuracy": lambda: torchmetrics.Accuracy(task="multiclass", num_classes=4),
    "confusion": lambda: torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4),
    "collection": pair,
    "auroc": lambda: torchmetrics.AUROC(task="multiclass", num_classes=4),
    "wrapped": lambda: torchmetrics.ClasswiseWrapper(
        torchmetrics.Recall(task="multiclass", num_classes=4, average="none")
    ),
    "composed": lambda: torchmetrics.Accuracy(task="multiclass", num_classes=4) * 2.0,
    "largest": largest,
    "pearson": lambda: torchmetrics.PearsonCorrCoef(),
}


def test_can_merge_torchmetrics_objects():
    assert can_merge(torchmetrics.MeanMetric())


def parts_of(name, counts):
    """One metric for each count of batches, and one that saw them all."""
    generator = torch.Generator().manual_seed(0)
    whole, parts = FOREIGN[name](), [FOREIGN[name]() for _ in counts]
    for part, count in zip(parts, counts, strict=True):
        for _ in range(count):
            outputs, targets = torch.randn(9, 4, generator=generator), torch.randint(4, (9,), generator=generator)
            if name == "pearson":
                outputs, targets = outputs[:, 0], outputs[:, 0] + outputs[:, 1]
            whole.update(outputs, targets)
            part.update(outputs, targets)
    return whole, parts


def values(metric):
    value = metric.compute()
    return value if isinstance(value, dict) else {"value": value}


@pytest.mark.parametrize("counts", [(2, 3), (1, 0, 2)])
@pytest.mark.parametrize("name", FOREIGN)
def test_torchmetrics_objects_merge_to_that_of_all_batches(name, counts):
    whole, parts = parts_of(name, counts)
    if name == "pearson" and 0 in counts:
        pytest.skip("torchmetrics divides by the count of each process")
    together = FOREIGN[name]()
    merge(together, [to_host(accumulated(part)) for part in parts])
    for key, value in values(whole).items():
        if name == "pearson":  # made of float32 statistics of the parts
            assert torch.allclose(values(together)[key], value, rtol=1e-5)
        else:
            assert torch.equal(values(together)[key], value)


@pytest.mark.parametrize("name", [name for name in FOREIGN if name != "pearson"])
def test_torchmetrics_objects_go_on_after_a_merge(name):
    whole, parts = parts_of(name, (2, 1, 1))
    together = FOREIGN[name]()
    merge(together, [to_host(accumulated(part)) for part in parts], goes_on=True)
    generator = torch.Generator().manual_seed(1)
    outputs, targets = torch.randn(9, 4, generator=generator), torch.randint(4, (9,), generator=generator)
    whole.update(outputs, targets)
    together.update(outputs, targets)
    assert all(torch.equal(values(together)[key], value) for key, value in values(whole).items())


def test_torchmetrics_states_that_are_kept_apart_cannot_go_on():
    _, parts = parts_of("pearson", (1, 1))
    with pytest.raises(PluginError, match=r"PearsonCorrCoef keeps 'mean_x' .*with another number of processes"):
        merge(FOREIGN["pearson"](), [accumulated(part) for part in parts], goes_on=True)


def test_torchmetrics_objects_send_their_states_alone():
    metric = FOREIGN["accuracy"]()
    metric.network = nn.Linear(100, 100)
    assert accumulated(metric).keys() == {"tp", "fp", "tn", "fn"}


def test_metrics_of_ones_own_get_the_states_by_rank():
    class Seen(Mergeable):
        def merge(self, states):
            self.states = states

    metric = Seen()
    merge(metric, [{"a": 1}, {"a": 2}])
    assert metric.states == [{"a": 1}, {"a": 2}]


# To the host


@pytest.mark.parametrize("copied", [to_host, lambda state: unpacked(pickle.loads(pickle.dumps(packed(state))))])
def test_to_host_and_packing_copy_every_kind_of_tensor(copied):
    state = {
        "count": 3,
        "none": None,
        "float64": torch.tensor(1.5, dtype=torch.float64),
        "nested": [torch.arange(5), {"bool": torch.tensor([True, False])}, (torch.zeros(0, 3), torch.ones(2, 3).T)],
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "grad": torch.ones(2, requires_grad=True),
    }
    copied = copied(state)
    assert copied["count"] == 3
    assert copied["none"] is None
    assert isinstance(copied["nested"][2], tuple)
    for one, other in [
        (state["float64"], copied["float64"]),
        (state["nested"][0], copied["nested"][0]),
        (state["nested"][1]["bool"], copied["nested"][1]["bool"]),
        (state["nested"][2][0], copied["nested"][2][0]),
        (state["nested"][2][1], copied["nested"][2][1]),
        (state["half"], copied["half"]),
        (state["complex"], copied["complex"]),
        (state["grad"], copied["grad"]),
    ]:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert other.data_ptr() != one.data_ptr() or not one.numel()
        assert not other.requires_grad


def test_to_host_cuts_a_slice_from_its_storage():
    large = torch.zeros(100_000)
    copied = to_host({"a": large[:2], "b": large[5]})
    assert [tensor.untyped_storage().nbytes() for tensor in copied.values()] == [8, 4]
    assert len(pickle.dumps(packed({"a": large[:2], "b": large[5]}))) < 1_000


def test_to_host_leaves_what_has_no_tensor():
    state = {"count": 3, "values": [1.0, None]}
    assert to_host(copy.deepcopy(state)) == state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_to_host_takes_one_transfer():
    state = {"a": torch.arange(3, device="cuda"), "b": [torch.tensor(0.5, device="cuda"), torch.ones(2)]}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        copied = to_host(state)
    assert sum("DtoH" in event.key for event in profiler.key_averages()) == 1
    assert torch.equal(copied["a"], torch.arange(3))
    assert copied["b"][0].item() == 0.5


def test_added_is_the_merge_of_a_metric_of_counts():
    class Hits(Metric):
        def reset(self):
            self.hits = 0

        def merge(self, states):
            self.load_state_dict(added(states))

    metric = Hits()
    assert can_merge(metric)
    merge(metric, [{"hits": 2}, {"hits": 3}])
    assert metric.hits == 5
