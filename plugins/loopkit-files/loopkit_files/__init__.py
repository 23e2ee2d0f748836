"""Runs in TOML files: ``loopkit_files.load("run.toml").build()``; see the README."""

from loopkit_files import _core as _core
from loopkit_files.calls import make
from loopkit_files.document import Built, Config, dump, load
from loopkit_files.errors import ConfigError

__all__ = ["Built", "Config", "ConfigError", "dump", "load", "make"]
