"""The subcommands of ``loopkit``, a module for each topic; importing this package registers them.

They may import everything, and nothing imports them.
"""

from loopkit.commands import checkpoints, completion, plugins  # noqa: F401  (a module registers its commands)
