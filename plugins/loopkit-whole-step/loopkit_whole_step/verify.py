"""Comparing a compiled step with the same step as it is, from equal state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.author import devices
from loopkit_whole_step.graph import copied

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit_whole_step.record import Recording

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
FLOOR = 0.1
"""Numbers of a kind are compared with their own size, and with so much of the largest of the kind."""
SUMS = ("a metric", "the metrics")
"""These are kept wider than what is added, and count what may be a near thing."""
NEAR_ZERO = 1e-3
"""A gradient below this share of the largest one may be only rounding, which some optimizers turn into steps."""
NEAR = 1e-2
"""A value next to 0 may be on either side of it, and its gradient through a ReLU there or not: that changes so much."""
OF_A_MOVE = 1e-2
"""How far the others may end up from each other, as a share of how far they have moved."""


class Comparison:
    """A compiled step from the state as it is now, on copies; with ``live`` on the state itself.

    Args:
        recording: The step.
        epoch: The epoch.
        leaves: Of the batch.
        live: Copies are for the step as it is instead.
    """

    def __init__(self, recording: Recording, epoch: Epoch, leaves: Sequence[Any], live: bool = False) -> None:
        self.recording = recording
        cells = recording.given.cells
        tensors = cells.tensors()
        self._live = recording.inputs.now(epoch, leaves, tensors)
        state = len(self._live) - len(recording.given.where)
        copies = [copied(each) for each in self._live[:state]]
        self._copies = [*copies, *[each.detach() for each in self._live[state:]]]
        self._before = [each.detach().clone() for each in tensors] if not live else []
        self._random = torch.get_rng_state()
        self._parts = (len(tensors), len(tensors) + len(cells.state()))
        self._trained = [i for i, each in enumerate(tensors) if each.requires_grad]
        self._others = {*self._trained, *cells.voted}
        """The tensors that are no buffers."""
        narrow = any(map(torch.is_autocast_enabled, devices.types()))
        self._least = TOLERANCES[torch.bfloat16] if narrow else 0.0
        self.outputs = recording.run(self._live if live else self._copies)
        self._plain: Sequence[Any] = ()
        if not live:
            self.draw_again()
        self.grads: list[Tensor | None] = []
        self.gross = False
        """Whether a difference is more than what a value at the kink of a function makes of rounding."""

    @property
    def kept(self) -> bool:
        """Whether no vote was against the step."""
        return not self.recording.votes or bool(self.outputs[0].item())

    def draw_again(self) -> None:
        """Let the next step draw the random numbers that the graph has drawn."""
        torch.set_rng_state(self._random)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the gradients that the optimizer gets are kept."""
        grads: dict[int, Tensor | None] = {}

        def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                grads.update({id(p): None if p.grad is None else p.grad.detach().clone() for p in group["params"]})

        handles = [each.register_step_pre_hook(keep) for each in self.recording.given.cells.optimizers]
        try:
            yield
        finally:
            self.grads = [grads.get(id(p)) for p in self.recording.given.params()]
            for handle in handles:
                handle.remove()

    def difference(self, step: Step, updated: bool) -> str:
        """Name a difference of the plain step from the graph's; empty without one."""
        recording, (tensors, state) = self.recording, self._parts
        said = []
        for name, value in recording.result.values.items():
            if value.kind == "output":
                own = getattr(step, name, None)
                if not isinstance(own, Tensor):
                    return f"step.{name}"
                said.append(self._compared(f"step.{name}", [own], [self.outputs[value.only]]))
        places = [at for each in recording.result.grads.values() for at in each]
        ours = [None if at is None else self.outputs[at] for at in places]
        eager = self.grads if updated else [p.grad for p in recording.given.params()]
        pairs = [(one, other) for one, other in zip(eager, ours, strict=False) if one is not None and other is not None]
        said.append(self._compared("the gradients", [one for one, _ in pairs], [other for _, other in pairs]))
        live, copies = recording.given.cells.tensors(), self._copies[:tensors]
        buffers = [i for i in range(tensors) if i not in self._others]
        said.append(self._compared("the buffers", [live[i] for i in buffers], [copies[i] for i in buffers]))
        said.append(self._compared("the optimizer's state", recording.given.cells.state(), self._copies[tensors:state]))
        if updated:
            said.append(self._parameters(live, copies))
        return next(filter(None, said), "")

    def _parameters(self, live: Sequence[Tensor], copies: Sequence[Tensor]) -> str:
        """The same of the parameters, where the gradient is more than rounding: the others may go anywhere."""
        largest = max((_largest(grad) for grad in self.grads if grad is not None), default=0.0)
        grads = {
            id(p): grad for p, grad in zip(self.recording.given.params(), self.grads, strict=True) if grad is not None
        }
        for i in self._trained:
            if (grad := grads.get(id(live[i]))) is None:
                continue
            known = grad.abs() > NEAR_ZERO * largest
            moved = _largest((live[i].detach() - self._before[i])[known])
            apart = _largest((live[i].detach() - copies[i])[known])
            rounding = 4 * torch.finfo(live[i].dtype).eps * _largest(live[i].detach())
            if not apart <= max(OF_A_MOVE, 5 * self._least) * moved + rounding:
                self.gross = True
                return f"a parameter ({apart:.2g} apart, moved by {moved:.2g})"
        return ""

    def difference_of_metrics(self) -> str:
        """The same of the metrics, when the step has ended."""
        start = self._parts[1] + len(self.recording.inputs.rates)
        live = [value for _, value in self.recording.inputs.tensors_of_metrics()]
        return self._compared("a metric", live, self._copies[start : start + len(live)])

    def difference_from_plain(self, epoch: Epoch) -> str:
        """Name a difference of the plain step, run on the copies; the compiled one ran on the state itself."""
        after = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            self._plain = self.recording.run_as_it_is(epoch, self._copies)
        finally:
            torch.set_rng_state(after)
        tensors, state = self._parts
        rest = [i for i in range(len(self._live)) if i not in self._others]
        by_kind = {
            "the buffers": [i for i in rest if i < tensors],
            "the state": [i for i in rest if tensors <= i < state],
        }
        by_kind["the metrics"] = [i for i in rest if i >= state]
        said = [self._compared("what it returns", self._plain, self.outputs)]
        for what, at in by_kind.items():
            said.append(self._compared(what, [self._copies[i] for i in at], [self._live[i] for i in at]))
        return next(filter(None, said), "")

    def take_plain(self) -> None:
        """Make the state what the step as it is has made of it."""
        with torch.no_grad():
            for live, copy in zip(self._live, self._copies, strict=True):
                live.copy_(copy)
        self.outputs = self._plain

    def _compared(self, what: str, eager: Sequence[Any], ours: Sequence[Any]) -> str:
        """Which of these differ by more than rounding, and by how much."""
        pairs = [(one.detach(), other.detach()) for one, other in zip(eager, ours, strict=True) if _is_number(one)]
        largest = max([_largest(one) for one, _ in pairs], default=0.0)
        said = ""
        for one, other in pairs:
            if one.shape != other.shape or one.dtype != other.dtype:
                self.gross = True
                return f"{what} (another shape or dtype)"
            difference = one.double() - other.double()
            error = _largest(difference)
            tolerance = max(TOLERANCES.get(one.dtype, 1e-3), self._least)
            if what in SUMS:
                tolerance = max(tolerance, TOLERANCES[torch.float32])
            allowed = tolerance * (_largest(one) + FLOOR * largest)
            if not one.is_floating_point():
                allowed = max(1.0, allowed) if what in SUMS else 0.0
            if error <= allowed or _overflown(one, other):
                continue
            near = one.is_floating_point() and bool(difference.norm() <= NEAR * one.double().norm())
            self.gross = self.gross or not near
            said = said or f"{what} ({error:.2g} apart, of {_largest(one):.2g})"
        return said


def _overflown(one: Tensor, other: Tensor) -> bool:
    """Whether both have overflowed at the same places."""
    finite = torch.isfinite(one)
    return not bool(finite.all()) and bool((finite == torch.isfinite(other)).all())


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_complex() and value.numel() > 0


def _largest(value: Tensor) -> float:
    return float(value.double().abs().max()) if value.numel() else 0.0
