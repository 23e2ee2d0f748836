"""torch's anomaly detection, as a plugin."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from loopkit.author import Shown
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.phases import Phase

__all__ = ["DetectAnomaly"]


class DetectAnomaly(Shown):
    """Run training steps under torch's anomaly detection, which names the forward call of a gradient that is nan.

    An error in backward then comes with the traceback of the forward operation that caused it. No bit changes. It is
    slow: each backward looks at every gradient.

    Args:
        check_nan: Also raise where backward makes a nan; False: only show the forward call of other errors.
        name: The plugin's name.

    Source: ``torch.autograd.detect_anomaly``.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[DetectAnomaly()])
    """

    provides = "observer"

    def __init__(self, check_nan: bool = True, name: str = "detect_anomaly") -> None:
        self.check_nan = check_nan
        self.name = name

    @hookimpl(phase="training")
    def step_context(self, phase: Phase) -> AbstractContextManager[None]:
        """Watch the step and its backward."""
        return torch.autograd.set_detect_anomaly(True, self.check_nan)
