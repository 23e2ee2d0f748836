"""How loopkit is built, in figures that may only fall.

Each row is measured from the source, or by tracing a run. When a figure falls, the commit that lowers it lowers its
bound here; a bound goes up only in the commit that says why. `house` measures.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from house import (
    ENGINE,
    arguments,
    bare,
    circles,
    imports,
    longest,
    private_reads,
    step_calls,
    untyped,
    upward_calls,
)
from loopkit_testing.reference import public_modules

from loopkit import Learner

RULED = [*ENGINE, "learner.py"]
"""The files of the engine, and the learner."""


def private() -> Iterable[Any]:
    return private_reads(*RULED)


def circles_that_run() -> list[str]:
    return [module for circle in circles(imports()) for module in circle]


def circles_named() -> list[str]:
    return [module for circle in circles(imports(annotations=True)) for module in circle]


def any_arguments() -> Iterable[str]:
    return untyped("**/*.py")


def upward() -> Iterable[Any]:
    return upward_calls().elements()


def largest_class() -> int:
    return longest(ast.ClassDef, *RULED)


def longest_function() -> int:
    return longest(ast.FunctionDef, *RULED)


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
    bound: int
    """Today's figure."""
    goal: int | None
    """None: it has none of its own."""
    measure: Callable[[], int | Iterable[Any]]
    """The figure, or the items that it counts."""


# fmt: off
ROWS = [
    #   what                                                                bound   goal
    Row("reads of another object's private names",                             0,     0, private),
    Row("modules in circles of imports that run",                               0,     0, circles_that_run),
    Row("modules in circles, with what annotations name",                       0,     0, circles_named),
    Row("arguments called learner, epoch, step or phase that are Any",         6,  None, any_arguments),
    Row("calls upwards in a training epoch and a validation",                  0,     0, upward),
    Row("code lines of the largest class of engine and learner",              300,   300, largest_class),
    Row("code lines of the longest function of engine and learner",            60,    60, longest_function),
    Row("attributes of a Learner",                                             5,    20, learner_attributes),
    Row("public members of a Learner",                                        40,    40, learner_members),
    Row("arguments of Learner",                                                12,    12, learner_arguments),
    Row("arguments of fit",                                                    12,    12, fit_arguments),
    Row("calls of a bare training step",                                       14,    15, calls_of_a_step),
    Row("files of a bare training step",                                        3,     4, files_of_a_step),
]
# fmt: on


def figure(row: Row) -> tuple[int, list[str]]:
    """What a row comes to, and what it counts."""
    found = row.measure()
    items = [] if isinstance(found, int) else [str(item) for item in found]
    return found if isinstance(found, int) else len(items), items


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_figure_of_the_house_does_not_rise(row):
    measured, items = figure(row)
    assert measured <= row.bound, f"{row.what}: {measured}, and {row.bound} before\n" + "\n".join(items)


def test_dir_of_a_public_module_shows_its_public_names_alone():
    shown = {name: dir(module) for name, module in public_modules().items()}
    assert shown == {name: sorted(module.__all__) for name, module in public_modules().items()}


def test_circle_of_three_modules_is_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}
    assert circles(graph) == [["a", "b", "c"]]


def test_circle_within_a_chain_that_ends_elsewhere_is_found():
    assert circles({"a": {"b", "c"}, "b": set(), "c": {"b", "d"}, "d": {"c"}}) == [["c", "d"]]
