"""The subcommands of ``loopkit``, a module for each topic; importing this package registers them."""

from loopkit.commands import checkpoints, plugins, runs, scaffold

__all__ = ["checkpoints", "plugins", "runs", "scaffold"]
