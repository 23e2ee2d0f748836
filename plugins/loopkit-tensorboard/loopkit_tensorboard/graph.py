"""The graph of a model: its modules, and what flows between them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensorboardX.proto.attr_value_pb2 import AttrValue
from tensorboardX.proto.graph_pb2 import GraphDef
from tensorboardX.proto.node_def_pb2 import NodeDef
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.proto.versions_pb2 import VersionDef
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["modules_graph", "traced_graph"]


def modules_graph(model: nn.Module) -> GraphDef:
    """One node for each module that holds no others, with the shapes of its parameters; no edges.

    Nodes are named as modules, with "/" for ".": TensorBoard folds them as the modules are nested.
    """
    leaves = ((name, module) for name, module in model.named_modules() if not next(module.children(), None))
    nodes = [
        NodeDef(
            name=_scoped(name) or "model",
            op=type(module).__name__,
            attr={key: _text(_shape_text(tensor)) for key, tensor in module.named_parameters()},
        )
        for name, module in leaves
    ]
    return _graph(nodes)


def traced_graph(model: nn.Module, inputs: Any) -> GraphDef:
    """The operations of a forward pass with their shapes, in the scopes of the modules that call them.

    The forward pass is made by a copy of the model that has only shapes: it takes no memory for values, draws no
    random numbers, and neither the model nor its hooks notice it.

    Args:
        model: A module.
        inputs: A tensor, a tuple of arguments, or a mapping of named ones.

    Raises:
        Exception: Whatever the model raises without values: it cannot look at them, as in ``if x.sum() > 0``.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        held = (*model.parameters(), *model.buffers())
        shadow = copy.deepcopy(model, {id(tensor): fake.from_tensor(tensor) for tensor in held})
        for module in shadow.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        given = pytree.tree_map_only(Tensor, fake.from_tensor, inputs)
        recorder = Recorder(shadow, given)
        with recorder:
            outputs = _call(shadow, given)
        recorder.end(outputs)
    return _graph(recorder.nodes)


class Recorder(TorchFunctionMode):
    """Makes a node of each function of torch that is called, and of each parameter that one takes."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.nodes: list[NodeDef] = []
        self._scopes: list[str] = []
        self._names: set[str] = set()
        self._made: dict[int, tuple[Tensor, str]] = {}
        """By ``id``, a tensor (kept, so that no other gets its id) and the node that made it."""
        self._held = {
            id(tensor): (tensor, name, kind)
            for kind, named in (("Buffer", model.named_buffers()), ("Parameter", model.named_parameters()))
            for name, tensor in named
        }
        for tensor in _tensors(inputs):
            self._add("input", "Input", (), [tensor])
        self._handles = [
            handle
            for name, module in model.named_modules()
            for handle in (
                module.register_forward_pre_hook(self._enter(_scoped(name))),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function; it becomes a node if it returns tensors."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        made = list(_tensors(result))
        if made:
            name = getattr(function, "__name__", "operation").strip("_") or "operation"
            if name != "get":
                inputs = [self._source(tensor) for tensor in _tensors((args, kwargs))]
                self._add("/".join((*self._scopes[-1:], name)), name, inputs, made)
        return result

    def end(self, outputs: Any) -> None:
        """Make the node of the outputs."""
        for tensor in _tensors(outputs):
            self._add("output", "Output", [self._source(tensor)], [tensor])
        for handle in self._handles:
            handle.remove()

    def _source(self, tensor: Tensor) -> str:
        """The node that a tensor comes from."""
        if id(tensor) not in self._made:
            _, name, kind = self._held.get(id(tensor), (tensor, "/".join((*self._scopes[-1:], "constant")), "Constant"))
            self._add(_scoped(name), kind, (), [tensor])
        return self._made[id(tensor)][1]

    def _add(self, name: str, op: str, inputs: Sequence[str], made: Sequence[Tensor]) -> None:
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        name = next(each for each in names if each not in self._names)
        self._names.add(name)
        shapes = AttrValue.ListValue(
            shape=[TensorShapeProto(dim=[TensorShapeProto.Dim(size=int(n)) for n in t.shape]) for t in made]
        )
        attributes = {"_output_shapes": AttrValue(list=shapes), "dtype": _text(str(made[0].dtype))}
        self.nodes.append(NodeDef(name=name, op=op, input=inputs, attr=attributes))
        self._made.update({id(tensor): (tensor, name) for tensor in made})

    def _enter(self, scope: str) -> Callable[..., None]:
        return lambda module, args: self._scopes.append(scope) if scope else self._scopes.append("model")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._scopes.pop()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _scoped(name: str) -> str:
    return name.replace(".", "/")


def _shape_text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _text(text: str) -> AttrValue:
    return AttrValue(s=text.encode())


def _graph(nodes: Sequence[NodeDef]) -> GraphDef:
    return GraphDef(node=nodes, versions=VersionDef(producer=22))
