"""When a run pauses or may stop, how many steps make an update, and steps in parts that fit; criteria, trends."""

from loopkit_control import _core as _core
from loopkit_control.accumulate import Accumulate as Accumulate
from loopkit_control.at_least import AtLeast as AtLeast
from loopkit_control.deadline import Deadline as Deadline
from loopkit_control.micro_batch import MicroBatch as MicroBatch
from loopkit_control.prechelt import GeneralisationLoss as GeneralisationLoss
from loopkit_control.prechelt import ProgressQuotient as ProgressQuotient
from loopkit_control.stop_on import StopOn as StopOn

__all__ = ["Accumulate", "AtLeast", "Deadline", "GeneralisationLoss", "MicroBatch", "ProgressQuotient", "StopOn"]
__dir__ = __all__.copy
