"""``python -m loopkit``: the same as the command ``loopkit``."""

import sys

from loopkit.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
