"""Data beyond `loopkit.data`: tokens of language models, streams cut into epochs, steps without data, splits."""

from loopkit_data import _core as _core
from loopkit_data.documents import Documents as Documents
from loopkit_data.lengths import episodes as episodes
from loopkit_data.lengths import limit as limit
from loopkit_data.lengths import per_epoch as per_epoch
from loopkit_data.lengths import steps as steps
from loopkit_data.split import train_val_split as train_val_split
from loopkit_data.tokens import Tokens as Tokens

__all__ = ["Documents", "Tokens", "episodes", "limit", "per_epoch", "steps", "train_val_split"]
__dir__ = __all__.copy
