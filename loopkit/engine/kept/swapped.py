"""Swapped: tensors and entries of mappings of which there are two forms, one in place and one kept aside."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from loopkit.base import sharded

MISSING = object()
"""Stands for an entry that is not there in one of the forms."""


class Swapped:
    """Two forms of the same things; `exchange` swaps them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Tensors, each with one that has the values which are not in place."""
        self.cells: list[tuple[dict[Any, Any], Any, Any]] = []
        """Mappings and keys, with the entries which are not in place."""

    def exchange(self) -> None:
        """Swap the two forms."""
        sharded.exchange(self.pairs)
        cells = []
        for holder, key, kept in self.cells:
            cells.append((holder, key, holder.get(key, MISSING)))
            if kept is MISSING:
                holder.pop(key, None)
            else:
                holder[key] = kept
        self.cells = cells
