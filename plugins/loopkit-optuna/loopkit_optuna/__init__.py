"""Optuna for loopkit: report a metric to the trial after each epoch, and end the fit if the trial is pruned."""

from loopkit_optuna import _core as _core
from loopkit_optuna.pruning import OptunaPruning

__version__ = "0.1.0"
__all__ = ["OptunaPruning"]
