"""digest: a short name of a value, equal for equal ones in every process and every run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.base.batches import parts
from loopkit.base.raw import raw

DIGITS = 32
PLAIN = (type(None), bool, int, float, complex, str, bytes)
Update = Callable[[bytes | memoryview], object]


def digest(value: Any) -> str | None:
    """Return 32 hexadecimal digits that stand for a value; None if something in it has no digest.

    Tensors and NumPy arrays (by dtype, shape and bits, wherever they are), numbers, strings, bytes, None, and mappings,
    tuples, lists and dataclasses of these have one.
    """
    hasher = hashlib.sha256()
    return hasher.hexdigest()[:DIGITS] if _add(hasher.update, value, ()) else None


def _add(update: Update, value: Any, around: tuple[int, ...]) -> bool:
    """Add a value to a hash; return whether all of it has a digest."""
    if isinstance(value, Tensor):
        return _add_tensor(update, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _add_array(update, numpy.asarray(value))
    if type(value) in PLAIN:
        update(f"{type(value).__name__} {value!r};".encode("utf-8", "surrogatepass"))
        return True
    inner = list(parts(value))
    empty = isinstance(value, (Mapping, tuple, list))
    if id(value) in around or not (inner or empty):
        return False
    update(f"{type(value).__qualname__} {len(inner)};".encode())
    for name, part in inner:
        update(f"{name}:".encode("utf-8", "surrogatepass"))
        if not _add(update, part, (*around, id(value))):
            return False
    return True


def _add_tensor(update: Update, value: Tensor) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.is_quantized or value.is_meta or value.is_nested:
        return False
    held = value.detach()
    if held.layout is not torch.strided:
        if held.layout is not torch.sparse_coo:
            return False
        held = held.coalesce()
        update(f"sparse {tuple(value.shape)};".encode())
        return _add_tensor(update, held.indices()) and _add_tensor(update, held.values())
    update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
    if held.numel():
        update(raw(held.resolve_conj().resolve_neg().cpu()).numpy().data)  # host sync: a save is one anyway
    return True


def _add_array(update: Update, value: Any) -> bool:
    if value.dtype.hasobject:
        return False
    update(f"array {value.dtype.str} {value.shape};".encode())
    update(value.tobytes())
    return True
