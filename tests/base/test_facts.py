"""Facts: equal for equal things, in every process, and different for different ones."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from loopkit.base.facts import fact, parts

PROGRAM = """
from loopkit.base.facts import fact

def loss(outputs, targets, kind="mse"):
    return kind in {"mse", "l2", "square"} and (outputs - targets).square().mean()

print(fact(loss))
"""


def test_function_has_one_fact_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    said = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said.add(subprocess.check_output([sys.executable, script], env=environment, text=True))
    assert len(said) == 1


def test_functions_that_compute_something_else_have_other_facts():
    assert fact(lambda o, t: (o - t).mean()) != fact(lambda o, t: (o + t).mean())
    assert fact(lambda o, t: (o - t).mean()) == fact(lambda o, t: (o - t).mean())


def counted(x):
    """Says something of itself."""
    return x.sum(), 1


def counted_without_words(x):
    return x.sum(), 1


counted_without_words.__qualname__ = counted_without_words.__name__ = "counted"


def test_docstring_of_a_function_makes_no_difference():
    assert fact(counted) == fact(counted_without_words)


def test_modules_are_told_by_class_and_options():
    assert fact(nn.MSELoss()) != fact(nn.MSELoss(reduction="sum"))
    assert fact(nn.CrossEntropyLoss(torch.ones(3))) != fact(nn.CrossEntropyLoss(torch.arange(3.0)))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_told_by_their_values(layout):
    one = torch.eye(3).to_sparse(layout=layout)
    assert fact(one) == fact(one.clone())
    assert len({fact(one), fact(2 * one), fact(torch.eye(4).to_sparse(layout=layout)), fact(torch.eye(3))}) == 4


def scaled(x, by=2.0):
    return x * by


def scaled_more(x, by=3.0):
    return x * by


scaled_more.__qualname__ = scaled_more.__name__ = "scaled"


def keyword(x, *, by=2.0):
    return x * by


def keyword_more(x, *, by=3.0):
    return x * by


keyword_more.__qualname__ = keyword_more.__name__ = "keyword"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (partial(scaled, by=2.0), partial(scaled, by=3.0)),
        (partial(scaled, 2.0), partial(scaled, 3.0)),
        (nn.Dropout(0.1).forward, nn.Dropout(0.2).forward),
        (scaled, scaled_more),
        (lambda x: x.sum(), lambda x: x.mean()),
        (lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x]),
        (keyword, keyword_more),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4, 2), torch.zeros(2, 4)),
        (nn.Dropout(0.1).train, nn.Dropout(0.1).eval),
    ],
    ids=[
        "keyword of a partial",
        "argument of a partial",
        "object of a method",
        "default of a function",
        "names in a function",
        "code within a function",
        "default of a keyword of a function",
        "dtype of a tensor",
        "shape of a tensor",
        "name of a method",
    ],
)
def test_fact_tells_what_is_held_apart(one, other):
    assert fact(one) == fact(one)
    assert fact(one) != fact(other)


def test_fact_of_a_set_is_sorted():
    assert fact(set("hgfedcba")) == "('a', 'b', 'c', 'd', 'e', 'f', 'g', 'h')"


def test_parts_leave_out_what_may_differ():
    assert "reduction" in parts(nn.MSELoss())
    assert "reduction" not in parts(nn.MSELoss(), without=("reduction",))


def test_fact_of_what_holds_itself_ends():
    endless = []
    endless.append(endless)
    assert "..." in fact(endless)
