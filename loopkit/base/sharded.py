"""Sharded tensors, of which each process holds a part: made whole, and taken apart again."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(value: Any) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")  # it takes seconds to import, and where it is not, none is one
    return module is not None and isinstance(value, module.DTensor)


def class_of(module: nn.Module) -> str:
    """The name of a module's class; of the one that it had, if it was sharded since."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    if sharding is not None and isinstance(module, sharding.FSDPModule):
        return type(module).__mro__[2].__qualname__  # behind the class that was made and FSDPModule
    return type(module).__qualname__


def whole(value: Any) -> Any:
    """A nested value with whole tensors in main memory in the place of sharded ones; the rest is as it was.

    All processes must call it with the same tensors in the same order: there is a collective for each sharded one, and
    one tensor at a time is whole on the device. Tied tensors stay tied.
    """
    return value if "torch.distributed.tensor" not in sys.modules else _whole(value, {})


def _whole(value: Any, made: dict[int, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item, made) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(item, made) for item in value)
    if not is_sharded(value):
        return value
    if id(value) not in made:
        made[id(value)] = value.detach().full_tensor().cpu()
    return made[id(value)]


def weights(model: nn.Module, whole: Callable[[Any], Any] = whole) -> dict[str, Any]:
    """The ``state_dict`` of a model, with sharded tensors made whole by default; tied ones stay the same tensor."""
    state = dict(model.state_dict())
    if not any(is_sharded(value) for value in state.values()):
        return state
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name and name in state and earlier in state:
            tied[name] = earlier
    made = whole({name: value for name, value in state.items() if name not in tied})
    return {name: made[tied.get(name, name)] for name in state}


def like(value: Any, other: Any) -> Any:
    """A whole tensor, which all processes have, sharded as ``other`` is; the value itself, if that is not.

    No collective: each process keeps its part. Tensors sharded in another way are sent, by all of them together.
    """
    if not is_sharded(other):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    shards = cast(DTensor, other)
    if is_sharded(value):
        return cast(DTensor, value).redistribute(shards.device_mesh, shards.placements)
    kept = value.detach().to(shards.device)
    return distribute_tensor(kept, shards.device_mesh, shards.placements, src_data_rank=None)


def like_parameter(value: Any, param: Tensor) -> Any:
    """A value of an optimizer's state, sharded as its parameter is, if it has a number for each of the parameter's."""
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return value
    return like(value, param)


def part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory and without its graph. It may be empty."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of tensors that this process holds, without empty ones."""
    return [mine for mine in map(part, tensors) if mine.numel()]


def values(tensor: Tensor) -> Tensor:
    """The numbers of a tensor; of a sparse one its entries, each index once."""
    return tensor if tensor.layout is torch.strided else _values(tensor)


def _values(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor.detach().coalesce().values()
    compressed = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    return tensor.detach().values() if tensor.layout in compressed else tensor


def with_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of tensors, without empty sparse ones; one zero if all are empty."""
    found = []
    for tensor in tensors:
        numbers = values(tensor)
        if numbers is tensor or numbers.numel():
            found.append(numbers)
    return found or [torch.zeros((), dtype=each.dtype, device=each.device) for each in tensors[:1]]


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all tensors together, some of which are sharded, as a plain scalar, equal in all processes.

    One collective. Bitwise ``torch.nn.utils.get_total_norm``, which fails for ``math.inf`` where a process holds
    no part of a tensor.
    """
    if norm_type != math.inf:
        norm = torch.nn.utils.get_total_norm(tensors, norm_type)
        return norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
    device = part(tensors[0]).device
    dtype = tensors[0].dtype
    norms = [norm.to(device, dtype) for norm in torch._foreach_norm(parts(tensors), math.inf)]
    largest = torch.stack(norms).amax() if norms else torch.zeros((), dtype=dtype, device=device)
    both = torch.stack([largest.nan_to_num(math.inf), largest.isnan().to(dtype)])  # a maximum may lose a nan
    spread = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    if spread is not None:
        for group in spread.device_mesh.get_all_groups():  # type: ignore[attr-defined]
            dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return torch.where(both[1] > 0, math.nan, both[0])


def exchange(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Exchange the values of two tensors, for each pair; without a copy, but for sharded ones."""
    for one, other in pairs:
        if is_sharded(one):  # whose memory is known elsewhere, too
            here, there = part(one), part(other)
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        else:
            one.data, other.data = other.data, one.data
    torch.clear_autocast_cache()  # it may hold casts of what was in place
