"""The API pages: every public name is in one group of the index, and has an example that runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import io
import re
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopkit
from loopkit import Learner, data

pytest.importorskip("loopkit_testing", reason="the pages list names as it does")

ROOT = Path(__file__).parents[2]


def load() -> Any:
    """The script that writes the pages, as a module."""
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "api_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = load()
NAMES: dict[str, Any] = PAGES.names()
EXAMPLES: dict[str, str] = PAGES.examples()
DOCS = {
    path: inspect.getdoc(value) or ""
    for path, value in NAMES.items()
    if path not in EXAMPLES and (inspect.isclass(value) or inspect.isroutine(value))
}
"""The docstrings that must have an example themselves."""


def given(path: str) -> dict[str, Any]:
    """The names that the example of a docstring may use: those of its module, all of loopkit's, and a small problem."""
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    batches = data.TensorLoader(x, y, batch_size=16)
    model, loss_fn = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), nn.CrossEntropyLoss()

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    known: dict[str, Any] = {"torch": torch, "nn": nn, "loopkit": loopkit, "Path": Path}
    for name in ("loopkit.plugins", "loopkit", path.rpartition(".")[0], NAMES[path].__module__):
        known |= vars(importlib.import_module(name))
    learner = Learner(model, loss_fn, optimizer)
    problem = {"train": batches, "val": batches, "model": model, "loss_fn": loss_fn, "optimizer": optimizer}
    return known | problem | {"learner": learner}


def blocks(doc: str) -> list[str]:
    """The code of a docstring after ``::``."""
    return [textwrap.dedent(found) for found in re.findall(r"::\n\n((?:(?: {4,}.*)?\n)+)", doc + "\n")]


def test_index_lists_every_public_name_once() -> None:
    listed = [name for group in PAGES.groups().values() for name in group]
    assert sorted(listed) == sorted(set(listed))
    missing = {path for path in listed if path not in NAMES}
    assert set(NAMES) - set(listed) == set()
    assert {path for path in missing if importlib.util.find_spec(path.partition(".")[0]) is not None} == set()


def test_every_class_and_function_has_an_example() -> None:
    assert [path for path, doc in DOCS.items() if ">>>" not in doc and not blocks(doc)] == []
    assert [name for name in EXAMPLES if name not in NAMES and name.partition(".")[0] in sys.modules] == []


@pytest.mark.parametrize("path", [path for path, doc in DOCS.items() if ">>>" in doc])
def test_docstring_prints_what_it_shows(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out: list[str] = []
    test = doctest.DocTestParser().get_doctest(DOCS[path], given(path), path, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=out.append).failed == 0, "".join(out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that distributions adapt
@pytest.mark.parametrize("path", [path for path, doc in DOCS.items() if blocks(doc) and ">>>" not in doc])
def test_docstring_code_runs(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = given(path)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for code in blocks(DOCS[path]):
            exec(compile(code, path, "exec"), known)


def test_page_of_a_name_has_its_docstring_and_example() -> None:
    page = PAGES.pages()["loopkit.criteria.TimeLimit.md"]
    assert page.startswith("# loopkit.criteria.TimeLimit\n")
    assert ".. autoclass:: loopkit.criteria.TimeLimit" in page
    assert "## Example" in page
    assert "TimeLimit(3600)" in page


def test_page_of_a_class_lists_inherited_members_of_loopkit() -> None:
    page = PAGES.pages()["loopkit.ValidationPhase.md"]
    assert "unpack" in re.findall(r"\w+", re.findall(":members: (.*)", page)[0])
