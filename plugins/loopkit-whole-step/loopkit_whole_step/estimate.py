"""How long a step and its compiler take, by counts: the same graph has the same answers on every machine.

The figures are those of one core of a virtual machine of 2026. On another one all of them are longer or shorter, so
that the steps which pass while a graph is compiled are nearly as many.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

BUILD, BUILD_A_NODE = 4.5, 0.015
"""Seconds to compile a graph in a process of its own, its start included."""
RECORD, RECORD_A_NODE = 0.3, 0.001
"""Seconds to record a graph."""
NODES_A_PARAMETER = 45
"""Operations of a graph for each tensor of parameters: most belong to the optimizer."""
STEP, NODE, FLOP, FLOP_OF_CONVOLUTION, ELEMENT = 1e-4, 8e-7, 1.5e-11, 2.5e-11, 1.5e-10
"""Seconds of an eager step, by the operations of its graph and what they do."""
CONVOLUTION = 1e-4
"""Seconds of a convolution, of both directions, beside its FLOPs."""
CALLS, CALLS_A_PARAMETER = 1e-4, 2.7e-5
"""Seconds of an eager step in which nothing is computed: Python, autograd, and calls of kernels."""
COMPUTED, CALLED = 0.80, 0.35
"""The parts that are left of the time in which an eager step computes, and of the other, when it is compiled."""


def nodes_of(parameters: int) -> int:
    """How many operations the graph of a step is taken to have, before it is recorded."""
    return NODES_A_PARAMETER * parameters


def build_seconds(nodes: int) -> float:
    """How long a graph of so many operations is taken to be compiled."""
    return BUILD + BUILD_A_NODE * nodes


def record_seconds(nodes: int) -> float:
    """How long a step is taken to be recorded."""
    return RECORD + RECORD_A_NODE * nodes


def part_left(parameters: int, seconds: float) -> float:
    """The part of an eager step's time that its graph is taken to need.

    Args:
        parameters: Tensors that are trained.
        seconds: The time of an eager step.
    """
    calls = min(1.0, (CALLS + CALLS_A_PARAMETER * parameters) / seconds)
    return COMPUTED * (1 - calls) + CALLED * calls


def steps_beside(graph: fx.Graph) -> int:
    """How many eager steps are taken to last as long as the graph is compiled."""
    return math.ceil(build_seconds(len(graph.nodes)) / step_seconds(graph))


def step_seconds(graph: fx.Graph) -> float:
    """How long an eager step of a graph is taken to last."""
    from torch.utils.flop_counter import flop_registry

    seconds = STEP + NODE * len(graph.nodes)
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        made = node.meta.get("val")
        seconds += ELEMENT * (made.numel() if isinstance(made, Tensor) else 0)
        counts = flop_registry.get(node.target.overloadpacket)
        if counts is None:
            continue
        args, options = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
        flops = counts(*args, **options, out_val=made)
        is_convolution = "convolution" in str(node.target)
        seconds += flops * (FLOP_OF_CONVOLUTION if is_convolution else FLOP) + CONVOLUTION * is_convolution
    return seconds
