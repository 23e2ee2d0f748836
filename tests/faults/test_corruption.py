"""Decay of the newest checkpoint of a run: it is seen, said, and the run goes on from the one before."""

from __future__ import annotations

import copy
import os
import random
import re
import shutil

import pytest
import torch
from helpers import differences
from torch import nn

from loopkit import Learner, checkpoint, every
from loopkit.checkpoint import disk
from loopkit.data import TensorLoader
from loopkit.errors import CheckpointError, CorruptCheckpointError
from loopkit.plugins import History, WeightAverage
from loopkit.plugins.checkpoint import Checkpoint

EPOCHS = 2
FILES = ("manifest.json", "model.safetensors", "state.json", "state.safetensors", "structure.json")


def make(*plugins):
    """A learner, and its data: 6 steps an epoch."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
    learner = Learner(
        nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 3)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=0.01),
        plugins=[WeightAverage(0.9), History(steps=True), *plugins],
        standard=False,
        seed=5,
    )
    return learner, TensorLoader(inputs, targets, batch_size=4, shuffle=True, seed=3)


def fit(*plugins, epochs=EPOCHS):
    """The state at the end."""
    learner, data = make(*plugins)
    learner.fit(data, epochs=epochs)
    return copy.deepcopy(learner.state_dict())


@pytest.fixture(scope="module")
def reference():
    """The state of a run that was never stopped."""
    return fit()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directory of a run that ended after its first epoch, with two checkpoints."""
    directory = tmp_path_factory.mktemp("corruption") / "run"
    fit(Checkpoint(directory, save=every(updates=5)), epochs=1)
    assert sorted(os.listdir(directory)) == ["000001-step-5", "000002-step-6"]
    return directory


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of that directory."""
    return shutil.copytree(stopped, tmp_path / "run")


def cut(path, name, older):
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])


def empty(path, name, older):
    (path / name).write_bytes(b"")


def grow(path, name, older):
    with open(path / name, "ab") as file:
        file.write(b"\0")


def flip(path, name, older):
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 4
    (path / name).write_bytes(data)


def zero(path, name, older):
    (path / name).write_bytes(bytes((path / name).stat().st_size))


def drop(path, name, older):
    (path / name).unlink()


def swap_with_older(path, name, older):
    (path / name).write_bytes((older / name).read_bytes())


def swap_with_next(path, name, older):
    other = FILES[(FILES.index(name) + 1) % len(FILES)]
    one, two = (path / name).read_bytes(), (path / other).read_bytes()
    (path / name).write_bytes(two)
    (path / other).write_bytes(one)


DAMAGES = (cut, empty, grow, flip, zero, drop, swap_with_older, swap_with_next)
SAMPLE = [(damage, FILES[i % len(FILES)]) for i, damage in enumerate(DAMAGES)] + [
    (DAMAGES[(i + 3) % len(DAMAGES)], name) for i, name in enumerate(FILES)
]
EQUAL = (swap_with_older, "structure.json")
ALL = [(damage, name) for damage in DAMAGES for name in FILES if (damage, name) not in (*SAMPLE, EQUAL)]


@pytest.mark.parametrize(
    ("damage", "name"),
    [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damage_is_warned_of_and_the_run_goes_on_from_the_older_checkpoint(run, reference, damage, name, capsys):
    older, newest = run / "000001-step-5", run / "000002-step-6"
    damage(newest, name, older)
    with pytest.warns(UserWarning, match="is passed over") as told:
        state = fit(Checkpoint(run, resume="auto"))
    assert not list(differences(reference, state))
    assert f"{newest}/" in str(told[0].message)
    if damage is not swap_with_next and (damage, name) != (swap_with_older, "manifest.json"):  # it names another file
        assert name in str(told[0].message)
    assert f"resumed {older}" in capsys.readouterr().err


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda value: value.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_damaged_checkpoint_is_not_loaded_and_changes_nothing(run, damage, name):
    newest = run / "000002-step-6"
    damage(newest, name, run / "000001-step-5")
    learner, _ = make()
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(newest))):
        checkpoint.load(learner, newest)
    assert not list(differences(before, learner.state_dict()))
    if name == "model.safetensors":
        with pytest.raises(CorruptCheckpointError, match=re.escape(str(newest))):
            checkpoint.load_weights(learner.model, newest)
        assert not list(differences(before, learner.state_dict()))


def test_checkpoint_whose_files_are_all_those_of_another_is_not_loaded(run):
    older, newest = run / "000001-step-5", run / "000002-step-6"
    for name in FILES:
        swap_with_older(newest, name, older)
    learner, _ = make()
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json has number 1: .* files exchanged"):
        checkpoint.load(learner, newest)
    with pytest.raises(CorruptCheckpointError, match="files exchanged"):
        checkpoint.load_weights(learner.model, newest)
    assert not list(differences(before, learner.state_dict()))


def test_damage_of_all_checkpoints_is_an_error_and_nothing_begins_anew(run):
    for path in run.iterdir():
        flip(path, "state.safetensors", None)
    learner, data = make(Checkpoint(run, resume="auto"))
    before = copy.deepcopy({**learner.state_dict(), "fit": None})
    with (
        pytest.warns(UserWarning, match=r"state\.safetensors.*is passed over"),
        pytest.raises(CorruptCheckpointError, match="holds no checkpoint that can be read"),
    ):
        learner.fit(data, epochs=EPOCHS)
    assert not list(differences(before, {**learner.state_dict(), "fit": None}))
    assert sorted(os.listdir(run)) == ["000001-step-5", "000002-step-6"]


def test_damaged_checkpoint_that_is_named_is_an_error(run):
    newest = run / "000002-step-6"
    flip(newest, "state.json", None)
    learner, data = make(Checkpoint(run / "next", resume=newest))
    with pytest.raises(CorruptCheckpointError, match=r"state\.json has changed.*SHA-256"):
        learner.fit(data, epochs=EPOCHS)


def test_disk_that_cannot_read_is_an_error_that_names_the_file(run):
    class Broken(disk.System):
        def read(self, file, buffer):
            if os.readlink(f"/proc/self/fd/{file}").endswith("000002-step-6/state.safetensors"):
                raise OSError(5, "Input/output error")
            return super().read(file, buffer)

    disk.system = Broken()
    try:
        learner, _ = make()
        before = copy.deepcopy(learner.state_dict())
        with pytest.raises(CheckpointError, match=r"state\.safetensors: EIO"):
            checkpoint.load(learner, run)
        assert not list(differences(before, learner.state_dict()))
    finally:
        disk.system = disk.System()


def read(learner, path, name, index):
    """Use a file, as those do who need it."""
    if name == "model.safetensors" and index % 2:
        checkpoint.load_weights(learner.model, path)
    else:
        checkpoint.load(learner, path)


def flip_bits(run, count, seed):
    """Flip single bits, spread over the files by their size, and see that each is found."""
    path = run / "000002-step-6"
    content = {name: (path / name).read_bytes() for name in FILES}
    rng = random.Random(seed)
    learner, _ = make()
    before = copy.deepcopy(learner.state_dict())
    seen = set()
    for index in range(count):
        name = FILES[index % len(FILES)]
        data = bytearray(content[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=rf"{name} .*SHA-256.*[0-9a-f]{{64}}"):
            read(learner, path, name, index)
        (path / name).write_bytes(content[name])
        seen.add(name)
    assert seen == set(FILES)
    assert not list(differences(before, learner.state_dict()))
    checkpoint.load(learner, path)  # each was put back


def test_single_bits_are_found(run):
    flip_bits(run, 100, seed=1)


@pytest.mark.slow
def test_two_thousand_single_bits_are_found(run):
    flip_bits(run, 2_000, seed=2)


READERS = {
    "load": lambda path: checkpoint.load(make()[0], path),
    "load_weights": lambda path: checkpoint.load_weights(make()[0].model, path),
    "inspect": checkpoint.inspect,
}


@pytest.mark.parametrize("reader", READERS)
def test_structure_that_was_altered_is_refused_by_all_that_read_a_checkpoint(run, reader):
    path = run / "000002-step-6"
    saved = (path / "structure.json").read_bytes()
    for place in range(0, len(saved), 37):
        altered = bytearray(saved)
        altered[place] ^= 1
        (path / "structure.json").write_bytes(altered)
        with pytest.raises(CorruptCheckpointError, match=r"structure\.json has changed since it was written"):
            READERS[reader](path)
