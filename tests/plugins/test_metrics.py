"""Metrics: what each epoch accumulates, when it is read, and what it refuses."""

import copy
import functools
import gc
import math
import weakref
from typing import NamedTuple

import pytest
import torch
from helpers import Late, batches, differences, make_learner, on
from test_metrics import Reads
from torch import nn

from loopkit import CancelEpoch, Learner, Phase, TrainingPhase, ValidationPhase, every, hookimpl, losses
from loopkit.errors import PluginError
from loopkit.events import LossBegin
from loopkit.metrics import F1, Accuracy, Mean, Metric
from loopkit.plugins import EarlyStopping, LogMetrics, Metrics

torchmetrics = Late("torchmetrics")
sklearn = Late("sklearn.metrics")
SIZES = [8, 8, 8, 3]


def mae(outputs, targets):
    return (outputs - targets).abs()


def uneven(seed=0):
    """Float64 batches of 8, 8, 8 and 3 samples."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(SIZES), 3, dtype=torch.float64, generator=generator)
    targets = torch.randn(sum(SIZES), 1, dtype=torch.float64, generator=generator)
    return list(zip(inputs.split(SIZES), targets.split(SIZES), strict=True))


def regression(*plugins, **options):
    torch.manual_seed(0)
    return make_learner(*plugins, model=nn.Linear(3, 1).double(), **options)


def whole(data):
    return tuple(torch.cat(parts) for parts in zip(*data, strict=True))


class Classification(Phase):
    """Outputs are given, so that metrics can be compared with those of the outputs taken at once."""

    name = "val"
    emits = (LossBegin,)

    def step(self, learner, step):
        step.outputs, step.targets = step.batch


def classified(classes=4, image=()):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(sum(SIZES), classes, *image, generator=generator)
    targets = torch.randint(classes, (sum(SIZES), *image), generator=generator)
    return list(zip(outputs.split(SIZES), targets.split(SIZES), strict=True))


def classifier(*plugins):
    return Learner(nn.Identity(), plugins=plugins, phases=[Classification()], standard=False)


def goes_on(metrics, store):
    """Lets the epoch begin with what was saved of one, as a resume does."""
    given = copy.deepcopy(store)
    return on("epoch_begin", lambda epoch: epoch.store(metrics).update(given), "resume", before=("metrics",))


def evaluate(metrics, data, store=None):
    return classifier(metrics, goes_on(metrics, store or {})).evaluate(data)


# Values


def test_metrics_loss_of_an_uneven_last_batch_is_that_of_the_whole_data():
    learner, data = regression(Metrics()), uneven()
    inputs, targets = whole(data)
    expected = nn.functional.mse_loss(learner.model(inputs), targets).item()
    assert learner.evaluate(data)["val/loss"] == pytest.approx(expected, rel=1e-14)  # order of the float64 sums


def test_metrics_loss_is_the_weighted_mean_of_the_steps_losses():
    losses = []
    log = on("step_end", lambda step, **_: losses.append((step.loss.item(), step.samples)))
    learner = regression(Metrics(), log)
    learner.fit(uneven(), epochs=1)
    expected = sum(loss * samples for loss, samples in losses) / sum(SIZES)
    assert learner.metrics["train/loss"] == pytest.approx(expected, rel=1e-15)  # order of the float64 sums


def test_metrics_weight_the_loss_by_tokens():
    class Tokens(ValidationPhase):
        def step(self, learner, step):
            super().step(learner, step)
            step.weight = torch.tensor(step.index + 1)

    losses = []
    log = on("step_end", lambda step, **_: losses.append(step.loss.item()))
    learner = regression(Metrics(), log, phases=[Tokens()])
    value = learner.evaluate(uneven())["val/loss"]
    expected = sum(loss * (i + 1) for i, loss in enumerate(losses)) / 10
    assert value == pytest.approx(expected, rel=1e-15)  # order of the float64 sums


def test_metrics_weight_scalar_functions_by_tokens():
    class Tokens(ValidationPhase):
        def step(self, learner, step):
            super().step(learner, step)
            step.weight = step.index + 1

    seen = []

    def first(outputs, targets):
        seen.append(outputs[0].item())
        return outputs[0].mean()

    value = regression(Metrics(first), phases=[Tokens()]).evaluate(uneven())["val/first"]
    expected = sum(each * (i + 1) for i, each in enumerate(seen)) / 10
    assert value == pytest.approx(expected, rel=1e-15)  # order of the float64 sums


@pytest.mark.parametrize("function", [mae, nn.functional.l1_loss], ids=["per sample", "scalar"])
def test_metrics_take_functions(function):
    learner, data = regression(Metrics(mae=function)), uneven()
    inputs, targets = whole(data)
    expected = mae(learner.model(inputs), targets).mean().item()
    assert learner.evaluate(data)["val/mae"] == pytest.approx(expected, rel=1e-14)  # order of the float64 sums


def test_metrics_name_functions_by_their_names():
    assert regression(Metrics(mae)).evaluate(uneven()).keys() == {"val/loss", "val/mae"}


def test_metrics_take_objects():
    class Largest:
        def reset(self):
            self.value = -float("inf")

        def update(self, outputs, targets):
            self.value = max(self.value, outputs.max().item())

        def compute(self):
            return self.value

    learner, data = regression(Metrics(Largest())), uneven()
    expected = learner.model(whole(data)[0]).max().item()
    assert learner.evaluate(data)["val/largest"] == expected


def test_metrics_take_their_own_classes():
    data = classified()
    outputs, targets = whole(data)
    values = evaluate(Metrics(Accuracy(), F1("micro"), macro=F1()), data)
    right = outputs.argmax(1).eq(targets).double().mean().item()
    macro = sklearn.f1_score(targets, outputs.argmax(1), average="macro", labels=range(4), zero_division=0)
    assert values == pytest.approx({"val/accuracy": right, "val/f1": right, "val/macro": macro}, rel=1e-14)  # sums


def test_metrics_take_images():
    data = classified(image=(2, 3))
    outputs, targets = whole(data)
    expected = outputs.argmax(1).eq(targets).double().mean().item()
    assert evaluate(Metrics(Accuracy()), data) == {"val/accuracy": expected}


def test_metrics_of_other_attributes_come_by_mean():
    class Critic(Phase):
        name = "critic"

        def step(self, learner, step):
            step.critic_loss = step.batch[1].mean()

    data = uneven()
    values = regression(Metrics(Mean("critic_loss"))).run(Critic(), data)
    expected = whole(data)[1].mean().item()
    assert values == {"critic/critic_loss": pytest.approx(expected, rel=1e-14)}  # order of the float64 sums


TORCHMETRICS = {
    "accuracy": lambda: torchmetrics.Accuracy(task="multiclass", num_classes=4),
    "f1": lambda: torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
    "mean": lambda: torchmetrics.MeanMetric(),
    "auroc": lambda: torchmetrics.AUROC(task="multiclass", num_classes=4),
}


@pytest.mark.parametrize("name", TORCHMETRICS)
def test_metrics_take_torchmetrics_objects(name):
    data = classified()
    if name == "mean":
        data = [(outputs[:, 0], targets) for outputs, targets in data]  # values and weights
    by_hand = TORCHMETRICS[name]()
    for outputs, targets in data:
        by_hand.update(outputs, targets)
    assert evaluate(Metrics(ours=TORCHMETRICS[name]()), data) == {"val/ours": by_hand.compute().item()}


def test_metrics_name_torchmetrics_objects_by_their_classes():
    assert evaluate(Metrics(TORCHMETRICS["f1"]()), classified()).keys() == {"val/multiclassf1score"}


def collection():
    return torchmetrics.MetricCollection({"acc": TORCHMETRICS["accuracy"](), "f1": TORCHMETRICS["f1"]()}, prefix="tm_")


def test_metrics_take_a_metric_collection():
    data = classified()
    by_hand = collection()
    for outputs, targets in data:
        by_hand.update(outputs, targets)
    expected = {f"val/{name}": value.item() for name, value in by_hand.compute().items()}
    assert expected.keys() == {"val/tm_acc", "val/tm_f1"}
    assert evaluate(Metrics(collection()), data) == expected


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("BinaryRecall", {"threshold": 0.3}, {"threshold": 0.7}),
        ("BinaryPrecision", {"threshold": 0.3}, {"threshold": 0.7}),
        ("BinaryRecall", {"ignore_index": -1}, {"threshold": 0.7}),
        ("BinaryRecall", {}, {}),
    ],
)
def test_metrics_of_a_collection_have_the_values_that_each_has_alone(kind, one, other):
    first = torchmetrics.classification.BinaryRecall(**one)
    second = getattr(torchmetrics.classification, kind)(**other)
    sure = torch.tensor([0.01, 0.99, 0.02, 0.98]), torch.tensor([0, 1, 1, 1])  # for which every threshold is the same
    unsure = torch.tensor([0.5, 0.5, 0.4, 0.9]), torch.tensor([1, 0, 1, 1])
    expected = {}
    for name, metric in (("one", first.clone()), ("other", second.clone())):
        for batch in (sure, unsure):
            metric.update(*batch)
        expected[f"val/{name}"] = metric.compute().item()
    together = torchmetrics.MetricCollection({"one": first, "other": second})
    assert evaluate(Metrics(together), [sure, unsure]) == expected


def test_metrics_announce_the_names_of_a_collection():
    assert Metrics(collection(), Accuracy()).names() == (
        "metrics.*/loss",
        "metrics.*/tm_acc",
        "metrics.*/tm_f1",
        "metrics.*/accuracy",
    )


def test_metrics_start_anew_in_each_pass():
    learner, data = regression(Metrics(mae)), uneven()
    assert learner.evaluate(data) == learner.evaluate(data)


def test_metrics_start_anew_with_torchmetrics_objects():
    learner = Learner(nn.Identity(), plugins=[Metrics(collection())], phases=[Classification()], standard=False)
    data = classified()
    assert learner.evaluate(data[:2]) != learner.evaluate(data)
    assert learner.evaluate(data) == evaluate(Metrics(collection()), data)


def test_metrics_under_inference_mode_equal_those_under_no_grad():
    class Inference(ValidationPhase):
        grad_mode = "inference_mode"

    data = uneven()
    learner = regression(Metrics(mae), phases=[Inference()])
    assert learner.evaluate(data) == learner.evaluate(data) == regression(Metrics(mae)).evaluate(data)


# Phases


def test_metrics_of_phases_are_apart():
    learner, data, other = regression(Metrics(mae)), uneven(), uneven(1)
    learner.fit(data, other, epochs=1)
    train = learner.metrics["train/mae"]
    inputs, targets = whole(other)
    expected = mae(learner.model(inputs), targets).mean().item()
    assert learner.metrics["val/mae"] == pytest.approx(expected, rel=1e-14)  # order of the float64 sums
    assert train != learner.metrics["val/mae"]


def test_metrics_of_training_are_undisturbed_by_a_validation_inside():
    one, other = regression(Metrics(mae)), regression(Metrics(mae))
    one.fit(uneven(), uneven(1), epochs=1, validate=every(updates=1))
    other.fit(uneven(), epochs=1)
    assert one.metrics["train/loss"] == other.metrics["train/loss"]
    assert one.metrics["train/mae"] == other.metrics["train/mae"]


def test_metrics_of_a_phase_are_undisturbed_by_the_same_phase_inside():
    def inside(learner, phase, step):
        if step.index == 1 and not depth:
            depth.append(1)
            learner.evaluate(uneven(1))

    depth = []
    one, other = regression(Metrics(mae), on("step_end", inside)), regression(Metrics(mae))
    assert one.evaluate(uneven()) == other.evaluate(uneven())
    assert depth == [1]


def test_metrics_pass_over_phases_without_outputs_targets_or_loss():
    learner = regression(Metrics(mae, Accuracy(), collection()))
    assert learner.predict(uneven()).shape == (27, 1)
    assert learner.metrics == {}


def test_metrics_forget_the_values_of_the_pass_before():
    class Sometimes(ValidationPhase):
        silent = False

        def step(self, learner, step):
            if not self.silent:
                super().step(learner, step)

    phase = Sometimes()
    learner = regression(Metrics(mae), phases=[phase])
    assert learner.evaluate(uneven()).keys() == {"val/loss", "val/mae"}
    phase.silent = True
    assert learner.evaluate(uneven()) == {}


def test_metrics_of_a_cancelled_epoch_are_those_of_its_steps():
    def cancel(step, **_):
        if step.index == 2:
            raise CancelEpoch("enough")

    learner, data = regression(Metrics(mae), on("step_begin", cancel)), uneven()
    inputs, targets = whole(data[:2])
    expected = mae(learner.model(inputs), targets).mean().item()
    assert learner.evaluate(data)["val/mae"] == pytest.approx(expected, rel=1e-14)  # order of the float64 sums


def test_metrics_start_anew_after_an_error():
    def fail(step, **_):
        if step.index == 2 and not failed:
            failed.append(1)
            raise RuntimeError("deliberate")

    failed = []
    learner = regression(Metrics(mae), on("step_begin", fail))
    with pytest.raises(RuntimeError, match="deliberate"):
        learner.evaluate(uneven())
    assert learner.evaluate(uneven()) == regression(Metrics(mae)).evaluate(uneven())


def test_metrics_added_in_mid_epoch_take_the_steps_from_then_on():
    def add(learner, step, **_):
        if step.index == 1:
            learner.add(Metrics(mae))

    learner, data = regression(on("step_end", add)), uneven()
    inputs, targets = whole(data[2:])
    expected = mae(learner.model(inputs), targets).mean().item()
    assert learner.evaluate(data)["val/mae"] == pytest.approx(expected, rel=1e-14)  # order of the float64 sums


# Reading and memory


def test_metrics_read_nothing_in_steps_and_each_value_once_per_epoch():
    learner = regression(Metrics(mae, l1=nn.functional.l1_loss))
    inputs, targets = whole(uneven())
    data = [(inputs[i : i + 9], targets[i : i + 9].gt(0).double()) for i in (0, 9, 18)]
    counts = []
    with Reads() as reads:
        learner.add(on("step_end", lambda **_: counts.append(len(reads.calls)), name="z"))
        learner.fit(data, epochs=1)
    assert counts == [0, 0, 0]
    assert reads.calls == ["item"] * 3  # the loss and two metrics


class Token:
    """Lives as long as a graph."""


class Mark(torch.autograd.Function):
    """The identity; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx, outputs, token):
        ctx.token = token
        return outputs.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Keeps:
    """Keeps all that it was given."""

    def reset(self):
        self.kept = []

    def update(self, outputs, targets):
        self.kept.append((outputs, targets))

    def compute(self):
        return sum(float(outputs["out"].sum()) for outputs, _ in self.kept)


class KeepsToo(Keeps, Metric):
    """As a subclass of loopkit's own metrics."""

    name = "keeps"
    is_empty = False


class Adds(KeepsToo):
    """Adds what it was given up, graph and all."""

    def reset(self):
        self.total = 0.0

    def update(self, outputs, targets):
        self.total = self.total + outputs["out"].sum()

    def compute(self):
        return self.total


class Named(dict):
    """As the outputs of transformers' models: a mapping of another class."""


class Two(NamedTuple):
    out: torch.Tensor
    all: list[torch.Tensor]

    def __getitem__(self, key):
        return getattr(self, key)


@pytest.mark.parametrize("metric", [Keeps, KeepsToo, Adds])
@pytest.mark.parametrize("kind", [dict, Named, Two])
def test_metrics_keep_no_graph_alive(metric, kind):
    class Nested(TrainingPhase):
        def forward(self, learner, inputs):
            token = Token()
            nodes.append(weakref.ref(token))
            outputs = Mark.apply(learner.model(inputs), token)
            return kind(out=outputs, all=[outputs])

        def loss(self, learner, outputs, targets):
            return learner.loss_fn(outputs["out"], targets)

    nodes = []
    gc.disable()
    try:
        alive = []
        count = on("step_begin", lambda **_: alive.append(sum(node() is not None for node in nodes)))
        regression(Metrics(metric()), count, phases=[Nested()]).fit(uneven(), epochs=1)
    finally:
        gc.enable()
    assert alive == [0, 0, 0, 0]


def test_metrics_leave_training_bitwise_alone():
    one, other = regression(Metrics(mae, Mean("loss_twice"))), regression()
    for learner in (one, other):
        learner.fit(uneven(), uneven(1), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)


def test_metrics_peek_gives_the_values_so_far():
    def peek(step, **_):
        if step.index == 1:
            seen.append({name: float(value) for name, value in metrics.peek(step.epoch.name).items()})

    seen = []
    metrics, data = Metrics(mae), uneven()
    regression(metrics, on("step_end", peek, after=("metrics",))).evaluate(data)
    assert seen == [
        {name.removeprefix("val/"): value for name, value in regression(Metrics(mae)).evaluate(data[:2]).items()}
    ]


def test_metrics_peek_gives_those_of_the_epoch_around_after_one_of_the_same_phase():
    def look(learner, step, epoch):
        if epoch.depth == 0 and step.index == 1:
            before = metrics.peek("val")["loss"].item()
            learner.evaluate(uneven(1))
            seen.append((before, metrics.peek("val")["loss"].item()))

    seen = []
    metrics = Metrics()
    learner = regression(metrics, on("step_end", look, after=("metrics",)))
    learner.evaluate(uneven())
    assert [before == after for before, after in seen] == [True]
    assert metrics.peek("val") == {}


def test_metrics_of_another_kind_are_asked_by_the_name_of_the_phase():
    class Own:
        provides = "metrics"

        def __init__(self):
            self.asked = set()

        @hookimpl(writes=("metrics.*/loss",))
        def epoch_end(self, learner, phase):
            learner.metrics[f"{phase.name}/loss"] = 0.0

        def peek(self, phase: str):
            self.asked.add(phase)
            return {}

    own = Own()
    regression(own, LogMetrics(every=1)).fit(uneven(), epochs=1)
    assert own.asked == {"train"}


class Unready(Metric):
    """A metric whose ``__init__`` does not call that of `Metric`."""

    def __init__(self, power=1):
        self.power = power
        self.reset()

    def reset(self):
        self.total = 0.0

    @property
    def is_empty(self):
        return False

    def update(self, outputs, targets):
        self.total += float((outputs - targets).abs().pow(self.power).sum())

    def compute(self):
        return self.total


class OwnState(Unready):
    """The same, which finds its state itself."""

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]

    def to(self, device):
        """A number is nowhere."""


def test_metrics_name_a_metric_that_does_not_call_the_init_of_its_base():
    with pytest.raises(PluginError, match=r"metric Unready: Unready.__init__ does not call super\(\).__init__\(\)"):
        Metrics(Unready())


@pytest.mark.parametrize(
    "use",
    [Unready.state_dict, lambda metric: metric.load_state_dict({}), lambda metric: metric.to(torch.device("cpu"))],
    ids=["state_dict", "load_state_dict", "to"],
)
def test_metric_that_does_not_call_the_init_of_its_base_is_named_wherever_its_state_is_used(use):
    with pytest.raises(PluginError, match=r"Unready.__init__ does not call super"):
        use(Unready())


def test_metric_with_a_state_dict_needs_no_init_of_its_base():
    assert regression(Metrics(distance=OwnState())).evaluate(uneven())["val/distance"] > 0


# State


def interrupted(metrics, data, at, store=None):
    """What is saved of an epoch after ``at`` steps."""
    states = []

    def save(step):
        if step.index == at - 1:
            states.append(copy.deepcopy(step.epoch.saved_stores()["metrics"]))

    saver = on("step_end", save, after=("metrics",))
    classifier(metrics, saver, goes_on(metrics, store or {})).evaluate(data)
    return states[0]


KINDS = {
    "own": lambda: Metrics(Accuracy(), F1(), wrong=lambda outputs, targets: outputs.argmax(1).ne(targets).double()),
    "torchmetrics": lambda: Metrics(TORCHMETRICS["accuracy"](), TORCHMETRICS["auroc"]()),
    "collection": lambda: Metrics(collection()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_go_on_in_mid_epoch(kind):
    data = classified()
    store = interrupted(KINDS[kind](), data, 2)
    assert evaluate(KINDS[kind](), data[2:], store) == evaluate(KINDS[kind](), data)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_start_anew_in_the_epoch_after_the_resumed_one(kind):
    data, resumed = classified(), KINDS[kind]()
    evaluate(resumed, data[2:], interrupted(KINDS[kind](), data, 2))
    assert evaluate(resumed, data) == evaluate(KINDS[kind](), data)


def test_metrics_save_what_was_loaded():
    data = classified()
    store = interrupted(KINDS["own"](), data, 2)
    again = []
    metrics = KINDS["own"]()
    look = on(
        "epoch_begin", lambda epoch: again.append(copy.deepcopy(epoch.saved_stores()["metrics"])), after=("metrics",)
    )
    classifier(metrics, look, goes_on(metrics, store)).evaluate(data[2:])
    assert list(differences(store, again[0])) == []


def test_metrics_save_nothing_between_epochs():
    metrics = Metrics(Accuracy())
    learner = classifier(metrics)
    learner.evaluate(classified())
    assert learner.state_dict()["epochs"] == []
    assert "metrics" not in learner.state_dict()["plugins"]


def test_metrics_of_an_epoch_go_on_where_others_have_begun_or_gone():
    data = classified()
    store = interrupted(Metrics(Accuracy(), F1()), data, 2)
    assert evaluate(Metrics(Accuracy()), data[2:], store) == evaluate(Metrics(Accuracy()), data)
    added = evaluate(Metrics(Accuracy(), F1()), data[2:], interrupted(Metrics(Accuracy()), data, 2))
    assert added == {**evaluate(Metrics(F1()), data[2:]), **evaluate(Metrics(Accuracy()), data)}


@pytest.mark.parametrize("store", [{"so_far": {}}, {"so_far": {"fed": True, "metrics": {"accuracy": {}}}}])
def test_metrics_whose_saved_part_is_malformed_are_named(store):
    with pytest.raises(KeyError) as caught:
        evaluate(Metrics(Accuracy()), classified(), store)
    assert "in epoch_begin of plugin 'metrics', phase 'val', epoch 0" in caught.value.__notes__[-1]


def test_metrics_put_in_the_place_of_others_in_mid_epoch_begin_anew():
    def replace(learner, step):
        if step.index == 1:
            learner.replace("metrics", Metrics(F1()))

    data, acting = classified(), on("step_end", replace)
    assert classifier(Metrics(Accuracy()), acting).evaluate(data) == evaluate(Metrics(F1()), data[2:])


def test_metrics_of_a_phase_inside_itself_are_kept_apart():
    def inside(learner, step):
        if step.epoch.depth == 0 and step.index == 1:
            learner.evaluate(data[:1])

    data, metrics = classified(), KINDS["own"]()
    for _ in range(2):
        assert classifier(metrics, on("step_end", inside)).evaluate(data) == evaluate(KINDS["own"](), data)


# Another number of processes

SHARES = [[0, 1], [2], [3]]
"""The batches that each of three processes has."""


def resharded(kind, stores, rank, size):
    return KINDS[kind]().reshard_store(stores, rank, size)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_several_processes_go_on_in_one(kind):
    data = classified()
    stores = [interrupted(KINDS[kind](), [data[i] for i in share], len(share)) for share in SHARES[:2]]
    assert evaluate(KINDS[kind](), data[3:], resharded(kind, stores, 0, 1)) == evaluate(KINDS[kind](), data)


@pytest.mark.filterwarnings("ignore:No positive samples")  # torchmetrics, of the smallest part
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_one_process_go_on_in_several(kind):
    def share(batch, stores, rank, size):
        return interrupted(KINDS[kind](), [batch], 1, resharded(kind, stores, rank, size))

    data = classified()
    one = [interrupted(KINDS[kind](), data[:2], 2)]
    two = [share(data[2] if rank else data[1], one, rank, 2) for rank in range(2)]
    three = [share(data[0], two, rank, 3) for rank in range(3)]
    expected = evaluate(KINDS[kind](), [data[0], data[1], data[1], data[2], *[data[0]] * 3, data[3]])
    values = evaluate(KINDS[kind](), [data[3]], resharded(kind, three, 0, 1))
    assert values == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}  # order of the sums


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_other_ranks_start_from_nothing(kind):
    data = classified()
    stores = [interrupted(KINDS[kind](), data[:2], 2)] * 2
    store = resharded(kind, stores, 1, 3)
    assert evaluate(KINDS[kind](), data[2:], store) == evaluate(KINDS[kind](), data[2:])
    assert store["so_far"]["fed"] is False


def test_metrics_of_an_epoch_that_had_not_begun_start_from_nothing():
    assert resharded("own", [{}, {}], 0, 3) == {}


def test_metrics_that_cannot_be_merged_go_on_in_as_many_processes_alone():
    class Last(Keeps):
        def state_dict(self):
            return {"kept": list(self.kept)}

        def load_state_dict(self, state):
            self.kept = list(state["kept"])

        def compute(self):
            return len(self.kept)

    stores = [interrupted(Metrics(Last()), classified()[:2], 2)] * 2
    metrics = Metrics(Last())
    assert evaluate(metrics, classified()[:1], metrics.reshard_store(stores[:1], 0, 2)) == {"val/last": 3.0}
    with pytest.raises(PluginError, match=r"metric 'last' \(Last\) cannot be merged, and each of 2 processes sees"):
        metrics.reshard_store(stores, 0, 1)


# What is refused


@pytest.mark.parametrize("make", [lambda: Metrics(Accuracy(), Accuracy()), lambda: Metrics(mae, mae=mae)])
def test_metrics_of_one_name_are_refused(make):
    with pytest.raises(PluginError, match=r"two metrics are called '(\w+)'; name one: Metrics\(other_\1=\.\.\.\)"):
        make()


def test_metrics_named_loss_twice_are_refused():
    with pytest.raises(PluginError, match="two metrics are called 'loss'"):
        Metrics(Mean("loss"), loss=mae)


def test_metrics_replace_the_loss_by_one_of_that_name():
    learner, data = regression(Metrics(loss=mae)), uneven()
    inputs, targets = whole(data)
    expected = mae(learner.model(inputs), targets).mean().item()
    assert learner.evaluate(data) == {"val/loss": pytest.approx(expected, rel=1e-14)}  # order of the float64 sums


def test_metrics_refuse_a_class():
    for cls in (Accuracy, torchmetrics.MeanMetric):
        with pytest.raises(PluginError, match=rf"{cls.__name__} is a class; give an instance, {cls.__name__}\(\)"):
            Metrics(cls)


def test_metrics_refuse_a_lambda_without_a_name():
    with pytest.raises(PluginError, match="a lambda has no name"):
        Metrics(lambda outputs, targets: 0.0)


def test_metrics_refuse_what_is_no_metric():
    with pytest.raises(PluginError, match=r"Metrics\('accuracy'\): it is neither .*; Accuracy\(\) is one"):
        Metrics("accuracy")
    with pytest.raises(PluginError, match=r"Metrics\(name='scores'\): .*an argument's name names a metric"):
        Metrics(name="scores")


class Given(Metric):
    """Has a value whatever it sees."""

    name = "given"
    is_empty = False

    def __init__(self, value, labels=None):
        self.value, self.labels = value, labels
        super().__init__()

    def reset(self):
        pass

    def update(self, outputs, targets):
        pass

    def compute(self):
        return self.value


CANNOT_BE_LOGGED = [torch.zeros(2, 2, 2), torch.ones(2, dtype=torch.cfloat), "high", {"a": 1.0, "b": "low"}]


@pytest.mark.parametrize("value", CANNOT_BE_LOGGED)
@pytest.mark.parametrize("phase", [None, "val"])
def test_metrics_refuse_before_anything_is_trained_what_cannot_be_logged(value, phase):
    learner, data = classifier(Metrics(Given(value), phase=phase)), classified()
    with pytest.raises(PluginError, match=r"metric '(given|b)' is .*: a metric is a number, a vector or mapping"):
        learner.fit(data, data, epochs=1)
    assert learner.progress.updates == 0


def test_trial_of_a_metric_draws_no_random_numbers():
    class Draws(Given):
        def compute(self):
            return torch.rand(())

    torch.manual_seed(0)
    expected = torch.rand(2)[1]
    torch.manual_seed(0)
    evaluate(Metrics(Draws(0.0)), classified())
    assert torch.rand(()) == expected  # the epoch's value is the first number


def test_labels_are_counted_once_something_was_taken_in():
    class Grows(Given):
        """Has a value for each class that it has seen."""

        def update(self, outputs, targets):
            self.value = torch.ones(2)

    assert evaluate(Metrics(Grows(torch.zeros(3), ["a", "b"])), classified()) == {"val/given/a": 1, "val/given/b": 1}


class GivenLater(Given):
    """Has its value from the first step on."""

    def __init__(self, before, value):
        self.before = before
        super().__init__(value)

    def reset(self):
        self.steps = 0

    def update(self, outputs, targets):
        self.steps += 1

    def compute(self):
        return self.value if self.steps else self.before


@pytest.mark.parametrize("before", [None, torch.zeros(0), {}, {"a": None}, math.nan])
def test_metrics_that_are_nothing_yet_are_no_error(before):
    data = classified()
    assert classifier(Metrics(GivenLater(before, 2.0))).evaluate(data) == {"val/given": 2.0}


@pytest.mark.parametrize("value", [*CANNOT_BE_LOGGED, torch.zeros(0), None])
def test_metrics_refuse_after_a_step_what_cannot_be_logged(value):
    with pytest.raises(
        PluginError, match=r"metric '(given|b)' is .*: a metric is a number, a vector or mapping"
    ) as caught:
        evaluate(Metrics(GivenLater(None, value)), classified())
    assert any("plugin 'metrics', phase 'val', epoch 0, step 0" in note for note in caught.value.__notes__)


def test_metrics_refuse_labels_of_another_number():
    with pytest.raises(PluginError, match="metric 'given' has 3 values, and 2 labels: give one for each"):
        evaluate(Metrics(Given(torch.zeros(3), ["a", "b"])), classified())


# Several numbers, matrices


def test_metrics_of_several_numbers_have_a_name_each():
    data = classified()
    outputs, targets = whole(data)
    expected = sklearn.f1_score(targets, outputs.argmax(1), average=None)
    for labels, names in ((None, "0123"), (["a", "b", "c", "d"], "abcd")):
        learner = classifier(Metrics(F1(average=None, labels=labels)))
        assert learner.evaluate(data) == {
            f"val/f1/{name}": pytest.approx(value, rel=1e-14)  # another order of operations
            for name, value in zip(names, expected, strict=True)
        }


def test_metrics_of_torchmetrics_per_class_have_a_name_each():
    per_class = torchmetrics.Accuracy(task="multiclass", num_classes=4, average="none")
    values = evaluate(Metrics(each=per_class), classified())
    assert list(values) == [f"val/each/{i}" for i in range(4)]


def test_metrics_of_several_numbers_can_be_monitored():
    stack = [Metrics(F1(average=None)), EarlyStopping("val/f1/3", mode="max")]
    data = classified()
    learner = Learner(nn.Linear(4, 4), nn.functional.cross_entropy, torch.optim.SGD, plugins=stack, standard=False)
    learner.fit(data, data, epochs=1)
    learner.replace("early_stopping", EarlyStopping("val/f2/3"))
    with pytest.raises(PluginError, match="which no plugin makes"):
        learner.fit(data, data, epochs=1)


def test_metrics_log_a_matrix_as_a_table_and_keep_it_out_of_the_values():
    logged, metrics = {}, Metrics(Given(torch.eye(2), ["cat", "dog"]))
    log = on("log_value", lambda record: logged.update({record.name: record.value}), "log")
    assert classifier(metrics, log).evaluate(classified()) == {}
    table = logged["val/given"]
    assert table is metrics.tables["val/given"]
    assert (table.columns, table.rows) == (("", "cat", "dog"), (("cat", 1.0, 0.0), ("dog", 0.0, 1.0)))


def test_metrics_of_one_phase_stand_beside_those_of_all():
    data = uneven()
    learner = regression(Metrics(), Metrics(mae, phase="val"), Metrics(error=mae, phase="train"))
    learner.fit(data, data, epochs=1)
    assert sorted(learner.metrics) == ["train/error", "train/loss", "val/loss", "val/mae"]


def test_metrics_of_a_phase_that_there_is_not_are_refused():
    with pytest.raises(PluginError, match="no phase is called 'vla'; they are train, val, predict"):
        regression(Metrics(mae, phase="vla")).evaluate(uneven())


def test_metrics_name_plugin_and_metric_in_the_error_of_a_metric():
    def broken(outputs, targets):
        raise ZeroDivisionError("deliberate")

    with pytest.raises(ZeroDivisionError) as caught:
        regression(Metrics(broken)).evaluate(uneven())
    notes = " | ".join(caught.value.__notes__)
    assert "metric 'broken' raised this; outputs: Tensor[8, 1] float64 cpu" in notes
    assert "in step_end of plugin 'metrics', phase 'val', epoch 0, step 0" in notes


def test_metrics_name_the_metric_whose_value_fails():
    class Fails:
        def reset(self):
            pass

        def update(self, outputs, targets):
            pass

        def compute(self):
            raise ZeroDivisionError("deliberate")

    with pytest.raises(ZeroDivisionError) as caught:
        evaluate(Metrics(Fails()), classified())
    assert "metric 'fails' raised this" in caught.value.__notes__


def test_metrics_of_float32_batches_are_those_of_the_batches_in_float64():
    learner = make_learner(Metrics(mae))
    data = batches(3)
    steps = [mae(learner.model(inputs), targets).detach().double() for inputs, targets in data]
    expected = torch.cat(steps).mean().item()
    assert learner.evaluate(data)["val/mae"] == pytest.approx(expected, rel=1e-15)  # order of the float64 sums


# Losses that are sums


def squared(outputs, targets):
    return (outputs - targets).square().sum()


SUMS = {
    "module": nn.MSELoss(reduction="sum"),
    "partial": functools.partial(torch.nn.functional.mse_loss, reduction="sum"),
    "summed": losses.summed(squared),
    "summed_module": losses.summed(nn.MSELoss(reduction="sum")),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss_fn", SUMS.values(), ids=SUMS)
def test_loss_that_is_a_sum_is_divided_by_the_samples(loss_fn, accumulate):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(10, 3, generator=generator), torch.randn(10, 1, generator=generator)
    model = nn.Linear(3, 1)
    plain = functools.partial(torch.optim.SGD, lr=0.0)
    learner = Learner(model, loss_fn, plain, plugins=[Metrics()], accumulate=accumulate, standard=False)
    batches = [(inputs[:8], targets[:8]), (inputs[8:], targets[8:])]
    metrics = learner.fit(batches, batches, epochs=1).metrics
    each = sum(squared(model(x), y).double().item() for x, y in batches) / 10
    assert metrics["train/loss"] == metrics["val/loss"] == each


def test_sum_over_one_batch_is_divided_too_and_no_other_value_of_a_step():
    other = on(
        "step_end", lambda step: setattr(step, "other", step.loss.detach()), before=("metrics",), updates=("step",)
    )
    learner = make_learner(Metrics(Mean("other")), other)
    learner.loss_fn = SUMS["module"]
    metrics = learner.evaluate(batches(1))
    (inputs, targets), *_ = batches(1)
    loss = squared(learner.model(inputs), targets).item()
    assert metrics["val/loss"] == loss / len(inputs)
    assert metrics["val/other"] == loss


@pytest.mark.parametrize("weight", [1, 3, 7, 10])
def test_mean_of_one_value_is_that_value(weight):
    for value in (0.1, 1 / 3, math.pi * 1e-9):
        mean = Mean("loss")
        mean.add(torch.tensor(value, dtype=torch.float64), weight)
        assert float(mean.compute()) == value
        again = Mean("loss")
        again.load_state_dict(mean.state_dict())
        assert float(again.compute()) == value
        again.merge([Mean("loss").state_dict(), mean.state_dict()])
        assert float(again.compute()) == value
        mean.add(torch.tensor(value, dtype=torch.float64), weight)
        assert float(mean.compute()) == pytest.approx(value, rel=1e-15)


class Counted:
    """A metric of the user's own, without a state."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.count = 0

    def update(self, outputs, targets):
        self.count += len(outputs)

    def compute(self):
        return self.count


@pytest.mark.parametrize("has", ["state_dict", "load_state_dict"])
def test_metric_with_half_a_state_is_refused(has):
    metric = Counted()
    setattr(metric, has, dict)
    with pytest.raises(PluginError, match=rf"Counted object at .* has {has}, but no "):
        Metrics(metric)


class Merged(Counted):
    """It loads a state by merging it alone, as several processes do."""

    name = "merged"

    def state_dict(self):
        return {"count": self.count}

    def merge(self, states):
        self.count = sum(state["count"] for state in states)


def test_metric_that_merges_goes_on_by_that():
    states = []

    def save(learner):
        states.append(copy.deepcopy(learner.state_dict()))

    learner = make_learner(Metrics(Merged()), on("step_end", save, reads=("*",)))
    learner.fit(batches(4), epochs=1)
    again = make_learner(Metrics(Merged()))
    again.load_state_dict(states[1])
    assert again.fit(batches(4), epochs=1).metrics == learner.metrics


def test_metric_without_a_state_is_warned_of_where_it_is_saved_and_where_it_goes_on():
    message, states = r"metric 'counted' \(Counted\) has no state_dict, and no checkpoint holds", []

    def save(learner, step):
        if step.index in (1, 2):
            states.append(learner.state_dict())

    learner = make_learner(Metrics(Counted()), on("step_end", save))
    with pytest.warns(UserWarning, match=message) as said:
        learner.fit(batches(4), epochs=1)
    assert len(said) == 1
    learner = make_learner(Metrics(Counted()))
    learner.load_state_dict(states[0])
    with pytest.warns(UserWarning, match=f"{message}.*covers only the rest"):
        learner.fit(batches(4), epochs=1)
    assert learner.metrics["train/counted"] < 4 * len(batches(1)[0][0])


@pytest.mark.parametrize("value", [{"a": 1.0}, "1.0", None, [1.0]], ids=str)
def test_function_that_returns_no_number_is_refused_with_what_to_give(value):
    learner = make_learner(Metrics(m=lambda outputs, targets: value))
    with pytest.raises(PluginError, match=r"it returned .*: the function of a metric returns one number") as caught:
        learner.fit(batches(1), epochs=1)
    assert "metric 'm' raised this" in caught.value.__notes__[0]
