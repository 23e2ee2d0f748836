"""Checkpoints and logs of a run in an object store, through ``fsspec``.

The plugin `Upload` brings there what a run writes, while it trains::

    Learner(model, loss_fn, optimizer, plugins=[Checkpoint("runs/a", resume="auto"), Upload("s3://bucket/runs/a")])

`upload` and `download` are the same by hand.
"""

from loopkit_remote import _core as _core
from loopkit_remote.store import RemoteError as RemoteError
from loopkit_remote.transfer import download as download
from loopkit_remote.transfer import upload as upload
from loopkit_remote.uploading import Upload as Upload

__all__ = ["RemoteError", "Upload", "download", "upload"]
__dir__ = __all__.copy
