"""A step as a function of tensors: the phase's own, the plugins' hooks and the optimizer's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from loopkit.author import generators
from loopkit_whole_step.given import Given
from loopkit_whole_step.hooked import Hook, Unliftable
from loopkit_whole_step.inputs import Inputs, tensors_of
from loopkit_whole_step.python_state import PythonState
from loopkit_whole_step.result import Ends, Result
from loopkit_whole_step.sealed import Refused, SealedEpoch, SealedStep

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.metrics import Metric


class StepFunction:
    """A step as a function of the inputs of its graph.

    Args:
        given: The step.
        inputs: The inputs.
    """

    def __init__(self, given: Given, inputs: Inputs) -> None:
        self._given = given
        self._inputs = inputs

    @contextmanager
    def restored(self, epoch: Epoch, changes: bool = False) -> Iterator[None]:
        """Inside, the phase's step may run: Python's state is put back, and with ``changes`` looked at before."""
        metrics = self._inputs.metrics_of(epoch)
        free = {f"plugin {name!r}": owner for name, owner in self._given.owners.items()}
        free.update({f"metric {i} of {name!r}": m for name, each in metrics.items() for i, m in enumerate(each)})
        own = PythonState(self._given.watched)
        others = PythonState(free)
        drawn = generators.save()
        try:
            yield
            if changes and (change := next(own.changes(), "")):
                raise Refused(f"it changes {change}, which a graph would not")
            if changes and (name := _drawing(drawn, generators.save())):
                raise Refused(f"it draws random numbers of {name}, which a graph would not")
        finally:
            own.put_back()
            others.put_back()
            generators.restore(drawn)

    def __call__(self, flat: Sequence[Tensor]) -> tuple[list[Tensor], Result, list[bool]]:
        """Run the step on its inputs, which it changes in place.

        Returns:
            The outputs of its graph, where its values are among them, and which metrics it has changed.
        """
        given, cells = self._given, self._given.cells
        metrics = self._inputs.metrics
        values = iter(flat)
        tensors = [next(values).detach().requires_grad_(each.requires_grad) for each in cells.tensors()]
        state = [next(values) for _ in cells.state()]
        rates = [next(values) for _ in self._inputs.rates]
        held = [{key: next(values) for key in tensors_of(metric)} for metric in metrics]
        windowed = given.window.steps > 0
        grads = [next(values) if windowed and p.grad is not None else None for p in given.params()]
        found = list(values)
        before = [(each, each._version, each.clone()) for each in flat] if self._has_votes() else []
        for metric, own in zip(metrics, held, strict=True):
            metric.load_state_dict(own)
        loaded = [tensors_of(metric) for metric in metrics]
        votes: list[Tensor] = []
        ends = Ends(given.hooks.sets)
        with cells.replaced(tensors, [_wide(each) for each in state], rates):
            for p, grad in zip(given.params(), grads, strict=True):
                p.grad = grad
            step, last = self._sealed_step(self._batch(found), votes, ends.updated)
            self._run(step, last)
            with torch.no_grad():
                self._write_state(state)
                self._write_rebound(tensors)
            for name, params in zip(given.optimizers, cells.params(), strict=True):
                ends.grads.setdefault(name, [p.grad for p in params])
        changed = _write_metrics(metrics, held, loaded)
        kept = _put_back_unless_kept(votes, before)
        outputs, result = Result.of(given, step, ends, found, kept)
        return outputs, result, changed

    def _batch(self, found: Sequence[Tensor]) -> Any:
        """A batch of these tensors."""
        leaves, spec = self._given.batch
        leaves = list(leaves)
        for at, leaf in zip(self._given.where, found, strict=True):
            leaves[at] = leaf
        return tree_unflatten(leaves, spec)

    def _has_votes(self) -> bool:
        return any(hook.vote for hooks in self._given.hooks.calls.values() for hook in hooks)

    def _sealed_step(
        self, batch: Any, votes: list[Tensor], updated: Callable[[str, Sequence[Tensor]], None]
    ) -> tuple[SealedStep, dict[str, Callable[[SealedStep], Any]]]:
        """The step to record, and the calls of the hooks of its end."""
        given = self._given
        epoch = SealedEpoch(self._inputs.epoch)
        arguments = {"learner": given.sealed, "phase": given.phase, "epoch": epoch}

        def caller(hook: Hook) -> Callable[[SealedStep], Any]:
            if hook.vote:
                return lambda step: votes.append(hook.function(step))
            return lambda step: hook.function(*({**arguments, "step": step}[name] for name in hook.arguments))

        ends = {hook.plugin: caller(hook) for hook in given.hooks.ends}
        calls = {event: [caller(hook) for hook in hooks] for event, hooks in given.hooks.calls.items()}
        pairs = zip(given.cells.optimizers, given.cells.params(), strict=True)
        optimizers = dict(zip(given.optimizers, pairs, strict=True))
        return SealedStep(epoch, batch, given.samples, calls, optimizers, given.window, updated), ends

    def _run(self, step: SealedStep, ends: Mapping[str, Callable[[SealedStep], Any]]) -> None:
        """Run the phase's step, and the recorded hooks of its end."""
        given = self._given
        counts = copy.deepcopy(given.cells.counts())
        phase_step: Callable[..., Any] = given.phase.step
        with torch.set_grad_enabled(given.phase.training):
            if phase_step(given.sealed, step) is not None:
                raise Refused("it returns something")
            if not step.complete:
                raise Refused("it does not call step.backward and step.update once each")
            for plugin, call in ends.items():
                try:
                    call(step)
                except Exception as error:
                    raise Unliftable(plugin, str(error)) from error
        now = given.cells.counts()
        if now != counts:
            pairs = zip(counts, now, strict=False)
            key = next((one[0] for one, other in pairs if one != other), "a part")
            raise Refused(f"its optimizer changes {key!r} in Python, which a graph would not")

    def _write_state(self, state: Sequence[Tensor]) -> None:
        """Write the optimizers' state into what was given."""
        now = self._given.cells.state()
        if len(now) != len(state):
            raise Refused("its optimizer has made new state, which it does in its first updates")
        for old, new in zip(state, now, strict=True):
            if new is not old:
                old.copy_(new)

    def _write_rebound(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that the step has put in the place of given ones."""
        for slots, old in zip(self._given.cells.slots, tensors, strict=True):
            now = slots[0][0].get(slots[0][1])
            if now is not old:
                if not isinstance(now, Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
                    raise Refused(f"it puts something else in the place of {slots[0][1]!r}")
                old.copy_(now)


def _write_metrics(
    metrics: Sequence[Metric], held: Sequence[dict[str, Tensor]], loaded: Sequence[dict[str, Tensor]]
) -> list[bool]:
    """Write what metrics have come to; returns which have been fed."""
    changed = []
    for metric, old, before in zip(metrics, held, loaded, strict=True):
        now = tensors_of(metric)
        changed.append(any(now[key] is not before[key] for key in now))
        for key, value in now.items():
            if value is not before[key]:
                old[key].copy_(value)
    return changed


def _put_back_unless_kept(votes: Sequence[Tensor], before: Sequence[tuple[Tensor, int, Tensor]]) -> list[Tensor]:
    """Undo the step if a vote was against it; returns whether it stands, if there are votes."""
    if not votes:
        return []
    kept = torch.stack([vote.reshape(()) for vote in votes]).all()
    for each, version, old in before:
        if each._version != version:
            each.copy_(torch.where(kept, each, old))
    return [kept]


def _drawing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The generator that has moved, other than torch's; empty without one."""
    for key, name in (("python", "Python's random"), ("numpy", "NumPy")):
        leaves = zip(tree_flatten(before[key])[0], tree_flatten(now[key])[0], strict=True)
        if not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in leaves):
            return name
    return ""


def _wide(value: Tensor) -> Tensor:
    """A counter in float64: in float32 a correction by a power of it has a thousand times the error."""
    return value.double() if value.ndim == 0 and value.is_floating_point() else value
