"""Write the entry points of the core's own plugins into setup.cfg: ``python docs/make_entry_points.py``."""

from __future__ import annotations

import re
from pathlib import Path

from loopkit.discovery import declarations

FILE = Path(__file__).parent.parent / "setup.cfg"


def updated(text: str) -> str:
    """The text of setup.cfg with its groups of plugins made anew."""
    made = ""
    for group, values in declarations("loopkit.plugins").items():
        text = re.sub(rf"^{re.escape(group)} =\n(    .*\n)*", "", text, flags=re.MULTILINE)
        made += f"{group} =\n" + "".join(f"    {name} = {value}\n" for name, value in values.items())
    script = "    loopkit = loopkit.cli:main\n"
    return text.replace(script, script + made)


if __name__ == "__main__":
    FILE.write_text(updated(FILE.read_text()))
