"""Write the tables of docs/works-with.md from compat/results.json: ``python docs/make_works_with.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "works-with.md"
RESULTS = ROOT / "compat" / "results.json"
BEGIN, END = "<!-- made by docs/make_works_with.py -->", "<!-- end -->"
WORDS = {"equal": "equal", "differs": "not equal", "error": "does not run", "skipped": "not tried"}


def of_kind(found: dict[str, Any], *kinds: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The checks of a file with one of these results, as check, program and result."""
    for check, kept in found["checks"].items():
        for program, result in kept["other"].items():
            if result["result"] in kinds:
                yield check, program, result


def count(found: dict[str, Any], *kinds: str) -> int:
    """How many checks have one of these results."""
    if kinds == ("bitwise",):
        return sum(kept["bitwise"] for kept in found["checks"].values())
    return len(list(of_kind(found, *kinds)))


def gathered(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """What is not bitwise, as result, checks, programs and reason; rows with the same reason are one."""
    rows: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for check, program, result in of_kind(found, *WORDS):
        key = WORDS[result["result"]], result.get("reason") or result.get("seen", "")
        checks, programs = rows.setdefault(key, ({}, {}))
        checks[check] = None
        programs[program] = None
    for (kind, reason), (checks, programs) in rows.items():
        named = [f"`{each}`" for each in programs]
        listed = ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")
        yield kind, ", ".join(checks).replace("_", " "), listed, reason.replace("|", "\\|")


def tables(results: dict[str, Any]) -> str:
    """The tables, as Markdown."""
    lines = ["| package | version | tried | programs | bitwise | equal | other |", "|---|---|---|---|---|---|---|"]
    for name, found in results.items():
        first, *others = found["packages"].items()
        beside = f", with {', '.join(' '.join(each) for each in others)}" if others else ""
        figures = [count(found, "bitwise"), count(found, "equal"), count(found, "differs", "error", "skipped")]
        cells = [
            f"[{first[0]}](../compat/with_{name}.py)",
            first[1] + beside,
            found["date"],
            found["programs"],
            *figures,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Checks that are not bitwise:", "", "| package | programs | checks | result | reason |"]
    lines += ["|---|---|---|---|---|"]
    for found in results.values():
        for kind, checks, programs, reason in gathered(found):
            lines.append(f"| {next(iter(found['packages']))} | {programs} | {checks} | {kind} | {reason} |")
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with its tables made anew."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{tables(json.loads(RESULTS.read_text()))}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
