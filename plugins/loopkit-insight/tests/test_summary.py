"""`summarize`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from loopkit import Learner, ValidationPhase, hookimpl
from loopkit.errors import PhaseError
from loopkit.plugins import Compile, Metrics
from loopkit_insight.summary import summarize


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.norm, self.drop, self.shared = nn.BatchNorm1d(8), nn.Dropout(), shared
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        random.random()
        return self.shared(self.drop(self.norm(x)))


def make(*plugins, **options):
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(4, 8), Block(shared), Block(shared), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return Learner(model, nn.CrossEntropyLoss(), plugins=plugins, standard=False, **options)


BATCH = (torch.ones(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]))


def test_summary_has_shapes_parameters_and_bytes():
    found = {row.name: row for row in summarize(make(), BATCH).rows}
    assert list(found) == ["", "0", "1", "1.norm", "1.drop", "1.shared", "2", "2.norm", "2.drop", "2.shared", "3"]
    assert [found[name].outputs for name in ("", "0", "1", "3")] == ["(6, 2)", "(6, 8)", "(6, 8)", "(6, 2)"]
    assert (found["0"].parameters, found["0"].trainable, found["0"].bytes) == (40, 0, 160)
    assert found["1.norm"].bytes == 4 * (8 + 8 + 8 + 8) + 8
    assert found["1.shared"].calls == 2
    assert found["2.shared"].same_as == "1.shared"


def test_summary_counts_shared_parameters_once():
    learner = make()
    summary = summarize(learner)
    assert summary.parameters == sum(p.numel() for p in learner.model.parameters()) == 40 + 2 * 16 + 72 + 18
    assert summary.trainable == summary.parameters - 40
    assert summary.rows[0].outputs == ""


def test_summary_lists_the_data():
    summary = summarize(make(), {"inputs": torch.ones(6, 4), "more": [torch.ones(2, dtype=torch.int64)]})
    assert [(row.name, row.shape, row.dtype, row.device) for row in summary.data] == [
        ("batch['inputs']", (6, 4), "float32", "cpu"),
        ("batch['more'][0]", (2,), "int64", "cpu"),
    ]


def test_summary_leaves_everything_as_it_was():
    learner = make(Metrics())
    model = learner.model
    model.train()
    model[2].eval()
    grads = {p: p.grad for p in model.parameters()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    summarize(learner, BATCH)
    summarize(learner, BATCH, phase="val")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert [module.training for module in model.modules()] == modes
    assert {p: p.grad for p in model.parameters()} == grads
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert learner.metrics == {}
    assert (learner.progress.epochs, learner.progress.steps) == (0, 0)
    assert all(not module._forward_hooks for module in model.modules())


def test_summary_names_the_types_of_what_is_no_tensor():
    batch = {"inputs": torch.ones(6, 4), "names": ["a", "b"], "ids": np.arange(6), "more": (None, 1.5)}
    assert [(row.name, row.shape, row.dtype, row.device) for row in summarize(make(), batch).data] == [
        ("batch['inputs']", (6, 4), "float32", "cpu"),
        ("batch['names']", (2,), "str", ""),
        ("batch['ids']", (6,), "int64", ""),
        ("batch['more'][0]", (), "NoneType", ""),
        ("batch['more'][1]", (), "float", ""),
    ]


def test_summary_leaves_no_buffer_that_the_forward_made():
    class Caches(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("cache", None)

        def forward(self, x):
            self.cache = x.sum(0)
            self.register_buffer("late", torch.ones(1))
            return super().forward(x)

    learner = Learner(Caches(), standard=False)
    summarize(learner, BATCH)
    assert learner.model._buffers == {"cache": None}
    assert set(learner.model.state_dict()) == {"weight", "bias"}


def test_summary_changes_no_bit_of_a_fit():
    def weights(look):
        learner = make()
        learner._engine.models.set_optimizers(torch.optim.SGD(learner.model.parameters(), lr=0.1))
        if look:
            summarize(learner, BATCH)
        learner.fit([BATCH] * 3, epochs=2)
        return torch.cat([p.detach().flatten() for p in learner.model.parameters()])

    assert torch.equal(weights(False), weights(True))


def test_summary_takes_off_its_hooks_after_an_error():
    learner = make()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        summarize(learner, (torch.ones(6, 5), None))
    assert all(not module._forward_hooks for module in learner.model.modules())
    assert learner.model.training


def test_summary_runs_a_phase_of_the_users():
    class Pairs(ValidationPhase):
        def unpack(self, batch):
            return batch["x"], batch["y"]

    learner = make(phases=[Pairs("pairs")])
    summary = summarize(learner, {"x": BATCH[0], "y": BATCH[1]}, phase="pairs")
    assert summary.rows[0].outputs == "(6, 2)"


def test_summary_moves_the_batch():
    class Widens:
        @hookimpl
        def move_batch(self, batch):
            return batch[0].repeat(1, 2), batch[1]

    summary = summarize(make(Widens()), (torch.ones(6, 2), BATCH[1]))
    assert summary.data[0].shape == (6, 4)


def test_summary_of_a_compiled_model_compiles_nothing():
    from torch._dynamo.testing import CompileCounter  # takes a second

    counter = CompileCounter()
    assert summarize(make(Compile(backend=counter)), BATCH).rows[1].outputs == "(6, 8)"
    assert counter.frame_count == 0


def test_summary_of_several_models():
    learner = Learner({"one": nn.Linear(4, 2), "two": nn.Linear(2, 2)}, standard=False)
    assert [row.name for row in summarize(learner).rows] == ["one", "two"]


def test_summary_refuses_a_phase_that_trains():
    with pytest.raises(PhaseError, match="phase 'train' trains"):
        summarize(make(), BATCH, phase="train")


def test_summary_refuses_parameters_without_a_shape():
    learner = Learner(nn.Sequential(nn.LazyLinear(3)), standard=False)
    with pytest.raises(PhaseError, match=r"'0\.weight' of model 'model' has no shape before the first forward"):
        summarize(learner, BATCH)
    assert summarize(learner).parameters == 0


def test_summary_prints_a_tree_within_100_characters():
    printed = str(summarize(make(), BATCH))
    lines = printed.splitlines()
    assert lines[0].split() == ["module", "type", "output", "parameters", "trainable", "size"]
    assert lines[4].startswith("    norm    BatchNorm1d  (6, 8)")
    assert "= 1.shared" in printed
    assert "162 parameters, 122 of them trainable; 800 B with buffers" in printed
    assert max(map(len, lines)) <= 100


def test_summary_prints_to_a_depth():
    assert [row.name for row in summarize(make(), BATCH, depth=1).rows] == ["", "0", "1", "2", "3"]


def test_summary_is_two_tables_in_a_notebook():
    learner = Learner(nn.Linear(12, 2), nn.CrossEntropyLoss(), torch.optim.SGD, standard=False)
    told = summarize(learner, (torch.randn(4, 12), torch.zeros(4, dtype=torch.long)))
    assert repr(told) == str(told)
    assert told._repr_html_().count("<table>") == 2
    assert "26 parameters" in told._repr_html_()
