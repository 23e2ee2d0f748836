"""Runs in TOML files: ``loopkit_files.load("run.toml").build()``; runs as plain PyTorch: `eject`; see the README."""

from loopkit_files import _core as _core
from loopkit_files.calls import make
from loopkit_files.document import Built, Config, dump, load
from loopkit_files.errors import ConfigError
from loopkit_files.plain import EjectError, eject, eject_config

__all__ = ["Built", "Config", "ConfigError", "EjectError", "dump", "eject", "eject_config", "load", "make"]
