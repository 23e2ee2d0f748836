"""Samples for training and for validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from loopkit.data import LoaderError


def train_val_split(*data: Any, val: float | int = 0.2, seed: int = 0, strata: Any = None) -> tuple[Any, Any]:
    """Divide samples in two, in an order that depends only on the seed.

    Args:
        data: Tensors or arrays of one length, ``(samples, ...)``; or a dataset with samples by index.
        val: The share of the validation, between 0 and 1, or how many samples.
        seed: Draws the samples.
        strata: The class of each sample, ``(samples)``: both parts have the same share of each, rounded so that the
            validation has as many as asked for.

    Returns:
        What the training has and what the validation has: tuples like ``data``, a single tensor as it is, or subsets.

    Raises:
        LoaderError: The lengths differ, or a part would be empty.

    Example::

        >>> train, val = train_val_split(torch.arange(10), val=0.3, seed=1)
        >>> len(train), len(val), sorted([*train.tolist(), *val.tolist()]) == list(range(10))
        (7, 3, True)
    """
    lengths = {len(each) for each in (*data, *(() if strata is None else (strata,)))}
    if len(lengths) != 1:
        raise LoaderError(
            f"train_val_split: give data of one length, not {', '.join(map(str, sorted(lengths))) or 'none'}"
        )
    samples = lengths.pop()
    count = round(val * samples) if isinstance(val, float) else val
    if not 0 < count < samples:
        raise LoaderError(f"train_val_split: val={val!r} of {samples} samples is {count}: both parts need one at least")
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).numpy()
    classes = np.zeros(samples, int) if strata is None else np.unique(np.asarray(strata), return_inverse=True)[1]
    groups = [order[classes[order] == each] for each in range(classes.max() + 1)]
    exact = np.array([len(group) * count / samples for group in groups])
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: count - shares.sum()]] += 1
    chosen = np.concatenate([group[:share] for group, share in zip(groups, shares, strict=True)])
    mask = np.zeros(samples, bool)
    mask[chosen] = True
    parts = [_taken(data, np.flatnonzero(~mask)), _taken(data, np.flatnonzero(mask))]
    return parts[0], parts[1]


def _taken(data: Sequence[Any], indices: Any) -> Any:
    made: list[Any] = []
    for each in data:
        if isinstance(each, Tensor):
            made.append(each[torch.from_numpy(indices).to(each.device)])
        else:
            made.append(each[indices] if isinstance(each, np.ndarray) else Subset(each, indices.tolist()))
    return made[0] if len(made) == 1 else tuple(made)
