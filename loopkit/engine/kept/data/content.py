"""content: a digest of the data of an epoch, read without running any code of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from loopkit.base.digest import digest
from loopkit.data import Loader

SHOWN = 64
"""Rows at each end of a tensor that stand for all of them."""


def content(data: Any, steps: int) -> str | None:
    """Return a digest of the data of an epoch, after so many steps of it, without running any code of the user's.

    Lists and tuples have one, of the batches that come next and the last; so have loaders over tensors, lists and parts
    of these, of the samples at both ends. None for other data.
    """
    if type(data) in (list, tuple):
        following = list(data[steps : steps + 2])
        last = list(data[-1:])
        return digest((len(data), following, last))
    tensors = getattr(data, "tensors", None) if isinstance(data, Loader) else None
    if tensors is not None:
        return digest(_ends(tensors))
    if isinstance(data, DataLoader):
        return _of_dataset(data.dataset)
    return None


def _of_dataset(dataset: Any) -> str | None:
    """Return a digest of the samples at both ends of a data set whose insides are known."""
    if type(dataset) is Subset:
        whole = _of_dataset(dataset.dataset)
        return None if whole is None else digest((whole, list(dataset.indices)))
    if type(dataset) is TensorDataset:
        return digest(_ends(dataset.tensors))
    if type(dataset) in (list, tuple) or isinstance(dataset, Tensor):
        return digest(_ends([dataset]))
    return None


def _ends(tensors: Any) -> Any:
    """Return the first and the last rows of tensors and lists, in whatever holds them."""
    if isinstance(tensors, Mapping):
        return {str(name): _ends([each]) for name, each in tensors.items()}
    return [_ends_of_one(each) for each in tensors]


def _ends_of_one(value: Any) -> Any:
    has_rows = type(value) in (list, tuple) or (isinstance(value, Tensor) and value.ndim > 0)
    if not has_rows:
        return value
    return len(value), value[:SHOWN], value[-SHOWN:]
