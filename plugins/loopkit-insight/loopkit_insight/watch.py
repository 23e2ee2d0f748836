"""Outputs inside a model, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from loopkit import hookimpl
from loopkit.author import Shown, describe, first_tensor, late, merging, nearest
from loopkit.errors import PluginError
from loopkit.metrics import Mean

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["Watch"]

Reduction = Literal["mean", "sum", "max", "min", "norm"]


def _mean(output: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mean(output, dtype=dtype)


def _sum(output: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.sum(output, dtype=dtype)


def _max(output: Tensor, dtype: torch.dtype) -> Tensor:
    return output.amax().to(dtype)


def _min(output: Tensor, dtype: torch.dtype) -> Tensor:
    return output.amin().to(dtype)


def _norm(output: Tensor, dtype: torch.dtype) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(output if output.is_floating_point() else output.to(dtype), dtype=dtype)
    return norm


REDUCTIONS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "mean": _mean,
    "sum": _sum,
    "max": _max,
    "min": _min,
    "norm": _norm,
}


class Watch(Shown):
    """Record a number for the outputs of modules inside the model.

    It is put into ``learner.metrics`` as ``"<phase>/<path>"``.

    Args:
        reductions: The reductions of the outputs by the module's path, as in ``model.named_modules()``:
            ``{"encoder.hidden": "norm"}``. With several models the path begins with the model's name:
            ``"generator.conv1"``. A reduction is over all elements of one output: ``"mean"``, ``"sum"``, ``"max"``,
            ``"min"`` or ``"norm"`` (the 2-norm), in float32, or float64 for float64 outputs.
        name: The plugin's name.

    The metric is the mean of these numbers over the epoch, weighted by the samples of their steps; a module that is
    called several times in a step counts each time. Of an output that is no tensor, the first tensor in it counts,
    looked for in order and depth first. Numbers stay on the device until the epoch ends, no graph is kept, and
    training is bitwise the same as without it. A module that is never called in an epoch has no metric in it, and a
    cancelled step does not count. Several processes merge theirs at the end of the epoch, in one exchange, so that all
    have the same values.

    Outputs are seen through forward hooks, which are on the modules while an epoch runs. In a model compiled as a whole
    such hooks may not be called.

    Raises:
        PluginError: A reduction is unknown; when the learner is built, no module has a path.

    Example::

        Watch({"encoder": "norm", "encoder.hidden": "max"})
    """

    provides = "observer"

    def __init__(self, reductions: Mapping[str, Reduction], name: str = "watch") -> None:
        self.name = name
        if not isinstance(reductions, Mapping) or not reductions:
            raise PluginError(
                f"Watch takes a mapping from paths of modules to reductions, such as {{'encoder': 'norm'}}; "
                f"this is {reductions!r}"
            )
        for path, reduction in reductions.items():
            if not isinstance(path, str) or not path:
                raise PluginError(f"Watch: {path!r} is no path of a module, such as 'encoder.hidden'")
            if not isinstance(reduction, str) or reduction not in REDUCTIONS:
                hint = nearest(reduction, REDUCTIONS) if isinstance(reduction, str) else ""
                raise PluginError(
                    f"Watch: the reduction of {path!r} is {reduction!r}{hint}; it is one of {', '.join(REDUCTIONS)}"
                )
        self.reductions = dict(reductions)
        self._phases: dict[str, dict[str, Mean]] = {}
        self._epochs: list[Epoch] = []
        """The running epochs, the outermost first."""
        self._seen: dict[str, list[tuple[str, Tensor]]] = {}

    def names(self) -> tuple[str, ...]:
        """The names that it puts into ``learner.metrics``, with ``*`` for the phase."""
        return tuple(f"metrics.*/{path}" for path in self.reductions)

    @hookimpl(reads=("model",))
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Check that the modules exist."""
        self._modules(learner)
        return model

    @hookimpl(reads=("model",))
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> AbstractContextManager[None]:
        """Listen to the modules during the epoch."""
        return self._listening(learner, epoch)

    @contextmanager
    def _listening(self, learner: Learner, epoch: Epoch) -> Iterator[None]:
        handles: list[Any] = []
        self._epochs.append(epoch)
        try:
            for path, module in self._modules(learner).items():
                hook = partial(self._reduce, learner, epoch, path)
                handles.append(module.register_forward_hook(hook))
            yield
        finally:
            self._epochs.remove(epoch)
            for handle in handles:
                handle.remove()

    def _reduce(self, learner: Learner, epoch: Epoch, path: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if learner.models.aside or self._epochs[-1] is not epoch:
            return  # a plugin's own forward; a phase that runs inside this one listens itself, if at all
        output = first_tensor(outputs)
        if output is None:
            raise PluginError(
                f"plugin {self.name!r}: the output of {path!r} holds no tensor: it is {describe(outputs)}"
            )
        output = output.detach()
        if output.numel():
            output = output.abs() if output.is_complex() else output
            dtype = torch.promote_types(output.dtype, torch.float32)
            value = REDUCTIONS[self.reductions[path]](output, dtype)
            self._seen.setdefault(epoch.name, []).append((path, value))

    @hookimpl
    def epoch_begin(self, phase: Phase, epoch: Epoch) -> None:
        """Start empty, unless a saved epoch is resumed."""
        if not epoch.resumed or phase.name not in self._phases:
            self._phases[phase.name] = {path: Mean(path) for path in self.reductions}

    @hookimpl
    def step_begin(self, phase: Phase) -> None:
        """Forget what was called outside of a step, or in one that was cancelled."""
        self._seen.pop(phase.name, None)

    @hookimpl
    def step_end(self, phase: Phase, step: Step) -> None:
        """Take in one step."""
        means = self._phases[phase.name]
        for path, value in self._seen.pop(phase.name, ()):
            means[path].add(value, step.samples)

    @hookimpl(writes=lambda plugin: plugin.names())
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Read the values of this epoch."""
        self._seen.pop(phase.name, None)
        means = self._phases.pop(phase.name)
        if learner.world.size > 1:
            said = learner.world.gather(merging.packed({path: mean.state_dict() for path, mean in means.items()}))
            states = [merging.unpacked(each) for each in said]
            for path, mean in means.items():
                mean.merge([state[path] for state in states])
        values = {path: mean.compute() for path, mean in means.items() if not mean.is_empty}
        learner.metrics.update({f"{phase.name}/{path}": value for path, value in late.read(values).items()})

    def _modules(self, learner: Learner) -> dict[str, nn.Module]:
        """The watched modules by path."""
        named = isinstance(learner.model, Mapping)
        known = {
            (f"{model}.{path}" if path else model) if named else path: module
            for model, top in learner.models.items()
            for path, module in top.named_modules(remove_duplicate=False)
        }
        known.pop("", None)
        for path in self.reductions:
            if path not in known:
                close = get_close_matches(path, known, n=3, cutoff=0.5) or list(known)[:10]
                raise PluginError(
                    f"plugin {self.name!r}: no module has the path {path!r}; near it are: "
                    f"{', '.join(map(repr, close)) or 'none, the model has no modules inside'}"
                )
        return {path: known[path] for path in self.reductions}

    def state_dict(self) -> dict[str, Any]:
        """The means of the epochs that are running, by phase and path."""
        return {
            phase: {path: mean.state_dict() for path, mean in means.items()} for phase, means in self._phases.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`; paths that are watched no more are left out."""
        for phase, values in state.items():
            means = self._phases[phase] = {path: Mean(path) for path in self.reductions}
            for path, value in values.items():
                if path in means:
                    means[path].load_state_dict(value)

    def reshard(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The state of one of ``size`` processes, made of the states that another number of processes saved.

        Rank 0 resumes from all of them merged, the others empty.
        """
        if len(states) == size:
            return states[rank]
        made: dict[str, Any] = {}
        for phase in dict.fromkeys(phase for state in states for phase in state):
            saved = [merging.to_host(state[phase]) for state in states if phase in state] if rank == 0 else []
            made[phase] = {}
            for path in dict.fromkeys(path for state in states for path in state.get(phase, ())):
                mean = Mean(path)
                if parts := [each[path] for each in saved if path in each]:
                    mean.merge(parts)
                made[phase][path] = mean.state_dict()
        return made
