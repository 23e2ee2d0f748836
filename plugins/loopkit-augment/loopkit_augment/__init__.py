"""Mixup, CutMix and label smoothing, on the batch as the phase has unpacked it."""

from loopkit_augment import _core as _core
from loopkit_augment.plugins import CutMix, LabelSmoothing, Mixup

__all__ = ["CutMix", "LabelSmoothing", "Mixup"]
