"""SAM and ASAM: a forward before the phase's own, from whose gradients the weights are moved for only that step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from loopkit import Learner, Step, TrainingPhase, hookimpl
from loopkit.author import Shown, checks
from loopkit.errors import PluginError

__all__ = ["ASAM", "SAM"]

SMALLEST = 1e-12
"""Added to the norm, so that a gradient of 0 leaves the weights."""


class SAM(Shown):
    """Take gradients at weights moved along the gradient, for flat minima (SAM).

    Before the forward of a step there is another one, on the same inputs, whose gradients move the weights to
    ``w + rho * g / |g|``. The phase's own forward and backward run there; then the weights are back, bit for bit, and
    the update uses the gradients of that backward. They are also back after a cancelled step and after an error.

    The loss and the outputs of the step are those at the moved weights; validation is at the weights themselves.
    Buffers (the statistics of batch norms) are from the first forward. With ``accumulate``, and in each of
    several processes, each step moves by the gradient of its own batch.

    Args:
        rho: How far to move, as the norm over all parameters that are trained; above 0.

    Raises:
        PluginError: ``rho`` is not a positive number; at ``fit_begin``: parameters are sharded, as by ``FSDP``.

    Source:
        Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization",
        2021, equation 2 and algorithm 1.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[SAM(rho=0.05), ClipGradNorm(1.0)])
    """

    name = "sam"
    volatile = ("_*",)

    def __init__(self, rho: float = 0.05) -> None:
        checks.positive(type(self).__name__, rho=rho)
        self.rho = rho
        self._params: Sequence[Tensor] = ()
        """The parameters while they are moved."""
        self._kept: Sequence[Tensor] = ()
        """The parameters' own values."""
        self._buffers: Sequence[tuple[Tensor, Tensor]] = ()
        """The buffers, and what the first forward left in them."""

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Raise for sharded parameters: the norm would be the norm of a part."""
        for name, model in learner.models.items():
            if any(hasattr(p, "device_mesh") for p in model.parameters()):
                raise PluginError(
                    f"{type(self).__name__}: the parameters of model {name!r} are sharded, and the move is by the norm "
                    f"over all of them: train with DDP, whose processes hold whole ones"
                )

    @hookimpl(phase=TrainingPhase)
    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Move back where ``backward_end`` did not come: the step was cancelled, or failed."""
        try:
            yield
        finally:
            self._move_back()

    @hookimpl(
        phase=TrainingPhase,
        reads=("inputs", "targets"),
        updates=("params", "buffers", "rng"),
        after=("augment",),  # both draw random numbers; the inputs of the forward are final then
    )
    def forward_begin(self, learner: Learner, phase: TrainingPhase, step: Step) -> None:
        """The first forward and its gradients; the weights are moved along them."""
        self._move_back()  # of a phase with several forwards
        named: dict[Tensor, str] = {
            p: name for model in learner.models.with_extras().values() for name, p in model.named_parameters()
        }
        trained = [p for p in named if p.requires_grad]
        with _of_this_process(learner):
            loss = phase.loss(learner, phase.forward(learner, step.inputs), step.targets)
        if not loss.requires_grad:
            return  # the phase's own backward says what is wrong
        with torch.autocast(loss.device.type, enabled=False):
            grads = torch.autograd.grad(loss, trained, allow_unused=True)
        found = [(p, grad) for p, grad in zip(trained, grads, strict=True) if grad is not None]
        self._params = [p for p, _ in found]
        self._kept = [p.detach().clone() for p in self._params]
        self._buffers = [(b, b.clone()) for model in learner.models.with_extras().values() for b in model.buffers()]
        with torch.no_grad():
            moves = self._moves([named[p] for p in self._params], self._kept, [grad for _, grad in found])
            torch._foreach_add_(self._params, moves)

    @hookimpl(phase=TrainingPhase, updates=("params", "buffers"))
    def backward_end(self) -> None:
        """The gradients are there: the weights go back before the update."""
        self._move_back()

    def _moves(self, names: Sequence[str], params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """By how much each parameter is moved."""
        factor = self.rho / (torch.nn.utils.get_total_norm(grads) + SMALLEST)
        return [grad * factor for grad in grads]

    def _move_back(self) -> None:
        with torch.no_grad():
            for there, kept in (*zip(self._params, self._kept, strict=True), *self._buffers):
                there.copy_(kept)
        self._params = self._kept = self._buffers = ()


class ASAM(SAM):
    """`SAM` with moves relative to the size of each weight (ASAM).

    Scaling layers against each other has no effect on it. The weights are moved to ``w + rho * t**2 * g / |t * g|``
    with ``t = |w| + eta``, and ``t = 1`` for biases.

    Args:
        rho: How far to move; about ten times the value for `SAM`.
        eta: Added to the sizes, so that a weight of 0 moves, too; at least 0.

    Raises:
        PluginError: ``rho`` is not a positive number, or ``eta`` is below 0; at ``fit_begin`` as `SAM`.

    Source:
        Kwon, Kim, Park, Choi, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural
        Networks", 2021, equation 11 and algorithm 1.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[ASAM(rho=0.5)])
    """

    name = "asam"

    def __init__(self, rho: float = 0.5, eta: float = 0.01) -> None:
        super().__init__(rho)
        checks.not_negative("ASAM", eta=eta)
        self.eta = eta

    def _moves(self, names: Sequence[str], params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        sizes = [
            torch.ones_like(p) if name.rpartition(".")[2] == "bias" else p.abs() + self.eta
            for name, p in zip(names, params, strict=True)
        ]
        scaled = [size * grad for size, grad in zip(sizes, grads, strict=True)]
        factor = self.rho / (torch.nn.utils.get_total_norm(scaled) + SMALLEST)
        return [size * grad * factor for size, grad in zip(sizes, scaled, strict=True)]


def _of_this_process(learner: Learner) -> AbstractContextManager[None]:
    """A context whose forwards no plugin syncs over processes."""
    unsynced = next((plugin.unsynced for plugin in learner.plugins.values() if hasattr(plugin, "unsynced")), None)
    return nullcontext() if unsynced is None else unsynced()
