"""The subcommands of ``loopkit``, a module for each topic, and what a command of a distribution is written with.

Importing this package registers them. They may import everything, and no library code imports them.
"""

from typing import TYPE_CHECKING

from loopkit.base.lazy import homes, lazily
from loopkit.commands import checkpoints, completion, plugins  # noqa: F401  (a module registers its commands)

if TYPE_CHECKING:
    from loopkit.commands.cli import JSON as JSON
    from loopkit.commands.cli import Parser as Parser
    from loopkit.commands.cli import argument as argument
    from loopkit.commands.cli import existing as existing
    from loopkit.commands.cli import plain as plain
    from loopkit.commands.cli import reporting as reporting
    from loopkit.commands.cli import say as say
    from loopkit.commands.cli import say_json as say_json
    from loopkit.commands.cli import standalone as standalone
    from loopkit.commands.cli import table as table
    from loopkit.commands.scripts import ScriptError as ScriptError
    from loopkit.commands.scripts import made as made
    from loopkit.commands.scripts import split as split

__getattr__ = lazily(__name__)
__all__ = list(homes(__name__))
__dir__ = __all__.copy
