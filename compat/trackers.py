"""The checks of every tracker: what is in its store after a training by hand, with loopkit, and over a resume."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from checks import Dies, Differs, Program, seed, stop, stopped
from torch import Tensor

from loopkit import every
from loopkit.plugins import Checkpoint, LogMetrics, LogTo

STEPS = 7
"""Training steps of an epoch."""
Rows = dict[str, list[tuple[int, float]]]
"""The values of each name, with their steps."""


class Tracked(Program):
    """A log of each step and each epoch. A tracker overrides the first three methods."""

    own_checks = True

    def write(self, folder: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
        """Log rows by hand, with the calls of the package."""
        raise NotImplementedError

    def backend(self, folder: Path) -> Any:
        """A new backend of loopkit."""
        raise NotImplementedError

    def read(self, folder: Path) -> Rows:
        """What is in the store."""
        raise NotImplementedError

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The loss; those of training steps are kept for the log by hand."""
        loss = super().loss(outputs, targets)
        if torch.is_grad_enabled():
            self.seen.append(loss.item())
        return loss

    def by_hand(self, folder: Path) -> Rows:
        """The store after a training by hand."""
        self.seen: list[float] = []
        losses = self.hand().losses
        steps = [(step, {"train/loss/step": loss}) for step, loss in enumerate(self.seen, 1)]
        epochs = [(STEPS * epoch, {"val/loss": loss}) for epoch, loss in enumerate(losses, 1)]
        self.write(folder, sorted(steps + epochs, key=lambda row: row[0]))
        return self.read(folder)

    def logged(self, folder: Path, *plugins: Any) -> Rows:
        """The store after a training with loopkit."""
        self.seen = []
        seed()
        model = self.model()
        stack = [LogTo(self.backend(folder)), LogMetrics(every=1), *plugins]
        learner = self.learner(model, self.optimizer(model), *stack)
        torch.manual_seed(3)
        learner.fit(self.train(), self.val(), epochs=3)
        return self.read(folder)

    def check_rows(self) -> float:
        """The losses of each step and each validation, by hand and here."""
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            hand, here = self.by_hand(Path(one)), self.logged(Path(other))
        for name in ("train/loss/step", "val/loss"):
            if not hand[name] or hand[name] != here.get(name):
                raise Differs(f"{name} is {hand[name]} by hand, {here.get(name)} here"[:300])
        if len(here.get("train/loss", ())) != 3:
            raise Differs(f"train/loss is {here.get('train/loss')}")
        return 0.0

    def check_rows_after_a_resume(self) -> float:
        """A run that ended by an error two steps after its last checkpoint, and was resumed: the rows of the whole."""
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            whole = self.logged(Path(one))
            saving = lambda: Checkpoint(Path(other) / "saved", save=every(updates=4), resume="auto")  # noqa: E731
            stopped(lambda: self.logged(Path(other) / "log", saving(), Dies(10, stop)))
            parts = self.logged(Path(other) / "log", saving())
        for name in {"val/loss", *whole, *parts}:
            if name not in whole or whole[name] != parts.get(name):
                raise Differs(f"{name} is {whole.get(name)} in one go, {parts.get(name)} resumed"[:400])
        return 0.0
