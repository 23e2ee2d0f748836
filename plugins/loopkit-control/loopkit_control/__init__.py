"""When a run pauses or may stop: deadlines, least lengths, criteria every n updates and of overfitting."""

from loopkit_control import _core as _core
from loopkit_control.at_least import AtLeast as AtLeast
from loopkit_control.deadline import Deadline as Deadline
from loopkit_control.prechelt import GeneralisationLoss as GeneralisationLoss
from loopkit_control.prechelt import ProgressQuotient as ProgressQuotient
from loopkit_control.stop_on import StopOn as StopOn

__all__ = ["AtLeast", "Deadline", "GeneralisationLoss", "ProgressQuotient", "StopOn"]
__dir__ = __all__.copy
