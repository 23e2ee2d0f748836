"""Checks of the objects kept alive."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from loopkit import Step
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.phases import Phase
from loopkit_testing.case import Case, seed_all


def no_graph_kept(case: Case) -> list[str]:
    """A step's graphs are freed before the next step's forward, without the garbage collector.

    It is observed on what the models return; a phase that does not call them as a whole is not observed. A step may
    call them as often as it likes.
    """
    alive = _graphs_alive(case, case.plugins())
    if not any(alive.values()):
        return []
    without = _graphs_alive(case, case.plugins()[1:]) if _runs_without(case) else {}
    for step, count in alive.items():
        if count > without.get(step, 0):
            return [
                f"it keeps the graph of step {step - 1} alive while step {step} runs: it holds step.loss, "
                f"step.outputs or the step itself. Keep step.loss.detach() or step.outputs.detach()"
            ]
    return []


def _runs_without(case: Case) -> bool:
    """Whether a fit runs without the plugin, which the problem's optimizer or a companion may need."""
    try:
        case.bench(case.plugins()[1:]).train(epochs=1, short=True)
    except Exception:
        return False
    return True


class _Token:
    """Lives as long as the graph of one forward pass."""


class _Mark(torch.autograd.Function):
    """The identity, whose node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: _Token) -> Tensor:
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Steps:
    """Counts steps."""

    name = "!steps"
    volatile = ("*",)

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def move_batch(self, batch: Any) -> Any:
        self.count += 1
        return batch


def _graphs_alive(case: Case, plugins: Sequence[Any]) -> dict[int, int]:
    """For each step of a fit that makes graphs, how many of earlier ones are alive when the first is made."""
    tokens: list[tuple[int, weakref.ref[_Token]]] = []
    counts: dict[int, int] = {}
    steps = _Steps()

    def mark(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            return outputs
        now = steps.count - 1
        counts.setdefault(now, sum(step < now and token() is not None for step, token in tokens))
        token = _Token()
        tokens.append((now, weakref.ref(token)))
        return _Mark.apply(outputs, token)  # type: ignore[no-untyped-call]

    learner = case.bench([*plugins, steps])
    for model in learner.models.values():
        model.register_forward_hook(mark)
    collects = gc.isenabled()
    gc.disable()
    try:
        seed_all()
        learner.train()
    finally:
        if collects:
            gc.enable()
    return counts


STEPS, EPOCHS, PIECE, LAST = 120, 5, 15, 3
"""Steps of an epoch, epochs, steps between two counts, and how many of the last epochs are compared."""

BYTES = 900
"""Less than this in each step is not reported: numbers that a plugin notes, lines that wait to be written."""


def bounded_memory(case: Case) -> list[str]:
    """The tensors and bytes in use do not grow with steps or epochs.

    A plugin may keep some tensors, such as the last three hundred, or the last fifty of an epoch, and a few numbers of
    each step; but no tensor of each step, nor 900 bytes. It is observed over the last three of five long epochs, for
    Python's tensors and objects. The fit ends after the third epoch if there was no growth in it.
    """
    census = _Census()
    learner = case.bench([*case.plugins(), census])
    with _traced():
        learner.train(epochs=EPOCHS, times=-(-STEPS // len(learner.problem.train)))
    if tensors := _within(census.tensors):
        return [
            f"within an epoch it keeps about {tensors:.2g} tensors more with each step: keep sums, or read them by "
            f"LateValues, or a bounded number of them"
        ]
    if held := _within(census.held, BYTES * PIECE):
        return [
            f"within an epoch it keeps about {held:.0f} bytes more with each step: keep sums, or a bounded number of "
            f"things"
        ]
    if tensors := _between(census.tensors):
        return [f"with each epoch it keeps about {tensors:.2g} tensors more: let those go in epoch_begin or epoch_end"]
    if held := _between(census.held, BYTES * STEPS):
        return [f"with each epoch it keeps about {held:.0f} bytes more: let those go in epoch_begin or epoch_end"]
    return []


def learner_freed(case: Case) -> list[str]:
    """After a fit the learner, with model and optimizer, is freed even if the plugin is kept."""
    plugins = case.plugins()
    learner = case.bench(plugins)
    learner.train()
    left = weakref.ref(learner)
    del learner
    gc.collect()
    if left() is None:
        return []
    del plugins
    gc.collect()
    if left() is None:
        return ["it holds the learner, and so the model, after the fit: let go of it in fit_end"]
    return ["something that outlives it holds the learner, and so the model, after the fit: let go of it in fit_end"]


def _within(epochs: Sequence[Sequence[int]], by: int = 1) -> float:
    """How much the counts rise with a step, if they rise in the later half of each of the last epochs."""
    growths = [_growth(counts[:-1], (len(counts) - 1) // 2, by) for counts in epochs[-LAST:]]  # all but that of its end
    return growths[-1] / PIECE if growths and all(growths) else 0.0


def _between(epochs: Sequence[Sequence[int]], by: int = 1) -> float:
    """How much the last and the highest counts of the last epochs rise with an epoch, if both do.

    A buffer that is emptied now and then may happen to be a little fuller at the end of each epoch.
    """
    last = [counts for counts in epochs if counts][-LAST - 1 :]
    return min(_growth([counts[-1] for counts in last], 0, by), _growth([max(counts) for counts in last], 0, by))


def _growth(counts: Sequence[int], start: int, by: int) -> float:
    """How much the counts from ``start`` rise from one to the next, on average; 0 if that is not ``by``.

    The largest rise does not count: something may be made once and stay. Nor what the largest fall takes away, which
    is a buffer that is emptied.
    """
    rises = [b - a for a, b in pairwise(counts)]
    late = rises[start:]
    if len(late) < LAST or sum(late) - max(late) + min(0, *rises) < by * (len(late) - 1):
        return 0.0
    return sum(late) / len(late)


def _grows(passes: Sequence[Sequence[int]], within: int, between: int) -> bool:
    """Whether the counts rise in the later half of the last epoch, or rise from the epoch before to the last one.

    Growth in each of the last three of five epochs includes the third, which is the first of these; with
    even growth from epoch to epoch, half is enough to look on.
    """
    before, last = passes[-2:]
    rise = min(last[-1] - before[-1], max(last) - max(before))
    return _growth(last[:-1], (len(last) - 1) // 2, within) > 0 or rise > between / 2


class _Census:
    """Count the tensors that are alive, and the bytes in use: some times in each epoch, and at its end."""

    name = "~~census"
    volatile = ("*",)

    def __init__(self) -> None:
        self.tensors: list[list[int]] = []
        self.held: list[list[int]] = []

    @hookimpl
    def epoch_begin(self, phase: Phase) -> None:
        if phase.training:
            self.tensors.append([])
            self.held.append([])

    @hookimpl(reads=("*",))
    def step_end(self, step: Step, phase: Phase) -> None:
        if phase.training and step.index % PIECE == PIECE - 1:
            self._count()

    @hookimpl(reads=("*",))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        if phase.training:
            self._count()
            if len(self.tensors) == EPOCHS - LAST + 1 and not (
                _grows(self.tensors, 1, 0) or _grows(self.held, BYTES * PIECE, BYTES * STEPS)
            ):
                learner.stop("no growth")

    def _count(self) -> None:
        tensors, held = _alive()
        self.tensors[-1].append(tensors)
        self.held[-1].append(held)


def _alive() -> tuple[int, int]:
    """The tensors that are alive, and the bytes of these and of Python's objects."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    stores = {}
    for each in tensors:
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided:  # others may have no storage
            store = each.untyped_storage()
            stores[store._cdata] = store.nbytes()
    return len(tensors), sum(stores.values()) + tracemalloc.get_traced_memory()[0]


@contextmanager
def _traced() -> Iterator[None]:
    """Let Python count the bytes of its objects."""
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start()
    try:
        yield
    finally:
        if mine:
            tracemalloc.stop()
