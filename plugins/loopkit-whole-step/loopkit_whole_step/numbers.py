"""Numbers on the CPU that a loop over a tensor reads: computed once, before the loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


def compute_once(graph: fx.Graph, keep: Any) -> None:
    """Give its own memory to each number that larger tensors are made with.

    Inductor puts its computation into the loop over the tensor, such as a power by a step counter into each vector.

    Args:
        graph: The graph.
        keep: The operation that gives memory, and is a copy otherwise.
    """
    for node in list(graph.nodes):
        if _makes_number(node):
            larger = [user for user in node.users if _is_tensor(user) and user.meta["val"].ndim]
            if not larger:
                continue
            with graph.inserting_after(node):
                kept = graph.call_function(keep, (node,))
            kept.meta["val"] = node.meta["val"]
            for user in larger:
                user.replace_input_with(node, kept)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _makes_number(node: fx.Node) -> bool:
    """Whether an operation computes a new tensor without dimensions on the CPU, of real numbers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not _is_tensor(node):
        return False
    value = node.meta["val"]
    shares = any(each.alias_info is not None for each in node.target._schema.returns)
    return value.ndim == 0 and value.device.type == "cpu" and value.is_floating_point() and not shares
