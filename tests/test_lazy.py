"""Names that are imported when somebody asks for them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import loopkit
from loopkit import checkpoint, logs, plugins


@pytest.mark.parametrize("package", [checkpoint, logs, plugins])
def test_homes_are_those_of_the_imports_for_type_checkers(package):
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        each.name: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for each in node.names
    }
    assert imported == package.HOMES
    assert {name for name in package.__all__ if not hasattr(package, name)} == set()


def test_modules_are_there_after_import_of_loopkit_alone():
    assert loopkit.schedules.cosine(10) is not None
    assert loopkit.distributed.World is not None


def test_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'loopkit\.logs' has no attribute 'JsonLine'"):
        logs.JsonLine  # noqa: B018
