"""How long a graph takes, estimated without a clock: the same graph has the same answers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

BUILD, BUILD_A_NODE = 10.0, 0.02
"""Seconds to compile a graph in a separate process."""
NODE, FLOP, ELEMENT = 2e-6, 2e-11, 2e-10
"""Seconds of an eager step, by its operations and what they do."""


def build_seconds(nodes: int) -> float:
    """How long a graph of so many operations is taken to be compiled."""
    return BUILD + BUILD_A_NODE * nodes


def steps_beside(graph: fx.Graph) -> int:
    """How many eager steps are taken to last as long as the graph is compiled."""
    return math.ceil(build_seconds(len(graph.nodes)) / _step_seconds(graph))


def _step_seconds(graph: fx.Graph) -> float:
    from torch.utils.flop_counter import flop_registry

    seconds = 0.0
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        made = node.meta.get("val")
        seconds += NODE + ELEMENT * (made.numel() if isinstance(made, Tensor) else 0)
        counts = flop_registry.get(node.target.overloadpacket)
        if counts is not None:
            args, options = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
            seconds += FLOP * counts(*args, **options, out_val=made)
    return max(seconds, NODE)
