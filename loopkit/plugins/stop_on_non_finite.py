"""A guard against infinite and undefined numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from loopkit.base import devices, sharded
from loopkit.base.batches import describe
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import nearest
from loopkit.base.world import must_agree
from loopkit.errors import CancelStep, NonFiniteError, PluginError
from loopkit.groups import params_of
from loopkit.hooks import OWN_UPDATES, hookimpl
from loopkit.plugin import changed_options
from loopkit.plugins.late import LateValues

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.plugins.buffers import Buffers

POLICIES = ("raise", "skip", "rollback")


class StopOnNonFinite(Shown):
    """Raise `NonFiniteError` when a loss, or a gradient, is nan or infinite.

    A loss is looked at as its backward begins. On the CPU the error comes before the optimizer moves, so the parameters
    are as after the last good update. On an accelerator losses and gradients are read when they have arrived, so that
    no step waits: the error comes some steps later, by the end of the epoch at the latest, and names the steps between
    which it was; updates since then have used it, unless ``gradients=True`` and the optimizer is fused: it skips them
    on the device. Until the numbers have arrived `suspect` is true; plugins that save parameters call `settle` first.

    In a phase with ``own_updates`` it looks at ``step.loss`` as each step ends, after the phase's updates. There the
    other policies, and ``gradients=True``, raise when the fit begins.

    The other policies continue with the next batch. On an accelerator they wait for the loss and the gradients.

    - ``"skip"``: a step with a bad loss is cancelled, and training continues as if its batch had not been there. An
      update with a bad gradient is skipped, and training continues as if the batches of its window had not been there;
      ``update_skipped`` comes instead of ``update_end``.
    - ``"rollback"``: the step is cancelled, open windows are dropped, and parameters, buffers and the state of the
      optimizers go back to a copy in memory, with values that optimizers of other packages keep in their parameter
      groups. Counters, options that a plugin changes, the data and other plugins (schedules,
      averages) do not go back.

    With both, buffers (running statistics) go back to what they were before the step or window; random generators do
    not. That costs a copy of all buffers in every step, rollback also one of parameters and optimizer states in every
    ``snapshot_every`` updates. An overflow that loss scaling has found is the scaler's business and does not count.

    Processes that share their gradients skip and roll back together, if the loss of any of them is bad: that takes one
    reduction of one number, in the host's memory, in every step. Of the gradients all see the same. With ``"raise"``
    the process whose loss is bad raises, and the others end with a `PeerError` that names it.

    Args:
        policy: ``"raise"``, ``"skip"`` or ``"rollback"``; each skip or rollback is a warning.
        gradients: Look at the gradients of each update, too, and name the first bad parameter; it takes one more run
            over them, and is the default with skip and rollback. Without it a bad gradient is noticed by the loss of
            the next step, after an update that used it. An update that another plugin skips is not looked at.
        late: False: look before each backward on an accelerator too, where each step then waits for its loss. True:
            look late on the CPU too.
        max_skips: So many bad steps and updates in a row are skipped; the next one raises.
        max_rollbacks: So many rollbacks are made in the whole training; the next one raises.
        snapshot_every: Updates between two copies for rollback.

    Raises:
        PluginError: An argument is out of range, or skip and rollback meet ``late=True`` or ``gradients=False``.
        NonFiniteError: As above. Also under the other policies: at their bounds, and in an update with a closure.
    """

    name = "stop_on_non_finite"
    provides = "non_finite"
    per_process = ()  # it talks to the others
    syncs = ("backward_begin", "update_begin", "step_begin")
    """Reads one number in these hooks; on the CPU without waiting."""

    def __init__(
        self,
        policy: str = "raise",
        *,
        gradients: bool | None = None,
        late: bool | None = None,
        max_skips: int = 10,
        max_rollbacks: int = 3,
        snapshot_every: int = 100,
    ) -> None:
        if policy not in POLICIES:
            hint = nearest(policy, POLICIES) if isinstance(policy, str) else ""
            raise PluginError(f"StopOnNonFinite(policy={policy!r}): it is {', '.join(map(repr, POLICIES))}{hint}")
        if policy != "raise" and (late or gradients is False):
            raise PluginError(
                f"StopOnNonFinite(policy={policy!r}, gradients={gradients}, late={late}): {policy} has to know before "
                f"the optimizer moves; leave gradients and late out"
            )
        if max_skips < 0 or max_rollbacks < 0 or snapshot_every < 1:
            raise PluginError(
                f"StopOnNonFinite: max_skips={max_skips} and max_rollbacks={max_rollbacks} must be at least 0, "
                f"snapshot_every={snapshot_every} at least 1"
            )
        self.policy = policy
        self.gradients = gradients
        self.late = late
        self.max_skips = max_skips
        self.max_rollbacks = max_rollbacks
        self.snapshot_every = snapshot_every
        self.skips = 0
        """Bad steps and updates in a row."""
        self.rollbacks = 0
        """Rollbacks so far."""
        self._goes_on = policy != "raise"
        self._late = False if self._goes_on else late
        self._flagged: torch.optim.Optimizer | None = None
        """The fused optimizer that holds a flag of ours."""
        self._snapshot: dict[str, Any] | None = None

    @property
    def own_updates(self) -> str:
        """How it does its part where a phase updates in its own way; only if it looks at the loss, and raises."""
        if self._goes_on or self.gradients:
            return ""
        return "stop_on_non_finite looks at step.loss when a step ends, after its updates, and not at gradients"

    def _puts_back(self) -> bool:
        return self._goes_on

    def _looks_at_gradients(self) -> bool:
        return bool(self.gradients) or self._goes_on

    def _changed(self) -> tuple[str, ...]:
        if not self._goes_on:
            return ()
        return ("buffers", "params", "optimizer.state") if self.policy == "rollback" else ("buffers",)

    @hookimpl(when=_looks_at_gradients)
    @contextmanager
    def epoch_context(self) -> Iterator[None]:
        """Take the flag from a fused optimizer, whatever was raised."""
        try:
            yield
        finally:
            self._take_flag()

    def _of(self, epoch: Epoch) -> _Watched:
        """The state of an epoch; the buffers that may have to be put back are saved with it."""
        keep = epoch.keep(self)
        if "now" not in keep:
            keep["now"] = _Watched(epoch.store(self).setdefault("buffers", []) if self._goes_on else [])
        return keep["now"]  # type: ignore[no-any-return]

    @hookimpl(when=_puts_back, updates=_changed)
    def step_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Copy what may have to go back: the buffers, and for rollback sometimes the rest."""
        if not phase.training:
            return
        now = self._of(step.epoch)
        window_open = step.epoch.window_open
        now.before = now.step if window_open else now.window
        if self.policy == "rollback" and not window_open:
            due = self._snapshot is None or learner.progress.updates - self._snapshot["at"] >= self.snapshot_every
            params = [p for model in learner.models.with_extras().values() for p in model.parameters()]
            if due and not any(map(is_lazy, params)):
                if self._snapshot is None or _finite(params):  # host sync: once in snapshot_every updates
                    self._snapshot = _take_snapshot(learner)
                else:
                    name, value = _first_bad(learner, gradients=False)
                    what = f"parameter {name!r} holds {value} ({step.epoch.where()})"
                    self._roll_back(learner, what, self._warns(learner), step.epoch)
        now.before.take(learner)

    @hookimpl(reads=("loss",), updates=_changed)
    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Look at the loss, or at earlier ones that have arrived."""
        loss = getattr(step, "loss", None)
        if not isinstance(loss, Tensor) or not step.samples:  # of an empty batch, a mean is undefined
            return
        if self._late or (self._late is None and not loss.is_cpu):
            self._look_later(loss.detach(), learner, step)
            return
        value = loss.item()  # host sync: on an accelerator, where late=False asks for it
        bad = not math.isfinite(value)
        if not (bad or self._goes_on):
            return
        first = self._first_bad_rank(learner, bad)
        if first is None:
            return
        what = self._told(step, value if bad else None, first, learner)
        if self._goes_on and step.closure is None:
            if self.policy == "skip":
                self._skip(learner, what, learner.world.rank == first, self._of(step.epoch).before)
            else:
                self._roll_back(learner, what, learner.world.rank == first, step.epoch)
            raise CancelStep(what)
        raise NonFiniteError(
            f"{what}. Its backward has not run: the parameters are those before this step{_closure(step)}. "
            f"Look at this batch, or lower lr"
        )

    def _first_bad_rank(self, learner: Learner, bad: bool) -> int | None:
        """The first process whose loss is not finite, if there is one; the processes agree if they go on."""
        rank = learner.world.rank
        if not (self._goes_on and must_agree(learner)):
            return rank if bad else None
        last = learner.world.size - 1
        first = last - int(learner.world.highest(last - rank if bad else -1)[0])
        return first if first <= last else None

    def _told(self, step: Step, value: float | None, first: int, learner: Learner) -> str:
        """Describe the loss, which is None if it is another process's."""
        name, held = _first_bad(learner, gradients=False)
        already = f". Parameter {name!r} holds {held} already" if name else ""
        where = step.epoch.where(step)
        if value is None:
            return f"the loss of rank {first} is infinite or not a number ({where}){already}"
        return f"the loss is {value} ({where}; batch: {describe(step.batch)}){already}"

    @hookimpl(when=_looks_at_gradients, reads=("grads",), updates=_changed)
    def update_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Look at the gradients as the optimizer will get them."""
        self._take_flag()
        grads = [p.grad for p in step.params if p.grad is not None]
        if not grads or step.skip_reason is not None:
            return
        largest = _largest(grads)
        overflow: Tensor | None = getattr(step.optimizer, "found_inf", None)
        if overflow is not None:  # loss scaling skips this update on the device
            largest = torch.where(devices.to_device(overflow, largest.device).reshape(()) > 0, 0, largest)
        if self._late or (self._late is None and not largest.is_cpu):
            pending = self._look_later(largest, learner, step)
            self._guard(pending, step.optimizer, overflow)
        elif not math.isfinite(largest.item()):  # host sync: on an accelerator, where late=False asks for it
            name, value = _first_bad(learner)
            name = name or "(of none of the models, or of a part that another process holds)"
            where = f"({step.epoch.where(step)}; batch: {describe(step.batch)})"
            what = f"the gradient of parameter {name!r} holds {value} {where} although the loss is finite"
            if self._goes_on and step.closure is None:
                if self.policy == "skip":
                    self._skip(learner, what, self._warns(learner), self._of(step.epoch).window)
                    step.skip_update(what)
                    return
                self._roll_back(learner, what, self._warns(learner), step.epoch)
                raise CancelStep(what)
            raise NonFiniteError(
                f"{what}. The optimizer has not run: the parameters are those before this update{_closure(step)}. "
                f"Look for a division or root of 0, or clip what it is applied to"
            )

    @hookimpl(phase=OWN_UPDATES, reads=("loss",))
    def step_end(self, learner: Learner, step: Step) -> None:
        """Look at the loss of a step that has made its updates itself."""
        loss = vars(step).get("loss")
        if not isinstance(loss, Tensor) or not step.samples:
            return
        if self._late or (self._late is None and not loss.is_cpu):
            self._look_later(loss.detach(), learner, step)
        elif not bool(torch.isfinite(loss).all()):  # host sync: on an accelerator, where late=False asks for it
            name, held = _first_bad(learner)
            now = f". Parameter {name!r}, or its gradient, holds {held} by now" if name else ""
            raise NonFiniteError(
                f"the loss is {loss.detach()[~torch.isfinite(loss)].flatten()[0].item()} ({step.epoch.where(step)}; "
                f"batch: {describe(step.batch)}){now}. The phase updates in its own way, so its updates have used it: "
                f"look at this batch, or lower lr"
            )

    def vote(self, hook: str) -> Callable[[Step], Tensor] | None:
        """A function that returns, in a recorded step, whether a hook can be skipped: all values are finite."""
        if hook == "backward_begin":
            return lambda step: torch.isfinite(step.loss)
        if hook == "update_begin":
            return lambda step: torch.isfinite(_largest([p.grad for p in step.params if p.grad is not None]))
        return None

    @hookimpl(when=_looks_at_gradients)
    def update_end(self) -> None:
        """Take the flag from a fused optimizer; the parameters have moved, by good gradients."""
        self._take_flag()
        self.skips = 0

    @hookimpl(when=_looks_at_gradients)
    def update_skipped(self) -> None:
        """Take the flag from a fused optimizer, which another plugin has kept from its update."""
        self._take_flag()

    @hookimpl(reads=("loss",))
    def epoch_end(self, learner: Learner, epoch: Epoch) -> None:
        """Look at the losses that were still on their way."""
        self._read_all(learner, epoch)

    def suspect(self, learner: Learner) -> bool:
        """Whether there are losses or gradients that have not been read yet."""
        watched = [now.pending for epoch in _open(learner) if (now := epoch.keep(self).get("now")) is not None]
        return any(pending.sum is not None and pending.good <= pending.index for pending in watched)

    def settle(self, learner: Learner) -> None:
        """Wait for the losses and gradients that have not been read yet.

        Raises:
            NonFiniteError: One of them is infinite or not a number.
        """
        for epoch in _open(learner):
            self._read_all(learner, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The counts, and the copy for rollback; empty with ``policy="raise"``."""
        if not self._goes_on:
            return {}
        return {"skips": self.skips, "rollbacks": self.rollbacks, "snapshot": copy.deepcopy(self._snapshot)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        if self._goes_on and state:
            self.skips = state["skips"]
            self.rollbacks = state["rollbacks"]
            self._snapshot = copy.deepcopy(state["snapshot"])

    def _look_later(self, value: Tensor, learner: Learner, step: Step) -> _Pending:
        pending = self._of(step.epoch).pending
        pending.add(value, step.index)
        values = pending.values.arrived()
        if values or not pending.under_way:
            self._check(pending, values, learner, step.epoch)
            pending.send()
        return pending

    def _read_all(self, learner: Learner, epoch: Epoch) -> None:
        now = epoch.keep(self).get("now")
        if now is not None and now.pending.sum is not None:
            now.pending.send()
            self._check(now.pending, now.pending.values.wait(), learner, epoch)

    @staticmethod
    def _check(pending: _Pending, values: dict[str, float], learner: Learner, epoch: Epoch) -> None:
        if math.isnan(values.get("sum", 0.0)):
            name, value = _first_bad(learner)
            now = f"Parameter {name!r}, or its gradient, holds {value} by now. " if name else ""
            since = (
                "updates since then were skipped by the fused optimizer: the parameters are those before it"
                if pending.guarded
                else "updates since then have used it; StopOnNonFinite(late=False) stops before them, and is slower"
            )
            where = epoch.where()
            raise NonFiniteError(
                f"the loss or a gradient was infinite or not a number in one of the steps {pending.good} to "
                f"{pending.sent} ({where}). {now}On an accelerator it is read late, so {since}"
            )
        if values:
            pending.good = pending.sent + 1

    def _guard(self, pending: _Pending, optimizer: torch.optim.Optimizer, overflow: Tensor | None) -> None:
        """Let a fused optimizer skip this update, and those after it, on the device."""
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            pending.guarded = False
            return
        pending.guarded = pending.guarded is not False
        assert pending.sum is not None
        bad = pending.sum.isnan().float()
        if overflow is None:
            self._flagged = optimizer
        else:
            bad = torch.maximum(devices.to_device(bad, overflow.device), overflow)
        optimizer.found_inf = bad  # type: ignore[attr-defined]

    def _take_flag(self) -> None:
        if self._flagged is not None:
            vars(self._flagged).pop("found_inf", None)
            self._flagged = None

    @staticmethod
    def _warns(learner: Learner) -> bool:
        """Whether this process warns for all."""
        return learner.world.rank == 0 or not must_agree(learner)

    def _skip(self, learner: Learner, what: str, warns: bool, before: Buffers) -> None:
        if self.skips >= self.max_skips:
            raise NonFiniteError(f"{what}. {self.skips} in a row were skipped (max_skips={self.max_skips}): lower lr")
        self.skips += 1
        before.restore(learner)
        if warns:
            warn(f"{what}: skipped ({self.skips} in a row)")

    def _roll_back(self, learner: Learner, what: str, warns: bool, epoch: Epoch) -> None:
        if self.rollbacks >= self.max_rollbacks:
            raise NonFiniteError(
                f"{what}, after {self.rollbacks} rollbacks (max_rollbacks={self.max_rollbacks}): lower lr"
            )
        if self._snapshot is None:
            raise NonFiniteError(f"{what}, and there is no good state to go back to yet")
        self.rollbacks += 1
        for window in epoch.windows:
            window.drop()
        _put_back(learner, self._snapshot)
        if warns:
            warn(f"{what}: back to the state after {self._snapshot['at']} updates")
        self._snapshot["at"] = learner.progress.updates  # the next copy is due so many updates from here


def _closure(step: Step) -> str:
    return "" if step.closure is None else ", or where its optimizer tried (an update with a closure is not undone)"


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute value: finite if all numbers are, also in other processes."""
    if any(map(sharded.is_sharded, tensors)):
        return sharded.total_norm(tensors, math.inf)
    norms = torch._foreach_norm(sharded.with_values(tensors), math.inf)
    return torch.stack([devices.to_device(norm, norms[0].device) for norm in norms]).amax()


def _finite(params: Sequence[Tensor]) -> bool:
    with torch.no_grad():
        kept = [p for p in params if p.is_floating_point() and not is_lazy(p) and p.numel()]
        return not kept or math.isfinite(_largest(kept).item())  # host sync: the answer is wanted now


def _first_bad(learner: Learner, gradients: bool = True) -> tuple[str, float]:
    """The first parameter, in the models' order, that is not finite or has such a gradient, and the number.

    Of sharded ones this process's part is looked at.
    """
    for name, p in learner.models.named_parameters():
        for held in (p.grad if gradients else None, p.detach()):
            tensor = None if held is None else sharded.values(sharded.part(held))
            if tensor is not None and not bool((finite := torch.isfinite(tensor)).all()):
                return name, tensor[~finite][0].item()
    return "", 0.0


def _take_snapshot(learner: Learner) -> dict[str, Any]:
    from loopkit.plugins.buffers import cells, extra_states  # not before it may have to go back

    models = learner.models.with_extras().values()
    with learner.models.weights.own():  # and sharded, where they are whole for the time of a step
        return {
            "at": learner.progress.updates,
            "params": [p.detach().clone() for model in models for p in model.parameters()],
            "buffers": [holder[key].detach().clone() for holder, key in cells(learner)],  # type: ignore[union-attr]
            "optimizers": {
                name: {i: copy.deepcopy(dict(optimizer.state.get(p, {}))) for i, p in enumerate(params_of(optimizer))}
                for name, optimizer in learner.optimizers.items()
            },
            "extra": extra_states(learner),
            "own": learner.models.own_optimizer_states(),
        }


def _put_back(learner: Learner, snapshot: dict[str, Any]) -> None:
    from loopkit.plugins.buffers import Buffers, put_extra_states

    with learner.models.weights.own():
        params = [p for model in learner.models.with_extras().values() for p in model.parameters()]
        for p, saved in zip(params, snapshot["params"], strict=False):  # an older state has the models' only
            p.detach().copy_(sharded.like(saved, p))
    Buffers(snapshot["buffers"]).restore(learner)
    put_extra_states(learner, snapshot.get("extra", {}))
    own = snapshot.get("own", {})  # an older state has none
    learner.models.put_optimizers_back(own, keep=changed_options(learner.plugins.values()))
    for name, optimizer in learner.optimizers.items():
        if name in own:
            continue
        for i, param in enumerate(params_of(optimizer)):
            optimizer.state.pop(param, None)
            if values := snapshot["optimizers"][name][i]:
                values = copy.deepcopy(values)
                optimizer.state[param] = {key: sharded.like_parameter(value, param) for key, value in values.items()}


class _Watched:
    """The state of an epoch: its buffers, and the values that are still to be read.

    Args:
        buffers: The copy of the buffers before the window, which is saved.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        from loopkit.plugins.buffers import Buffers

        self.pending = _Pending()
        self.step, self.window = Buffers(), Buffers(buffers)
        self.before = self.window
        """The buffers to put back if this step is skipped."""


class _Pending:
    """The losses of an epoch, and its largest gradients: multiplied by 0 and added up on the device.

    The sum is nan from the first of them on that is not finite.
    """

    def __init__(self) -> None:
        self.values = LateValues()
        self.sum: Tensor | None = None
        self.under_way = False
        self.guarded: bool | None = None
        """Whether fused optimizers skip on the device; None: no update was looked at."""
        self.index = self.sent = -1
        """The last step in the sum, and the last in the transfer under way."""
        self.good = 0
        """The first step that is not known to be good."""

    def add(self, loss: Tensor, index: int) -> None:
        zero = loss * 0
        self.sum = zero if self.sum is None else self.sum + devices.to_device(zero, self.sum.device)
        self.index = index

    def send(self) -> None:
        assert self.sum is not None
        self.values.send({"sum": self.sum})
        self.sent = self.index
        self.under_way = True


def _open(learner: Learner) -> list[Epoch]:
    """The epochs of the fit that are running."""
    return [] if learner.current is None else learner.current.open_epochs
