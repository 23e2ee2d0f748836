"""Every plugin class of the docs pages keeps the contract, unless the page says that it shows a mistake."""

from __future__ import annotations

import ast
import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks

from loopkit.hooks import hooks
from loopkit_testing import check_plugin

DOCS = Path(__file__).parents[3] / "docs"


def plugin_classes(page: Path) -> list[str]:
    """The names of classes whose methods are marked as hooks, in the Python blocks that run."""
    found = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python" and not block.comment.startswith("no-run:"):
            found += [node.name for node in ast.parse(block.text).body if _is_plugin(node)]
    return found


def _is_plugin(node: ast.AST) -> bool:
    methods = node.body if isinstance(node, ast.ClassDef) else []
    known = hooks()
    return any(isinstance(each, ast.FunctionDef) and each.name in known and each.decorator_list for each in methods)


PAGES = {page: names for page in sorted(DOCS.glob("*.md")) if (names := plugin_classes(page))}
CLASSES = [(page, name) for page, names in PAGES.items() for name in dict.fromkeys(names)]
KEPT = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)


def definitions(page: Path) -> dict[str, Any]:
    """The classes and functions of a page, without its programs."""
    module = types.ModuleType("page_" + page.stem.replace("-", "_"))
    sys.modules[module.__name__] = module
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python" and not block.comment.startswith("no-run:"):
            tree = ast.parse("\n" * block.line + block.text)
            tree.body = [node for node in tree.body if isinstance(node, KEPT)]
            with contextlib.suppress(ImportError):
                exec(compile(tree, str(page), "exec"), vars(module))
    return vars(module)


ARGUMENTS = {
    "StopAfter": (1000,),
    "PauseAfter": (1000,),
    "StopWhenGood": (0.0,),
    "ClipNorm": (0.5,),
    "LossOfFirstBatch": ((torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)),),
}
OWN_MODEL = {
    "ShowEmbedding": "is for a phase of the page",
    "LogSamples": "is for the page's model",
    "FreezeBias": "is for a model of one layer",
    "LogWeights": "is for a model of one layer",
    "SampleText": "is for a model of texts",
    "SampleImages": "is for a model of images",
    "StopAfter": "stops a run, which resumes elsewhere",
    "PauseAfter": "pauses a run, which resumes elsewhere",
    "Careless": "shows the mistakes that the kit finds",
}
"""What is not for `tiny_problem`, and why."""
ONE_MODEL = {"Sam", "Decay", "ByHand", "LastEpochs"}
"""What is written for one model, and so breaks under a phase with two."""
SYNCS = {"Show"}
"""What prints the loss of a step, as the loop that it replaces does."""


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), CLASSES, ids=lambda each: getattr(each, "stem", each))
def test_plugin_of_a_page_keeps_the_contract(page, name):
    if name in OWN_MODEL:
        pytest.skip(f"{name} {OWN_MODEL[name]}")
    cls = definitions(page)[name]
    left = ["unknown_phases"] * (name in ONE_MODEL) + ["no_device_sync"] * (name in SYNCS)
    check_plugin(lambda: cls(*ARGUMENTS.get(name, ())), skip=left)


def test_every_exception_is_on_a_page():
    assert {*ARGUMENTS, *OWN_MODEL, *ONE_MODEL, *SYNCS} <= {name for _, name in CLASSES}


@pytest.mark.parametrize("name", ["LastEpochs", "Perturbed", "ByHand", "Sam"])
def test_plugin_of_a_page_keeps_its_most_likely_promises(name):
    page = next(page for page, other in CLASSES if other == name)
    check_plugin(definitions(page)[name], checks=["declared_access", "state_round_trip", "measured_weights"])
