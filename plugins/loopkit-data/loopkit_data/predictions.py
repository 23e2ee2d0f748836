"""Predictions on several loaders, written with the index of each sample."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.author import describe
from loopkit.errors import ArgumentError, PhaseError

if TYPE_CHECKING:
    from loopkit import Learner, Phase


def write_predictions(
    learner: Learner, data: Any, path: str | os.PathLike[str], phase: str | Phase | None = None
) -> Path:
    """Predict on one or several loaders, and write a line for each sample: its loader, its index and its outputs.

    The file is CSV. It is written batch by batch, so memory does not grow with the data. Floating point outputs are
    written so that they read back as the same number. The file appears when it is complete: until then its name ends
    in ``.part``. A symbolic link stays one; a path that is no regular file, such as ``/dev/fd/1``, is written as it is.

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
        StepStateError: A loader does not know its samples.
        PhaseError: The outputs are no dense tensor with a row of the same length for each sample.
        ArgumentError: There is no folder for the file.

    Example::

        write_predictions(learner, {"train": train, "val": val}, "predictions.csv")
    """
    path = Path(path)
    folder = path.resolve().parent if path.is_symlink() and not path.exists() else path.parent
    if not folder.is_dir():
        raise ArgumentError(f"write_predictions: there is no folder {folder}: make it, or give another path")
    if path.is_dir():
        raise ArgumentError(f"write_predictions: {path} is a folder: give the path of a file in it")
    if learner.world.size > 1:
        path = path.with_stem(f"{path.stem}-{learner.world.rank}")
    named = data if isinstance(data, Mapping) else {"": data}
    with closing(_rows(learner, named, phase)) as rows:
        first = next(rows, None)
        if first is None:
            raise PhaseError("write_predictions: there are no loaders")
        _write(path, itertools.chain([first], rows), len(first) - len(FIXED))
    return path


def _write(path: Path, rows: Iterable[list[str]], width: int) -> None:
    """Write the lines beside the file, and put them in its place when they are complete."""
    if path.exists() and not path.is_file():  # such as /dev/fd/1, which cannot be put in another's place
        with path.open("w", newline="", encoding="utf-8") as file:
            _write_rows(file, rows, width)
        return
    path = path.resolve()  # of a symbolic link, the file that it names
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", newline="", encoding="utf-8") as file:
            _write_rows(file, rows, width)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_rows(file: IO[str], rows: Iterable[list[str]], width: int) -> None:
    table = csv.writer(file)
    table.writerow([*FIXED, *(["output"] if width == 1 else [f"output {i}" for i in range(width)])])
    table.writerows(rows)


FIXED = ("loader", "index")
"""The first columns."""


def _rows(learner: Learner, named: Mapping[str, Any], phase: str | Phase | None) -> Generator[list[str], None, None]:
    """Yield a line for each sample."""
    width: int | None = None
    for name, loader in named.items():
        where = f"write_predictions, loader {name!r}" if name else "write_predictions"
        with closing(_Predicted(learner.predict_batches(loader, phase, indices=True))) as made:
            for indices, outputs in made:
                texts = _texts(outputs)
                _check_rows(indices, outputs, texts, where)
                for index, values in zip(indices.tolist(), texts, strict=True):
                    width = len(values) if width is None else width
                    _check_width(index, len(values), width, where)
                    yield [name, str(index), *values]
        _check_all(made, where)


class _Predicted:
    """The indices and outputs of each batch, and how many there were."""

    def __init__(self, batches: Generator[Any, None, int | None]) -> None:
        self._batches = batches
        self.given = 0
        """Batches with outputs."""
        self.came: int | None = None
        """All batches; None if the epoch was left before its last one."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                batch = next(self._batches)
            except StopIteration as end:
                self.came = end.value
                return
            self.given += 1
            yield batch

    def close(self) -> None:
        """Leave the epoch."""
        self._batches.close()


def _check_rows(indices: Tensor, outputs: Any, texts: list[list[str]], where: str) -> None:
    """Raise unless the outputs of a batch have a row for each sample."""
    if len(texts) != len(indices):
        raise PhaseError(
            f"{where}: a batch of {len(indices)} samples has outputs {describe(outputs)}, and a line has the outputs "
            f"of one sample: return a tensor with a row for each sample"
        )


def _check_width(index: int, numbers: int, width: int, where: str) -> None:
    """Raise for a sample that has another number of outputs than those before it."""
    if numbers != width:
        raise PhaseError(
            f"{where}: sample {index} has {numbers} outputs, and a sample before it has {width}: a file has the same "
            f"columns in each line. Write a file for each width, or fill up the outputs"
        )


def _check_all(made: _Predicted, where: str) -> None:
    """Raise if some batches of a loader had no outputs."""
    if made.came is None:
        raise PhaseError(
            f"{where}: the epoch was ended after {made.given} batches, so the samples of the others have no line: "
            f"leave out the plugin that raised CancelEpoch or CancelFit"
        )
    if made.given < made.came:
        raise PhaseError(
            f"{where}: {made.came - made.given} of {made.came} batches have no outputs, so their samples have no line: "
            f"let the phase set step.outputs for each batch"
        )


def _texts(outputs: Any) -> list[list[str]]:
    """Return the outputs of each sample as texts."""
    if not isinstance(outputs, Tensor) or not outputs.ndim:
        raise PhaseError(
            f"write_predictions: outputs are {describe(outputs)}, and a line has the numbers of one tensor: take "
            f"learner.predict_batches(loader, indices=True), and write the parts that you need"
        )
    if outputs.is_nested or outputs.layout is not torch.strided:
        form = "nested" if outputs.is_nested else "sparse"
        raise PhaseError(
            f"write_predictions: outputs are a {form} tensor, and a line has the numbers of a dense one: return "
            f"{'outputs.to_padded_tensor(0.0)' if outputs.is_nested else 'outputs.to_dense()'}"
        )
    table = outputs.detach().cpu().flatten(1) if outputs.ndim > 1 else outputs.detach().cpu()[:, None]
    exact = table.float() if table.is_floating_point() and table.element_size() < SINGLE else table
    texts: list[list[str]] = exact.numpy().astype(str).tolist()
    return texts


SINGLE = 4
"""Bytes of a number of float32."""
