"""Exact checkpoints: what a run is made of, written so that it can go on as if it had never stopped.

The plugin ``loopkit.plugins.Checkpoint`` saves and resumes by itself. This package is for what comes before and after::

    from loopkit import checkpoint

    print(checkpoint.inspect("runs/a"))                    # what is there, without loading it
    checkpoint.load_weights(model, "runs/a")               # the weights alone, of the newest valid checkpoint
    checkpoint.load_best(learner, "runs/a")                # those of the best one, into a learner
    checkpoint.save(learner, "runs/b")                     # a whole run, from a loop of your own
    checkpoint.load(learner, "runs/b")                     # and on with it

It imports the learner's state and what is below; no plugin, and nothing of several processes but the world.
"""

from typing import TYPE_CHECKING

from loopkit.lazy import lazily

if TYPE_CHECKING:
    from loopkit.checkpoint.bundle import best, load, save
    from loopkit.checkpoint.inspection import Inspection, inspect
    from loopkit.checkpoint.storage import Listing, Manifest, listing, verify
    from loopkit.checkpoint.weights import LoadReport, load_best, load_torch, load_weights, save_weights

__getattr__ = lazily(__name__)
__all__ = [
    "Inspection",
    "Listing",
    "LoadReport",
    "Manifest",
    "best",
    "inspect",
    "listing",
    "load",
    "load_best",
    "load_torch",
    "load_weights",
    "save",
    "save_weights",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
