"""Predictions on several loaders, written with the index of each sample."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.author import describe
from loopkit.errors import PhaseError

if TYPE_CHECKING:
    from loopkit import Learner, Phase


def write_predictions(
    learner: Learner, data: Any, path: str | os.PathLike[str], phase: str | Phase | None = None
) -> Path:
    """Predict on one or several loaders, and write a line for each sample: its loader, its index and its outputs.

    The file is CSV. It is written batch by batch, so memory does not grow with the data. Floating point outputs are
    written so that they read back as the same number.

    Args:
        learner: Predicts.
        data: A loader, or a mapping of names to loaders. The loaders know their samples: a loader of `loopkit.data`, or
            a ``DataLoader`` that is not shuffled or has a ``ResumableSampler``.
        path: The file. Where several processes share the data, each writes its own samples, into a file with its rank
            in the name: ``predictions-1.csv``.
        phase: The phase that predicts; the standard one by default.

    Returns:
        The file of this process.

    Raises:
        PhaseError: A loader does not know its samples, or the outputs are no tensor with a row for each sample.

    Example::

        write_predictions(learner, {"train": train, "val": val}, "predictions.csv")
    """
    path = Path(path)
    if learner.world.size > 1:
        path = path.with_stem(f"{path.stem}-{learner.world.rank}")
    named = data if isinstance(data, Mapping) else {"": data}
    rows = _rows(learner, named, phase)
    first = next(rows, None)
    if first is None:
        raise PhaseError("write_predictions: there are no loaders")
    columns = ["output"] if len(first) == len(FIXED) + 1 else [f"output {i}" for i in range(len(first) - len(FIXED))]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*FIXED, *columns])
        table.writerow(first)
        table.writerows(rows)
    return path


FIXED = ("loader", "index")
"""The first columns."""


def _rows(learner: Learner, named: Mapping[str, Any], phase: str | Phase | None) -> Iterator[list[str]]:
    """Yield a line for each sample."""
    for name, loader in named.items():
        for indices, outputs in learner.predict_batches(loader, phase, indices=True):
            for index, values in zip(indices.tolist(), _texts(outputs), strict=True):
                yield [name, str(index), *values]


def _texts(outputs: Any) -> list[list[str]]:
    """Return the outputs of each sample as texts."""
    if not isinstance(outputs, Tensor) or not outputs.ndim:
        raise PhaseError(
            f"write_predictions: outputs are {describe(outputs)}, and a line has the numbers of one tensor: take "
            f"learner.predict_batches(loader, indices=True), and write the parts that you need"
        )
    table = outputs.detach().cpu().flatten(1) if outputs.ndim > 1 else outputs.detach().cpu()[:, None]
    exact = table.float() if table.is_floating_point() and table.element_size() < SINGLE else table
    texts: list[list[str]] = exact.numpy().astype(str).tolist()
    return texts


SINGLE = 4
"""Bytes of a number of float32."""
