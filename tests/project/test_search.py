"""The site's search: seventy questions, as people ask them, find their page first.

The index is Sphinx's own, of the pages without the API; its ranking is that of Sphinx's script in the browser.
"""

from __future__ import annotations

import io
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx", reason="the extra `docs` has it")
pytest.importorskip("myst_parser", reason="the extra `docs` has it")

from sphinx.application import Sphinx
from sphinx.search import IndexBuilder

ROOT = Path(__file__).parents[2]
TITLE, PART_OF_TITLE, TERM, PART_OF_TERM, ENTRY = 15, 7, 5, 2, 100
"""Scores of Sphinx's script: `Scorer` in its searchtools.js, and 100 for an entry of the index."""

QUESTIONS = {
    "docs/distributed": ["multi gpu", "multiple gpus", "ddp", "fsdp", "slurm", "torchrun"],
    "docs/notebooks": ["jupyter", "Colab"],
    "docs/sweeps": ["sweep", "grid search", "hyperparameter search"],
    "docs/plugins": ["ema", "swa", "callbacks"],
    "docs/validation": ["validate every", "evaluate"],
    "plugins/loopkit-wandb/README": ["weights & biases", "wandb"],
    "plugins/loopkit-tensorboard/README": ["tensorboard"],
    "docs/criteria": ["time limit", "early stopping"],
    "docs/training-options": ["mixed precision", "amp", "gradient accumulation", "gradient clipping", "torch.compile"],
    "docs/schedules": ["learning rate", "warmup"],
    "docs/checkpoints": ["resume", "save best model", "ctrl-c"],
    "docs/writing-plugins": ["custom callback"],
    "docs/fine-tuning": ["fine-tuning", "freeze layers"],
    "docs/gan": ["gan"],
    "docs/ppo": ["ppo"],
    "docs/metrics": ["f1 score"],
    "docs/determinism": ["seed", "reproducibility"],
    "docs/debugging": ["nan loss", "out of memory"],
    "docs/migrating-lightning": ["pytorch lightning"],
    "docs/inference": ["predict"],
    "docs/data": ["dataloader"],
    "docs/own-loop": ["training loop"],
    "docs/performance": ["benchmark"],
    "plugins/loopkit-insight/README": ["profiler"],
}
SYNONYMS = {
    "docs/checkpoints": ["continue training", "save every n steps", "auto resume"],
    "docs/plugins": ["moving average of weights", "polyak averaging"],
    "docs/training-options": ["half precision", "clip_grad_norm", "move to gpu"],
    "docs/distributed": ["data parallel", "cluster", "sbatch"],
    "docs/sweeps": ["hpo", "bayesian optimization"],
    "docs/schedules": ["onecyclelr", "lr decay"],
    "docs/custom-phases": ["two optimizers", "override training step"],
    "docs/own-loop": ["manual loop"],
    "docs/inference": ["batch inference", "predict on files"],
    "docs/criteria": ["stop when loss stops improving"],
    "docs/debugging": ["loss is nan", "cuda out of memory"],
    "docs/logging": ["log to file"],
    "docs/samples": ["sample during training"],
    "docs/fine-tuning": ["discriminative learning rates"],
    "docs/data": ["infinite dataset"],
    "docs/notebooks": ["kaggle"],
    "docs/install": ["requirements"],
    "docs/performance": ["how fast"],
}
"""More ways to ask, in other words than the pages' own."""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """Sphinx's index of all pages, which takes some seconds: it reads a hundred pages, and writes none."""
    out = tmp_path_factory.mktemp("site")
    options = {
        "extensions": ["myst_parser", "sphinx.ext.autodoc"],
        "exclude_patterns": ["docs/api.md", "docs/api/*", "docs/examples"],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Sphinx and its extensions, about each other
        app = Sphinx(ROOT, ROOT / "docs", out, out / "doctrees", "dummy", options, status=None, warning=io.StringIO())
        app.builder.read()
    builder = IndexBuilder(app.env, "en", {}, "")
    for page in sorted(app.env.found_docs):
        builder.feed(page, f"{page}.md", app.env.titles[page].astext(), app.env.get_doctree(page))
    return builder.lang, builder.freeze()


def found(language: Any, index: dict[str, Any], question: str) -> list[str]:
    """The pages that the site shows for a question, the first one first."""
    asked = question.lower().strip()
    scores: list[tuple[int, str, str]] = []

    def add(score: int, page: int) -> None:
        scores.append((-score, index["titles"][page], index["docnames"][page]))

    for title, places in index["alltitles"].items():
        if asked in title.lower() and len(asked) >= len(title) / 2:
            for page, _ in places:
                add(round(TITLE * len(asked) / len(title)) + (index["titles"][page] == title), page)
    for entry, places in index["indexentries"].items():
        if asked in entry and len(asked) >= len(entry) / 2:
            for page, _, main in places:
                add(round(ENTRY * len(asked) / len(entry)) if main else 0, page)
    for page, score in in_text(language, index, asked).items():
        add(score, page)
    return list(dict.fromkeys(page for _, _, page in sorted(scores)))


def in_text(language: Any, index: dict[str, Any], asked: str) -> dict[int, int]:
    """The pages that have all words of a question, with the score of the best one."""
    words = {language.stem(word) for word in re.findall(r"\w+", asked) if word not in language.stopwords}
    by_word = [in_pages(index, word) for word in words if len(word) > 2 or word in index["terms"]]
    pages = set.intersection(*map(set, by_word)) if by_word else set()
    return {page: max(scores[page] for scores in by_word) for page in pages}


def in_pages(index: dict[str, Any], word: str) -> dict[int, int]:
    """The pages that have a word, or one that contains it, with its score."""
    scores: dict[int, int] = {}
    for table, whole, part in (("terms", TERM, PART_OF_TERM), ("titleterms", TITLE, PART_OF_TITLE)):
        exact = word in index[table]
        matching = [word] if exact else [term for term in index[table] if word in term]
        for term in matching:
            pages = index[table][term]
            for page in [pages] if isinstance(pages, int) else pages:
                scores[page] = max(scores.get(page, 0), whole if exact else part)
    return scores


ASKED = [(question, page) for asked in (QUESTIONS, SYNONYMS) for page, each in asked.items() for question in each]


def test_there_are_at_least_sixty_questions() -> None:
    assert len({question for question, _ in ASKED}) >= 60


@pytest.mark.parametrize(("question", "page"), ASKED)
def test_question_finds_its_page_first(question: str, page: str, index: tuple[Any, dict[str, Any]]) -> None:
    assert found(*index, question)[:1] == [page]


def test_words_of_the_search_are_for_pages_that_exist(index: tuple[Any, dict[str, Any]]) -> None:

    words = tomllib.loads((ROOT / "docs" / "search.toml").read_text())
    assert [page for page in words if not (ROOT / f"{page}.md").exists()] == []
    twice = sorted(word for all_words in words.values() for word in all_words)
    assert len(twice) == len(set(twice))
