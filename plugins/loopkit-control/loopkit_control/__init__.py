"""When a run pauses, how many steps make an update, and steps in parts that fit."""

from loopkit_control.accumulate import Accumulate as Accumulate
from loopkit_control.deadline import Deadline as Deadline
from loopkit_control.micro_batch import MicroBatch as MicroBatch

__all__ = ["Accumulate", "Deadline", "MicroBatch"]


def __dir__() -> list[str]:
    return __all__
