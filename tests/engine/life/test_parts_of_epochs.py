"""What is due after parts of an epoch: validations and saves, compared with Lightning, over kills and resumes."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import make_learner
from torch.utils.data import DataLoader

from engine.life.runs import at, end, kill, killed, make, rows, same, script, sigterm, train, val
from loopkit import every
from loopkit.checkpoint import listing
from loopkit.data import TensorLoader
from loopkit.errors import PluginError
from loopkit.plugins import Checkpoint, History


def loader(steps):
    return TensorLoader(torch.randn(steps, 3), torch.randn(steps, 1), batch_size=1)


def validated(steps, part, epochs=2, **options):
    """Return the training steps after which a fit validates."""
    learner = make_learner(History(), **options)
    learner.fit(loader(steps), loader(1), epochs=epochs, validate=every(epochs=part))
    return [row["steps"] for row in rows(learner) if row["phase"] == "val"]


def by_lightning(steps, part, epochs=2):
    """Return the steps after which Lightning validates."""
    lightning = pytest.importorskip("lightning")
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch):
            return self.layer(batch[0]).mean()

        def validation_step(self, batch, index):
            seen.append(self.trainer.global_step)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=epochs, val_check_interval=part, num_sanity_val_steps=0, accelerator="cpu", **quiet
        )
        trainer.fit(Module(), *(DataLoader(list(loader(each)), batch_size=None) for each in (steps, 1)))
    return seen


@pytest.mark.parametrize(("steps", "part"), [(8, 0.25), (12, 0.5), (10, 0.2)])
def test_parts_of_an_epoch_are_those_of_lightning(steps, part):
    assert validated(steps, part) == by_lightning(steps, part)


@pytest.mark.parametrize(
    ("steps", "part", "expected"),
    [
        (10, 0.25, [2, 5, 7, 10, 12, 15, 17, 20]),
        (10, 0.3, [3, 6, 9, 12, 15, 18, 20]),
        (100, 0.29, [29, 58, 87, 116, 145, 174, 200]),
        (2, 0.1, [1, 2, 3, 4]),
        (10, 0.7, [7, 14, 20]),
    ],
)
def test_parts_are_exact_and_counted_over_epochs(steps, part, expected):
    assert validated(steps, part) == expected


def test_parts_count_batches_and_not_updates():
    assert validated(8, 0.25, accumulate=4) == validated(8, 0.25)


@pytest.mark.parametrize("index", range(4))
def test_run_that_is_stopped_between_parts_goes_on_bit_for_bit(tmp_path, index):
    fit = {"epochs": 2, "validate": every(epochs=0.5)}
    whole = make()
    whole.fit(train(), val(), **fit)
    first = script(tmp_path, at(sigterm, index=index, epochs=1))
    with pytest.raises(SystemExit):
        first.fit(train(), val(), **fit)
    again = script(tmp_path, again=True)
    again.fit(train(), val(), **fit)
    same(end(again), end(whole))


def test_run_that_is_killed_in_a_validation_after_a_part_goes_on_bit_for_bit(tmp_path):
    fit = {"epochs": 2, "validate": every(epochs=0.5)}
    whole = make()
    whole.fit(train(), val(), **fit)
    with killed():
        script(tmp_path, at(kill, phase="val", index=1, epochs=1), save=every(epochs=0.25)).fit(train(), val(), **fit)
    again = script(tmp_path, again=True, save=every(epochs=0.25))
    again.fit(train(), val(), **fit)
    same(end(again), end(whole))


def test_saves_come_after_parts_and_at_the_end(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, save=every(epochs=0.25), keep=99))
    learner.fit(loader(8), epochs=2)
    assert [each.about["progress"]["steps"] for each in reversed(listing(tmp_path))] == [2, 4, 6, 8, 10, 12, 14, 16]


def test_data_without_a_length_have_no_parts(tmp_path):
    learner = make_learner()
    stream = [(torch.zeros(1, 3), torch.zeros(1, 1))]
    with pytest.raises(ValueError, match=r"no len\(\): give every\(updates=100\)"):
        learner.fit((batch for batch in stream), loader(1), epochs=1, validate=every(epochs=0.5))
    with pytest.raises(ValueError, match=r"no len\(\): give every\(updates=100\)"):
        learner.fit(lambda: iter(stream), loader(1), epochs=1, validate=every(epochs=0.5))
    saving = make_learner(Checkpoint(tmp_path, save=every(epochs=0.5)))
    with pytest.raises(PluginError, match=r"no len\(\): give every\(updates=100\)"):
        saving.fit(iter(stream), epochs=1)


def test_function_of_data_with_a_length_has_parts():
    learner = make_learner(History())
    learner.fit(lambda: loader(4), loader(1), epochs=1, validate=every(epochs=0.5))
    assert [row["steps"] for row in rows(learner) if row["phase"] == "val"] == [2, 4]
