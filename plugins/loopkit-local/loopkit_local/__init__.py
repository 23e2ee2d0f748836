"""Local training for loopkit: each process updates by itself, and from time to time the parameters are averaged.

::

    from loopkit_local import AverageParameters, EverySteps

    learner = Learner(model, loss_fn, optimizer, plugins=[AverageParameters(EverySteps(8))])
"""

from loopkit_local import _core as _core
from loopkit_local.average_parameters import AverageParameters, Collective, ThroughHost
from loopkit_local.cadence import Cadence, Controller, EverySteps, Free
from loopkit_local.rounds import Rounds

__version__ = "0.1.0"
__all__ = [
    "AverageParameters",
    "Cadence",
    "Collective",
    "Controller",
    "EverySteps",
    "Free",
    "Rounds",
    "ThroughHost",
]
