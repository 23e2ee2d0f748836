"""What is used of ``fully_shard`` that has no public name; tests/test_private.py says in which versions it was seen.

A gradient that is not summed over the processes has no public way to it. ``FSDPModule.unshard`` would show it, for one
more all-gather, but not where it is kept in another dtype than that of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

KNOWN = ("2.13",)
"""The versions of torch with which the tests were run."""


@dataclass(frozen=True)
class Kept:
    """What ``fully_shard`` keeps for a parameter."""

    param: Tensor
    """This process's part, as the optimizer has it."""
    _internal: Any

    @property
    def own_grad(self) -> Tensor | None:
        """The whole gradient that this process has added up by itself."""
        internal = self._internal
        kept: Tensor | None = internal.unsharded_accumulated_grad  # in the dtype of the sum, if that is another one
        return kept if kept is not None or not hasattr(internal, "_unsharded_param") else internal._unsharded_param.grad

    def drop(self) -> None:
        """Forget that gradient."""
        self._internal.unsharded_accumulated_grad = None
        if hasattr(self._internal, "_unsharded_param"):
            self._internal._unsharded_param.grad = None


def kept(modules: Iterable[Any]) -> Iterator[Kept]:
    """What is kept for each parameter of modules that are sharded themselves."""
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.10 has one at most, under another name
        for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
            for internal in group.fsdp_params:
                yield Kept(internal.sharded_param, internal)
