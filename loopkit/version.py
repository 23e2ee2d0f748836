"""The version of loopkit."""

__version__ = "0.1.0"
