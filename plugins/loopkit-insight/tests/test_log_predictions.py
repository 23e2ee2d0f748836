"""``LogPredictions``: which samples are kept, and how they are shown."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import keeps_contract, on, raising
from torch import Tensor, nn

from loopkit import Learner
from loopkit.errors import LogError, PluginError
from loopkit.logs import Image, Table
from loopkit_insight import LogPredictions


def test_plugin_keeps_the_contract() -> None:
    keeps_contract(lambda: LogPredictions(count=3), "log_predictions")
    keeps_contract(lambda: LogPredictions("table", every=2, worst=False))


SCORES = torch.tensor([[3.0, 0, 0], [0, 2, 0], [0, 0, 1], [0, 0, 0], [5, 0, 0], [0, 0, 4], [2, 0, 0]])
CLASSES = torch.tensor([0, 0, 2, 1, 1, 2, 0])
LOSSES = nn.functional.cross_entropy(SCORES, CLASSES, reduction="none")


class Given(nn.Module):
    """Returns its inputs, and has a parameter to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return x * self.scale if isinstance(x, Tensor) else x


def split(*tensors: Tensor, sizes: tuple[int, ...] = (3, 3, 1)) -> list[tuple[Tensor, ...]]:
    """Batches of uneven sizes."""
    return list(zip(*(each.split(sizes) for each in tensors), strict=True))


def learner_of(*plugins: Any, loss: Any = None, model: Any = None) -> tuple[Learner, list[Any]]:
    records: list[Any] = []
    made = Learner(
        model or Given(),
        loss or nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.0),
        plugins=[*plugins, on("log_value", lambda record, **given: records.append(record), "listen")],
        standard=False,
    )
    return made, records


def run(plugin: LogPredictions, val: Any = None, *, loss: Any = None, model: Any = None, epochs: int = 1) -> list[Any]:
    """What a fit logs."""
    val = split(SCORES, CLASSES) if val is None else val
    learner, records = learner_of(plugin, loss=loss, model=model)
    learner.fit(val[:1], val, epochs=epochs)
    return records


def rows(records: list[Any]) -> list[dict[str, Any]]:
    """The rows of the only table."""
    (table,) = [record.value for record in records if isinstance(record.value, Table)]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


# Which samples


def test_log_predictions_keeps_the_worst_of_all_batches() -> None:
    worst = LOSSES.sort(descending=True, stable=True).indices[:4].tolist()
    found = rows(run(LogPredictions(count=4)))
    assert [row["sample"] for row in found] == worst
    assert [row["loss"] for row in found] == LOSSES[worst].tolist()
    assert [row["true"] for row in found] == CLASSES[worst].tolist()
    assert [row["predicted"] for row in found] == SCORES.argmax(1)[worst].tolist()
    assert [row["probability"] for row in found] == SCORES.softmax(1).amax(1)[worst].tolist()


def test_log_predictions_keeps_the_first_ones() -> None:
    found = rows(run(LogPredictions(count=5, worst=False)))
    assert [row["sample"] for row in found] == [0, 1, 2, 3, 4]
    assert "loss" not in found[0]


def test_log_predictions_of_a_short_pass_are_all() -> None:
    assert len(rows(run(LogPredictions(count=100)))) == 7


def test_log_predictions_keeps_no_more_than_count() -> None:
    sizes = []

    def look(phase: Any, epoch: Any) -> None:
        if phase.name == "val":
            sizes.append(len(epoch.saved_stores()["log_predictions"]["kept"]["columns"]["sample"]))

    learner, _ = learner_of(LogPredictions(count=2), on("step_end", look, "watch"))
    learner.fit(split(SCORES, CLASSES), split(SCORES, CLASSES), epochs=1)
    assert sizes == [2, 2, 2]


def test_log_predictions_puts_undefined_losses_first() -> None:
    scores = SCORES.clone()
    scores[5] = math.nan
    found = rows(run(LogPredictions(count=2), split(scores, CLASSES)))
    assert [row["sample"] for row in found] == [5, 4]
    assert math.isnan(found[0]["loss"])


def test_log_predictions_without_targets_are_the_first_ones() -> None:
    learner, records = learner_of(LogPredictions(count=2))
    predict = on(
        "phase_end",
        lambda phase, **given: learner.predict(split(SCORES)) if phase.name == "train" else None,
        "predicts",
    )
    learner.add(predict)
    learner.fit(split(SCORES, CLASSES), epochs=1)
    assert [record.name for record in records] == ["predict/predictions"]
    assert [(row["sample"], row["predicted"]) for row in rows(records)] == [(0, 0), (1, 1)]


def test_log_predictions_every_so_many_passes() -> None:
    records = run(LogPredictions(every=2), epochs=5)
    assert [record.epoch for record in records if record.name == "val/predictions"] == [1, 3, 5]


def test_log_predictions_logs_nothing_outside_of_a_fit() -> None:
    learner, records = learner_of(LogPredictions())
    learner.evaluate(split(SCORES, CLASSES))
    assert records == []


def test_log_predictions_of_a_pass_inside_another_are_its_own() -> None:
    learner, records = learner_of(LogPredictions(count=7, worst=False))
    inner = split(SCORES[:2], CLASSES[:2], sizes=(2,))

    def nest(phase: Any, step: Any, learner: Any) -> None:
        if phase.name == "val" and step.index == 1 and len(learner.current.open_epochs) == 1:
            learner.run("val", inner)

    learner.add(on("step_end", nest, "nests"))
    learner.fit(inner, split(SCORES, CLASSES), epochs=1)
    assert [len(record.value.rows) for record in records] == [2, 7]


def test_log_predictions_forgets_a_pass_that_failed() -> None:
    learner, records = learner_of(LogPredictions(), raising("step_end", RuntimeError("test"), at=1, phase="val"))
    with pytest.raises(RuntimeError, match="test"):
        learner.fit(split(SCORES, CLASSES), split(SCORES, CLASSES), epochs=1)
    learner.fit(split(SCORES, CLASSES), split(SCORES, CLASSES), epochs=1)
    assert len(rows(records)) == 7


# How classes are shown


def test_log_predictions_uses_labels() -> None:
    found = rows(run(LogPredictions(labels=["cat", "dog"], worst=False)))
    assert [row["true"] for row in found] == ["cat", "cat", 2, "dog", "dog", 2, "cat"]
    assert found[1]["predicted"] == "dog"


def test_log_predictions_takes_probabilities_as_they_are() -> None:
    given = SCORES.softmax(1)
    found = rows(run(LogPredictions(worst=False), split(given, CLASSES)))
    assert [row["probability"] for row in found] == given.amax(1).tolist()


def test_log_predictions_of_half_precision() -> None:
    found = rows(run(LogPredictions(worst=False), split(SCORES.bfloat16(), CLASSES)))
    assert [row["probability"] for row in found] == SCORES.softmax(1).amax(1).tolist()


# How other things are shown


def test_log_predictions_of_numbers() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [4.0], [3.0]])
    found = rows(run(LogPredictions(count=2), split(outputs, targets, sizes=(2, 1)), loss=nn.MSELoss()))
    assert found == [
        {"sample": 1, "inputs": 2.0, "predicted": 2.0, "true": 4.0, "loss": 4.0},
        {"sample": 2, "inputs": 4.0, "predicted": 4.0, "true": 3.0, "loss": 1.0},
    ]


def test_log_predictions_of_several_numbers_are_text() -> None:
    values = torch.tensor([[1.0, 0.25], [3.0, 4.0]])
    found = rows(run(LogPredictions(), split(values, values, sizes=(2,)), loss=nn.L1Loss()))
    assert found[0] == {"sample": 0, "inputs": "1, 0.25", "predicted": "1, 0.25", "true": "1, 0.25", "loss": 0.0}


def test_log_predictions_of_many_numbers_are_left_out() -> None:
    values = torch.ones(2, 17)
    assert set(rows(run(LogPredictions(), split(values, values, sizes=(2,)), loss=nn.MSELoss()))[0]) == {
        "sample",
        "loss",
    }


def test_log_predictions_of_sequences_of_other_lengths() -> None:
    val = [(torch.ones(2, 3), torch.zeros(2, 3)), (torch.ones(1, 5), torch.ones(1, 5))]
    found = rows(run(LogPredictions(), val, loss=nn.MSELoss()))
    assert [row["true"] for row in found] == ["0, 0, 0, 0, 0", "0, 0, 0, 0, 0", "1, 1, 1, 1, 1"]


def test_log_predictions_of_other_outputs_warns_once() -> None:
    val = [({"inputs": ({"x": SCORES},), "targets": CLASSES})]
    plugin = LogPredictions()
    with pytest.warns(UserWarning, match=r"'log_predictions': the outputs of phase 'val' are tuple\(dict") as seen:
        records = run(
            plugin,
            val,
            loss=lambda outputs, targets: learner_parameter(outputs),
            model=Given(),
            epochs=2,
        )
    assert records == []
    assert len(seen) == 1


def learner_parameter(outputs: Any) -> Tensor:
    return torch.zeros((), requires_grad=True)


# Images

PIXELS = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 1, 3, 4)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.float().reshape(len(x), -1))


def images(inputs: Tensor, *options: Any, **more: Any) -> list[Any]:
    torch.manual_seed(0)
    val = [(inputs, torch.tensor([0, 1]))]
    found = run(LogPredictions(*options, worst=False, **more), val, model=Pixels())
    return [record for record in found if isinstance(record.value, Image)]


def test_log_predictions_logs_images_with_captions() -> None:
    found = images(PIXELS / 24, labels=["cat", "dog"])
    assert [record.name for record in found] == ["val/predictions/0", "val/predictions/1"]
    assert found[1].value.array()[:, :, 0].tolist() == (PIXELS[1, 0] / 24 * 255).round().int().tolist()
    assert [record.value.caption.split(", ")[1] for record in found] == ["true cat", "true dog"]
    assert found[0].value.caption.startswith(("predicted cat", "predicted dog"))


def test_log_predictions_stretches_images_that_leave_the_range() -> None:
    found = images(PIXELS - 5)
    assert [record.value.array().min() for record in found] == [0, 0]
    assert [record.value.array().max() for record in found] == [255, 255]


def test_log_predictions_of_bytes_are_as_they_are() -> None:
    assert images(PIXELS.to(torch.uint8))[1].value.array().max() == 23


def test_log_predictions_of_flat_images_by_a_function() -> None:
    found = images(PIXELS.flatten(1) / 24, lambda inputs: inputs.reshape(-1, 3, 4))
    assert [record.value.array().shape for record in found] == [(3, 4, 1)] * 2


def test_log_predictions_of_texts_by_a_function() -> None:
    tokens = ["to be", "or not"]
    found = rows(
        run(
            LogPredictions(lambda inputs: [tokens[int(row[0])] for row in inputs], worst=False),
            [(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([0, 1]))],
        )
    )
    assert [row["inputs"] for row in found] == ["or not", "to be"]


def test_log_predictions_of_images_as_a_table() -> None:
    assert images(PIXELS, "table") == []


def test_log_predictions_of_images_that_are_none_says_so() -> None:
    with pytest.raises(LogError, match=r"Image: pixels have the shape \(3,\)"):
        run(LogPredictions("image"))


# The loss of a sample


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")),
        (
            nn.CrossEntropyLoss(torch.tensor([1.0, 9, 1])),
            nn.CrossEntropyLoss(torch.tensor([1.0, 9, 1]), reduction="none"),
        ),
        (nn.functional.cross_entropy, nn.CrossEntropyLoss(reduction="none")),
        (lambda o, t: nn.functional.cross_entropy(o, t) * 2, nn.CrossEntropyLoss(reduction="none")),
    ],
)
def test_log_predictions_asks_the_loss_for_each_sample(loss: Any, expected: Any) -> None:
    found = rows(run(LogPredictions(), loss=loss))
    assert {row["sample"]: row["loss"] for row in found} == dict(enumerate(expected(SCORES, CLASSES).tolist()))


def test_log_predictions_leaves_the_loss_as_it_was() -> None:
    loss = nn.CrossEntropyLoss()
    run(LogPredictions(), loss=loss)
    assert loss.reduction == "mean"


def test_log_predictions_takes_a_loss() -> None:
    found = rows(run(LogPredictions(count=1, loss=lambda outputs, targets: outputs.sum(1))))
    assert [(row["sample"], row["loss"]) for row in found] == [(4, 5.0)]


def test_log_predictions_that_cannot_tell_the_loss_says_so() -> None:
    val = [(torch.ones(2, 3, 4), torch.ones(2))]
    loss = lambda outputs, targets: outputs.mean()  # noqa: E731
    with pytest.raises(PluginError, match=r"the loss of a single sample is not known.*worst=False"):
        run(LogPredictions(), val, loss=loss)
    assert len(rows(run(LogPredictions(worst=False), val, loss=loss))) == 2


def test_log_predictions_refuses_a_loss_of_the_batch() -> None:
    with pytest.raises(PluginError, match=r"the losses of 3 samples are Tensor\[\] float32 cpu: give"):
        run(LogPredictions(loss=lambda outputs, targets: outputs.mean()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": "images"}, r"inputs='images'\): it is 'image', 'table' or a function \(did you mean 'image'\?\)"),
        ({"inputs": 3}, r"inputs=3\): it is 'image'"),
        ({"every": 0}, "every is 0: it is a whole number, from 1"),
        ({"count": -1}, "count is -1"),
        ({"labels": "ab"}, r"labels='ab'\): give a list of strings"),
        ({"labels": [1]}, r"labels=\[1\]\)"),
        ({"loss": "mse"}, r"loss='mse'\): give a function"),
    ],
)
def test_log_predictions_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        LogPredictions(**options)
