"""A graph in plain values, for the process that compiles it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

NAMESPACES = ("aten", "prims", "_inductor_test")
"""Operations of others are not registered in another process."""
MATH = {"operator.getitem": operator.getitem}
Kind = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


class NotHandedOver(Exception):
    """A graph that another process cannot compile."""


@dataclass(frozen=True)
class At:
    """A value that another operation made."""

    name: str


@dataclass(frozen=True)
class Written:
    """A graph in plain values."""

    nodes: list[tuple[str, str, str, Any, Any]]
    """The name, kind, target, arguments and options of each operation."""
    kinds: list[Kind]
    """The kinds of the inputs."""

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Tensor]) -> tuple[Written, list[Tensor]]:
        """Write a graph down; its constants become inputs after the others, and are returned.

        Raises:
            NotHandedOver: It has inputs that are not on the CPU, or operations that another process does not have.
        """
        named = {node: operator.attrgetter(node.target)(module) for node in module.graph.find_nodes(op="get_attr")}
        every = [*inputs, *(each.detach() for each in named.values())]
        if any(each.device.type != "cpu" or each.layout != torch.strided for each in every):
            raise NotHandedOver("it has inputs that are not on the CPU")
        if _changes_what_it_shares(module.graph, inputs):
            raise NotHandedOver("it changes an input that shares memory with another")
        given = [*module.graph.find_nodes(op="placeholder"), *named]
        nodes: list[tuple[str, str, str, Any, Any]] = [(node.name, "placeholder", node.name, (), {}) for node in given]
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                args, options = _plain(node.args), _plain(node.kwargs)
                nodes.append((node.name, node.op, _name(node), args, options))
        kinds = [(each.dtype, tuple(each.shape), each.stride()) for each in every]
        return cls(nodes, kinds), every[len(inputs) :]

    def inputs(self) -> list[Tensor]:
        """Tensors of the kinds of the inputs, whose values are whatever the memory holds."""
        return [torch.empty_strided(shape, stride, dtype=dtype) for dtype, shape, stride in self.kinds]

    def read(self) -> fx.GraphModule:
        """The graph, with the kinds of its values."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        graph = fx.Graph()
        made: dict[str, fx.Node] = {}
        for name, op, target, args, options in self.nodes:
            args, options = tree_map_only(At, lambda at: made[at.name], (args, options))
            made[name] = graph.create_node(op, _target(op, target), args, options, name)
        module = fx.GraphModule({}, graph)
        FakeTensorProp(module, FakeTensorMode()).propagate(*self.inputs())
        return module


def _plain(value: Any) -> Any:
    """Arguments in tuples, lists and dicts of Python's own, and `At` for what other operations made."""
    if isinstance(value, fx.Node):
        return At(value.name)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(_plain(each) for each in value)
    return value


def _name(node: fx.Node) -> str:
    """The name of an operation's function."""
    if node.op == "output":
        return "output"
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        if node.target.namespace in NAMESPACES:
            return str(node.target)
    elif node.target is operator.getitem:
        return "operator.getitem"
    raise NotHandedOver(f"another process does not have {node.target}")


def _target(op: str, name: str) -> Callable[..., Any] | str:
    """The function of an operation's name."""
    if op != "call_function":
        return name
    found: Any = MATH.get(name) or operator.attrgetter(name)(torch.ops)
    return found  # type: ignore[no-any-return]


def _changes_what_it_shares(graph: fx.Graph, inputs: Sequence[Tensor]) -> bool:
    """Whether inputs that are changed in place share their memory with another input."""
    owners: dict[int, list[int]] = {}
    for at, each in enumerate(inputs):
        owners.setdefault(each.untyped_storage().data_ptr(), []).append(at)
    shared = {at for group in owners.values() if len(group) > 1 for at in group if inputs[at].numel()}
    if not shared:
        return False
    given = [node for node in graph.nodes if node.op == "placeholder"]
    roots = {node: at for at, node in enumerate(given)}
    for node in graph.nodes:  # views of an input are of its memory
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not isinstance(value, fx.Node) or value not in roots:
                continue
            if argument.alias_info.is_write and roots[value] in shared:
                return True
            roots[node] = roots[value]
    return False
