"""Write the tables of docs/hooks.md from the code: ``python docs/make_hooks_tables.py``."""

from __future__ import annotations

import re
from pathlib import Path

from loopkit_testing.hooks_tables import Entry, markdown, tables

PAGE = Path(__file__).parent / "hooks.md"


def anchor(entry: Entry) -> str:
    """Where the page says more of a hook."""
    return f"#{entry.name}{entry.cells['takes'].replace(', ', '-')}"


def updated(page: str) -> str:
    """The page with its tables made anew."""
    found = tables()

    def made(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}\n{markdown(found[name], anchor if name == 'hooks' else None)}\n{match[3]}"

    return re.sub(r"(?s)(<!-- made by docs/make_hooks_tables.py: (\w+) -->).*?(<!-- end -->)", made, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
