"""Predictions on several loaders, and their files: indices as Lightning's writer gets them."""

from __future__ import annotations

import csv
import os
import warnings

import pytest
import torch
from distributed.processes import run
from helpers import make_learner
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from loopkit import PredictionPhase
from loopkit.data import ResumableSampler, TensorLoader
from loopkit.errors import ArgumentError, CancelEpoch, CancelFit, PhaseError, PhaseInputError, StepStateError
from loopkit.plugins import DDP
from loopkit_data import write_predictions

INPUTS = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
OTHERS = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


class Inputs(Dataset):
    """Inputs by index."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index]


def made(inputs):
    """Each kind of loader that knows its samples."""
    samples = Inputs(inputs)
    return {
        "loader": TensorLoader(inputs, batch_size=4),
        "shuffled": TensorLoader(inputs, batch_size=4, shuffle=True, seed=1),
        "dataloader": DataLoader(samples, batch_size=4),
        "workers": DataLoader(samples, batch_size=4, num_workers=2),
        "one by one": DataLoader(samples, batch_size=1),
        "without a tail": DataLoader(samples, batch_size=4, drop_last=True),
        "resumable": DataLoader(samples, batch_size=4, sampler=ResumableSampler(samples, seed=2)),
    }


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_mapping_of_loaders_predicts_on_each():
    learner = make_learner()
    loaders = {"a": TensorLoader(INPUTS, batch_size=4), "b": DataLoader(Inputs(OTHERS), batch_size=2)}
    found = learner.predict(loaders)
    assert list(found) == ["a", "b"]
    assert torch.equal(found["a"], learner.predict(loaders["a"]))
    assert torch.equal(found["b"], learner.predict(OTHERS))


def test_mapping_that_is_one_batch_raises_as_before():
    with pytest.raises(PhaseInputError):
        make_learner().predict({"x": INPUTS})


@pytest.mark.parametrize("kind", made(INPUTS))
def test_each_output_has_the_index_of_its_sample(kind):
    learner = make_learner()
    found = list(learner.predict_batches(made(INPUTS)[kind], indices=True))
    expected = learner.predict(INPUTS)
    indices = torch.cat([each for each, _ in found])
    assert sorted(indices.tolist()) == list(range(8 if kind == "without a tail" else 11))
    torch.testing.assert_close(torch.cat([each for _, each in found]), expected[indices], rtol=1e-6, atol=1e-7)  # sizes


def by_lightning(loaders):
    """The indices that Lightning's writer gets of each loader."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import BasePredictionWriter

    seen = [[] for _ in loaders]

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            seen[dataloader_idx] += batch_indices

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, inputs):
            return self.layer(inputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            callbacks=[Writer("batch")],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.predict(Module(), loaders, return_predictions=False)
    return seen


def test_file_has_the_indices_that_lightning_writes(tmp_path):
    loaders = {"a": DataLoader(Inputs(INPUTS), batch_size=4), "b": DataLoader(Inputs(OTHERS), batch_size=2)}
    rows = read(write_predictions(make_learner(), loaders, tmp_path / "predictions.csv"))[1:]
    found = [[int(index) for loader, index, *_ in rows if loader == name] for name in loaders]
    assert found == by_lightning(list(loaders.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3])
def test_numbers_read_back_as_they_were(tmp_path, dtype, width):
    learner = make_learner(model=nn.Linear(3, width).to(dtype))
    loader = TensorLoader(INPUTS.to(dtype), batch_size=4)
    header, *rows = read(write_predictions(learner, loader, tmp_path / "a.csv"))
    assert header == ["loader", "index", *(["output"] if width == 1 else ["output 0", "output 1", "output 2"])]
    found = torch.tensor([[float(each) for each in row[2:]] for row in rows], dtype=dtype)
    assert torch.equal(found, learner.predict(loader))


class Classes(PredictionPhase):
    def step(self, learner, step):
        step.outputs = learner.model(step.batch).argmax(1)


class Pairs(PredictionPhase):
    def step(self, learner, step):
        step.outputs = learner.model(step.batch), step.batch


def test_one_number_a_sample_is_one_column(tmp_path):
    learner = make_learner(model=nn.Linear(3, 3), phases=[Classes()])
    rows = read(write_predictions(learner, TensorLoader(INPUTS, batch_size=4), tmp_path / "a.csv"))
    assert rows[0] == ["loader", "index", "output"]
    assert [int(row[2]) for row in rows[1:]] == learner.predict(INPUTS).tolist()


def test_outputs_of_several_parts_raise(tmp_path):
    learner = make_learner(phases=[Pairs()])
    with pytest.raises(PhaseError, match=r"outputs are tuple\(.*predict_batches\(loader, indices=True\)"):
        write_predictions(learner, TensorLoader(INPUTS, batch_size=4), tmp_path / "a.csv")


class Made(PredictionPhase):
    """Outputs that a function makes."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def step(self, learner, step):
        if (made := self.make(step.batch, step.index)) is not None:
            step.outputs = made


WRONG = {
    "fewer rows": (lambda batch, index: batch[:2], r"a batch of 4 samples has outputs Tensor\[2, 3\]"),
    "more rows": (lambda batch, index: torch.cat([batch, batch]), r"a batch of 4 samples has outputs Tensor\[8, 3\]"),
    "pooled": (lambda batch, index: batch.mean(0), r"a batch of 4 samples has outputs Tensor\[3\]"),
    "ragged": (lambda batch, index: batch[:, : 3 - index], "sample 4 has 2 outputs, and a sample before it has 3"),
    "sparse": (lambda batch, index: batch.to_sparse(), r"outputs are a sparse tensor.*outputs.to_dense\(\)"),
    "nested": (
        lambda batch, index: torch.nested.nested_tensor([*batch], layout=torch.jagged),
        "outputs are a nested tensor.*to_padded_tensor",
    ),
    "none of a batch": (lambda batch, index: batch if index else None, "1 of 3 batches have no outputs"),
}


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("kind", WRONG)
def test_outputs_that_are_no_table_raise_and_leave_the_file(tmp_path, kind, old):
    make, message = WRONG[kind]
    path = tmp_path / "a.csv"
    loader = TensorLoader(INPUTS, batch_size=4)
    if old:
        write_predictions(make_learner(), loader, path)
    before = path.read_bytes() if old else None
    learner = make_learner(phases=[Made(make)])
    with pytest.raises(PhaseError, match=message):
        write_predictions(learner, loader, path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.csv"] * old
    assert not old or path.read_bytes() == before
    learner.evaluate([(INPUTS, INPUTS[:, :1])])  # no epoch is open


class Longer(DataLoader):
    """A loader whose length is too large by one."""

    def __len__(self):
        return super().__len__() + 1


class LongerTensors(TensorLoader):
    def __len__(self):
        return super().__len__() + 1


@pytest.mark.parametrize(
    "make", [lambda: Longer(Inputs(INPUTS), batch_size=4), lambda: LongerTensors(INPUTS, batch_size=4)]
)
def test_length_that_is_too_large_is_a_warning(tmp_path, make):
    with pytest.warns(UserWarning, match="is 4, but it gave 3 batches; 3 counts"):
        path = write_predictions(make_learner(), make(), tmp_path / "a.csv")
    assert len(read(path)) == 12


def test_batches_without_outputs_are_counted_where_the_length_is_wrong(tmp_path):
    learner = make_learner(phases=[Made(lambda batch, index: batch if index else None)])
    loader = Longer(Inputs(INPUTS), batch_size=4)
    with (
        pytest.warns(UserWarning, match="3 counts"),
        pytest.raises(PhaseError, match="1 of 3 batches have no outputs"),
    ):
        write_predictions(learner, loader, tmp_path / "a.csv")


@pytest.mark.parametrize("error", [CancelEpoch, CancelFit])
def test_epoch_that_is_ended_writes_no_file(tmp_path, error):
    def cancel(batch, index):
        if index == 2:
            raise error("enough")
        return batch

    learner = make_learner(phases=[Made(cancel)])
    with pytest.raises(PhaseError, match="the epoch was ended after 2 batches"):
        write_predictions(learner, TensorLoader(INPUTS, batch_size=4), tmp_path / "a.csv")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("there", [True, False])
def test_symbolic_link_stays_one(tmp_path, there):
    folder = tmp_path / "b"
    folder.mkdir()
    if there:
        (folder / "b.csv").write_text("old")
    link = tmp_path / "a.csv"
    link.symlink_to(folder / "b.csv")
    assert write_predictions(make_learner(), TensorLoader(INPUTS, batch_size=4), link) == link
    assert link.is_symlink()
    assert len(read(folder / "b.csv")) == 12
    assert [*folder.iterdir()] == [folder / "b.csv"]


def test_link_into_no_folder_raises(tmp_path):
    (tmp_path / "a.csv").symlink_to(tmp_path / "none" / "b.csv")
    with pytest.raises(ArgumentError, match=r"there is no folder .*none"):
        write_predictions(make_learner(), TensorLoader(INPUTS, batch_size=4), tmp_path / "a.csv")


def test_pipe_is_written_directly():
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        with os.fdopen(writing, "w"):
            write_predictions(make_learner(), TensorLoader(INPUTS, batch_size=4), f"/dev/fd/{writing}")
        assert len(list(csv.reader(lines))) == 12


def test_named_pipe_is_written_directly(tmp_path):
    path = tmp_path / "a.csv"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as lines:
        write_predictions(make_learner(), TensorLoader(INPUTS, batch_size=4), path)
        assert len(list(csv.reader(lines))) == 12
    assert path.is_fifo()


def test_file_is_there_when_it_is_complete(tmp_path):
    seen = []
    learner = make_learner(phases=[Made(lambda batch, index: seen.append(sorted(tmp_path.iterdir())) or batch)])
    path = write_predictions(learner, TensorLoader(INPUTS, batch_size=4), tmp_path / "a.csv")
    assert seen[-1] == [tmp_path / "a.csv.part"]
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("path", "message"), [("none/a.csv", "there is no folder .*none"), ("", "is a folder: give the path of a file")]
)
def test_path_that_cannot_be_a_file_raises_before_the_predictions(tmp_path, path, message):
    learner = make_learner(phases=[Made(lambda batch, index: pytest.fail("it predicts"))])
    with pytest.raises(ArgumentError, match=message):
        write_predictions(learner, TensorLoader(INPUTS, batch_size=4), tmp_path / path)


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(Inputs(INPUTS), batch_size=4, shuffle=True),
        DataLoader(Inputs(INPUTS), batch_sampler=BatchSampler(RandomSampler(Inputs(INPUTS)), 4, False)),
        DataLoader(Inputs(INPUTS), batch_sampler=[[0, 1], [2]]),
        list(INPUTS.split(4)),
    ],
    ids=["shuffled", "shuffled batches", "batches", "list"],
)
def test_data_that_do_not_know_their_samples_raise(data):
    with pytest.raises(StepStateError, match="does not know its samples"):
        list(make_learner().predict_batches(data, indices=True))


def write_two(rank, folder):
    learner = make_learner(DDP(timeout=60))
    return str(write_predictions(learner, {"a": DataLoader(Inputs(INPUTS), batch_size=2)}, folder / "a.csv"))


@pytest.mark.two_processes
def test_two_processes_write_their_own_samples(tmp_path):
    paths = run(lambda rank: write_two(rank, tmp_path), 2, timeout=60)
    assert [path.rsplit("/")[-1] for path in paths] == ["a-0.csv", "a-1.csv"]
    rows = [row for path in paths for row in read(tmp_path / path)[1:]]
    expected = make_learner().predict(INPUTS)
    assert sorted(int(row[1]) for row in rows) == list(range(11))
    for _, index, value in rows:
        torch.testing.assert_close(torch.tensor(float(value)), expected[int(index), 0], rtol=1e-5, atol=1e-6)  # sizes


def test_indices_of_a_training_step_are_known_for_an_unshuffled_loader():
    data = DataLoader(TensorDataset(INPUTS, INPUTS[:, :1]), batch_size=4)
    learner = make_learner()
    with learner.epoch("train", data=data) as epoch:
        seen = [epoch.step(batch).indices.tolist() for batch in epoch.batches()]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
