"""Data beyond `loopkit.data`: tokens of language models, streams, lengths of epochs, splits, files of predictions."""

from loopkit_data import _core as _core
from loopkit_data.documents import Documents as Documents
from loopkit_data.elements import batched as batched
from loopkit_data.lengths import episodes as episodes
from loopkit_data.lengths import in_steps as in_steps
from loopkit_data.lengths import limit as limit
from loopkit_data.lengths import per_epoch as per_epoch
from loopkit_data.lengths import steps as steps
from loopkit_data.predictions import write_predictions as write_predictions
from loopkit_data.split import train_val_split as train_val_split
from loopkit_data.tokens import Tokens as Tokens

__all__ = [
    "Documents",
    "Tokens",
    "batched",
    "episodes",
    "in_steps",
    "limit",
    "per_epoch",
    "steps",
    "train_val_split",
    "write_predictions",
]
__dir__ = __all__.copy
