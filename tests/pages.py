"""Pages of documentation: their code runs in one namespace, and prints what they show."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = {"python", "text", "sh", "toml", "ini", "yaml", "json"}
EXACT, WRAPPED, SHAPE = "output", "output, wrapped", "output, numbers differ"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the HTML comment right above it."""

    language: str
    text: str
    comment: str
    line: int
    """Of the opening fence, from 1."""


def blocks(page: str) -> list[Block]:
    found = []
    pattern = r"(?:^<!-- *((?:(?!-->).)*?) *-->\n+)?^```(\w*)[^\n]*\n(.*?)^```$"
    for match in re.finditer(pattern, page, re.MULTILINE | re.DOTALL):
        line = page.count("\n", 0, match.start(2)) + 1
        found.append(Block(match[2], match[3], match[1] or "", line))
    return found


def shape(text: str) -> str:
    """The text with its durations and numbers replaced, and runs of spaces made one."""
    text = re.sub(r"\d+:\d\d(:\d\d)?|\d+(\.\d+)? s\b", "TIME", text)
    return re.sub(r" +", " ", re.sub(r"\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "N", text))


def agrees(shown: str, printed: str, how: str = EXACT) -> bool:
    """Whether a page shows what was printed; a line ``...`` of a shape stands for any lines."""
    if how == EXACT:
        return shown.rstrip() == printed.rstrip()
    if how == WRAPPED:
        return shown.split() == printed.split()
    parts = [re.escape(part.strip()) for part in re.split(r"^\.\.\.$", shape(shown), flags=re.MULTILINE)]
    return re.fullmatch("\n(?:.*\n)*".join(parts), shape(printed).strip()) is not None


def run_page(page: Path) -> None:
    """Run the Python blocks of a page in one namespace and compare what they print with what the page shows."""
    module = types.ModuleType("page_" + re.sub(r"\W", "_", page.stem))
    sys.modules[module.__name__] = module
    printed: str | None = None
    try:
        for block in blocks(page.read_text()):
            where = f"{page.name}:{block.line}"
            assert block.language in LANGUAGES, f"{where}: a block in {block.language!r}, one of {sorted(LANGUAGES)}"
            if block.language == "python":
                code = compile("\n" * block.line + block.text, str(page), "exec")
                skipped = block.comment.startswith("no-run:")
                assert not skipped or block.comment.removeprefix("no-run:").strip(), f"{where}: no-run without a reason"
                printed = None
                if not skipped:
                    out = io.StringIO()
                    with contextlib.redirect_stdout(out):
                        exec(code, vars(module))
                    printed = out.getvalue()
            elif block.comment in (EXACT, WRAPPED, SHAPE):
                assert printed is not None, f"{where}: no block before this output was run"
                assert agrees(block.text, printed, block.comment), f"{where}: it printed\n{printed}"
    finally:
        del sys.modules[module.__name__]
