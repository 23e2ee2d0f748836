"""The metrics themselves, against scikit-learn and against the whole data taken at once."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import Late
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from loopkit.errors import CallError, PluginError
from loopkit.metrics import F1, Accuracy, BinaryAccuracy, FunctionMetric, Loss, Mean, Metric, Precision, Recall, added

sklearn = Late("sklearn.metrics")
SCORES = {
    Precision: lambda: sklearn.precision_score,
    Recall: lambda: sklearn.recall_score,
    F1: lambda: sklearn.f1_score,
}
NEVER = {"none": [], "never a target": [1], "never at all": [1, 3]}


def classification(classes=5, samples=103, never=(), image=()):
    """Outputs ``(samples, classes, *image)`` and targets ``(samples, *image)``."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(samples, classes, *image, generator=generator)
    targets = torch.randint(classes, (samples, *image), generator=generator)
    for each in never:
        targets[targets == each] = 0
    return outputs, targets


def in_batches(metric, outputs, targets, size=32):
    """The value after batches of 32, 32, 32 and 7 samples."""
    for pair in zip(outputs.split(size), targets.split(size), strict=True):
        metric.update(*pair)
    return float(metric.compute())


class Reads(TorchFunctionMode):
    """Counts what reads a tensor on the host."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero"):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("metric", [Accuracy(), Precision(), Recall(), F1(), BinaryAccuracy(from_logits=True)])
def test_metrics_read_nothing_of_a_device(metric):
    outputs, targets = (each.to("meta") for each in classification())  # which has no values: to read one fails
    if isinstance(metric, BinaryAccuracy):
        outputs, targets = outputs[:, 0], targets % 2
    for pair in zip(outputs.split(32), targets.split(32), strict=True):
        metric.update(*pair)
    assert metric.compute().device.type == "meta"


@pytest.mark.parametrize("metric", [Accuracy(), Accuracy(ignore_index=1), BinaryAccuracy(from_logits=True)])
def test_counts_on_the_host_go_on_from_tensors(metric):
    outputs, targets = classification()
    if isinstance(metric, BinaryAccuracy):
        outputs, targets = outputs[:, 0], targets % 2
    whole = copy.deepcopy(metric)
    in_batches(metric, outputs[:50], targets[:50])
    metric.load_state_dict({key: torch.tensor(value) for key, value in metric.state_dict().items()})
    assert in_batches(metric, outputs[50:], targets[50:]) == in_batches(whole, outputs, targets)


@pytest.mark.parametrize("never", NEVER.values(), ids=NEVER)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("score", SCORES)
def test_class_scores_equal_scikit_learn(score, average, never):
    outputs, targets = classification(never=never)
    if len(never) > 1:
        outputs[:, never] = -100.0  # never predicted either
    expected = SCORES[score]()(targets, outputs.argmax(1), average=average, labels=range(5), zero_division=0)
    assert in_batches(score(average), outputs, targets) == pytest.approx(expected, rel=1e-14)  # order of the sums


@pytest.mark.parametrize("score", SCORES)
def test_class_scores_ignore_an_index(score):
    outputs, targets = classification()
    targets[::3] = -100
    kept = targets != -100
    expected = SCORES[score]()(
        targets[kept], outputs.argmax(1)[kept], average="macro", labels=range(5), zero_division=0
    )
    value = in_batches(score(ignore_index=-100), outputs, targets)
    assert value == pytest.approx(expected, rel=1e-14)  # order of the sums


@pytest.mark.parametrize("score", SCORES)
def test_class_scores_take_images(score):
    outputs, targets = classification(image=(3, 4))
    expected = SCORES[score]()(targets.flatten(), outputs.argmax(1).flatten(), average="macro", zero_division=0)
    assert in_batches(score(), outputs, targets) == pytest.approx(expected, rel=1e-14)  # order of the sums


def test_class_scores_count_a_target_out_of_range_as_a_wrong_prediction():
    metric = Precision("micro")
    metric.update(torch.eye(2), torch.tensor([0, 7]))
    assert float(metric.compute()) == 0.5


def test_class_scores_refuse_another_average():
    with pytest.raises(ValueError, match="average is 'binary': it is 'macro', 'micro', 'weighted' or None"):
        F1("binary")


def test_weighted_score_of_ignored_targets_alone_is_zero():
    metric = F1("weighted", ignore_index=0)
    metric.update(torch.eye(2), torch.tensor([0, 0]))
    assert float(metric.compute()) == 0.0


def test_accuracy_equals_scikit_learn():
    outputs, targets = classification()
    assert in_batches(Accuracy(), outputs, targets) == sklearn.accuracy_score(targets, outputs.argmax(1))


def test_accuracy_takes_images():
    outputs, targets = classification(image=(3, 4))
    expected = sklearn.accuracy_score(targets.flatten(), outputs.argmax(1).flatten())
    assert in_batches(Accuracy(), outputs, targets) == expected


def test_accuracy_takes_classes_in_the_last_axis():
    outputs, targets = classification(image=(7,))
    expected = in_batches(Accuracy(), outputs, targets)
    assert in_batches(Accuracy(), outputs.movedim(1, -1), targets) == expected


def test_accuracy_ignores_an_index():
    outputs, targets = classification()
    targets[::3] = -100
    kept = targets != -100
    expected = sklearn.accuracy_score(targets[kept], outputs.argmax(1)[kept])
    assert in_batches(Accuracy(ignore_index=-100), outputs, targets) == expected


def test_accuracy_of_ignored_targets_alone_is_not_a_number():
    metric = Accuracy(ignore_index=0)
    metric.update(torch.eye(2), torch.tensor([0, 0]))
    assert math.isnan(metric.compute())


def test_accuracy_asks_where_the_shapes_leave_the_axis_open():
    outputs, targets = classification(classes=4, image=(4,))
    with pytest.raises(ValueError, match=r"\(103, 4, 4\).*choose axis=-1 or axis=1"):
        Accuracy().update(outputs, targets)


@pytest.mark.parametrize("axis", [1, -1])
def test_accuracy_takes_the_axis_that_is_given(axis):
    outputs, targets = classification(classes=4, image=(4,))
    expected = sklearn.accuracy_score(targets.flatten(), outputs.argmax(axis).flatten())
    assert in_batches(Accuracy(axis=axis), outputs, targets) == expected


def test_accuracy_refuses_an_axis_that_does_not_fit():
    outputs, targets = classification(image=(7,))
    with pytest.raises(ValueError, match="class indices are compared with outputs of shape"):
        Accuracy(axis=-1).update(outputs, targets)


def test_accuracy_refuses_targets_of_the_shape_of_the_outputs():
    with pytest.raises(ValueError, match=r"\(3, 2\) and targets \(3, 2\)"):
        Accuracy().update(torch.zeros(3, 2), torch.zeros(3, 2))


@pytest.mark.parametrize("metric", [Accuracy, F1])
def test_metric_of_classes_refuses_targets_that_are_several_tensors(metric):
    labels = torch.zeros(3, dtype=torch.long)
    with pytest.raises(
        PluginError, match=r"targets tuple\(Tensor\[3, 4\] .*: a metric of classes compares two tensors"
    ):
        metric().update(torch.zeros(3, 4), (torch.zeros(3, 4), labels))


def test_accuracy_refuses_a_single_class():
    with pytest.raises(ValueError, match=r"there is one class.*BinaryAccuracy"):
        Accuracy().update(torch.zeros(3, 1), torch.zeros(3))


def test_binary_accuracy_of_logits_equals_scikit_learn():
    outputs, targets = classification()
    logits, targets = outputs[:, :1], targets % 2
    expected = sklearn.accuracy_score(targets, logits[:, 0] > 0)
    assert in_batches(BinaryAccuracy(from_logits=True), logits, targets) == expected


def test_binary_accuracy_of_probabilities_equals_that_of_logits():
    outputs, targets = classification()
    logits, targets = outputs[:, 0], targets % 2
    expected = sklearn.accuracy_score(targets, logits.sigmoid() > 0.3)
    assert in_batches(BinaryAccuracy(from_logits=False, threshold=0.3), logits.sigmoid(), targets) == expected
    assert in_batches(BinaryAccuracy(from_logits=True, threshold=0.3), logits, targets) == expected


def test_binary_accuracy_must_be_told_of_logits():
    with pytest.raises(TypeError, match="from_logits"):
        BinaryAccuracy()


@pytest.mark.parametrize("threshold", [0, 1, 50])
def test_binary_accuracy_refuses_a_threshold_that_is_no_probability(threshold):
    with pytest.raises(ValueError, match=f"threshold is {threshold}: it is a probability"):
        BinaryAccuracy(from_logits=True, threshold=threshold)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (5,)])
def test_binary_accuracy_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"outputs have shape.*take Accuracy"):
        BinaryAccuracy(from_logits=True).update(torch.zeros(shape), torch.zeros(6))


def test_mean_weights_its_values():
    metric = Mean("critic_loss")
    metric.add(torch.tensor(2.0), 3)
    metric.add(torch.tensor(4.0), 1)
    assert float(metric.compute()) == 2.5


def test_mean_takes_numbers_in_float64():
    metric = Mean("temperature")
    metric.add(0.1, 7)
    assert float(metric.compute()) == 0.1 * 7 / 7


def test_mean_takes_integers_and_booleans():
    metric = Mean("hits")
    metric.add(torch.tensor(3), 1)
    metric.add(torch.tensor(True), 1)
    assert float(metric.compute()) == 2.0


def test_mean_keeps_the_digits_of_large_token_counts():
    metric = Loss()
    tokens = torch.tensor(2**24 + 1)  # not a float32
    metric.add(torch.tensor(1.0), tokens)
    metric.add(torch.tensor(3.0), tokens)
    metric.add(torch.tensor(3.0), torch.tensor(1))
    assert float(metric.compute()) == (4 * (2**24 + 1) + 3) / (2 * (2**24 + 1) + 1)


@pytest.mark.parametrize("sums", [False, True])
def test_mean_of_numbers_on_the_host_has_the_bits_of_one_of_tensors(sums):
    """It goes on with tensors after a weight that is one, from its state, and for a plugin that records steps."""
    values, weights = torch.randn(50).exp().unbind(), torch.randint(1, 1 << 20, (50,)).tolist()
    quick, slow, saved = Mean("loss"), Mean("loss"), Mean("loss")
    quick.sums = slow.sums = saved.sums = sums
    slow.tensors()
    for value, weight in zip(values[:40], weights[:40], strict=True):
        quick.add(value, weight)
        slow.add(value, weight)
        assert torch.equal(quick.compute(), slow.compute())
    saved.load_state_dict(quick.state_dict())
    for value, weight in zip(values[40:], weights[40:], strict=True):
        for mean in (quick, slow, saved):
            mean.add(value, torch.tensor(weight))
    assert quick.compute().dtype is torch.float64
    assert torch.equal(quick.compute(), slow.compute())
    assert torch.equal(saved.compute(), slow.compute())
    assert torch.equal(quick.tensors()["total"], slow.total)


def test_mean_takes_a_loss_of_one_element():
    metric = Loss()
    metric.add(torch.tensor([2.0]), 1)
    metric.add(torch.tensor([4.0]), torch.tensor(1))
    assert float(metric.compute()) == 3.0


def test_mean_refuses_several_elements():
    with pytest.raises(ValueError, match=r"loss has shape \(3,\): its mean takes one number"):
        Loss().add(torch.zeros(3), 3)


def test_mean_keeps_no_graph():
    metric = Loss()
    metric.add(torch.ones((), requires_grad=True) * 2, torch.ones((), requires_grad=True) * 2)
    assert not metric.compute().requires_grad


def test_function_metric_averages_over_elements():
    outputs, targets = torch.randn(2, 103, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    metric = FunctionMetric(lambda outputs, targets: (outputs - targets).abs(), "mae")
    expected = float((outputs - targets).abs().mean())
    assert in_batches(metric, outputs, targets) == pytest.approx(expected, rel=1e-14)  # order of the sums


@pytest.mark.parametrize("shape", [(8, 3), (3,), (3, 8), (8, 3, 2)], ids=str)
def test_function_metric_of_several_values_for_each_sample_is_refused_by_name(shape):
    metric = FunctionMetric(lambda outputs, targets: torch.zeros(shape), "scores")
    with pytest.raises(PluginError, match=r"metric 'scores' returned .* for a batch of 8: .*value\.mean\(1\)"):
        metric.update(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
    assert metric.is_empty


@pytest.mark.parametrize(
    ("shape", "targets"),
    [((8,), (8,)), ((8, 1), (8,)), ((), (8,)), ((1,), (8,)), ((8, 5), (8, 5)), ((40,), (8, 5))],
    ids=str,
)
def test_function_metric_of_a_value_for_each_sample_or_target_is_taken(shape, targets):
    metric = FunctionMetric(lambda outputs, targets: torch.ones(shape))
    metric.update(torch.zeros(*targets, 3), torch.zeros(targets))
    assert float(metric.compute()) == 1.0


def test_function_metric_weights_scalars_by_samples():
    outputs, targets = torch.randn(2, 103, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    metric = FunctionMetric(torch.nn.functional.mse_loss)
    expected = float(torch.nn.functional.mse_loss(outputs, targets))
    assert in_batches(metric, outputs, targets) == pytest.approx(expected, rel=1e-14)  # order of the sums


def test_function_metric_takes_python_numbers():
    outputs, targets = classification()
    metric = FunctionMetric(lambda outputs, targets: float(outputs.argmax(1).eq(targets).double().mean()), "accuracy")
    expected = sklearn.accuracy_score(targets, outputs.argmax(1))
    assert in_batches(metric, outputs, targets) == pytest.approx(expected, rel=1e-14)  # order of the sums


def test_function_metric_is_named_after_its_function():
    assert FunctionMetric(torch.nn.functional.l1_loss).name == "l1_loss"


OWN = {
    "accuracy": Accuracy,
    "accuracy with ignored": lambda: Accuracy(ignore_index=2),
    "binary": lambda: BinaryAccuracy(from_logits=True),
    "f1": F1,
    "function": lambda: FunctionMetric(lambda outputs, targets: outputs.argmax(1).eq(targets), "share"),
}


def data_for(name):
    outputs, targets = classification()
    return (outputs[:, 0], targets % 2) if name == "binary" else (outputs, targets)


@pytest.mark.parametrize("name", OWN)
def test_metric_goes_on_from_its_state(name):
    outputs, targets = data_for(name)
    one, other = OWN[name](), OWN[name]()
    in_batches(one, outputs[:50], targets[:50])
    other.load_state_dict(one.state_dict())
    assert in_batches(other, outputs[50:], targets[50:]) == in_batches(one, outputs[50:], targets[50:])


@pytest.mark.parametrize("name", OWN)
def test_metric_state_is_a_copy(name):
    outputs, targets = data_for(name)
    metric = OWN[name]()
    in_batches(metric, outputs, targets)
    state = metric.state_dict()
    value = float(metric.compute())
    in_batches(metric, outputs[:7], targets[:7])
    other = OWN[name]()
    other.load_state_dict(state)
    assert float(other.compute()) == value


def test_metric_state_does_not_hold_options():
    assert Accuracy(ignore_index=1).state_dict().keys() == {"correct", "count"}


@pytest.mark.parametrize("name", OWN)
def test_metric_forgets(name):
    outputs, targets = data_for(name)
    metric = OWN[name]()
    in_batches(metric, outputs[:50], targets[:50])
    metric.reset()
    assert metric.is_empty
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("name", OWN)
def test_metric_goes_on_outside_inference_mode(name):
    outputs, targets = data_for(name)
    metric = OWN[name]()
    other = copy.deepcopy(metric)
    with torch.inference_mode():
        in_batches(metric, outputs[:50], targets[:50])
    in_batches(other, outputs[:50], targets[:50])
    assert in_batches(metric, outputs[50:], targets[50:]) == in_batches(other, outputs[50:], targets[50:])


@pytest.mark.parametrize("name", OWN)
def test_metric_moves_what_it_has_accumulated(name):
    metric = OWN[name]()
    in_batches(metric, *data_for(name))
    state = metric.state_dict()
    metric.load_state_dict({key: torch.tensor(v) if isinstance(v, int) else v for key, v in state.items()})
    metric.to(torch.device("meta"))
    assert metric.compute().device.type == "meta"


# Merging


MERGED = {
    **OWN,
    "precision": lambda: Precision("micro", ignore_index=1),
    "recall": lambda: Recall("weighted"),
}
SHARDS = st.sampled_from([1, 2, 4]).flatmap(
    lambda shards: st.tuples(st.just(shards), st.lists(st.integers(0, shards - 1), min_size=1, max_size=7))
)


def merged(make, states):
    metric = make()
    metric.merge(states)
    return metric


@pytest.mark.parametrize("name", MERGED)
@given(dealt=SHARDS)
@settings(max_examples=25, deadline=None)
def test_metrics_of_shards_merge_to_that_of_all_batches(name, dealt):
    shards, owners = dealt
    outputs, targets = data_for(name)
    whole, parts = MERGED[name](), [MERGED[name]() for _ in range(shards)]
    for owner, *batch in zip(owners, outputs.split(16), targets.split(16), strict=False):
        whole.update(*batch)
        parts[owner].update(*batch)
    together = merged(MERGED[name], [part.state_dict() for part in parts])
    assert not together.is_empty
    assert float(together.compute()) == float(whole.compute())
    for value, expected in zip(together.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected))


@given(dealt=SHARDS, weight=st.sampled_from([1, 3.0, torch.tensor(5)]))
@settings(max_examples=50, deadline=None)
def test_means_of_shards_merge_to_that_of_all_values(dealt, weight):
    shards, owners = dealt
    whole, parts = Loss(), [Loss() for _ in range(shards)]
    for i, owner in enumerate(owners):
        value = torch.tensor(float(i)).sin()
        whole.add(value, weight)
        parts[owner].add(value, weight)
    together = merged(Loss, [part.state_dict() for part in parts])
    assert float(together.weight) == float(whole.weight)
    assert float(together.compute()) == pytest.approx(float(whole.compute()), rel=1e-12, abs=1e-14)  # order of the sums


def test_means_are_merged_by_rank():
    states = []
    for value in (1e16, 1.0, -1e16):
        metric = Loss()
        metric.add(value, 1)
        states.append(metric.state_dict())
    assert float(merged(Loss, states).compute()) == 0.0
    assert float(merged(Loss, [states[0], states[2], states[1]]).compute()) == 1 / 3


@pytest.mark.parametrize("name", MERGED)
def test_merged_metric_of_nothing_is_empty(name):
    metric = MERGED[name]()
    in_batches(metric, *data_for(name))
    metric.merge([MERGED[name]().state_dict()] * 2)
    assert metric.is_empty
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("name", MERGED)
def test_merged_metric_goes_on(name):
    outputs, targets = data_for(name)
    states = []
    for part in (slice(0, 32), slice(32, 64)):
        one = MERGED[name]()
        in_batches(one, outputs[part], targets[part])
        states.append(one.state_dict())
    expected = in_batches(MERGED[name](), outputs, targets)
    assert in_batches(merged(MERGED[name], states), outputs[64:], targets[64:]) == expected


def test_merging_leaves_the_states_alone():
    one, other = Accuracy(), Accuracy()
    in_batches(one, *classification())
    states = [one.state_dict(), other.state_dict()]
    metric = merged(Accuracy, states)
    in_batches(metric, *classification())
    assert int(states[0]["correct"]) == int(one.correct)
    assert states[1] == {"correct": None, "count": 0}


def test_metric_without_a_merge_has_none():
    class Own(Metric):
        def reset(self):
            self.largest = 0.0

    with pytest.raises(NotImplementedError):
        Own().merge([Own().state_dict()])


def test_added_sums_in_order():
    assert added([{"a": 1e16, "b": None}, {"a": 1.0, "b": None}, {"a": -1e16, "b": None}]) == {"a": 0.0, "b": None}


def test_accuracy_names_the_metric_of_one_logit_a_sample():
    with pytest.raises(ValueError, match=r"for one logit a sample: BinaryAccuracy\(from_logits=True\)"):
        Accuracy().update(torch.zeros(32, 1), torch.zeros(32, 1))


@pytest.mark.parametrize("number", [np.bool_(True), np.array(1.0), True])
def test_function_may_return_any_number(number):
    metric = FunctionMetric(lambda outputs, targets: number)
    metric.update(torch.zeros(4), torch.zeros(4))
    assert metric.compute() == 1.0


@pytest.mark.parametrize("make", [Accuracy, lambda k: Accuracy(k, None)], ids=["one", "two"])
def test_number_of_classes_is_not_taken_for_an_ignored_class(make):
    with pytest.raises(CallError, match=r"by name \(ignore_index, axis\)"):
        make(10)
