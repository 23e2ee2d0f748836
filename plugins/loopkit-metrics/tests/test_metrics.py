"""Metrics against scikit-learn, torchmetrics, NumPy or a loop: on random cases, over uneven batches and processes."""

from functools import partial

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
import torchmetrics
from torch import nn
from torchmetrics.functional import classification as functional
from torchmetrics.functional import regression as errors

import loopkit_metrics
from loopkit import Learner, data
from loopkit.logs import Table, read_log
from loopkit.metrics import F1, FBeta, Precision, Recall
from loopkit.plugins import LogMetrics, LogTo, Metrics
from loopkit_metrics import (
    AUROC,
    MAE,
    MSE,
    R2,
    RMSE,
    AveragePrecision,
    ConfusionMatrix,
    Dice,
    ExponentialMean,
    IoU,
    PrecisionRecall,
    Quantile,
    SamplesPerSecond,
    TopK,
)

CASES = 200
CLOSE = {"rtol": 1e-9, "atol": 1e-12}  # sums in another order


def error(outputs, targets):
    return (outputs - targets).abs()


def fed(make, outputs, targets, generator):
    """The metric of all samples, from one object, from one that was saved on its way, and from three processes."""
    cuts = sorted(torch.randint(1, len(outputs), (3,), generator=generator).tolist())
    parts = list(zip(outputs.tensor_split(cuts), targets.tensor_split(cuts), strict=True))
    parts = [part for part in parts if len(part[0])]
    one, saved, ranks = make(), make(), [make() for _ in range(3)]
    for index, part in enumerate(parts):
        one.update(*part)
        saved.update(*part)
        again = make()
        again.load_state_dict(saved.state_dict())
        saved = again
        ranks[index % 3].update(*part)
    merged = make()
    merged.merge([rank.state_dict() for rank in ranks])
    return [np.asarray(metric.compute()) for metric in (one, saved, merged)]


def numbers(generator, size):
    return [100 + torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]


def columns(generator, size):
    return [values.reshape(-1, 2) for values in numbers(generator, 2 * size)]


def binary(generator, size):
    """Scores with ties, and targets of both classes."""
    scores = torch.randint(7, (size,), generator=generator) / 7
    targets = torch.randint(2, (size,), generator=generator)
    targets[:2] = torch.tensor([0, 1])
    return scores.double(), targets


def classes(generator, size):
    targets = torch.randint(4, (size,), generator=generator)
    targets[:4] = torch.arange(4)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64), targets


def several(generator, size):
    targets = torch.randint(2, (size, 3), generator=generator)
    targets[0], targets[1] = 0, 1
    return torch.randint(9, (size, 3), generator=generator) / 9, targets


def top2(outputs, targets):
    return reference.top_k_accuracy_score(targets, outputs, k=2, labels=range(4))


def confusion(normalize=None):
    return lambda outputs, targets: reference.confusion_matrix(targets, outputs.argmax(1), normalize=normalize)


def auroc(average):
    def score(outputs, targets):
        given = outputs.softmax(1) if outputs.shape[1:] == (4,) else outputs
        return reference.roc_auc_score(targets, given, average=average, multi_class="ovr")

    return score


def precision(average):
    def score(outputs, targets):
        one_hot = nn.functional.one_hot(targets, 4) if outputs.shape[1:] == (4,) else targets
        given = outputs.softmax(1) if outputs.shape[1:] == (4,) else outputs
        return reference.average_precision_score(one_hot, given, average=average)

    return score


LOGITS = {"from_logits": True}
TABLE = {
    "mse": (MSE, numbers, lambda o, t: reference.mean_squared_error(t, o)),
    "mae": (MAE, numbers, lambda o, t: reference.mean_absolute_error(t, o)),
    "rmse": (RMSE, numbers, lambda o, t: reference.root_mean_squared_error(t, o)),
    "r2": (R2, numbers, lambda o, t: reference.r2_score(t, o)),
    "r2 of columns": (R2, columns, lambda o, t: reference.r2_score(t, o)),
    "top2": (lambda: TopK(2), classes, top2),
    "confusion": (ConfusionMatrix, classes, confusion()),
    "confusion true": (lambda: ConfusionMatrix("true"), classes, confusion("true")),
    "confusion pred": (lambda: ConfusionMatrix("pred"), classes, confusion("pred")),
    "confusion all": (lambda: ConfusionMatrix("all"), classes, confusion("all")),
    "auroc": (AUROC, binary, lambda o, t: reference.roc_auc_score(t, o)),
    "auroc of classes": (lambda: AUROC(**LOGITS), classes, auroc("macro")),
    "auroc weighted": (lambda: AUROC("weighted", **LOGITS), classes, auroc("weighted")),
    "auroc per class": (lambda: AUROC(None, **LOGITS), classes, auroc(None)),
    "auroc of labels": (AUROC, several, auroc("macro")),
    "ap": (AveragePrecision, binary, lambda o, t: reference.average_precision_score(t, o)),
    "ap of classes": (lambda: AveragePrecision(**LOGITS), classes, precision("macro")),
    "ap weighted": (lambda: AveragePrecision("weighted", **LOGITS), classes, precision("weighted")),
    "ap per class": (lambda: AveragePrecision(None, **LOGITS), classes, precision(None)),
    "ap of labels": (AveragePrecision, several, precision("macro")),
    "quantile": (lambda: Quantile(error, 0.3), numbers, lambda o, t: np.quantile(error(o, t), 0.3)),
    "quantiles": (lambda: Quantile(error, [0, 0.5, 1]), numbers, lambda o, t: np.quantile(error(o, t), [0, 0.5, 1])),
    "precision per class": (
        lambda: Precision(average=None),
        classes,
        lambda o, t: reference.precision_score(t, o.argmax(1), average=None, labels=range(4), zero_division=0),
    ),
    "recall per class": (
        lambda: Recall(average=None),
        classes,
        lambda o, t: reference.recall_score(t, o.argmax(1), average=None, labels=range(4), zero_division=0),
    ),
    "f1 per class": (
        lambda: F1(average=None),
        classes,
        lambda o, t: reference.f1_score(t, o.argmax(1), average=None, labels=range(4), zero_division=0),
    ),
}


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("name", TABLE)
def test_metric_equals_its_reference_in_random_cases(name):
    make, draw, expected = TABLE[name]
    generator = torch.Generator().manual_seed(len(name))
    for _ in range(CASES):
        outputs, targets = draw(generator, int(torch.randint(8, 30, (), generator=generator)))
        wanted = expected(outputs, targets)
        for found in fed(make, outputs, targets, generator):
            np.testing.assert_allclose(found, wanted, **CLOSE)


def multiclass(name, **options):
    return lambda o, t: getattr(functional, f"multiclass_{name}")(o, t, 4, **options)


NONE, WEIGHTED, AP = {"average": "none"}, {"average": "weighted"}, "average_precision"
TORCHMETRICS = {
    "mse": (MSE, numbers, errors.mean_squared_error),
    "mae": (MAE, numbers, errors.mean_absolute_error),
    "rmse": (RMSE, numbers, lambda o, t: errors.mean_squared_error(o, t, squared=False)),
    "r2": (R2, numbers, errors.r2_score),
    "r2 of columns": (R2, columns, errors.r2_score),
    "auroc": (AUROC, binary, functional.binary_auroc),
    "auroc of classes": (lambda: AUROC(**LOGITS), classes, multiclass("auroc")),
    "auroc weighted": (lambda: AUROC("weighted", **LOGITS), classes, multiclass("auroc", **WEIGHTED)),
    "auroc per class": (lambda: AUROC(None, **LOGITS), classes, multiclass("auroc", **NONE)),
    "auroc of labels": (AUROC, several, lambda o, t: functional.multilabel_auroc(o, t, 3)),
    "ap": (AveragePrecision, binary, functional.binary_average_precision),
    "ap of classes": (lambda: AveragePrecision(**LOGITS), classes, multiclass(AP)),
    "ap weighted": (
        lambda: AveragePrecision("weighted", **LOGITS),
        classes,
        multiclass(AP, **WEIGHTED),
    ),
    "ap per class": (lambda: AveragePrecision(None, **LOGITS), classes, multiclass(AP, **NONE)),
    "ap of labels": (AveragePrecision, several, lambda o, t: functional.multilabel_average_precision(o, t, 3)),
    "top2": (lambda: TopK(2), classes, multiclass("accuracy", top_k=2, average="micro")),
    "confusion": (ConfusionMatrix, classes, multiclass("confusion_matrix")),
    "confusion true": (lambda: ConfusionMatrix("true"), classes, multiclass("confusion_matrix", normalize="true")),
    "confusion pred": (lambda: ConfusionMatrix("pred"), classes, multiclass("confusion_matrix", normalize="pred")),
    "confusion all": (lambda: ConfusionMatrix("all"), classes, multiclass("confusion_matrix", normalize="all")),
    "f1 per class": (lambda: F1(average=None), classes, multiclass("f1_score", **NONE)),
    "precision per class": (lambda: Precision(average=None), classes, multiclass("precision", **NONE)),
    "recall per class": (lambda: Recall(average=None), classes, multiclass("recall", **NONE)),
}
"""It has neither a quantile nor a mean that forgets by weights."""


@pytest.mark.filterwarnings("ignore:.*NaN values found in confusion matrix have been replaced")
@pytest.mark.parametrize("name", TORCHMETRICS)
def test_metric_equals_torchmetrics_in_random_cases(name):
    make, draw, expected = TORCHMETRICS[name]
    generator = torch.Generator().manual_seed(0)
    for _ in range(CASES):
        outputs, targets = draw(generator, 20)
        metric = make()
        metric.update(outputs, targets)
        np.testing.assert_allclose(metric.compute(), expected(outputs, targets), rtol=1e-6)  # it counts in float32


def test_exponential_mean_equals_the_loop_by_hand_in_random_cases():
    generator = torch.Generator().manual_seed(0)
    for case in range(CASES):
        beta = [0.0, 0.5, 0.98][case % 3]
        values, weights = torch.rand(2, 2, 12, generator=generator, dtype=torch.float64)
        one, ranks, above, below = ExponentialMean(beta=beta), [ExponentialMean(beta=beta) for _ in range(2)], 0, 0
        for step in range(12):
            whole, weight = (values * weights)[:, step].sum(), weights[:, step].sum()
            one.add(whole / weight, float(weight))
            for rank in range(2):
                ranks[rank].add(values[rank, step], float(weights[rank, step]))
            above, below = beta * above + whole, beta * below + weight
        merged = ExponentialMean(beta=beta)
        merged.merge([rank.state_dict() for rank in ranks])
        np.testing.assert_allclose([one.compute(), merged.compute()], [above / below] * 2, **CLOSE)


def test_exponential_mean_of_equal_weights_starts_at_the_first_value():
    metric = ExponentialMean(beta=0.9)
    metric.add(torch.tensor(3.0), 1)
    assert metric.compute() == 3
    metric.add(torch.tensor(1.0), 1)
    assert metric.compute().item() == pytest.approx((0.9 * 3 + 1) / 1.9, rel=1e-15)


def test_samples_per_second_count_the_time_of_both_parts_and_the_samples_of_all():
    metric = SamplesPerSecond()
    metric.load_state_dict({"samples": 5, "seconds": 100.0})
    metric.update(torch.zeros(5, 1), torch.zeros(5))
    assert 0.09 < metric.compute() <= 0.1
    metric.merge([{"samples": 30, "seconds": 10.0}, {"samples": 10, "seconds": 20.0}])
    assert 1.9 < metric.compute() <= 2


def classifier(*metrics):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return Learner(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters()), plugins=[Metrics(*metrics)])


def loader():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)
    return data.TensorLoader(inputs, targets, batch_size=8)


def test_metrics_in_a_learner_have_a_name_each_and_a_table():
    stack = [AUROC(None, from_logits=True, labels=["a", "b", "c"]), ConfusionMatrix(labels=["a", "b", "c"])]
    stack += [ExponentialMean(), TopK(2), F1(average=None), torchmetrics.Accuracy(task="multiclass", num_classes=3)]
    learner = classifier(*stack)
    learner.remove("progress")
    plugin = next(plugin for plugin in learner.plugins.values() if isinstance(plugin, Metrics))
    values = learner.evaluate(loader())
    names = ["loss", *(f"auroc/{name}" for name in "abc"), "smooth_loss", "top2", *(f"f1/{i}" for i in range(3))]
    assert list(values) == [f"val/{name}" for name in [*names, "multiclassaccuracy"]]
    table = plugin.tables["val/confusion_matrix"]
    assert isinstance(table, Table)
    assert sum(sum(row[1:]) for row in table.rows) == 30


def test_matrix_of_a_fit_is_a_table_in_the_log_and_no_column(tmp_path):
    learner = classifier(ConfusionMatrix(labels=["a", "b", "c"]))
    for plugin in (LogTo(tmp_path), LogMetrics()):
        learner.add(plugin)
    learner.remove("progress")
    learner.fit(loader(), loader(), epochs=2)
    log = read_log(tmp_path)
    tables = log.values("val/confusion_matrix")
    assert [(table["kind"], table["columns"]) for table in tables] == [("table", ["", "a", "b", "c"])] * 2
    inputs, targets = (torch.cat(each) for each in zip(*loader(), strict=True))
    with torch.no_grad():
        expected = reference.confusion_matrix(targets, learner.model(inputs).argmax(1))
    assert [row[1:] for row in tables[-1]["rows"]] == expected.tolist()
    assert [row[0] for row in tables[-1]["rows"]] == ["a", "b", "c"]
    assert list(log.frame("val").columns) == ["phase", "epoch", "step", "update", "time", "loss"]


def test_state_of_a_metric_is_a_copy():
    for make, draw, _ in TABLE.values():
        metric = make()
        outputs, targets = draw(torch.Generator().manual_seed(0), 8)
        metric.update(outputs, targets)
        before = metric.state_dict()
        metric.update(outputs, targets)
        again = make()
        again.load_state_dict(before)
        again.update(outputs, targets)
        np.testing.assert_array_equal(metric.compute(), again.compute())


@pytest.mark.parametrize("cls", [AUROC, AveragePrecision])
def test_scores_that_are_nan_are_not_ranked(cls):
    one = cls()
    one.update(torch.tensor([0.1, 0.9, torch.nan, 0.4]), torch.tensor([0, 1, 0, 1]))
    assert one.compute().isnan()
    outputs, targets = torch.rand(6, 3), torch.tensor([0, 1, 2, 1, 0, 2])
    outputs[3, 1] = torch.nan
    each, mean, weighted = (cls(average, from_logits=False) for average in (None, "macro", "weighted"))
    for metric in (each, mean, weighted):
        metric.update(outputs, targets)
    assert each.compute().isnan().tolist() == [False, True, False]
    assert mean.compute().isnan()
    assert weighted.compute().isnan()


def test_ranks_of_many_samples_are_exact():
    samples = 2**23 + 3  # of so many, float32 has no halves of ranks
    scores, hits = torch.zeros(1, samples, dtype=torch.int8), torch.zeros(1, samples, dtype=torch.float64)
    scores[0, -2:] = hits[0, -1] = 1
    assert AUROC().score(scores, hits).item() == (samples - 1.5) / (samples - 1)  # one of the others ties


def test_scores_of_a_class_that_does_not_occur_are_left_out_of_the_mean():
    outputs, targets = torch.rand(6, 3), torch.tensor([0, 1, 0, 1, 0, 0])
    for cls in (AUROC, AveragePrecision):
        each, mean, weighted = (cls(average, from_logits=False) for average in (None, "macro", "weighted"))
        for metric in (each, mean, weighted):
            metric.update(outputs, targets)
        assert each.compute().isnan().tolist() == [False, False, True]
        assert mean.compute() == each.compute()[:2].mean()
        np.testing.assert_allclose(weighted.compute(), np.average(each.compute()[:2], weights=[4, 2]))


REFUSED = {
    "k is 0: it is a whole number": lambda: TopK(0),
    "normalize is 'rows'": lambda: ConfusionMatrix("rows"),
    "average is 'micro'": lambda: AUROC("micro"),
    "give average=None": lambda: AUROC(labels=["a"]),
    "q is 2: it is between 0 and 1": lambda: Quantile(error, 2),
    "beta is 1: it is from 0": lambda: ExponentialMean(beta=1),
    "give from_logits=True": lambda: AUROC().update(torch.rand(4, 3), torch.zeros(4)),
    "both the same shape": lambda: AveragePrecision().update(torch.rand(4, 3), torch.zeros(5)),
    "give them the same shape": lambda: MSE().update(torch.rand(4, 3), torch.zeros(4)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_metric_refuses(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_metric_of_nothing_is_empty():
    for name in set(loopkit_metrics.__all__) - {"Quantile", "SamplesPerSecond"}:
        metric = getattr(loopkit_metrics, name)()
        assert metric.is_empty
        assert np.isnan(metric.compute())


def test_metrics_say_whether_higher_values_are_better():
    said = {each: Metrics(m=each()).higher_is_better("val/m") for each in (AUROC, AveragePrecision, R2, MSE, MAE, RMSE)}
    assert said == {AUROC: True, AveragePrecision: True, R2: True, MSE: False, MAE: False, RMSE: False}
    assert Metrics(m=TopK(2)).higher_is_better("val/m") is True
    assert Metrics(m=Quantile("loss", 0.5)).higher_is_better("val/m") is None


def highest(outputs, targets, recalls):
    """For each recall, the highest precision of scikit-learn's curve at it or above."""
    precision, recall, _ = reference.precision_recall_curve(targets, outputs)
    return [precision[:-1][recall[:-1] >= at - 1e-9].max() for at in recalls]


@pytest.mark.parametrize("ties", [False, True])
def test_precision_recall_is_the_highest_precision_of_the_curve(ties):
    outputs, targets = binary(torch.Generator().manual_seed(0), 60)
    outputs = outputs.mul(3).round() if ties else outputs
    metric = PrecisionRecall(points=21)
    for part in (slice(0, 7), slice(7, 60)):
        metric.update(outputs[part], targets[part])
    table = metric.compute()
    assert table.columns == ("recall", "precision")
    at, precision = np.array(table.rows).T
    np.testing.assert_allclose(at, np.linspace(0, 1, 21), atol=1e-7)
    np.testing.assert_allclose(precision, highest(outputs.numpy(), targets.numpy(), at), atol=1e-6)


def test_precision_recall_of_classes_has_a_column_each_and_is_a_table():
    outputs, targets = classes(torch.Generator().manual_seed(0), 40)
    targets = targets.clamp(max=2)
    scores = Metrics(PrecisionRecall(5, from_logits=True, labels=list("abcd")), phase="val")
    batch = data.TensorLoader(outputs, targets, batch_size=16)
    learner = Learner(nn.Identity(), nn.CrossEntropyLoss(), plugins=[scores], standard=False)
    assert learner.evaluate(batch) == {}
    table = scores.tables["val/precision_recall"]
    assert table.columns == ("recall", "a", "b", "c", "d")
    rows = np.array(table.rows)
    given = outputs.softmax(1).numpy()
    for at in range(3):
        np.testing.assert_allclose(rows[:, at + 1], highest(given[:, at], targets == at, rows[:, 0]), atol=1e-6)
    assert np.isnan(rows[:, 4]).all()


def test_precision_recall_refuses_points_and_labels_that_do_not_fit():
    with pytest.raises(ValueError, match="points is 1: it is a whole number, from 2"):
        PrecisionRecall(1)
    metric = PrecisionRecall(labels=["a", "b", "c"])
    metric.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="there are 1 classes, and 3 labels"):
        metric.compute()


LABELS = {
    "precision": (Precision, lambda t, p, average: reference.precision_score(t, p, average=average, zero_division=0)),
    "recall": (Recall, lambda t, p, average: reference.recall_score(t, p, average=average, zero_division=0)),
    "f1": (F1, lambda t, p, average: reference.f1_score(t, p, average=average, zero_division=0)),
    "f2": (
        lambda **options: FBeta(2, **options),
        lambda t, p, average: reference.fbeta_score(t, p, beta=2, average=average, zero_division=0),
    ),
    "iou": (IoU, lambda t, p, average: reference.jaccard_score(t, p, average=average, zero_division=0)),
    "dice": (Dice, lambda t, p, average: reference.f1_score(t, p, average=average, zero_division=0)),
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted", None])
@pytest.mark.parametrize("form", ["classes", "labels", "one label", "one column", "probabilities"])
def test_scores_of_classes_and_labels_equal_those_of_scikit_learn(kind, average, form):
    make, score = LABELS[kind]
    generator = torch.Generator().manual_seed(len(kind))
    for case in range(10):
        size = 5 + case
        outputs = torch.randn(size, 3, generator=generator)
        options = {"average": average}
        if form == "classes":
            targets = torch.randint(3, (size,), generator=generator)
            predicted = outputs.argmax(1)
        elif form == "probabilities":
            targets = torch.randint(2, (size, 3), generator=generator)
            outputs = outputs.sigmoid()
            options |= {"from_logits": False, "threshold": 0.7}
            predicted = outputs.gt(0.7)
        elif form == "labels":
            targets = torch.randint(2, (size, 3), generator=generator)
            options |= {"from_logits": True}
            predicted = outputs.gt(0)
        else:
            targets = torch.randint(2, (size,), generator=generator)
            outputs = outputs[:, :1] if form == "one column" else outputs[:, 0]
            options |= {"from_logits": True}
            predicted = outputs.reshape(size).gt(0)
        if form.startswith("one "):
            expected = score(targets, predicted, "binary")
        elif form == "classes" and average in ("macro", None):
            full = torch.cat([targets, torch.arange(3)]), torch.cat([predicted, torch.arange(3)])
            targets, predicted = full
            outputs = torch.cat([outputs, torch.eye(3) * 9])
            expected = score(targets, predicted, average)
        else:
            expected = score(targets, predicted, average)
        for found in fed(partial(make, **options), outputs, targets, generator):
            np.testing.assert_allclose(found.reshape(np.shape(expected)), expected, **CLOSE)


def test_iou_of_masks_counts_each_pixel():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 2, 5, 6, generator=generator)
    masks = torch.randint(2, (4, 2, 5, 6), generator=generator)
    metric = IoU(average=None, from_logits=True)
    metric.update(outputs, masks)
    each = [reference.jaccard_score(masks[:, i].flatten(), outputs[:, i].flatten() > 0) for i in range(2)]
    np.testing.assert_allclose(metric.compute(), each, **CLOSE)


@pytest.mark.parametrize("make", [Precision, Recall, F1, IoU])
def test_score_of_one_logit_a_sample_names_its_own_option(make):
    with pytest.raises(ValueError, match=rf"for one logit a sample: {make.__name__}\(from_logits=True\)"):
        make().update(torch.randn(4, 1), torch.zeros(4, 1))
