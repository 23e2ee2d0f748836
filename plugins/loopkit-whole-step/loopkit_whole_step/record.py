"""Recording a step as one graph of tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit_whole_step import private
from loopkit_whole_step.function import StepFunction
from loopkit_whole_step.given import Given
from loopkit_whole_step.graph import Graph, first_line
from loopkit_whole_step.inputs import Constants, Inputs
from loopkit_whole_step.result import Result
from loopkit_whole_step.sealed import Refused

if TYPE_CHECKING:
    from loopkit import Epoch

SEQUENCE = 32
"""So many steps of a recurrent module are unrolled at most; each costs the compiler some 50 operations."""
ASKS = "it asks for the value of a tensor, by .item() or by a choice that depends on data"
STRANGER = "it uses a tensor that is in no model, phase, loss or batch, such as the scale of the loss in float16"


class Recording:
    """One step of a phase for one shape of its batches, which can be replayed, and run as it is.

    Args:
        given: The step.
        epoch: The epoch of the step.
        worth: Why a graph of so many operations is not worth compiling; empty if it is.

    Raises:
        Refused: It cannot be recorded, or is not worth compiling.
    """

    def __init__(self, given: Given, epoch: Epoch, worth: Callable[[int], str]) -> None:
        started = time.perf_counter()
        self.given = given
        self.inputs = Inputs(given)
        self.inputs.feed(epoch)
        self.constants = Constants(given)
        self._function = StepFunction(given, self.inputs)
        self.result: Result
        module, inputs, changed = self._trace(epoch)
        if changed and not all(changed):  # metrics that this phase does not feed stay as they are
            self.inputs.feed_only(changed)
            module, inputs, _ = self._trace(epoch, again=True)
        if private.multiply(module.graph):
            raise Refused(ASKS)
        if name := private.recurrent(module.graph):
            raise Refused(f"it uses {name}, and what compiles it gave wrong numbers around recurrent operations")
        self.draws = private.draws(module.graph)
        """Whether it takes random numbers."""
        if reason := worth(len(module.graph.nodes)):
            raise Refused(reason)
        module.recompile()
        self.graph = Graph(module, inputs)
        self.inputs.expect(inputs)
        self.seconds = time.perf_counter() - started

    def _trace(self, epoch: Epoch, again: bool = False) -> tuple[torch.fx.GraphModule, list[Tensor], list[bool]]:
        """The graph, its inputs, and which metrics it changes; the second time nothing is looked for."""
        changed: list[bool] = []

        def run(*flat: Tensor) -> list[Tensor]:
            outputs, self.result, changed[:] = self._function(flat)
            return outputs

        with self._function.restored(epoch, changes=not again):
            inputs = [each.detach() for each in self.inputs_now(epoch, self.given.batch[0])]
            try:
                with private.short_sequences(SEQUENCE, Refused):
                    return private.trace(run, inputs), inputs, changed
            except Refused:
                raise
            except Exception as error:
                raise Refused(_reason(error)) from None

    # Replaying

    @property
    def votes(self) -> bool:
        """Whether plugins vote on its update."""
        return self.result.votes

    def inputs_now(self, epoch: Epoch, leaves: Sequence[Any]) -> list[Tensor]:
        """The inputs of the graph now, for a batch."""
        return self.inputs.now(epoch, leaves, self.given.cells.tensors())

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Replay the graph."""
        return self.graph.run(inputs)

    def run_as_it_is(self, epoch: Epoch, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Run the step on other tensors, in the graph's place, without compiling."""
        with self._function.restored(epoch), torch.enable_grad():
            return self._function(inputs)[0]


def _reason(error: Exception) -> str:
    """Why a step could not be recorded."""
    if private.depends_on_data(error):
        return ASKS
    if private.meets_a_stranger(error):
        return STRANGER
    return f"it cannot be recorded ({first_line(error)})"
