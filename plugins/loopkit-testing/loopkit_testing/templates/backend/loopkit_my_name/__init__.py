"""A log of loopkit: lines of tab-separated values."""

from loopkit_my_name.my_name import MyName, my_name, read

__all__ = ["MyName", "my_name", "read"]
