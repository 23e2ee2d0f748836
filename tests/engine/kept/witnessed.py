"""What the witness names in a short run that saves after each update."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.life.runs import make, train, val
from loopkit import Learner, every
from loopkit.plugins import Checkpoint


def said(act: Callable[[], Any]) -> list[str]:
    """What is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught]


def named_in(directory: Path, **made: Any) -> list[str]:
    """What is warned of in a run of two epochs."""
    return named_by(make(Checkpoint(directory, save=every(updates=1)), *made.pop("plugins", ()), **made))


def named_by(learner: Learner) -> list[str]:
    """What is warned of in a run of two epochs of a learner."""
    return said(lambda: learner.fit(train(), val(), epochs=2))
