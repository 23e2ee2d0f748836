"""A model as a file that needs neither loopkit nor the model's source."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.errors import PhaseError, PluginError

if TYPE_CHECKING:
    from loopkit.learner import Learner

AVERAGE = "average"
"""The ``provides`` of plugins that average weights."""


def export(
    learner: Learner,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    model: str | None = None,
    weights: str | None = AVERAGE,
    dynamic: bool = True,
    onnx: bool | None = None,
) -> list[Path]:
    """Write a model, in eval mode and on the CPU, for inference.

    Args:
        learner: Its model, and its averaged weights if a plugin keeps such.
        path: ``"model"`` or ``"model.pt2"`` gives ``model.pt2``, which `load` reads, and ``model.onnx``.
        inputs: A batch of inputs, ``(batch, ...)``, with which the model is traced: a tensor, or a tuple for a model of
            several arguments.
        model: Which of several models, by name.
        weights: The plugin, by its name or what it provides, whose weights the file has; None: the models' own.
        dynamic: The batch may have any size, not only the size of ``inputs``.
        onnx: Write ONNX too; None: where the packages ``onnx`` and ``onnxscript`` are installed.

    Returns:
        The files, each of which is replaced when the new one is written; of several processes rank 0 writes.

    Raises:
        PhaseError: There are several models and ``model`` names none of them.
        PluginError: No plugin is called ``weights``; the default is left out where there is none.
        ImportError: ``onnx=True``, and a package is missing.

    Example::

        export(learner, "model", next(iter(val))[0])
        outputs = load("model.pt2")(inputs)
    """
    names = list(learner.models)
    chosen = names[0] if model is None and len(names) == 1 else model
    if chosen not in names:
        raise PhaseError(f"export: model is {model!r}: it is one of {', '.join(map(repr, names))}")
    with _averaged(learner, weights):
        module = copy.deepcopy(learner.models[chosen]).cpu()
        module.eval()  # a module's own may return None
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if onnx and missing:
        raise ImportError(f"export(onnx=True) needs {' and '.join(missing)}: pip install 'loopkit-export[onnx]'")
    stem = os.fspath(path).removesuffix(".pt2").removesuffix(".onnx")
    files = [Path(stem + ".pt2"), *([Path(stem + ".onnx")] if onnx or (onnx is None and not missing) else [])]
    if learner.world.rank:
        return files
    arguments = tuple(each.cpu() for each in (inputs if isinstance(inputs, tuple) else (inputs,)))
    shapes = tuple({0: torch.export.Dim("batch")} for _ in arguments) if dynamic else None
    with torch.no_grad():
        program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    _write(files[0], lambda new: torch.export.save(program, new))
    for file in files[1:]:
        _write(file, lambda new: torch.onnx.export(program, (), new, dynamo=True, external_data=False))
    return files


def load(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """The model in a file of `export`, as a function of its inputs, without gradients.

    The file holds code: load only what you trust.
    """
    module = torch.export.load(path).module()

    @torch.no_grad()
    def run(*inputs: Tensor) -> Any:
        return module(*inputs)

    return run


def _write(file: Path, save: Callable[[Path], object]) -> None:
    """Write a file aside, which then takes the place of the one before."""
    with TemporaryDirectory(prefix=".new-", dir=file.parent) as folder:
        new = Path(folder, file.name)
        save(new)
        new.replace(file)


def _averaged(learner: Learner, word: str | None) -> Any:
    """A context in which the weights that ``word`` means stand in the place of the models' own."""
    plugins = learner.plugins.items()
    found = [each for name, each in plugins if word in (name, getattr(each, "provides", "")) and word is not None]
    if not found and word not in (None, AVERAGE):
        raise PluginError(
            f"export: weights is {word!r}: no plugin is called so; there are {', '.join(learner.plugins)}"
        )
    if len(found) > 1 or (found and not hasattr(found[0], "averaged")):
        names = ", ".join(name for name, each in plugins if hasattr(each, "averaged")) or "none"
        raise PluginError(f"export: weights is {word!r}, not one plugin that keeps averaged weights; those are {names}")
    return found[0].averaged(learner) if found else nullcontext()
