"""How loopkit is built, in figures that may only fall.

Each row is measured from the source, or by tracing a run. When a figure falls, the commit that lowers it lowers its
bound here; a bound goes up only in the commit that says why. `house` measures.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from house import (
    arguments,
    bare,
    branched,
    circles,
    core,
    distributions,
    docstrings_with_a_clause,
    files,
    imports,
    long_statement,
    longest,
    mean_statement,
    most_attributes,
    nested_ternaries,
    paired_assignments,
    private_reads,
    step_calls,
    tokens,
    unpublished,
    untyped,
    upward_calls,
)
from loopkit_testing.reference import public_modules

from loopkit import Learner

RULED = [*files("engine/**/*.py"), *files("learner.py")]
"""The files of the engine, and the learner."""


def everywhere() -> list[Path]:
    return [*core(), *distributions()]


def tokens_of_the_core() -> int:
    return tokens(core())


def mean_tokens() -> float:
    return mean_statement(core())


def tokens_of_long_statements() -> int:
    return long_statement(core())


def functions_above_15_branches() -> Iterable[str]:
    return branched(15, core())


def ternaries_in_ternaries() -> Iterable[str]:
    return nested_ternaries(core())


def unrelated_assignments() -> Iterable[str]:
    return paired_assignments(core())


def weak_docstrings() -> Iterable[str]:
    return docstrings_with_a_clause(everywhere())


def names_that_are_not_public() -> Iterable[str]:
    return sorted(unpublished(public_modules()))


def private() -> Iterable[Any]:
    return private_reads(RULED)


def private_everywhere() -> Iterable[Any]:
    return private_reads(everywhere())


def circles_that_run() -> list[str]:
    return [module for circle in circles(imports()) for module in circle]


def circles_named() -> list[str]:
    return [module for circle in circles(imports(annotations=True)) for module in circle]


def largest_circle_as_drawn() -> list[str]:
    return next(iter(circles(imports(annotations=True, exempt=False))), [])


def any_arguments() -> Iterable[str]:
    return untyped("**/*.py")


def upward() -> Iterable[Any]:
    return upward_calls().elements()


def largest_class() -> int:
    return longest(ast.ClassDef, RULED)


def largest_class_anywhere() -> int:
    return longest(ast.ClassDef, everywhere())


def attributes_of_a_class() -> int:
    return most_attributes(everywhere())


def longest_function() -> int:
    return longest(ast.FunctionDef, RULED)


def learner_attributes() -> Iterable[str]:
    return vars(bare())


def learner_members() -> Iterable[str]:
    return [name for name in dir(bare()) if not name.startswith("_")]


def learner_arguments() -> Iterable[str]:
    return arguments(Learner.__init__)


def fit_arguments() -> Iterable[str]:
    return arguments(Learner.fit)


def calls_of_a_step() -> Iterable[Any]:
    return step_calls().elements()


def files_of_a_step() -> Iterable[str]:
    return {call.file for call in step_calls()}


@dataclass(frozen=True)
class Row:
    """A figure of the house."""

    what: str
    bound: float | None
    """Today's figure; None for a plain figure without a bound."""
    goal: float | None
    """The limit that it falls to, if there is one."""
    measure: Callable[[], float | Iterable[Any]]
    """The figure, or the items that it counts."""


# fmt: off
ROWS = [
    #   what                                                                bound   goal
    Row("tokens of loopkit",                                                None,  None, tokens_of_the_core),
    Row("tokens a statement, the mean",                                     10.5, 10.0, mean_tokens),
    Row("tokens a statement, the 95th percentile",                            25,    24, tokens_of_long_statements),
    Row("functions of more than 15 branches",                                  2,     1, functions_above_15_branches),
    Row("ternaries in a ternary",                                               0,     0, ternaries_in_ternaries),
    Row("assignments of unrelated values in one line",                         47,    80, unrelated_assignments),
    Row("docstrings that begin with a clause",                                 5,    50, weak_docstrings),
    Row("names that distributions import and that are not public",            0,     0, names_that_are_not_public),
    Row("reads of private names of another file",                              0,     0, private_everywhere),
    Row("modules in the largest circle, as drawn",                             7,     8, largest_circle_as_drawn),
    Row("code lines of the largest class",                                   443,   300, largest_class_anywhere),
    Row("attributes of the class with the most",                              33,    20, attributes_of_a_class),
    Row("reads of another object's private names in engine and learner",       0,     0, private),
    Row("modules in circles of imports that run",                               0,     0, circles_that_run),
    Row("modules in circles, with what annotations name",                       0,     0, circles_named),
    Row("arguments called learner, epoch, step or phase that are Any",         6,  None, any_arguments),
    Row("calls upwards in a training epoch and a validation",                  4,     0, upward),
    Row("code lines of the largest class of engine and learner",              298,   300, largest_class),
    Row("code lines of the longest function of engine and learner",            60,    60, longest_function),
    Row("attributes of a Learner",                                             5,    20, learner_attributes),
    Row("public members of a Learner",                                        40,    40, learner_members),
    Row("arguments of Learner",                                                12,    12, learner_arguments),
    Row("arguments of fit",                                                    12,    12, fit_arguments),
    Row("calls of a bare training step",                                       14,    15, calls_of_a_step),
    Row("files of a bare training step",                                        3,     4, files_of_a_step),
]
# fmt: on


def figure(row: Row) -> tuple[float, list[str]]:
    """What a row comes to, and what it counts."""
    found = row.measure()
    if isinstance(found, (int, float)):
        return found, []
    items = [str(item) for item in found]
    return len(items), items


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_figure_of_the_house_does_not_rise(row):
    measured, items = figure(row)
    print(f"{row.what}: {measured}, limit {row.goal}")  # pytest -rP tests/project/test_house.py shows all
    assert row.bound is None or measured <= row.bound, f"{row.what}: {measured}, and {row.bound} before\n" + "\n".join(
        items
    )


def test_dir_of_a_public_module_shows_its_public_names_alone():
    shown = {name: dir(module) for name, module in public_modules().items()}
    assert shown == {name: sorted(module.__all__) for name, module in public_modules().items()}


def test_circle_of_three_modules_is_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}
    assert circles(graph) == [["a", "b", "c"]]


def test_circle_within_a_chain_that_ends_elsewhere_is_found():
    assert circles({"a": {"b", "c"}, "b": set(), "c": {"b", "d"}, "d": {"c"}}) == [["c", "d"]]


SOURCE = '''"""What a file is."""

CHOSEN = 1 if A else 2 if B else 3


class Thing:
    """Of a thing."""

    size: int

    def __init__(self, one, other):
        self.one, self.other = one, other
        self.one, self.other = self.other, self.one
        first, second = self.one

    def choose(self, values):
        """Return one of them."""
        for value in values:
            if value and value.good or value is None:
                return [each for each in value] if value else None
        return None
'''


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file to measure."""
    path = tmp_path / "plugins/loopkit-a/loopkit_a/a.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    monkeypatch.setattr("house.ROOT", tmp_path)
    return path


def test_density_of_a_file_is_measured(source):
    assert list(branched(5, [source])) == ["loopkit_a/a.py:16: choose, 7 branches"]
    assert list(branched(7, [source])) == []
    assert list(nested_ternaries([source])) == ["loopkit_a/a.py:3"]
    assert list(paired_assignments([source])) == ["loopkit_a/a.py:12: self.one, self.other = (one, other)"]
    assert list(docstrings_with_a_clause([source])) == ["loopkit_a/a.py:1", "loopkit_a/a.py:7"]
    assert (longest(ast.ClassDef, [source]), most_attributes([source])) == (11, 3)


def test_tokens_of_a_file_are_measured_by_statement(source):
    source.write_text("if a:\n    b = 1\nelse:\n    c = f(2)\n")
    assert tokens([source]) == 14
    assert (mean_statement([source]), long_statement([source])) == (4.0, 6)
