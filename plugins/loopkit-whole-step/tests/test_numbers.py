"""Numbers that loops over tensors read, which are computed once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from loopkit_whole_step import private
from loopkit_whole_step.numbers import compute_once

aten = torch.ops.aten
KEEP = private.memory_of_its_own()


def decayed(count, *tensors):
    rate = 0.9**count
    return [rate * tensor for tensor in tensors]


def given(dtype=torch.float64):
    return [torch.tensor(3.0, dtype=dtype), torch.arange(40.0), torch.ones(5, 9), torch.tensor(2.0)]


def kept(graph):
    return [node.args[0] for node in graph.nodes if node.target is KEEP]


def test_power_by_a_counter_is_computed_once_and_kernels_are_called_from_cpp():
    graph = private.trace(decayed, given())
    compiled, (source, *_) = run_and_get_code(lambda: private.inductor(graph, given())(*given()))
    assert source.count("std::pow(") == 1
    assert "inductor_entry_impl" in source  # the kernels are called from C++
    for value, own in zip(compiled, decayed(*given()), strict=True):
        torch.testing.assert_close(value, own)


def test_number_gets_memory_for_its_larger_users_alone():
    graph = private.trace(decayed, given())
    compute_once(graph.graph, KEEP)
    (number,) = kept(graph.graph)
    assert number.target is aten.pow.Scalar
    graph.recompile()
    for value, own in zip(graph(*given()), decayed(*given()), strict=True):
        assert torch.equal(value, own)
    last = [node for node in graph.graph.nodes if node.target is aten.mul.Tensor][-1]  # of two numbers
    assert number in last.args


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda rate, tensor: rate * tensor, [torch.tensor(0.5), torch.ones(3)]),
        (lambda rates, tensor: rates[1] * tensor, [torch.ones(3), torch.ones(3)]),
        (lambda rate, tensor: rate.add_(1) * tensor, [torch.tensor(0.5), torch.ones(3)]),
        (lambda count, tensor: (count + 1) * tensor, [torch.tensor(0), torch.ones(3)]),
        (lambda one, other: (one + 1) * other, [torch.tensor(0.5), torch.tensor(0.5)]),
    ],
    ids=["input", "view", "in place", "whole number", "nothing larger"],
)
def test_what_has_memory_or_is_read_by_no_loop_stays_as_it_is(function, inputs):
    graph = private.trace(function, inputs)
    compute_once(graph.graph, KEEP)
    assert kept(graph.graph) == []


PARTS = {
    "copy": lambda v: v[1].clone(),
    "conversion": lambda v: v[1].to(torch.float32, copy=True),
    "power of one": lambda v: v[1] ** 1,
    "product with one": lambda v: v[1] * torch.ones(()),
    "sum with zero": lambda v: v[1] + torch.zeros(()),
    "copy of a part of a part": lambda v: v[1:][1].clone(),
}


def test_number_that_is_a_part_of_a_tensor_is_that_part():
    """Inductor takes each of these for its input, which is a view of what is computed in a loop."""

    def function(vector, tensor):
        return [part(vector + 1) * tensor for part in PARTS.values()]

    inputs = [torch.tensor([1.0, 2.0, 4.0]), torch.ones(20)]
    graph = private.trace(function, inputs)
    for name, value, own in zip(PARTS, private.inductor(graph, inputs)(*inputs), function(*inputs), strict=True):
        assert torch.equal(value, own), name


def test_operation_that_inductor_calls_in_a_slower_way_is_not_named():
    said = []
    handler, log = logging.Handler(), logging.getLogger("torch._inductor.ir")
    handler.emit = said.append
    log.addHandler(handler)
    try:
        graph = private.trace(lambda x: [torch.linalg.inv(x)], [torch.eye(3)])
        with torch._inductor.config.patch(fx_graph_cache=False):
            compiled = private.inductor(graph, [torch.eye(3)])
    finally:
        log.removeHandler(handler)
    assert torch.equal(compiled(2 * torch.eye(3))[0], torch.eye(3) / 2)
    assert said == []
