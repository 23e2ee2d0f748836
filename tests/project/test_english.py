"""Plain English: sentences of the docs are short, stiff habits are rare, and three words that are not ours stay out.

Habits are counted per 10,000 words, in pages, the README, docstrings and messages apart. The bounds are the
project's limits or less, and may only fall.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
SOURCES = [*sorted((ROOT / "loopkit").rglob("*.py")), *sorted(ROOT.glob("plugins/*/loopkit_*/**/*.py"))]
LONGEST = 31
NOT_OURS = re.compile(
    r"(?i)\b(?:an?|the|one|each|every|another|first|second|two|several|per) pass(?:es)?\b|\b(?:edges?|verbs?)\b(?!:)"
)
"""An epoch is no *pass*, the place between two steps no *edge*, and ``step.backward`` no *verb*; to pass is fine."""
WITH_EDGES = ("kinds.py", "graph.py")
"""Histograms and graphs have edges."""


class Habit(NamedTuple):
    """A stiff word or construction, and how often it may come in 10,000 words."""

    pattern: str
    pages: float
    readme: float
    docstrings: float
    messages: float


# fmt: off
HABITS = {  # in:                                                         pages, README, docstrings, messages
    "go on: resume, continue": Habit(r"\b(?:goes|go|going|went|gone) on\b",                  1,  0,  1,  1),
    "refuse: raise":           Habit(r"\brefuse[sd]?\b",                                     1,  0,  1,  1),
    "say, tell: print, list":  Habit(r"\b(?:says?|said|tells?|told)\b",                      6,  0,  4,  4),
    "a clause with what":      Habit(r"[.;:,] what\b(?! is\?)|\b(?:of|by|from|with|in) what\b", 4,  0,  3,  2),
    "that of, those of":       Habit(r"\b(?:that|those) (?:of|that|which|without|with)\b",   3,  0,  3,  2),
    "alone: only":             Habit(r"\balone\b",                                           1,  0,  1,  1),
    "of its own: its own":     Habit(r"\bof (?:its|your|their|his|my|our) own\b",            3,  0,  3,  3),
    "nobody, nothing":         Habit(r"\b(?:nobody|nothing|somebody)\b",                     5,  0,  4,  4),
}
# fmt: on
DIRECT, AT_LEAST = r"\byou (?:can|must|need|want|should|may)\b", 5
"""Pages address the reader, at least so often in 10,000 words."""
SHORT = 300
"""A page of more words keeps twice the limits by itself."""


def prose(page: str) -> str:
    """The page without code, tables, comments and the targets of links; headings and items are paragraphs."""
    page = re.sub(r"(?ms)^ *```.*?^ *```$|<!--.*?-->|^ *\|.*?$", "\n\n", page)
    page = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", page))
    return re.sub(r"(?m)^ *(?:#+|[-*]|\d+\.) ", "\n\n", page)


def sentences(page: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        yield from re.split(r"(?<=[.!?])[)\"*]* +(?=\S)", " ".join(paragraph.split()))


def words(page: str) -> str:
    """All words of a page, with its tables, on one line; code is one word."""
    page = re.sub(r"(?ms)^ *```.*?^ *```$|<!--.*?-->", "", page)
    return " ".join(re.sub(r"\]\([^)]*\)|\[", "", re.sub(r"`[^`]*`", "code", page)).split())


def rate(pattern: str, text: str) -> float:
    """How often a pattern comes in 10,000 words."""
    return 10_000 * len(re.findall(pattern, text, re.IGNORECASE)) / len(re.findall(r"[A-Za-z']+", text))


def places(pattern: str, text: str) -> list[str]:
    """The places of a pattern, with some words around."""
    return [text[max(0, at.start() - 40) : at.end() + 40] for at in re.finditer(pattern, text, re.IGNORECASE)]


def strings(sources: Iterable[Path]) -> tuple[str, str]:
    """The words of all docstrings, and those of all messages: other strings of more than one word."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for path in sources:
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found[id(node) in docs].append(re.sub(r"(?m)^\s*(?:>>>|\.\.\.).*$", "", node.value))
    docstrings, messages = (words(re.sub(r"``.*?``", "code", " ".join(found[kind]))) for kind in (True, False))
    return docstrings, messages


def said_in(source: str) -> Iterator[str]:
    """The docstrings, messages and comments of a module, without what is marked as code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield re.sub(r"(?s)``.*?``|`[^`]*`", "", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield re.sub(r"`[^`]*`", "", token.string)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_short_sentences_of_our_words(page: Path) -> None:
    said = list(sentences(page.read_text()))
    assert [sentence for sentence in said if len(sentence.split()) > LONGEST] == []
    assert [sentence for sentence in said if NOT_OURS.search(sentence)] == []


def test_docstrings_messages_and_comments_have_no_words_that_are_not_ours() -> None:
    sources = [path for path in SOURCES if path.name not in WITH_EDGES]
    found = {(path.name, text) for path in sources for text in said_in(path.read_text()) if NOT_OURS.search(text)}
    assert found == set()


MANUAL = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("habit", HABITS)
def test_stiff_habits_are_rare_in_the_pages(habit: str) -> None:
    text = " ".join(words(page.read_text()) for page in MANUAL)
    assert rate(HABITS[habit].pattern, text) <= HABITS[habit].pages, places(HABITS[habit].pattern, text)


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: page.name)
def test_page_keeps_twice_the_limits_and_addresses_the_reader(page: Path) -> None:
    text = words(page.read_text())
    if len(text.split()) <= SHORT:
        return
    often = {
        name: places(each.pattern, text) for name, each in HABITS.items() if rate(each.pattern, text) > 2 * each.pages
    }
    assert often == {}
    assert rate(DIRECT, text) >= AT_LEAST / 2, "no 'you can' or 'you need'"


def test_pages_address_the_reader() -> None:
    assert rate(DIRECT, " ".join(words(page.read_text()) for page in MANUAL)) >= AT_LEAST


@pytest.mark.parametrize("habit", HABITS)
def test_stiff_habits_do_not_spread(habit: str) -> None:
    pattern, _, *bounds = HABITS[habit]
    texts = words((ROOT / "README.md").read_text()), *strings(SOURCES)
    figures = [round(rate(pattern, text), 1) for text in texts]
    print(habit, figures)  # pytest -rP shows all
    assert all(figure <= bound for figure, bound in zip(figures, bounds, strict=True)), (figures, bounds)
