"""Logs of loopkit learners in TensorBoard.

::

    from loopkit.plugins import LogMetrics, LogTo
    from loopkit_tensorboard import TensorBoard

    learner = Learner(model, loss_fn, optimizer, plugins=[LogTo(TensorBoard("runs/a")), LogMetrics()])
"""

import os

from loopkit_tensorboard import _core as _core  # isort: split

from loopkit.plugins import LogTo
from loopkit_tensorboard.backend import TensorBoard

__all__ = ["TensorBoard", "tensorboard"]


def tensorboard(directory: str | os.PathLike[str], *, every: int | None = None, name: str = "tensorboard") -> LogTo:
    """A `LogTo` that writes only to TensorBoard, for configurations to name.

    Args:
        directory: As for `TensorBoard`.
        every: As for ``LogTo``: write after so many training steps, too.
        name: The plugin's name.

    Example::

        Learner(model, loss_fn, optimizer, plugins=["log_metrics", {"tensorboard": {"directory": "runs/a"}}])
    """
    return LogTo(TensorBoard(directory), every=every, name=name)
