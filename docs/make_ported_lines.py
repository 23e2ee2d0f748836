"""Count the lines that docs/ported.md gives of each program: ``python docs/make_ported_lines.py``."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parent / "ported.md"


def lines(path: Path) -> tuple[int, int]:
    """Code lines of the loop by hand, and of the same here: phases, plugins and the learner."""
    source = path.read_text()
    module = ast.parse(source)
    names = {node.name: node for node in module.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    hand, own = names["by_hand"], names["with_loopkit"]
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.lineno > hand.lineno]
    return _code(source, [hand]), _code(source, [*classes, own])


def _code(source: str, nodes: list[ast.stmt]) -> int:
    texts = source.splitlines()
    count = 0
    for node in nodes:
        strings = {
            line
            for each in ast.walk(node)
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
            for line in range(each.lineno, (each.end_lineno or 0) + 1)
        }
        assert node.end_lineno is not None
        count += sum(
            bool(texts[line - 1].strip()) for line in range(node.lineno, node.end_lineno + 1) if line not in strings
        )
    return count


def updated(page: str) -> str:
    """The page with its lines counted anew."""

    def counted(match: re.Match[str]) -> str:
        hand, own = lines(PAGE.parent / match[2])
        return f"{match[1]} ({hand} lines by hand, {own} here)"

    return re.sub(r"(\]\((\.\./examples/ported/\w+\.py)\)\*\*) \(\d+ lines by hand, \d+ here\)", counted, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
