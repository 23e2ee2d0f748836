from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers import make_learner, on
from torch import nn
from tqdm import tqdm

from loopkit import TrainingPhase, ValidationPhase
from loopkit.base.batches import count_samples, hands_on, odd_lengths, wrapped
from loopkit.data import Prefetch, from_function
from loopkit.errors import PhaseInputError
from loopkit.plugins import Metrics

LONG = torch.randn(9, 4, 3), torch.randn(4, 1)
SHORT = torch.randn(2, 4, 3), torch.randn(4, 1)


class TimeFirst:
    """Counts the second dimension."""

    def samples(self, batch: Any) -> int:
        return batch[0].shape[1]

    def forward(self, learner: Any, inputs: Any) -> Any:
        return learner.model(inputs[-1])


class Train(TimeFirst, TrainingPhase):
    pass


class Validate(TimeFirst, ValidationPhase):
    pass


class Graphs(TrainingPhase):
    """Batches are objects."""

    def samples(self, batch: Any) -> int:
        return batch.graphs

    def unpack(self, batch: Any) -> Any:
        return batch.x, batch.y


class Named(TrainingPhase):
    """A mapping whose first tensor has no samples."""

    def samples(self, batch: Any) -> int:
        return len(batch["y"])

    def unpack(self, batch: Any) -> Any:
        return batch["x"], batch["y"]


def graph(count: int) -> Any:
    return SimpleNamespace(graphs=count, x=torch.randn(count, 3), y=torch.randn(count, 1))


CASES = {
    "time first": (Train, [LONG, SHORT], 8),
    "objects": (Graphs, [graph(3), graph(5)], 8),
    "mapping": (Named, [{"edges": torch.zeros(2, 7), "x": torch.randn(6, 3), "y": torch.randn(6, 1)}], 6),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_of_a_phase_are_counted(case):
    phase, batches, expected = CASES[case]
    learner = make_learner(phases=[phase()])
    assert learner.fit(batches, epochs=1).samples == expected


def test_window_weighs_by_the_samples_of_the_phase():
    learner = make_learner(phases=[Train()], accumulate=2)
    by_hand = make_learner()
    for inputs, targets in (LONG, SHORT):
        (nn.functional.mse_loss(by_hand.model(inputs[-1]), targets) / 2).backward()
    by_hand.optimizer.step()
    learner.fit([LONG, SHORT], epochs=1)
    assert torch.equal(learner.model.weight, by_hand.model.weight)


def test_metrics_weigh_by_the_samples_of_the_phase():
    learner = make_learner(Metrics(), phases=[Validate()])
    losses = [nn.functional.mse_loss(learner.model(x[-1]), y).item() for x, y in (LONG, SHORT)]
    assert learner.evaluate([LONG, SHORT])["val/loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)  # summed in float64


@pytest.mark.parametrize("returned", [None, 1.5, -1, torch.tensor(4), True])
def test_samples_that_are_no_count_raise(returned):
    class Wrong(TrainingPhase):
        def samples(self, batch: Any) -> Any:
            return returned

    with pytest.raises(PhaseInputError, match=r"Wrong.samples returned .*an int from 0"):
        make_learner(phases=[Wrong()]).fit([SHORT], epochs=1)


def test_error_of_samples_is_located_there():
    class Broken(TrainingPhase):
        def samples(self, batch: Any) -> int:
            raise KeyError("x")

    with pytest.raises(KeyError) as error:
        make_learner(phases=[Broken()]).fit([SHORT], epochs=1)
    assert error.value.__notes__ == ["loopkit: in samples of phase 'train', as a batch came"]


def test_one_note_where_lengths_disagree(capsys):
    class Last(TrainingPhase):
        def forward(self, learner: Any, inputs: Any) -> Any:
            return learner.model(inputs[-1])

    make_learner(phases=[Last()]).fit([LONG, LONG], epochs=2)
    assert capsys.readouterr().err.count("parts begin with 9 and 4, and counts as 9 samples") == 1


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(9, 4), torch.zeros(4)), (9, 4)),
        ({"a": torch.zeros(6), "b": torch.zeros(4)}, (6, 4)),
        (((torch.zeros(5, 2),), torch.zeros(3)), (5, 3)),
        ((torch.zeros(8, 4), torch.zeros(4)), None),
        ((torch.zeros(8, 4), torch.tensor(1.0)), None),
        ((torch.zeros(8, 4), [torch.zeros(3), torch.zeros(5)]), None),
        (torch.zeros(3), None),
        (object(), None),
    ],
)
def test_odd_lengths_are_those_of_which_neither_is_a_multiple(batch, expected):
    assert odd_lengths(batch) == expected


def test_step_has_the_samples_of_the_phase():
    seen: list[Any] = []
    learner = make_learner(on("step_end", lambda step: seen.append((step.samples, step.weight))), phases=[Train()])
    learner.fit([LONG], epochs=1)
    assert seen == [(4, 4)]


class GraphBatch:
    """A batch of graphs, as torch_geometric makes it."""

    num_graphs = 4
    x = torch.zeros(9, 2)


class TensorMapping(dict):  # type: ignore[type-arg]
    """A mapping of tensors with a batch size, as tensordict makes it."""

    shape = torch.Size([])


IMAGES = tuple(torch.zeros(3, size, 8) for size in (8, 9, 10, 11))
BOXES = tuple({"boxes": torch.zeros(number, 4)} for number in (0, 1, 3, 2))
PACKED = torch.nn.utils.rnn.pack_sequence([torch.zeros(length, 2) for length in (7, 5, 2)])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (GraphBatch(), 4),
        ((GraphBatch(), torch.zeros(4)), 4),
        (PACKED, 3),
        ((PACKED, torch.zeros(3)), 3),
        ({"texts": PACKED}, 3),
        ((IMAGES, BOXES), 4),
        ([list(IMAGES), list(BOXES)], 4),
        ((IMAGES[:1], BOXES[:1]), 1),
        ((IMAGES[:3], BOXES[1:]), 3),
        ((IMAGES, torch.zeros(4)), 4),
        ((IMAGES[:1], torch.zeros(1)), 1),
        ((IMAGES, tuple(torch.zeros(n, 5) for n in (1, 2, 3, 4))), 4),
        (((torch.zeros(8, 2), torch.zeros(8, 3)), torch.zeros(8)), 8),
        (((torch.zeros(8, 2), torch.zeros(8, 3)), (torch.zeros(8), torch.zeros(8))), 8),
        (((torch.zeros(8, 5, 2), torch.zeros(8, 9, 2)), torch.zeros(8)), 8),
        (TensorMapping(x=torch.zeros(8, 2), y=torch.zeros(8)), 8),
        ({"boxes": torch.zeros(0, 4), "images": torch.zeros(3, 1)}, 3),
        ({"boxes": torch.zeros(0, 4), "ids": torch.zeros(0)}, 0),
        ((torch.zeros(0, 4), torch.zeros(3, 1)), 3),
        ([torch.zeros(0), torch.zeros(0, 2), torch.zeros(5)], 5),
        ((torch.zeros(0, 4), {"ids": torch.zeros(2)}), 2),
        ((torch.zeros(0, 4), torch.zeros(0)), 0),
        ({"scale": torch.tensor(1.0), "x": torch.zeros(5)}, 5),
        (torch.tensor(1.0), 1),
        (object(), 1),
    ],
)
def test_samples_of_batches_whose_kind_is_known(batch, expected):
    assert count_samples(batch) == expected


class SecondPart(TrainingPhase):
    """Takes the images, which come after the boxes."""

    def unpack(self, batch: Any) -> Any:
        return batch[1], batch[2]


@pytest.mark.parametrize("kind", [tuple, list])
def test_step_counts_the_first_tensor_that_is_not_empty(kind):
    batches = [kind((torch.zeros(empty, 4), torch.randn(n, 3), torch.randn(n, 1))) for empty, n in ((0, 3), (0, 5))]
    learner = make_learner(phases=[SecondPart()])
    weights = []
    learner.add(on("step_end", lambda step: weights.append((step.samples, step.weight))))
    learner.fit(batches, epochs=1)
    assert weights == [(3, 3), (5, 5)]
    assert learner.progress.samples == 8


class Counting(list):  # type: ignore[type-arg]
    """A list of batches that counts their samples."""

    def count_samples(self, batch: Any) -> int:
        return batch[0].shape[1]


def counting_loader():
    loader = torch.utils.data.DataLoader([LONG, SHORT], batch_size=None)
    loader.count_samples = lambda batch: batch[0].shape[1]  # type: ignore[attr-defined]
    return loader


class Last(TrainingPhase):
    """Takes the last time."""

    def forward(self, learner: Any, inputs: Any) -> Any:
        return learner.model(inputs[-1])


@pytest.mark.parametrize(
    "make", [lambda: Counting([LONG, SHORT]), counting_loader, lambda: counting_loader], ids=["list", "loader", "made"]
)
def test_function_of_the_data_counts_the_samples(make):
    learner = make_learner(phases=[Last()])
    learner.fit(make(), epochs=1)
    assert learner.progress.samples == 8


WRAPPERS = {
    "prefetch": lambda loader: Prefetch(loader, "cpu"),
    "several": lambda loader: Prefetch(Prefetch(loader, "cpu"), "cpu"),
    "bar": lambda loader: tqdm(Counting([LONG, SHORT]), disable=True),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_loaders_around_another_count_by_its_function(kind):
    loader = from_function(2, lambda index: (LONG, SHORT)[index])
    loader.count_samples = lambda batch: batch[0].shape[1]  # type: ignore[attr-defined]
    learner = make_learner(phases=[Last()])
    learner.fit(WRAPPERS[kind](loader), epochs=1)
    assert learner.progress.samples == 8


def turned(batch):
    return tuple(part.transpose(0, 1) if part.ndim > 2 else part for part in batch)


class First(TrainingPhase):
    """Takes the first time of sequences whose samples come first."""

    def forward(self, learner: Any, inputs: Any) -> Any:
        return learner.model(inputs[:, 0])


class Around:
    """A loader of another package around one."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return map(turned, self.source)


CHANGED = {
    "map": lambda loader: loader.map(turned),
    "map within": lambda loader: Prefetch(loader.map(turned), "cpu"),
    "other": Around,
}


@pytest.mark.parametrize("kind", CHANGED)
def test_loaders_that_change_batches_do_not_count_by_the_function_of_the_inner_one(kind):
    loader = from_function(2, lambda index: (LONG, SHORT)[index])
    loader.count_samples = lambda batch: pytest.fail("it counts another batch")  # type: ignore[attr-defined]
    learner = make_learner(phases=[First()])
    learner.fit(CHANGED[kind](loader), epochs=1)
    assert learner.progress.samples == 8


class AnyName:
    """Answers any name with a new object, as proxies of remote objects do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)()


class Remote(AnyName):
    def __iter__(self) -> Any:
        return iter([(torch.randn(4, 3), torch.zeros(4, 1))])


def mock() -> MagicMock:
    made = MagicMock()
    made.__iter__.side_effect = lambda: iter([(torch.randn(4, 3), torch.zeros(4, 1))])
    made.__len__.return_value = 1
    return made


@pytest.mark.parametrize("make", [Remote, mock])
def test_data_that_answer_any_name_are_trained_on(make):
    learner = make_learner()
    learner.fit(make(), epochs=1)
    assert learner.progress.samples == 4


def test_loaders_are_looked_through_to_a_depth():
    assert len(wrapped(AnyName())) == len(wrapped(mock())) == 8
    assert len(wrapped(AnyName(), hands_on)) == 1


def test_function_of_the_loader_around_goes_before_that_of_the_inner_one():
    loader = from_function(2, lambda index: (LONG, SHORT)[index])
    loader.count_samples = lambda batch: 1  # type: ignore[attr-defined]
    outer = loader.map(lambda batch: batch)
    outer.count_samples = lambda batch: batch[0].shape[1]  # type: ignore[attr-defined]
    learner = make_learner(phases=[Last()])
    learner.fit(outer, epochs=1)
    assert learner.progress.samples == 8


def test_phase_with_a_count_of_its_own_takes_that():
    learner = make_learner(phases=[Train()])
    data = Counting([LONG, SHORT])
    data.count_samples = lambda batch: 1  # type: ignore[method-assign,assignment]
    learner.fit(data, epochs=1)
    assert learner.progress.samples == 8


def test_validation_is_weighted_by_the_count_of_its_loader():
    batches = Counting([(torch.randn(9, 4, 3), torch.zeros(4, 1)), (torch.randn(2, 1, 3), torch.zeros(1, 1))])

    class LastOfVal(ValidationPhase):
        def forward(self, learner: Any, inputs: Any) -> Any:
            return learner.model(inputs[-1])

    learner = make_learner(Metrics(), phases=[LastOfVal()])
    loss = learner.evaluate(batches)["val/loss"]
    with torch.no_grad():
        errors = torch.cat([learner.model(x[-1]) for x, _ in batches]).square()
    torch.testing.assert_close(torch.tensor(loss), errors.mean(), rtol=1e-6, atol=0)  # summed in another order


@pytest.mark.parametrize("made", [None, -1, 2.0, torch.tensor(3)])
def test_count_of_the_data_that_is_no_number_raises(made):
    data = Counting([LONG])
    data.count_samples = lambda batch: made  # type: ignore[method-assign]
    with pytest.raises(PhaseInputError, match=r"Counting\.count_samples returned") as error:
        make_learner(phases=[Last()]).fit(data, epochs=1)
    assert error.value.__notes__ == ["loopkit: in count_samples of phase 'train', as a batch came"]
