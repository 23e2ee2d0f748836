"""Log the sizes of gradients, and of updates beside the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.author import Shown, checks, gradients, named_parameters
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit import Step
    from loopkit.learner import Learner

__all__ = ["LogGradients"]

HALVES = (torch.float16, torch.bfloat16)
Part = tuple[str, ...]
"""The end of the name under which something is logged; empty for all together."""
Members = dict[Part, list[int]]
"""Positions in ``step.params`` by part."""


class LogGradients(Shown):
    """Log the 2-norm of the gradients, as ``"grad_norm"``, also of each part.

    A part is a parameter group of the optimizer, ``"grad_norm/group0"`` or, if it has a name, ``"grad_norm/<name>"``,
    where there are several; or, with a depth, a module: ``"grad_norm/encoder.layer1"`` with ``depth=2``. Of several
    optimizers each has its own: ``"grad_norm/critic"``, ``"grad_norm/critic/encoder"``. Norms are computed on the
    device, at once over all gradients, and no step waits for them. Norms of half-precision gradients are in float32.

    Args:
        every: Log every so many updates of an optimizer; skipped ones do not count.
        depth: Parts are modules so deep in the model, and the rest above; by default they are parameter groups.
        ratio: Also log how large the update is beside the parameters, the norm of the change by the norm
            before it, as ``"update_ratio"`` and by part. It takes a copy of the parameters for the duration of each
            update that is logged.
        clipped: Measure what the optimizer gets; by default what a clipping plugin gets.
        name: The plugin's name.

    Raises:
        PluginError: ``every`` or ``depth`` is no number above 0.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a"), LogGradients(every=10, depth=1, ratio=True)])
    """

    provides = "observer"

    def __init__(
        self,
        every: int = 1,
        depth: int | None = None,
        ratio: bool = False,
        clipped: bool = False,
        name: str = "log_gradients",
    ) -> None:
        checks.whole("LogGradients", every=every)
        if depth is not None:
            checks.whole("LogGradients", depth=depth)
        self.name = name
        self.every, self.depth, self.ratio = every, depth, ratio
        self.clipped = clipped
        self.before = () if clipped else ("clip",)
        self._counts: dict[str, int] = {}
        """Updates by optimizer."""
        self._norms: dict[Part, Tensor] = {}
        """The norms of the current update."""
        self._copies: list[Tensor] = []
        self._members: dict[str, tuple[Sequence[Tensor], Members]] = {}
        """By optimizer: its parameters, and their parts."""

    @hookimpl(reads=("grads", "params"))
    def update_begin(self, learner: Learner, step: Step) -> None:
        """Measure the gradients, if it is due."""
        self._norms = {}
        if (self._counts.get(step.optimizer_name, 0) + 1) % self.every:
            return
        params = step.params
        self._norms = norms([p.grad for p in params], self._parts(learner, step))
        if self.ratio:
            self._copies = [p.detach().clone() for p in params]

    @hookimpl(reads=("params",))
    def update_end(self, learner: Learner, step: Step) -> None:
        """Log what was measured: the update was applied."""
        self._counts[step.optimizer_name] = self._counts.get(step.optimizer_name, 0) + 1
        if not self._norms:
            return
        where = [] if len(learner.optimizers) == 1 else [step.optimizer_name]
        learner.log({"/".join(["grad_norm", *where, *part]): norm for part, norm in self._norms.items()})
        self._norms = {}
        if self._copies:
            parts, before, self._copies = self._parts(learner, step), self._copies, []
            sizes = norms(before, parts)
            with torch.no_grad():
                changes = [p.detach() - old for p, old in zip(step.params, before, strict=True)]
            for part, norm in norms(changes, parts).items():
                learner.log("/".join(["update_ratio", *where, *part]), norm / sizes[part])

    @hookimpl(when=lambda plugin: plugin.ratio)
    def update_skipped(self) -> None:
        """Let go of the copies."""
        self._copies = []

    def _parts(self, learner: Learner, step: Step) -> Members:
        """The parts of the optimizer's parameters, looked for once."""
        params, members = self._members.get(step.optimizer_name, ((), {}))
        if params is not step.params:
            members = self._found(learner, step)
            self._members[step.optimizer_name] = step.params, members
        return members

    def _found(self, learner: Learner, step: Step) -> Members:
        positions = {p: i for i, p in enumerate(step.params)}
        members: Members = {}
        if self.depth is not None:
            placed: set[int] = set()
            for path, parameter in named_parameters(learner.models):
                position = positions.get(parameter)
                if position is not None and position not in placed:  # a shared one counts where it is first
                    placed.add(position)
                    depth = self.depth + (len(learner.models) > 1)
                    part = ".".join(path.split(".")[:-1][:depth])
                    members.setdefault((part or "model",), []).append(position)
        elif len(step.optimizer.param_groups) > 1:
            for number, group in enumerate(step.optimizer.param_groups):
                found = [positions[p] for p in group["params"] if p in positions]
                members.setdefault((str(group.get("name", f"group{number}")),), []).extend(found)
        return members

    def state_dict(self) -> dict[str, Any]:
        """How many updates there were."""
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._counts = dict(state["counts"])


def norms(tensors: Sequence[Tensor | None], parts: Members) -> dict[Part, Tensor]:
    """The 2-norm of all tensors together, and of each part, as scalars on the device.

    Args:
        tensors: Gradients or parameters; None is skipped, and so are parts without any.
        parts: Positions in ``tensors``.
    """
    there = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}
    if not there:
        return {}
    members = {part: [i for i in positions if i in there] for part, positions in parts.items()}
    members = {part: positions for part, positions in members.items() if positions}
    with torch.no_grad():
        given = list(there.values())
        if not gradients.alike(given):
            found = {part: _mixed(there[i] for i in positions) for part, positions in members.items()}
            return {(): _mixed(given), **found}
        dtype = torch.float32 if given[0].dtype in HALVES else None
        each = dict(zip(there, torch._foreach_norm(given, 2.0, dtype=dtype), strict=True))
        stacked = [torch.stack(list(each.values())), *(torch.stack([each[i] for i in m]) for m in members.values())]
        return dict(zip(((), *members), torch._foreach_norm(stacked, 2.0), strict=True))


def _mixed(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of tensors on several devices, of several dtypes, or sharded; of those it is one collective."""
    return gradients.total_norm([t.float() if t.dtype in HALVES else t for t in tensors])
