"""The page of packages that loopkit works with is made from the results of compat/, and these are of what is there."""

import ast
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "compat").glob("with_*.py"))
RESULTS = json.loads((ROOT / "compat" / "results.json").read_text())


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_has_the_results():
    page = (ROOT / "docs" / "works-with.md").read_text()
    assert script(ROOT / "docs" / "make_works_with.py").updated(page) == page


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_are_of_the_versions_of_the_file_and_as_it_expects(file):
    found = RESULTS[file.stem.removeprefix("with_")]
    pins = dict(each.split("==") for each in script(ROOT / "compat" / "run.py").needs_of(file))
    assert {name: found["packages"][name] for name in pins} == pins
    others = [result for kept in found["checks"].values() for result in kept["other"].values()]
    assert not any("unexpected" in each for each in others)
    assert all(each.get("reason") for each in others)


def test_every_file_says_what_it_is_and_every_result_has_one():
    assert all(ast.get_docstring(ast.parse(file.read_text())) for file in FILES)
    assert RESULTS.keys() == {file.stem.removeprefix("with_") for file in FILES}
