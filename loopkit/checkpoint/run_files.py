"""The forms in which a run is saved: its whole state, or only the weights of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopkit.checkpoint import storage
from loopkit.checkpoint.bundle import LEFT_OUT, ONCE, Contents, read_state
from loopkit.checkpoint.manifest import Manifest
from loopkit.checkpoint.place import Place
from loopkit.plugin import provided

if TYPE_CHECKING:
    from loopkit.learner import Learner


class RunFiles:
    """The whole state of a run as the files of a checkpoint, and back.

    Args:
        place: The directory of the run.

    Example::

        files = RunFiles(Place("runs/digits", after=120))
        newest = checkpoint.listing("runs/digits")[:1]
        states = [files.read(learner, manifest) for manifest in newest]
    """

    everywhere = False
    """Whether each process saves its own part: all of them `write`, and sharded tensors are not gathered."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def contents(self, learner: Learner, state: dict[str, Any], stands_in: str) -> Contents:
        """Return a state as files; all processes call it.

        Args:
            learner: The learner.
            state: Its state.
            stands_in: The plugin whose weights the last metric was measured with.
        """
        return Contents.of(learner, state)

    def measured_file(self, learner: Learner, phase: str, stands_in: str) -> str:
        """Return the word in the file names of the weights that a phase was measured with."""
        return f"weights.{phase}"

    def write(self, contents: Contents, about: dict[str, Any], label: str) -> Manifest | None:
        """Write a checkpoint; None in a process that knows of no manifest."""
        place = self.place
        place.keep()
        return storage.write(place.directory, contents.files(), about, label=label, there=place.note, kept=(ONCE,))

    def read(self, learner: Learner, manifest: Manifest) -> dict[str, Any]:
        """Read and verify a state, or this process's part of it."""
        return read_state(manifest)


class WeightFiles(RunFiles):
    """The weights of a run's models, with the averages of plugins in files beside them."""

    def contents(self, learner: Learner, state: dict[str, Any], stands_in: str) -> Contents:
        """Return the weights as files; all processes call it."""
        measured = None if stands_in in _averages(learner) else state.get("weights")
        return Contents.weights(learner, state["models"], measured, state.get(LEFT_OUT, {}))

    def measured_file(self, learner: Learner, phase: str, stands_in: str) -> str:
        """Return the name of the average that a phase was measured with: it has a file already."""
        return stands_in if stands_in in _averages(learner) else super().measured_file(learner, phase, stands_in)


def _averages(learner: Learner) -> list[str]:
    """List the plugins of which `Contents.weights` writes a file."""
    return [name for name, plugin in learner.plugins.items() if provided(plugin) == "average"]
