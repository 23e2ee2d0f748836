"""What a plugin may have stands in one place: `loopkit.plugin.Plugin`."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from loopkit_testing.hooks_tables import tables

from loopkit.hooks import hooks
from loopkit.plugin import Plugin

ROOT = Path(__file__).parents[3]
PLUGIN = re.compile(r"(self\._?|impl\.)?plugins?(\.get\(.*\)|\[.*\])?")
"""How the sources call a plugin."""
FOUND = {*vars(Plugin), *inspect.get_annotations(Plugin)}
KNOWN = {name for name in FOUND if not name.startswith("_")}


def sources():
    for folder in (ROOT / "loopkit", *ROOT.glob("plugins/*/loopkit_*")):
        yield from folder.rglob("*.py")


def looked_for(text):
    """The names that a source looks for on plugins, by ``getattr`` and ``hasattr``."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[owner, ast.Constant(str(name)), *_]):
                if PLUGIN.fullmatch(ast.unparse(owner)):
                    yield name


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in sources()])
def test_every_attribute_that_is_looked_for_is_in_the_protocol(path):
    names = {name for name in looked_for(path.read_text()) if not name.startswith("__")}
    assert names <= {*KNOWN, *hooks()}


def test_attribute_that_nobody_documents_is_found():
    assert list(looked_for("getattr(self.plugin, 'secret', 0), hasattr(plugins.get(name), 'other')")) == [
        "secret",
        "other",
    ]


def test_every_attribute_of_the_protocol_is_looked_for():
    texts = [path.read_text() for path in sources() if path != ROOT / "loopkit/plugin.py"]
    told = {"reads", "updates", "writes", "before", "after", "options"}  # by `declared` and `options_of`
    assert not {name for name in KNOWN - told if not any(f'"{name}"' in text for text in texts)}


def test_every_attribute_of_the_protocol_has_a_docstring():
    [made] = [node for node in ast.parse(inspect.getsource(Plugin)).body if isinstance(node, ast.ClassDef)]
    for node, after in zip(made.body, [*made.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node)
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr)


def methods_of(kind):
    """The functions of a class in a source, by name."""
    return {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}


def arguments(function):
    """The names and annotations of a method's arguments, without ``self``."""
    static = any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)
    taken = function.args.args if static else function.args.args[1:]
    return [(each.arg, each.annotation and ast.unparse(each.annotation)) for each in taken]


def promised():
    [made] = [node for node in ast.parse(inspect.getsource(Plugin)).body if isinstance(node, ast.ClassDef)]
    return {name: arguments(function) for name, function in methods_of(made).items()}


def plugins_in(text):
    """The classes of a source that have a hook."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            marks = [ast.unparse(each) for function in methods_of(node).values() for each in function.decorator_list]
            if any("hookimpl" in mark for mark in marks):
                yield node


def differing(text):
    """The methods of plugins whose arguments are not those that the protocol promises."""
    known = promised()
    for made in plugins_in(text):
        for name, function in methods_of(made).items():
            if name in known and not fits(known[name], arguments(function)):
                yield f"{made.name}.{name}{arguments(function)}: promised are {known[name]}"


def fits(told, taken):
    """Whether a method takes what it is given; an argument without an annotation, or Any, takes all."""
    if [name for name, _ in told] != [name for name, _ in taken]:
        return False
    wide = (None, "Any", "object")
    return all(mine in (*wide, theirs) or "Any" in theirs for (_, theirs), (_, mine) in zip(told, taken, strict=True))


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in sources()])
def test_every_plugin_takes_the_arguments_of_the_protocol(path):
    assert list(differing(path.read_text())) == []


@pytest.mark.parametrize(
    "method", ["peek(self, epoch: Epoch)", "hold_stop(self, learner: Learner, reason: str)", "vote(self, hook: int)"]
)
def test_a_plugin_with_other_arguments_is_found(method):
    source = f"class Odd:\n    @hookimpl\n    def step_end(self): ...\n    def {method}: ..."
    assert len(list(differing(source))) == 1


def test_a_plugin_that_looks_on_has_three_words_to_learn_and_one_that_changes_five_more():
    needed = [entry.cells["needed"] for entry in tables()["words"]]
    assert needed[:8] == ["to observe"] * 3 + ["to change something"] * 5
    assert not {*needed[:8]} & {*needed[8:]}
    assert {entry.name for entry in tables()["words"]} == {*KNOWN, "phase", "traced", "when"}
