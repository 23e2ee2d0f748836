"""Tensors out of the files of ``torch.save``, which are pickles, with no code of them run."""

from __future__ import annotations

import io
import os
import pickle
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from loopkit.author import SUFFIX, structure
from loopkit.errors import CheckpointError, LoopkitError

__all__ = ["load_torch"]


def load_torch(file: str | os.PathLike[str] | BinaryIO, *, key: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of a file of ``torch.save``, by ``torch.load(weights_only=True)``: no code of it is run.

    Args:
        file: A path, or a binary stream.
        key: Where the tensors are, if not at the top: ``"state_dict"``, ``"model"``.

    Returns:
        Tensors on the CPU by name, for `load_weights`.

    Raises:
        CheckpointError: The file cannot be read, holds something else than plain data, or no tensors by name.

    Example::

        load_weights(model, load_torch("theirs.pt", key="state_dict"), prefix="module")
    """
    where = "the stream"
    source: Any = file
    if isinstance(file, (str, os.PathLike)):
        source = where = os.fspath(file)
        try:
            if not stat.S_ISREG(os.stat(source).st_mode):
                raise CheckpointError(f"load_torch: {where} is no regular file. Give the path of a file")
        except LoopkitError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"load_torch: cannot open {where}: {error.strerror}. Give the path of a file"
            ) from error
    elif not getattr(file, "seekable", lambda: True)():
        source = io.BytesIO(file.read())
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"load_torch: {where} holds more than tensors and plain data, and loopkit runs no code of a file. "
            f"Where it comes from, save only the state_dict()"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"load_torch: {where} cannot be read ({type(error).__name__}): it was cut, or not written by torch.save. "
            f"A {SUFFIX} file goes to load_weights itself"
        ) from error
    if key is not None:
        if not isinstance(found, Mapping) or key not in found:
            keys = [str(each) for each in found] if isinstance(found, Mapping) else []
            held = structure.shown(keys) or type(found).__name__
            raise CheckpointError(f"load_torch: {where} has no key {key!r}{structure.near(key, keys)}; it has {held}")
        found = found[key]
    return _named(found, f"{where}[{key!r}]" if key is not None else where)


def _named(found: Any, where: str) -> dict[str, Tensor]:
    """Tensors by name, or an error that lists where they may be."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"load_torch: {where} is {type(found).__name__}, not tensors by name. Save state_dict()")
    others = [name for name, value in found.items() if not isinstance(name, str) or not isinstance(value, Tensor)]
    if others:
        inner = [name for name in others if isinstance(found[name], Mapping)
                 and any(isinstance(value, Tensor) for value in found[name].values())]  # fmt: skip
        fix = f"Choose a part: key={inner[0]!r}" if inner else "Save only the tensors"
        kinds = structure.shown(
            [f"{structure.plain(str(name))} ({type(found[name]).__name__})" for name in others], str
        )
        raise CheckpointError(f"load_torch: {where} holds more than tensors by name: {kinds}. {fix}")
    return dict(found)
