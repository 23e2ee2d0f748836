"""Plain English: sentences of the docs are short, and three words that are not ours stay out of docs and docstrings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LONGEST = 31
NOT_OURS = re.compile(r"(?i)(?<!forward )(?<!backward )\b(?:pass(?:es)?|edges?|verbs?)\b(?!:)")
"""An epoch is no *pass*, the place between two steps no *edge*, and ``step.backward`` no *verb*."""
LEFT: dict[str, int] = {}
"""How often such words are left in the docstrings and comments of a folder: figures that may only fall."""


def prose(page: str) -> str:
    """The page without code, tables, comments and the targets of links; headings and items are paragraphs."""
    page = re.sub(r"(?ms)^ *```.*?^ *```$|<!--.*?-->|^ *\|.*?$", "\n\n", page)
    page = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", page))
    return re.sub(r"(?m)^ *(?:#+|[-*]|\d+\.) ", "\n\n", page)


def sentences(page: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        yield from re.split(r"(?<=[.!?])[)\"*]* +(?=\S)", " ".join(paragraph.split()))


def comments(source: str) -> Iterator[str]:
    """The docstrings, those of attributes included, and the comments of a module, without what is marked as code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield re.sub(r"(?s)``.*?``|`[^`]*`", "", node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield re.sub(r"`[^`]*`", "", token.string)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_short_sentences_of_our_words(page: Path) -> None:
    said = list(sentences(page.read_text()))
    assert [sentence for sentence in said if len(sentence.split()) > LONGEST] == []
    assert [sentence for sentence in said if NOT_OURS.search(sentence)] == []


def test_docstrings_and_comments_have_no_more_words_that_are_not_ours() -> None:
    found: Counter[str] = Counter()
    for path in (ROOT / "loopkit").rglob("*.py"):
        folder = str(path.parent.relative_to(ROOT)) if path.name != "learner.py" else "loopkit/learner.py"
        found[folder] += sum(len(NOT_OURS.findall(text)) for text in comments(path.read_text()))
    assert {folder: count for folder, count in found.items() if count} == LEFT
