"""Summarize a learner's models and their outputs for a batch, before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.author import aligned, count_of_bytes, generators, html, paragraph, registry_of
from loopkit.errors import PhaseError
from loopkit.phases import Phase, PredictionPhase

if TYPE_CHECKING:
    from loopkit.learner import Learner


@dataclass(frozen=True)
class ModuleRow:
    """One module."""

    name: str
    """Its path in the learner's models; empty for a single model itself."""
    type: str
    depth: int
    """How many modules are around it."""
    outputs: str
    """The shapes that it returned in its last call, such as ``"(32, 10)"``; empty if it was not called."""
    calls: int
    parameters: int
    """The parameters of the module and all modules in it; each parameter counts once in a row."""
    trainable: int
    bytes: int
    """The size of parameters and buffers."""
    same_as: str = ""
    """The name under which the same module came before, if it did."""


@dataclass(frozen=True)
class DataRow:
    """One tensor of the batch, or what else is in it."""

    name: str
    """Its place in the batch, such as ``"batch[0]"``."""
    shape: tuple[int, ...]
    """The shape of the tensor; the length of a list of numbers or texts."""
    dtype: str
    """Or a type that is no array, such as ``"str"``."""
    device: str
    """Empty for what is no tensor."""


@dataclass(frozen=True, repr=False)
class Summary:
    """The modules as a tree, and the data; ``print`` it."""

    rows: tuple[ModuleRow, ...]
    data: tuple[DataRow, ...]
    parameters: int
    """The parameters of all models, each counted once."""
    trainable: int
    bytes: int
    """The size of all parameters and buffers."""

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        modules, *data = [aligned(columns, rows) for columns, rows in self._tables()]
        return "\n\n".join([modules, self._total(), *data])

    def _repr_html_(self) -> str:
        modules, *data = [html(columns, rows) for columns, rows in self._tables("\N{NO-BREAK SPACE}")]
        return "".join([modules, paragraph(self._total()), *data])

    def _total(self) -> str:
        return (
            f"{self.parameters:,} parameters, {self.trainable:,} of them trainable; "
            f"{count_of_bytes(self.bytes)} with buffers"
        )

    def _tables(self, space: str = " ") -> Iterator[tuple[tuple[str, ...], list[tuple[Any, ...]]]]:
        """Columns and rows of the modules, and of the data if there are."""
        cells: list[tuple[Any, ...]] = []
        for row in self.rows:
            name = space * 2 * row.depth + (row.name.rpartition(".")[2] or "model")
            note = f"= {row.same_as}" if row.same_as else row.outputs + (f" x{row.calls}" if row.calls > 1 else "")
            sizes = (None, None, None) if row.same_as else (row.parameters, row.trainable, count_of_bytes(row.bytes))
            cells.append((name, row.type, note, *sizes))
        yield ("module", "type", "output", "parameters", "trainable", "size"), cells
        if self.data:
            yield (
                ("data", "shape", "dtype", "device"),
                [(row.name, row.shape, row.dtype, row.device) for row in self.data],
            )


def summarize(
    learner: Learner, batch: Any = None, phase: str | Phase | None = None, depth: int | None = None
) -> Summary:
    """The modules as a tree, with their parameters and sizes and what they return, and the data. Print it.

    With a batch, one step of a phase that does not train is run on it, without plugins but ``move_batch``, and not
    compiled. Modes, buffers, gradients and random generators are afterwards as they were.

    Args:
        learner: The learner of the modules; it stays unchanged.
        batch: A batch as from a loader; None for only the modules, without shapes.
        phase: How the models are run; the standard prediction by default: ``learner.model(inputs)``.
        depth: Leave out modules with more than so many others around them; 0 is only the models.

    Raises:
        PhaseError: The phase trains, or a model has parameters whose shape only a first forward sets.

    Example::

        print(summarize(learner, next(iter(train))))
    """
    calls: dict[nn.Module, list[str]] = {}
    data: tuple[DataRow, ...] = ()
    if batch is not None:
        chosen = PredictionPhase() if phase is None else learner.phases.find(phase)
        if chosen.training:
            raise PhaseError(
                f"summary: phase {chosen.name!r} trains; one forward is run, without a change: give a phase that "
                f"does not, or none"
            )
        _refuse_lazy(learner)
        move = registry_of(learner).plan(chosen).move_batch if chosen.name in learner.phases else None
        with _as_it_was(learner):
            moved = batch if move is None else move(batch, 0)
            data = tuple(_data(moved, "batch"))
            calls = _run(learner, chosen, moved)
    rows = tuple(row for row in _rows(learner, calls) if depth is None or row.depth <= depth)
    tensors = list(dict.fromkeys(t for model in learner.models.values() for t in _made(model)))
    parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
    return Summary(
        rows,
        data,
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(t.numel() * t.element_size() for t in tensors),
    )


def _run(learner: Learner, phase: Phase, batch: Any) -> dict[nn.Module, list[str]]:
    """One step of a phase, without plugins; returns the shapes that each call of each module returned."""
    calls: dict[nn.Module, list[str]] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        calls.setdefault(module, []).append(_shape(output))

    bare = type(learner)(learner.model, learner.loss_fn, phases=[phase], standard=False)
    with ExitStack() as stack:
        for module in dict.fromkeys(m for model in learner.models.values() for m in model.modules()):
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_hook(note).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(learner.models.unwrapped())  # a wrapper may talk to other processes
        bare.run(phase, [batch])
    return calls


@contextmanager
def _as_it_was(learner: Learner) -> Iterator[None]:
    """Put buffers, gradients and generators back; modes are put back by the epoch."""
    state = generators.save()
    modules = dict.fromkeys(m for model in learner.models.values() for m in model.modules())
    held = [(module, dict(module._buffers)) for module in modules]
    buffers = [(b, b.detach().clone()) for _, named in held for b in named.values() if b is not None]
    grads = [(p, p.grad) for model in learner.models.values() for p in model.parameters()]
    try:
        yield
    finally:
        for module, named in held:  # a forward may fill in what was None, or register more
            module._buffers.clear()
            module._buffers.update(named)
        with torch.no_grad():
            for buffer, before in buffers:
                if not buffer.is_meta and not torch.equal(buffer, before):
                    buffer.copy_(before)
        for parameter, grad in grads:
            parameter.grad = grad
        generators.restore(state)


def _refuse_lazy(learner: Learner) -> None:
    for name, model in learner.models.items():
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(tensor):
                raise PhaseError(
                    f"summary: {path!r} of model {name!r} has no shape before the first forward, which would make it "
                    f"for good: call the model on a batch first, or give no batch"
                )


def _rows(learner: Learner, calls: Mapping[nn.Module, list[str]]) -> Iterator[ModuleRow]:
    single = not isinstance(learner.model, Mapping)
    seen: dict[nn.Module, str] = {}
    for key, model in learner.models.items():
        yield from _tree(model, "" if single else key, 0, calls, seen)


def _tree(
    module: nn.Module, name: str, depth: int, calls: Mapping[nn.Module, list[str]], seen: dict[nn.Module, str]
) -> Iterator[ModuleRow]:
    tensors = _made(module)
    parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
    shapes = calls.get(module, [])
    yield ModuleRow(
        name,
        type(module).__name__,
        depth,
        shapes[-1] if shapes else "",
        len(shapes),
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(t.numel() * t.element_size() for t in tensors),
        seen.get(module, ""),
    )
    if module not in seen:
        seen[module] = name or "model"
        for key, child in module._modules.items():
            if child is not None:
                yield from _tree(child, f"{name}.{key}" if name else key, depth + 1, calls, seen)


def _made(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers, each once, without the ones that have no shape yet."""
    tensors = (*module.parameters(), *module.buffers())
    return [t for t in tensors if not is_lazy(t)]


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shape(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_shape(each) for each in value) + "]"
    return type(value).__name__


def _data(value: Any, name: str) -> Iterator[DataRow]:
    if isinstance(value, Tensor):
        yield DataRow(name, tuple(value.shape), str(value.dtype).removeprefix("torch."), str(value.device))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _data(each, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        if value and all(isinstance(each, (str, bytes, int, float)) for each in value):
            yield DataRow(name, (len(value),), type(value[0]).__name__, "")
            return
        for index, each in enumerate(value):
            yield from _data(each, f"{name}[{index}]")
    elif hasattr(value, "__dataclass_fields__"):
        for key, each in vars(value).items():
            yield from _data(each, f"{name}.{key}")
    else:
        kind = getattr(value, "dtype", type(value).__name__)
        yield DataRow(name, tuple(getattr(value, "shape", ())), str(kind), "")
