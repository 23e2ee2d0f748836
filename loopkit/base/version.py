"""The version of loopkit, and the name of its distribution."""

__version__ = "0.1.0"
DISTRIBUTION = "loopkit-engine"
"""The name that pip knows. The distribution called ``loopkit`` is another library: `loopkit.found.namesake`."""
