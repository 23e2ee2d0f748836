"""The step that a recording is made of, and what belongs to it: the learner, the phase, a batch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from loopkit_whole_step.cells import Cells, optimizer_named
from loopkit_whole_step.sealed import SealedLearner
from loopkit_whole_step.shapes import UNTRAINED

if TYPE_CHECKING:
    from loopkit import Learner, Phase, Step
    from loopkit_whole_step.hooked import Hooks


class Given:
    """A step of a phase, for one shape of its batches.

    Args:
        learner: The learner, which it does not keep alive.
        phase: The phase.
        hooks: The recorded hooks of the plugins.
        step: A step of this shape.
    """

    def __init__(self, learner: Learner, phase: Phase, hooks: Hooks, step: Step) -> None:
        self._learner = weakref.ref(learner)
        self.phase = phase
        self.hooks = hooks
        self.owners = hooks.owners
        """The plugins with recorded hooks."""
        self.ends = {hook.plugin for hook in hooks.ends}
        """The plugins whose hooks of ``step_end`` are recorded."""
        self.cells = Cells.of(learner, phase, self.owners)
        """The tensors and constants."""
        self.batch: tuple[list[Any], Any] = tree_flatten(step.batch)
        """The leaves of a batch, and how it is made of them."""
        self.where = [i for i, leaf in enumerate(self.batch[0]) if isinstance(leaf, Tensor)]
        """The numbers of the leaves that are tensors."""
        self.samples = step.samples
        self.windows: Sequence[Any] = step.window_state if phase.training else UNTRAINED
        """The optimizers' windows, as the step finds them; they differ only by their names."""
        self.window = self.windows[0]
        self.sealed = SealedLearner(learner)

    @property
    def learner(self) -> Learner:
        """The learner."""
        learner = self._learner()
        assert learner is not None
        return learner

    @property
    def optimizers(self) -> list[str]:
        """The names of the optimizers that the phase trains with."""
        return list(self.learner.optimizers) if self.phase.training else []

    @property
    def watched(self) -> dict[str, Any]:
        """The objects whose Python a step must not change, by name."""
        learner = self.learner
        watched = {"the phase": self.phase, "the loss function": learner.loss_fn}
        watched.update({f"model {name!r}": model for name, model in learner.models.items()})
        return watched | {optimizer_named(learner, name): each for name, each in learner.optimizers.items()}

    def params(self) -> list[Tensor]:
        """The optimizers' parameters."""
        return [p for params in self.cells.params() for p in params]

    def gradients(self) -> list[Tensor]:
        """The gradients of earlier steps of the window."""
        if not self.window.steps:
            return []
        return [p.grad for p in self.params() if p.grad is not None]
