"""Sharpness-aware minimization: the gradient of each step is taken at weights that the loss is larger at."""

from loopkit_sam import _core as _core
from loopkit_sam.sam import ASAM, SAM

__all__ = ["ASAM", "SAM"]
