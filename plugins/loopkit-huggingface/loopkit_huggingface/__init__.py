"""Hugging Face for loopkit: phases for models that return their loss, loaders for datasets, and ``save_pretrained``."""

from loopkit_huggingface import _core as _core
from loopkit_huggingface.loaders import DatasetLoader, StreamLoader
from loopkit_huggingface.metrics import Perplexity
from loopkit_huggingface.phases import PredictionPhase, TrainingPhase, ValidationPhase
from loopkit_huggingface.save_pretrained import SavePretrained

__version__ = "0.1.0"
__all__ = [
    "DatasetLoader",
    "Perplexity",
    "PredictionPhase",
    "SavePretrained",
    "StreamLoader",
    "TrainingPhase",
    "ValidationPhase",
]
