"""Window: the steps whose gradients make one update of one optimizer."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loopkit.base import devices
from loopkit.base.raw import plain
from loopkit.base.sparse import packed
from loopkit.errors import PhaseError, StateError


class WindowState(NamedTuple):
    """An optimizer's window, as a step finds it."""

    name: str
    """The optimizer's."""
    steps: int
    """Steps in it so far."""
    size: int
    """Steps of a full one."""
    due: bool
    """Whether the update comes with this step."""
    seed: float | None
    """The seed of the step's backward; None if the weights of the window's steps differ, or it stays short: then
    gradients are rescaled."""


class Window:
    """The accumulated gradients of one optimizer, ``sum(w_i g_i) / sum(w_i)`` over the window's steps.

    Backward of step i starts from ``(w_i / w_0) / size``; at the update the gradients are multiplied by
    ``size * w_0 / sum(w_i)`` unless that is exactly 1. So a full window of equal weights is bitwise
    ``(loss / size).backward()``. With ``mean=False`` the gradients are ``sum(g_i)`` and weights are ignored; also if
    the optimizer counts its ``accumulated_iterations``, by which it divides itself, as in private training.

    The gradients of a step whose weight is 0 are multiplied by 0, so its loss has to be finite. If the weights of a
    window sum to 0, its update is skipped. A tensor on an accelerator is not read: there the update has gradients of 0.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, size: int, mean: bool) -> None:
        self.name = name
        self.optimizer = optimizer
        self.keeps_aside = hasattr(type(optimizer), "accumulated_iterations")
        """Whether the optimizer keeps the gradients of a window's steps apart, where no state has them."""
        self._mean = mean
        self.count = 0
        """Steps in the window so far; 0 is closed."""
        self.last: Any = None
        """The last of these steps, until the window is closed; to the window it is any object."""
        self._even = True
        """Whether the weights so far are equal numbers, so that a full window needs no rescaling."""
        self.asked = False
        """Whether an update was asked for since it was opened, which comes when it is full, or the epoch ends."""
        self.asked_in = -1
        """The index of the last step that asked for one."""
        self.first: float | Tensor = 1.0
        """The weight of its first step, w_0."""
        self.total: float | Tensor = 0.0
        """The sum of its steps' weights."""
        self._weight: float | Tensor = 1.0
        """The weight of its last step."""
        self._settled = False
        """Whether the gradients are scaled for the full window, before its last backward."""
        self._settling: tuple[Any, float | Tensor] | None = None
        """The step whose backward is the last one, and what the gradients before it are multiplied by."""
        self._left: tuple[Tensor, Tensor, int] | None = None
        """How the last backward left them: a parameter with a gradient, that, and its version."""
        self._clears_itself = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        self.needs_closure = _needs_closure(type(optimizer))  # type: ignore[arg-type]  # of which it says that it has no hash
        """Whether the optimizer's step cannot do without a closure."""
        self.refresh(size)

    def __repr__(self) -> str:
        return f"Window({self.name!r}, {self.count} of {self.size} steps)"

    def refresh(self, size: int) -> None:
        """Let the windows from now on be of this many steps, and of the parameters in the optimizer's groups."""
        self.size = size
        self.weighted = self._mean and size > 1 and not self.keeps_aside
        self.is_plain = size == 1 and not self._clears_itself and not self.needs_closure
        """Whether each step is an update, and clearing a gradient is setting it to None."""
        groups = self.optimizer.param_groups
        self._sizes = [len(group["params"]) for group in groups]
        self.params: Sequence[Tensor] = [p for group in groups for p in group["params"]]

    def seed(self, step: object, weight: float | Tensor) -> float | Tensor:
        """The factor that backward of a step with this weight starts from."""
        if not self._mean or (self.keeps_aside and self.size > 1):
            return 1.0
        counts: float | Tensor
        if isinstance(weight, Tensor):
            counts = weight.ne(0).to(weight if weight.is_floating_point() else torch.get_default_dtype())
        elif 0 <= weight < math.inf:
            counts = 1.0 if weight else 0.0
        else:
            raise PhaseError(f"step.weight is {weight!r}: a weight is a finite number that is not negative")
        if self.size == 1:
            return counts
        if self.count == 0:
            return counts / self.size
        if self.last is step:
            weight = self._weight
        return weight / _divisor(self.first) / self.size

    def state(self, weight: float | Tensor, last: bool) -> WindowState:
        """The window's state for a step with this weight; ``last`` if it is the epoch's last step."""
        steps = self.count + 1
        due = last or steps >= self.size
        seed: float | None = 1.0
        if self.weighted:
            is_rescaled = not self._stays_even(weight) or (due and steps != self.size)
            seed = None if is_rescaled else 1.0 / self.size
        return WindowState(self.name, self.count, self.size, due, seed)

    def _stays_even(self, weight: float | Tensor) -> bool:
        """Whether the weights stay equal numbers when a step with this one comes; a tensor is not read."""
        if isinstance(weight, Tensor):
            return False
        return self.count == 0 or (self._even and weight == self.first)

    def enter(self, step: object, weight: float | Tensor) -> None:
        """Count a step, once however often it calls backward; the first one clears the gradients."""
        if self.count == 0:
            if [len(group["params"]) for group in self.optimizer.param_groups] != self._sizes:
                self.refresh(self.size)
            if self._clears_itself:
                self.optimizer.zero_grad()
            else:  # `clear`, without the call: it is in each step
                for p in self.params:
                    p.grad = None
            self.first = weight
            self.total = 0.0
            self._even = True
        elif self.last is step:
            return
        if self._settling is not None and self._settling[0] is step:  # else that one was cancelled
            factor = self._settling[1]
            if self.count and (isinstance(factor, Tensor) or factor != 1.0):
                self._multiply(factor)
            self._settled = True
            self._settling = None
        self.count += 1
        self.last = step
        if self.weighted:
            self._weight = weight
            self.total = self.total + weight
            self._even = self._even and not isinstance(weight, Tensor) and weight == self.first

    def leave(self) -> None:
        """A backward is over."""
        p = next((p for p in self.params if p.grad is not None), None)
        self._left = None if p is None or p.grad is None else (p, p.grad, p.grad._version)

    def has_lost(self, step: object) -> bool:
        """Whether the gradients of the steps before this one were cleared since the last backward.

        As a rule it looks only at the first gradient, and never at values if it was not changed in place.
        """
        steps_before = self.count - 1 if self.last is step else self.count
        if self._left is None or steps_before <= 0:
            return False
        p, grad, version = self._left
        if p.grad is grad and grad._version == version:
            return False
        grads = [p.grad for p in self.params if p.grad is not None]
        return not any(bool(grad.any()) for grad in grads)  # host sync: after a change in place between two steps

    def settle(self, step: object, weight: float | Tensor, share: float | Tensor = 1.0) -> float | Tensor:
        """Scale the gradients for the full window before its last backward, the one of ``step``, which is about to run.

        For plugins whose sync is a part of that backward.

        Args:
            step: The step.
            weight: Its weight.
            share: Multiplies the gradients, too.

        Returns:
            What the step's seed has to be multiplied by.
        """
        factor = share
        if self.weighted:
            first = self.first if self.count else weight
            if not self._stays_even(weight) or self.count + 1 != self.size:
                total = self.total + weight if self.count else weight
                factor = factor * (self.size * _divisor(first) / _divisor(total))
        self._settling = step, factor
        return factor

    def factor(self) -> float | Tensor:
        """The factor that scales the gradients to the window's current content."""
        if not self.weighted or self._settled or (self._even and self.count == self.size):
            return 1.0
        return self.size * _divisor(self.first) / _divisor(self.total)

    def is_void(self) -> bool:
        """Whether its weights sum to 0, as far as that is known without waiting for a device."""
        if not self.weighted and self.count > 1:
            return False
        total = self.total if self.weighted else self.first
        if isinstance(total, Tensor):
            return self._mean and total.is_cpu and not total.any()
        return self._mean and not total

    def rescale(self) -> None:
        """Scale the gradients for the window as it is."""
        factor = self.factor()
        if isinstance(factor, Tensor) or factor != 1.0:
            self._multiply(factor)

    def take_factor(self) -> float | Tensor:
        """`factor`, for a plugin that multiplies by it, in the place of `rescale`."""
        factor = self.factor()
        self._settled = True
        return factor

    def _multiply(self, factor: float | Tensor) -> None:
        grads = [p.grad for p in self.params if p.grad is not None]
        if grads:
            devices.scale(grads, factor)

    def ask(self, index: int) -> None:
        """The step of this index has asked for an update."""
        self.asked = True
        self.asked_in = index

    def clear(self) -> None:
        """Clear the gradients."""
        self._left = None
        if self._clears_itself:
            self.optimizer.zero_grad()
        else:
            for p in self.params:
                p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The weights and gradients so far."""
        return {
            "size": self.size,
            "count": self.count,
            "first": plain(self.first),
            "total": plain(self.total),
            "weight": plain(self._weight),
            "even": self._even,
            "grads": [packed(p.grad) for p in self.params],
        }

    def reopen(self, step: object, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state_dict`, with ``step`` as the last of the window's steps.

        Raises:
            StateError: The window had another size.
        """
        if state["size"] != self.size:
            raise StateError(
                f"the state was saved after {state['count']} of the {state['size']} steps of an update, and here an "
                f"update takes {self.size}: give Learner(accumulate={state['size']}), or load a state without an open "
                f"window"
            )
        self.clear()
        for p, grad in zip(self.params, state["grads"], strict=True):
            p.grad = None if grad is None else grad.to(p.device)
        self.count = state["count"]
        self.last = step
        self.asked = True
        self.first = state["first"]
        self.total = state["total"]
        self._weight = state["weight"]
        self._even = state["even"]

    def drop(self) -> None:
        """Close the window and clear its gradients."""
        self.count = 0
        self.last = None
        self._settled = False
        self.asked = False
        self.clear()


@functools.cache
def _needs_closure(cls: Any) -> bool:
    """Whether the step of an optimizer's class has an argument without a default."""
    step = getattr(cls, "step", None)
    if step is None:  # of a wrapper that hands on what it has not
        return False
    if getattr(step, "__code__", None) is None and not hasattr(step, "__wrapped__"):
        return False
    plain = inspect.unwrap(step)
    defaults = len(getattr(plain, "__defaults__", None) or ())
    code = getattr(plain, "__code__", None)
    return code is not None and code.co_argcount - defaults > 1


def _divisor(weight: float | Tensor) -> float | Tensor:
    """The weight, or 1 in place of a 0, which has only gradients of 0 to divide."""
    return weight + weight.eq(0) if isinstance(weight, Tensor) else weight or 1.0
