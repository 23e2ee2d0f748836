"""Plain English: sentences of the docs are short, and three words that are not ours stay out of it all."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
SOURCES = [*sorted((ROOT / "loopkit").rglob("*.py")), *sorted(ROOT.glob("plugins/*/loopkit_*/**/*.py"))]
LONGEST = 31
NOT_OURS = re.compile(
    r"(?i)\b(?:an?|the|one|each|every|another|first|second|two|several|per) pass(?:es)?\b|\b(?:edges?|verbs?)\b(?!:)"
)
"""An epoch is no *pass*, the place between two steps no *edge*, and ``step.backward`` no *verb*; to pass is fine."""
WITH_EDGES = ("kinds.py", "graph.py")
"""Histograms and graphs have edges."""


def prose(page: str) -> str:
    """The page without code, tables, comments and the targets of links; headings and items are paragraphs."""
    page = re.sub(r"(?ms)^ *```.*?^ *```$|<!--.*?-->|^ *\|.*?$", "\n\n", page)
    page = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", page))
    return re.sub(r"(?m)^ *(?:#+|[-*]|\d+\.) ", "\n\n", page)


def sentences(page: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        yield from re.split(r"(?<=[.!?])[)\"*]* +(?=\S)", " ".join(paragraph.split()))


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
