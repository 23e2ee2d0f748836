"""Forward and backward of the models as CUDA graphs: one launch in place of many."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from loopkit.author import Shown, checks, warn
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SAVES = "loopkit-checkpoint"
"""The thread in which `Checkpoint` waits for copies and writes."""


class CudaGraph(Shown):
    """Replay forward and backward as CUDA graphs, one for each shape of inputs.

    It pays where steps are short and the time goes into launching kernels. Replayed are calls of a model in train mode
    with gradients, whose arguments are tensors on a CUDA device. All others run as they are: evaluation, other
    arguments, a second call before the backward of the first, a model with hooks on its modules, more shapes than
    ``max_graphs``. Where there is no CUDA device, or a model cannot be recorded (it reads tensors on the host, its
    control flow does not matter to torch, ...), there is one warning and it runs as it is.

    Args:
        warmup: Calls with a shape that run as they are before it is recorded, from 1.
        max_graphs: Shapes per model that are recorded; each costs the memory of its activations.

    What the model returns is a copy, and so are the gradients that a backward leaves (one foreach call), since a replay
    writes to the same memory each time. Batch-norm statistics and the random generators are as they would be without
    the recording. The graphs hold the addresses of the parameters: when these, ``requires_grad`` or the modes of
    modules are others at the begin of an epoch, the shapes are recorded anew. Do not change them within an epoch. Call
    backward by ``step.backward``; a backward that is kept for a second one (``retain_graph``) must not outlive the next
    forward.

    Raises:
        PluginError: An option is out of range.

    Source: ``torch.cuda.make_graphed_callables``.
    """

    name = "cuda_graph"
    provides = "cuda_graph"
    before = ("sync",)
    after = ("device", "memory_format", "freeze", "compile")
    device_type = "cuda"
    volatile = ("_*",)

    def __init__(self, warmup: int = 3, max_graphs: int = 8) -> None:
        checks.whole("CudaGraph", warmup=warmup, max_graphs=max_graphs)
        self.warmup = warmup
        self.max_graphs = max_graphs
        self._graphed: dict[str, GraphedModule] = {}
        self._warned = False

    def capture(self, module: nn.Module, args: tuple[Tensor, ...]) -> Callable[..., Any]:
        """Record a module's forward and backward for arguments like these."""
        return capture(module, args)

    @hookimpl(updates=("model",))
    def setup_model(self, name: str, model: nn.Module) -> nn.Module:
        """Let calls of the module go through its graphs."""
        device = next((p.device for p in model.parameters()), None)
        if device is None or device.type != self.device_type:
            self.warn(f"model {name!r} is on {device or 'no device'}, not on a CUDA device")
            return model
        self._graphed[name] = GraphedModule(model, name, self)
        return self._graphed[name]

    @hookimpl
    def epoch_begin(self, phase: Phase) -> None:
        """Forget the graphs if the parameters are elsewhere."""
        if phase.training:
            for graphed in self._graphed.values():
                graphed.check()

    @hookimpl(updates=("grads",))
    def backward_end(self, learner: Learner) -> None:
        """Move the gradients out of the memory that the next replay writes to."""
        params = [p for name in self._graphed for p in learner.models[name].parameters() if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        if grads and any(graphed.graphs for graphed in self._graphed.values()):
            for p, grad in zip(params, torch._foreach_mul(grads, 1.0), strict=True):
                p.grad = grad

    def warn(self, reason: str) -> None:
        """Warn, once, that something runs as it is."""
        if not self._warned:
            self._warned = True
            warn(f"plugin {self.name!r}: {reason}, so it runs without graphs")


class GraphedModule(nn.Module):
    """Calls a module, through a graph where that is possible.

    Args:
        module: The module.
        name: Its name, for messages.
        plugin: Its options set how to record and how often.
    """

    def __init__(self, module: nn.Module, name: str, plugin: CudaGraph) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # train() would change the modes inside
        self._name = name
        self._plugin = plugin
        self.graphs: dict[Any, Callable[..., Any]] = {}
        """The recorded graphs, by `key`."""
        self.seen: dict[Any, int] = {}
        """How often each key came before it was recorded; -1 where that has failed."""
        self._busy: dict[Any, weakref.ref[_Pending]] = {}
        self._modules_inside = list(module.modules())
        self._addresses = self._find_addresses()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graph of such arguments, or record one."""
        key = self.key(args, kwargs)
        if key is None:
            return self.module(*args, **kwargs)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self._record(key, args)
        pending = self._busy[key]() if key in self._busy else None
        if graph is None or (pending is not None and pending.waits):
            return self.module(*args)
        leaves, spec = tree_flatten(graph(*args))
        pending = _Pending()
        self._busy[key] = weakref.ref(pending)
        return tree_unflatten(_Detach.apply(pending, *leaves), spec)  # type: ignore[no-untyped-call]

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The key of the graph for a call; None where the module runs without one."""
        device = self._plugin.device_type
        if not self.module.training or not torch.is_grad_enabled() or kwargs or not args:
            return None
        if not all(isinstance(arg, Tensor) and arg.device.type == device for arg in args):
            return None
        if any(getattr(module, kind) for module in self._modules_inside for kind in HOOKS):
            return None
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return (autocast, *((arg.shape, arg.stride(), arg.dtype, arg.device, arg.requires_grad) for arg in args))

    def check(self) -> None:
        """Forget the graphs if the parameters are elsewhere, others are trained, or modes are others."""
        addresses = self._find_addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self._modules_inside = list(self.module.modules())
            self.graphs, self.seen, self._busy = {}, {}, {}

    def _find_addresses(self) -> list[Any]:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        addresses: list[Any] = [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]
        return addresses + [module.training for module in self.module.modules()]

    def _record(self, key: Any, args: tuple[Tensor, ...]) -> Callable[..., Any] | None:
        count = self.seen.get(key, 0)
        if count < 0 or len(self.graphs) >= self._plugin.max_graphs:
            return None
        if count < self._plugin.warmup:
            self.seen[key] = count + 1
            return None
        static = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        grads = [(p, p.grad) for p in self.module.parameters()]
        device = self._plugin.device_type
        for thread in threading.enumerate():  # while a graph is recorded, CUDA refuses calls of other threads, too
            if thread.name == SAVES:
                thread.join()
        try:
            with (
                torch.random.fork_rng(_indices(args), device_type=device),
                torch.autocast(
                    device,
                    torch.get_autocast_dtype(device),
                    enabled=torch.is_autocast_enabled(device),
                    cache_enabled=False,  # the casts of the weights must be in the graph
                ),
            ):
                self.graphs[key] = self._plugin.capture(self.module, static)
        except Exception as error:
            self.seen[key] = -1
            reason = str(error).strip().splitlines()
            self._plugin.warn(f"model {self._name!r} cannot be recorded ({' '.join(reason[:1]) or repr(error)})")
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for p, grad in grads:
                p.grad = grad
        return self.graphs.get(key)


class _Pending:
    """A call whose backward has not come; it is gone when its graph of autograd is."""

    def __init__(self) -> None:
        self.waits = True


class _Detach(torch.autograd.Function):
    """Copies of a graph's outputs, which notices their backward."""

    @staticmethod
    def forward(ctx: Any, pending: _Pending, *outputs: Any) -> Any:
        ctx.pending = pending
        return tuple(output.clone() if isinstance(output, Tensor) else output for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.pending.waits = False
        return None, *gradients


class _Call(nn.Module):
    """A module around another one, since what torch records replaces the module's ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def capture(module: nn.Module, args: tuple[Tensor, ...]) -> Callable[..., Any]:
    """``torch.cuda.make_graphed_callables`` of a module, which stays as it is."""
    graphed: Callable[..., Any] = torch.cuda.make_graphed_callables(_Call(module), args, allow_unused_input=True)
    return graphed


def _indices(args: Sequence[Tensor]) -> list[int]:
    return sorted({arg.device.index or 0 for arg in args if arg.device.type != "cpu"})
