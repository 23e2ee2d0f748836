"""Exact checkpoints: a run, written so that it can resume as if it had never stopped.

The plugin ``loopkit.plugins.Checkpoint`` saves and resumes by itself. This package is for what comes before and after::

    from loopkit import checkpoint

    print(checkpoint.inspect("runs/a"))                    # what is there, without loading it
    checkpoint.load_weights(model, "runs/a")               # only the weights, of the newest valid checkpoint
    checkpoint.load_best(learner, "runs/a")                # the best weights, into a learner
    checkpoint.save(learner, "runs/b")                     # a whole run, from your own loop
    checkpoint.load(learner, "runs/b")                     # and resume it

It imports the learner's state and what is below; no plugin, and for several processes only the world.
"""

from typing import TYPE_CHECKING

from loopkit.base.lazy import homes, lazily

if TYPE_CHECKING:
    from loopkit.checkpoint.bundle import best as best
    from loopkit.checkpoint.bundle import load as load
    from loopkit.checkpoint.bundle import save as save
    from loopkit.checkpoint.inspection import Inspection as Inspection
    from loopkit.checkpoint.inspection import inspect as inspect
    from loopkit.checkpoint.manifest import Listing as Listing
    from loopkit.checkpoint.manifest import Manifest as Manifest
    from loopkit.checkpoint.storage import listing as listing
    from loopkit.checkpoint.storage import verify as verify
    from loopkit.checkpoint.weights import LoadReport as LoadReport
    from loopkit.checkpoint.weights import load_best as load_best
    from loopkit.checkpoint.weights import load_weights as load_weights
    from loopkit.checkpoint.weights import save_weights as save_weights

__getattr__ = lazily(__name__)
__all__ = list(homes(__name__))
__dir__ = __all__.copy
