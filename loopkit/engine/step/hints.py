"""Hints: fixes for known errors of torch that a step raised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from loopkit.base.batches import describe, leaves
from loopkit.base.notes import shown
from loopkit.base.words import nearest


class Tried(Protocol):
    """A step that has raised."""

    batch: Any
    had_backward: bool

    @property
    def closure(self) -> Any:
        """The closure, during an update that has one."""


def hint(error: BaseException, step: Tried, parameters: Iterable[Tensor]) -> str:
    """Suggest a fix for an error, beginning with ``"; "``; an empty string if the error is not known."""
    text = shown(error)
    return (
        _of_call(error, text, type(step))
        or _of_gradients(text, step)
        or _of_batch(error, text, list(leaves(step.batch)), parameters)
        or _of_outputs(error, text, vars(step))
    )


def _of_call(error: BaseException, text: str, step: type) -> str:
    """Suggest a fix for a method of the step that was called with other arguments."""
    called = re.search(r"\bStep\.(\w+)\(\) (?:missing|got|takes)", text) if isinstance(error, TypeError) else None
    method = getattr(step, called[1], None) if called is not None else None
    if method is None:
        return ""
    name = method.__name__
    parameters = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
    missing = re.findall(r"'(\w+)'", text.partition(" missing ")[2])
    if not set(missing) <= {each.name for each in parameters}:
        return ""  # a class Step of the user's own
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", text):
        names = [each.name for each in parameters]
        return nearest(unknown[1], names).replace(" (", "; ").rstrip(")") or f"; it takes {', '.join(names)}"
    required = [each.name for each in parameters if each.default is each.empty]
    return f"; write step.{name}({', '.join('step.loss' if each == 'loss' else each for each in required)})"


def _of_gradients(text: str, step: Tried) -> str:
    if "backward through the graph a second time" in text:
        if step.had_backward:
            return (
                "; this step has called step.backward before, on the same graph: add the losses and call it once, "
                "step.backward(first + second), or give the first call retain_graph=True"
            )
        return (
            "; this loss was differentiated before: compute it again in each step, detach what is carried over, or "
            "delete a loss.backward() that was kept, which step.backward(loss) replaces"
        )
    if "closure" in text and step.had_backward and step.closure is None:
        return (
            "; the optimizer evaluates the loss itself: give step.update(closure=closure) a function that computes the "
            "loss, calls step.backward(loss) and returns the loss"
        )
    return ""


def _of_batch(error: BaseException, text: str, inside: list[Any], parameters: Iterable[Tensor]) -> str:
    if "Expected more than 1 value per channel" in text:
        return "; BatchNorm cannot train on a batch of one sample: leave it out, DataLoader(..., drop_last=True)"
    if isinstance(error, TypeError) and any(type(leaf).__module__ == "numpy" for leaf in inside):
        return (
            "; the batch holds NumPy arrays: make them tensors, torch.from_numpy(array).float(), or give "
            "loopkit.data.TensorLoader(inputs, targets, batch_size=32) or a DataLoader, which do"
        )
    doubled = any(_is_double(leaf) for leaf in inside) and not any(map(_is_double, parameters))
    if doubled and any(word in text for word in ("dtype", "Double", "double")):
        return "; the batch is float64, as NumPy makes it, and the model float32: convert the data once, with .float()"
    return ""


def _of_outputs(error: BaseException, text: str, made: Mapping[str, Any]) -> str:
    """Suggest a fix by the values that the step has made so far."""
    outputs = made.get("outputs")
    targets = made.get("targets")
    if outputs is None and isinstance(made.get("inputs"), Mapping):
        return (
            "; the model was called with the whole mapping: each phase's forward may call learner.model(**inputs); for "
            "models of transformers, learner.predict(data, PredictionPhase()) with that of loopkit_huggingface does"
        )
    if isinstance(outputs, Tensor):
        return _of_targets(text, outputs, targets) if isinstance(targets, Tensor) else ""
    if outputs is not None and isinstance(error, (AttributeError, TypeError)):
        return (
            f"; the model returned {describe(outputs)}, and the loss takes a tensor: choose one in the phase, "
            f"def forward(self, learner, inputs): return learner.model(inputs)[0]"
        )
    return ""


def _of_targets(text: str, outputs: Tensor, targets: Tensor) -> str:
    """Suggest a fix for targets whose shape or dtype one of torch's losses does not take."""
    if "must be the same as input size" in text:
        said = f"; the loss takes a number for each output, {tuple(outputs.shape)}: "
        alike = outputs.numel() == targets.numel()
        return said + ("targets.view_as(outputs).float()" if alike else "for classes give nn.CrossEntropyLoss()")
    if any(words in text for words in ("multi-target not supported", "target dtype to be Long", "scalar type Long")):
        return (
            "; CrossEntropyLoss takes the number of a class for each sample, (batch,) int64: targets.flatten().long()"
        )
    return "; the loss takes floats: targets.float()" if "be cast to the desired output type Long" in text else ""


def _is_double(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64
