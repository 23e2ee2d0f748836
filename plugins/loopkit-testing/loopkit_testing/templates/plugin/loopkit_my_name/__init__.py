"""The largest loss of each epoch, as a metric of loopkit."""

from loopkit_my_name.my_name import MyName

__all__ = ["MyName"]
