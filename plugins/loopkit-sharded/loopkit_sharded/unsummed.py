"""Gradients that a process has added up by itself, and that are not summed over the processes yet.

``fully_shard`` leaves them at the whole parameters, which a module has while it is unsharded. If they are summed in
another dtype, it would keep them in private. So they are added up here then, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


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
