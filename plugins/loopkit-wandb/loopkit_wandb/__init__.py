"""Logs of loopkit learners for Weights & Biases, offline or online, in its own format. A fit imports wandb.

::

    from loopkit.plugins import LogMetrics, LogTo
    from loopkit_wandb import Wandb

    learner = Learner(model, loss_fn, optimizer, plugins=[LogTo(Wandb("digits")), LogMetrics()])
"""

import os
from collections.abc import Sequence

from loopkit_wandb import _core as _core  # isort: split

from loopkit.plugins import LogTo
from loopkit_wandb.backend import Wandb

__all__ = ["Wandb", "wandb"]


def wandb(
    project: str = "loopkit",
    directory: str | os.PathLike[str] = "runs",
    *,
    run_name: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
    mode: str = "offline",
    every: int | None = None,
    name: str = "wandb",
) -> LogTo:
    """A `LogTo` that writes for Weights & Biases, for configurations to name.

    Args:
        project: As for `Wandb`, like the following ones.
        directory: Likewise.
        run_name: Likewise.
        group: Likewise.
        tags: Likewise.
        mode: Likewise.
        every: As for ``LogTo``: write after so many training steps, too.
        name: The plugin's name.

    Example::

        Learner(model, loss_fn, optimizer, plugins=["log_metrics", {"wandb": {"project": "digits"}}])
    """
    backend = Wandb(project, directory, run_name=run_name, group=group, tags=tags, mode=mode)
    return LogTo(backend, every=every, name=name)
