"""sparse: gradients of sparse embeddings, in a form that files hold, and back."""

from __future__ import annotations

from collections.abc import Mapping
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

INDICES, VALUES = methodcaller("_indices"), methodcaller("_values")
"""Read the parts of a sparse tensor as they are; torch's public methods take coalesced ones only."""
KEYS = frozenset(("indices", "values", "shape", "coalesced"))


def packed(grad: Tensor | None) -> Any:
    """Return a gradient in the form in which it is saved: a sparse one as its indices and values."""
    if grad is None or grad.layout is not torch.sparse_coo:
        return grad
    coalesced = grad.is_coalesced()
    return {"indices": INDICES(grad), "values": VALUES(grad), "shape": list(grad.shape), "coalesced": coalesced}


def is_packed(saved: Any) -> bool:
    """Whether a value has the form that `packed` returns."""
    if saved is None or isinstance(saved, Tensor):
        return True
    return isinstance(saved, Mapping) and saved.keys() == KEYS and isinstance(saved["indices"], Tensor)


def unpacked(saved: Any) -> Tensor | None:
    """Return the gradient that was packed, with the same indices in the same order."""
    if saved is None or isinstance(saved, Tensor):
        return saved
    size = torch.Size(saved["shape"])
    return torch.sparse_coo_tensor(
        saved["indices"], saved["values"], size, is_coalesced=saved["coalesced"] or None, check_invariants=True
    )
