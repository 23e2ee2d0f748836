"""OptimizerStates: the entries of a state for the learner's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from loopkit.base import sharded
from loopkit.base.kinds import NAMED
from loopkit.base.notes import locate
from loopkit.engine.kept.differences import names
from loopkit.engine.kept.optimizers import OptimizerPart, malformed
from loopkit.engine.kept.part import Part
from loopkit.engine.kept.undo import Undos, all_of, undone_by


class OptimizerStates(Part):
    """The state of each optimizer; see `OptimizerPart`.

    Args:
        optimizers: Returns the learner's, by name.
    """

    name = "optimizers"
    what = "the optimizers"
    kind = NAMED

    def __init__(self, optimizers: Callable[[], Mapping[str, torch.optim.Optimizer]]) -> None:
        self._optimizers = optimizers

    def _parts(self) -> dict[str, OptimizerPart]:
        return {name: OptimizerPart(name, optimizer) for name, optimizer in self._optimizers().items()}

    def saved(self, whole: bool = True) -> dict[str, Any]:
        """Return the states by name; tensors are those in use."""
        states = {name: part.saved() for name, part in self._parts().items()}
        return sharded.whole(states) if whole else states

    def malformed(self, saved: Mapping[str, Any]) -> list[str]:
        """List what no optimizer could have saved."""
        return [problem for name, each in saved.items() for problem in malformed(f"{self.name}.{name}", each)]

    def problems(self, saved: Mapping[str, Any], allow: Collection[str] = ()) -> list[str]:
        """List optimizers that only one of the two has, and what an optimizer here could not go on with."""
        parts = self._parts()
        problems = names("optimizers", saved, parts)
        for name, part in parts.items():
            if name in saved:
                problems += part.problems(saved[name])
        return problems

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Let each optimizer take its state; return the undo."""
        undos: Undos = []
        with undone_by(undos):
            for name, part in self._parts().items():
                try:
                    undos.append((f"optimizer {name!r}", part.load(saved[name])))
                except Exception as error:
                    locate(error, f"in load_state_dict of optimizer {name!r}")
                    raise
        return all_of(undos)
