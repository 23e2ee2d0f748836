"""Runs in TOML files: ``loopkit.config.load("run.toml").build()``; see docs/configs.md."""

from loopkit.config.calls import make
from loopkit.config.document import Built, Config, dump, load
from loopkit.errors import ConfigError

__all__ = ["Built", "Config", "ConfigError", "dump", "load", "make"]
