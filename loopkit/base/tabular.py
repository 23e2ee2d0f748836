"""Tables as text, and as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

NUMBER = re.compile(r"-?[\d,.]+(%| [kMGT]?B)?")


def aligned(columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int = 100) -> str:
    """Columns under their names: numbers, with a unit or not, to the right; texts to the left; None is left empty.

    Where a line would be wider than ``width`` characters, the widest texts are cut in the middle.

    >>> print(aligned(["name", "count"], [["a", 1], ["longer", 20]]))
    name    count
    a           1
    longer     20
    """
    cells = [list(columns), *([_shown(cell) for cell in row] for row in rows)]
    right = _of_numbers(columns, rows)
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for line in cells:
        cut = [_cut(cell, limit) for cell, limit in zip(line, widths, strict=True)]
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cut, widths, right, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def html(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The same as a table of HTML, for notebooks; the cells are escaped.

    >>> html(["name"], [["a < b"]])
    '<table><tr><th style="text-align: left">name</th></tr><tr><td style="text-align: left">a &lt; b</td></tr></table>'
    """
    from html import escape  # which holds the names of all characters

    sides = ["right" if numbers else "left" for numbers in _of_numbers(columns, rows)]

    def line(tag: str, cells: Sequence[Any]) -> str:
        made = []
        for cell, side in zip(cells, sides, strict=True):
            made.append(f'<{tag} style="text-align: {side}">{escape(_shown(cell))}</{tag}>')
        return f"<tr>{''.join(made)}</tr>"

    lines = [line("th", columns), *(line("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def paragraph(text: str) -> str:
    """A text as HTML."""
    from html import escape

    return f"<p>{escape(text)}</p>"


def count_of_bytes(count: int) -> str:
    """A number of bytes to three figures: ``"12.3 MB"``, of a million bytes each.

    >>> count_of_bytes(12_345_678)
    '12.3 MB'
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _of_numbers(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Which columns hold only numbers."""
    return [all(_is_number(row[i]) or row[i] is None for row in rows) for i in range(len(columns))]


def _is_number(cell: Any) -> bool:
    if isinstance(cell, str):
        return NUMBER.fullmatch(cell) is not None
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.6g}"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell)


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    if text.endswith(" ..."):  # a list that was cut: of what is left, whole words
        return shorten(text[:-4], width, placeholder=" ...")
    head = (width - 1) // 2
    tail = len(text) - (width - 1 - head)
    return f"{text[:head]}…{text[tail:]}"
