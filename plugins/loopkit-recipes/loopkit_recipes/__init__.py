"""Recipes of training, as plugins: sharpness-aware minimization, mixed batches, growing windows, micro-batches."""

from loopkit_recipes import _core as _core
from loopkit_recipes.accumulate import Accumulate as Accumulate
from loopkit_recipes.augment import CutMix as CutMix
from loopkit_recipes.augment import LabelSmoothing as LabelSmoothing
from loopkit_recipes.augment import Mixup as Mixup
from loopkit_recipes.micro_batch import MicroBatch as MicroBatch
from loopkit_recipes.sam import ASAM as ASAM
from loopkit_recipes.sam import SAM as SAM

__all__ = ["ASAM", "SAM", "Accumulate", "CutMix", "LabelSmoothing", "MicroBatch", "Mixup"]
__dir__ = __all__.copy
