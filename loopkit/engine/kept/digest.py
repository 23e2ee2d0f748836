"""digest: a short name of the values in a batch, equal for equal ones in every process and every run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from loopkit.base.batches import parts
from loopkit.data import Loader

DIGITS = 32
SHOWN = 64
"""Rows at each end of a tensor that stand for all of them, in `content`."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)
Update = Callable[[bytes | memoryview], object]


def digest(value: Any) -> str | None:
    """Return 32 hexadecimal digits that stand for a value; None if something in it has no digest.

    Tensors and NumPy arrays (by dtype, shape and bits, wherever they are), numbers, strings, bytes, None, and mappings,
    tuples, lists and dataclasses of these have one.
    """
    hasher = hashlib.sha256()
    return hasher.hexdigest()[:DIGITS] if _add(hasher.update, value, ()) else None


def content(data: Any, steps: int) -> str | None:
    """Return a digest of the data of an epoch, after so many steps of it, without running any code of the user's.

    Lists and tuples have one, of the batches that come next and the last; so have loaders over tensors, lists and parts
    of these, of the samples at both ends. None for other data.
    """
    if type(data) in (list, tuple):
        return digest((len(data), list(data[steps : steps + 2]), list(data[-1:])))
    tensors = getattr(data, "tensors", None) if isinstance(data, Loader) else None
    if tensors is not None:
        return digest(_ends(tensors))
    return _of_dataset(data.dataset) if isinstance(data, DataLoader) else None


def _of_dataset(dataset: Any) -> str | None:
    """Return a digest of the samples at both ends of a data set whose insides are known."""
    if type(dataset) is Subset:
        whole = _of_dataset(dataset.dataset)
        return None if whole is None else digest((whole, list(dataset.indices)))
    if type(dataset) is TensorDataset:
        return digest(_ends(dataset.tensors))
    return digest(_ends([dataset])) if type(dataset) in (list, tuple) or isinstance(dataset, Tensor) else None


def _ends(tensors: Any) -> Any:
    """Return the first and the last rows of tensors and lists, in whatever holds them."""
    if isinstance(tensors, Mapping):
        return {str(name): _ends([each]) for name, each in tensors.items()}
    return [(len(each), each[:SHOWN], each[-SHOWN:]) if _is_long(each) else each for each in tensors]


def _is_long(value: Any) -> bool:
    return type(value) in (list, tuple) or (isinstance(value, Tensor) and value.ndim > 0)


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
    flat = held.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)  # host sync: a save is one anyway
    if flat.numel():
        update(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data)
    return True


def _add_array(update: Update, value: Any) -> bool:
    if value.dtype.hasobject:
        return False
    update(f"array {value.dtype.str} {value.shape};".encode())
    update(value.tobytes())
    return True
