"""The counters of a learner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Counters of the training phases of a learner, over all its fits.

    A step counts before its ``step_end``, an update before its ``update_end``, an epoch before its ``phase_end``.
    """

    epochs: int = 0
    """Epochs that ended: complete, stopped or cancelled, but not by an error."""
    steps: int = 0
    """Steps that were not cancelled."""
    updates: int = 0
    """Updates that were applied: skipped ones do not count."""
    samples: int = 0
    """Samples in those steps."""
