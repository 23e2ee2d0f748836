"""The page on the architecture: its lists of functions are the order in which a run calls them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from house import batches, traced
from torch import nn, optim

from loopkit import Learner, hookimpl

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
WINGS = ["compile", "step", "life", "kept"]
SCREEN = 50
"""Lines of a page that one can take in at a glance."""


class Listener:
    """Listens when the fit begins, and around backward and the update, so that a step goes its long way."""

    @hookimpl
    def fit_begin(self) -> None:
        pass

    @hookimpl
    def backward_end(self) -> None:
        pass

    @hookimpl
    def update_end(self) -> None:
        pass


def told(heading: str) -> list[tuple[str, str]]:
    """The files and functions of a list of the page."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"(?m)^\d+\. `(\S+)` `(\S+)`", part)


@pytest.mark.parametrize("heading", ["The life of a fit", "The path of a batch"])
def test_page_lists_the_functions_in_the_order_of_a_run(heading: str) -> None:
    model = nn.Linear(3, 1)
    learner = Learner(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.1), plugins=[Listener()], standard=False)
    run = iter([(call.file, call.name) for call in traced(lambda: learner.fit(batches(2), batches(2), epochs=1))])
    listed = told(heading)
    assert len(listed) >= 10
    missing = [each for each in listed if each not in run]  # an iterator goes on behind what it has found
    assert missing == []


def test_page_names_files_that_exist() -> None:
    files = re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)
    assert len(files) > 30
    assert [file for file in files if not (ROOT / "loopkit" / file).exists() and not (ROOT / file).exists()] == []


@pytest.mark.parametrize("wing", WINGS)
def test_page_of_a_wing_lists_its_files(wing: str) -> None:
    page = (ROOT / f"docs/engine-{wing}.md").read_text()
    table = [line.rpartition("|")[0].rpartition("|")[0] for line in page.splitlines() if line.startswith("|")]
    listed = re.findall(r"`(\w+\.py)`", "\n".join(table))
    files = [path.name for path in (ROOT / "loopkit/engine" / wing).rglob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(files)
    assert len(page.splitlines()) <= SCREEN
