"""Log loopkit runs to an MLflow tracking server that may be slow, or away.

::

    from loopkit.logs import LogTo
    from loopkit_mlflow import MLflow

    log = LogTo(MLflow("http://127.0.0.1:5000", "digits", checkpoints="best"))
    learner = Learner(model, loss_fn, optimizer, plugins=[log])
"""

from loopkit_mlflow import _core as _core
from loopkit_mlflow.backend import MLflow, mlflow
from loopkit_mlflow.sender import create_run

__all__ = ["MLflow", "create_run", "mlflow"]
