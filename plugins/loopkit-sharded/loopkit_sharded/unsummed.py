"""Gradients that a process has added up by itself, and that are not summed over the processes yet.

``fully_shard`` leaves them at the whole parameters, which a module has while it is unsharded. If they are summed in
another dtype, it would keep them in private. So they are added up here then, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopkit.author import devices, sharded

Grads = list[tuple[Tensor, Tensor]]


class Whole:
    """A parameter of a sharded module as autograd sees it.

    Args:
        part: This process's part, as the optimizer has it.
        param: The whole.
        dtype: In which gradients are summed over the processes; None is the dtype of the whole.
    """

    def __init__(self, part: Tensor, param: nn.Parameter, dtype: torch.dtype | None) -> None:
        self.part = part
        self._param = param
        self._dtype = dtype
        self._converts = dtype not in (None, param.dtype)
        self._syncing = False
        self._total: Tensor | None = None
        """The gradient so far, where it has another dtype."""
        if self._converts:
            trained, param.requires_grad = param.requires_grad, True  # a frozen parameter may be thawed
            param.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
            param.requires_grad = trained

    def _add(self, param: Tensor) -> None:
        """Take the gradient of a backward; if it is to be summed now, give it back with those before."""
        assert param.grad is not None
        total = param.grad.to(self._dtype) if self._total is None else self._total.add_(param.grad)
        param.grad = None
        if self._syncing:
            param.grad_dtype = self._dtype
            param.grad, self._total = total, None
        else:
            self._total = total

    def set_syncing(self, syncing: bool) -> None:
        """Set whether the next backward sums gradients over the processes."""
        self._syncing = syncing
        if self._converts:
            self._total, self._param.grad = self.grad, None
            self._param.grad_dtype = self._param.dtype  # a backward adds within a step in this one

    @property
    def grad(self) -> Tensor | None:
        """The whole gradient so far."""
        return self._param.grad if self._total is None else self._total

    def drop(self) -> None:
        """Forget it."""
        self._param.grad = self._total = None


class Unsummed:
    """The gradients of sharded models that are not summed over the processes yet."""

    def __init__(self) -> None:
        self.some = False
        """Whether there may be any."""
        self._wholes: list[Whole] = []
        """The parameters, since a backward without sums."""
        self._shown: list[tuple[Tensor, Tensor | None]] = []
        """Parameters with gradients that are not summed, while whoever saves sees them as if they were."""

    def begin(self, modules: Sequence[Any], dtype: torch.dtype | None) -> None:
        """Expect gradients that are not summed, of modules as in `wholes`."""
        self.some = True
        self._wholes = self._wholes or wholes(modules, dtype)

    def set_syncing(self, syncing: bool) -> None:
        """Set whether the next backward sums gradients over the processes."""
        for whole in self._wholes:
            whole.set_syncing(syncing)

    def grads(self) -> Grads:
        """The parameters that have such gradients, and these, whole."""
        return [(whole.part, whole.grad) for whole in self._wholes if whole.grad is not None]

    def take(self) -> Grads:
        """The same, and forget them."""
        found = self.grads()
        for whole in self._wholes:
            whole.drop()
        self.some = False
        return found

    def scale(self, factor: float | Tensor) -> None:
        """Multiply them by a factor."""
        grads = [grad for _, grad in self.grads()]
        if grads and (isinstance(factor, Tensor) or factor != 1.0):
            devices.scale(grads, factor)

    def show(self) -> None:
        """Add their sums to the parameters' gradients, until `hide`."""
        if not self.some:
            return
        for p, grad in summed(self.grads()):
            self._shown.append((p, p.grad))
            p.grad = grad if p.grad is None else p.grad + grad

    def hide(self) -> None:
        """Give the parameters back their own gradients."""
        for p, own in self._shown:
            p.grad = own
        self._shown.clear()


def summed(grads: Grads) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's part of the means over the processes of whole gradients."""
    with torch.no_grad():
        for p, grad in grads:
            mean = grad.to(p.dtype, copy=True)
            dist.all_reduce(mean)
            yield p, sharded.like(mean.div_(dist.get_world_size()), p)


def wholes(modules: Iterable[Any], dtype: torch.dtype | None) -> list[Whole]:
    """The parameters of modules that are sharded themselves. Each module is unsharded for a moment.

    Args:
        modules: Each an ``FSDPModule``.
        dtype: In which their gradients are summed over the processes.
    """
    found: dict[Tensor, Whole] = {}
    for module in modules:
        parts = dict(module.named_parameters(remove_duplicate=False))
        module.unshard()
        for path, param in module.named_parameters(remove_duplicate=False):
            part = parts[path]
            if param is not part and part not in found:
                found[part] = Whole(part, param, dtype)
        module.reshard()
    return list(found.values())
