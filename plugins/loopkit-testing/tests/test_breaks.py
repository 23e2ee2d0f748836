"""Every break is found by its check and said in its words; what is unusual and right is not accused."""

from __future__ import annotations

import pytest
from backends import BROKEN, LEFT_OPEN, RIGHT, rows
from breaks import BREAKS
from unusual import UNUSUAL

from loopkit_testing import BACKEND_CHECKS, CHECKS, ContractError, check_backend, check_plugin, leftovers

LIKELY = [
    *("declared_access", "loader_kept", "metrics_reset", "no_graph_kept", "cancelled_step"),
    *("files_within", "data_wrapped"),
]
"""Where what is unusual is most likely to be accused; the others are left to the slow form."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is left running is not waited for."""
    monkeypatch.setattr(leftovers, "SECONDS", 0.2)
    yield
    while LEFT_OPEN:
        LEFT_OPEN.pop().close()


SAMPLED = [pytest.param(each, marks=[pytest.mark.slow] if at % 6 else []) for at, each in enumerate(BREAKS)]


@pytest.mark.parametrize("each", SAMPLED, ids=str)
def test_break_is_found_and_named(each):
    try:
        with pytest.raises(ContractError) as caught:
            check_plugin(each.make, checks=[each.check])
    finally:
        each.tidy()
    said = str(caught.value)
    assert [word for word in (f"{each.check}: ", *each.words) if word not in said] == []


def test_breaks_are_of_every_check():
    assert {each.check for each in BREAKS} == set(CHECKS)


@pytest.mark.parametrize("make", UNUSUAL, ids=lambda make: make.__name__)
def test_unusual_plugin_is_not_accused(make):
    check_plugin(make, checks=LIKELY)


@pytest.mark.slow
@pytest.mark.parametrize("make", UNUSUAL, ids=lambda make: make.__name__)
def test_unusual_plugin_is_not_accused_by_any_check(make):
    check_plugin(make)


@pytest.mark.slow
@pytest.mark.parametrize("each", BREAKS, ids=str)
def test_break_is_found_among_all_checks(each):
    try:
        with pytest.raises(ContractError) as caught:
            check_plugin(each.make)
    finally:
        each.tidy()
    assert all(word in str(caught.value) for word in each.words)


@pytest.mark.parametrize("each", BROKEN, ids=str)
def test_broken_backend_is_found_and_named(each):
    with pytest.raises(ContractError) as caught:
        check_backend(each.make, rows, checks=[each.check])
    said = str(caught.value)
    assert [word for word in ("backend '", f"{each.check}: ", *each.words) if word not in said] == []


def test_broken_backends_are_of_every_check():
    assert {each.check for each in BROKEN} == set(BACKEND_CHECKS)


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_right_backend_is_not_accused(make):
    check_backend(make, rows)
