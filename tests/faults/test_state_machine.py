"""Runs that are saved, killed, resumed, damaged and changed at random, against a loop written by hand."""

from __future__ import annotations

import copy
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers import differences
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import nn

from loopkit import Learner
from loopkit.checkpoint import bundle, storage
from loopkit.data import TensorLoader
from loopkit.engine.life.epoch import Epoch
from loopkit.errors import CorruptCheckpointError
from loopkit.plugins import ClipGradNorm, History

BATCHES, SIZE, ACCUMULATE = 4, 2, 2


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))


def make_data() -> TensorLoader:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randn(BATCHES * SIZE, width, generator=generator) for width in (3, 1))
    return TensorLoader(inputs, targets, batch_size=SIZE, shuffle=True)


class ByHand:
    """The loop of a careful person, one step at a time; a deep copy of it is a checkpoint."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.epoch = self.index = self.updates = 0
        self.clip = False
        self.generator = torch.get_rng_state()

    def copy(self) -> ByHand:
        """A deep copy, with the gradients, which torch's deep copies leave out."""
        made = copy.deepcopy(self)
        for mine, theirs in zip(self.model.parameters(), made.model.parameters(), strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        return made

    def step(self) -> None:
        torch.set_rng_state(self.generator)
        order = make_data()
        order.set_epoch(self.epoch)
        inputs, targets = list(order)[self.index]
        if self.index % ACCUMULATE == 0:
            self.optimizer.zero_grad()
        (nn.functional.mse_loss(self.model(inputs), targets) / ACCUMULATE).backward()
        self.index += 1
        if self.index % ACCUMULATE == 0:
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += 1
        self.generator = torch.get_rng_state()
        if self.index == BATCHES:
            self.epoch, self.index = self.epoch + 1, 0


class Training(RuleBasedStateMachine):
    """The same things are done to a learner, with checkpoints on a disk, and to the loop by hand.

    Both draw from torch's global generator, so each is given its own state of it. What a checkpoint has to bring back
    is a copy of the loop by hand, made when it was saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.saved: dict[Path, ByHand] = {}
        self.begin()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def begin(self) -> None:
        torch.manual_seed(1)
        self.hand = ByHand()
        torch.manual_seed(1)
        self.start()

    def start(self, load: Path | None = None) -> None:
        """A new process: a learner as the script makes it, and what a checkpoint says."""
        plugins = [ClipGradNorm(0.1)] if self.hand.clip else []
        self.learner = Learner(
            make_model(),
            nn.MSELoss(),
            lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            plugins=[History(), *plugins],
            accumulate=ACCUMULATE,
            standard=False,
        )
        if load is not None:
            bundle.load(self.learner, load)
        self.generator = torch.get_rng_state()
        self.stack = ExitStack()
        self.stack.enter_context(self.learner.rounds(on_interrupt=None))
        self.epoch: Epoch | None = None
        self.data = make_data()

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.hand.step()
            torch.set_rng_state(self.generator)
            if self.epoch is None:
                self.passing = ExitStack()
                self.epoch = self.passing.enter_context(self.learner.epoch("train", data=self.data))
                self.batches = iter(self.epoch.batches())
            self.epoch.step(next(self.batches))
            if self.epoch.steps == BATCHES:
                self.passing.close()
                self.epoch = None
            self.generator = torch.get_rng_state()

    @rule(steps=st.integers(1, 5))
    def save(self, steps: int) -> None:
        self.step(steps)
        torch.set_rng_state(self.generator)
        self.saved[bundle.save(self.learner, self.root).path] = self.hand.copy()

    @rule(seed=st.integers(2, 9), lost=st.integers(0, 4), steps=st.integers(1, 5))
    def kill(self, seed: int, lost: int, steps: int) -> None:
        """Lose some steps, go on from the newest checkpoint that is whole, for some steps."""
        for _ in range(lost):
            self.step(1)
        self.drop(seed)
        self.step(steps)

    @rule(before=st.integers(1, 7), lost=st.integers(0, 4), steps=st.integers(1, 5))
    def save_and_kill(self, before: int, lost: int, steps: int) -> None:
        self.save(before)
        self.kill(5, lost, steps)

    def drop(self, seed: int) -> None:
        """Forget the learner without any end, and load."""
        torch.manual_seed(seed)
        del self.learner, self.stack, self.epoch
        for manifest in storage.listing(self.root):
            try:
                storage.verify(manifest.path)
            except CorruptCheckpointError:
                assert manifest.path not in self.saved
                continue
            self.hand = self.saved[manifest.path].copy()
            self.start(manifest.path)
            return
        assert not self.saved
        self.begin()

    @precondition(lambda self: self.saved)
    @rule(name=st.sampled_from(["manifest.json", "state.json", "model.safetensors"]), where=st.floats(0, 0.99))
    def damage(self, name: str, where: float) -> None:
        """Flip a bit of the newest."""
        newest = max(self.saved)
        data = bytearray((newest / name).read_bytes())
        data[int(where * len(data))] ^= 4
        (newest / name).write_bytes(data)
        del self.saved[newest]

    @rule(lr=st.sampled_from([0.2, 0.05, 0.01]))
    def change_lr(self, lr: float) -> None:
        for optimizer in (self.learner.optimizer, self.hand.optimizer):
            optimizer.param_groups[0]["lr"] = lr

    @rule()
    def add_or_remove_a_plugin(self) -> None:
        self.hand.clip = not self.hand.clip
        if self.hand.clip:
            self.learner.add(ClipGradNorm(0.1))
        else:
            self.learner.remove("clip_grad_norm")

    @rule()
    def validate(self) -> None:
        torch.set_rng_state(self.generator)
        self.learner.evaluate(make_data())
        self.generator = torch.get_rng_state()

    @invariant()
    def both_are_the_same(self) -> None:
        learner, hand = self.learner, self.hand
        pending = [p.grad for p in learner.model.parameters()] if self.epoch is not None else None
        mine = [learner.model.state_dict(), learner.optimizer.state_dict(), self.generator, learner.progress.updates]
        theirs = [hand.model.state_dict(), hand.optimizer.state_dict(), hand.generator, hand.updates]
        assert not list(differences(mine, theirs))
        assert learner.progress.epochs == hand.epoch
        if pending is not None:
            assert not list(differences(pending, [p.grad for p in hand.model.parameters()]))


def run(examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Training,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=checks,
        ),
    )


def test_random_runs_equal_the_loop_by_hand():
    run(12, 15)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_long_random_runs_equal_the_loop_by_hand():
    run(500, 50)
