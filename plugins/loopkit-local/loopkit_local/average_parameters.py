"""Local training: each process updates by itself, and from time to time the parameters are averaged."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from loopkit import hookimpl
from loopkit.author import Member, buckets, checks, devices
from loopkit.data import Loader
from loopkit.errors import PluginError, WorldError
from loopkit_local.averaging import Average, Parts, parts_of, to_devices
from loopkit_local.cadence import Cadence, Controller, EverySteps, Free
from loopkit_local.outer import MakeOptimizer, OuterOptimizer
from loopkit_local.rounds import Rounds

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

__all__ = ["AverageParameters", "Collective", "ThroughHost"]

SAMPLES, UPDATES, WALL, HELD, EXCHANGE, DIVERGENCE, WANTED = range(7)
"""The places of the numbers sent with each average; memory and divergence are from the average before."""


def _check_delay(how: Any) -> None:
    delay = how.delay
    if delay is not None and (not isinstance(delay, int) or isinstance(delay, bool) or delay < 0):
        raise PluginError(f"{type(how).__name__}: delay is {delay!r}: it is a number of updates, from 0, or None")


@dataclass(frozen=True)
class Collective:
    """Average where the parameters are, by the collectives of their device.

    Args:
        delay: Updates that are made while the average is under way, at the end of which it is taken over. 0: training
            waits for it. None: until the next average begins.
    """

    delay: int | None = 0

    def __post_init__(self) -> None:
        _check_delay(self)


@dataclass(frozen=True)
class ThroughHost:
    """Average copies of the parameters in the host's memory, by Gloo, in a thread, while training continues.

    They are copied in parts of 64 MiB, and so are the averages; training waits for no copy where that can be.

    Args:
        delay: As in `Collective`; by default the average is taken over when the next one begins.
    """

    delay: int | None = None

    def __post_init__(self) -> None:
        _check_delay(self)


class AverageParameters(Member):
    """Average the parameters of processes that train by themselves (local SGD).

    Averaged are the parameters that an optimizer has, each process weighted by the samples of its steps since the last
    average, and so are floating buffers; of other buffers rank 0's are taken. It takes place after the step of an
    update, and at the end of each training epoch, so that all processes validate and save the same model; in the
    middle of an epoch each has its own. The first training epoch of a fit begins with rank 0's parameters and buffers.

    What one process asks for (a stop, a save, a signal) happens in all of them at the next average, where, unless it is
    under way while training continues, all have the same state: see `synced`.

    An average that runs while training continues (see ``delay``) keeps the updates made in the meantime: the parameters
    become ``local + (average - snapshot)``. Buffers and moments are then taken as they were averaged.

    The data: with `EverySteps` the ordinary equal parts; with `Cadence` and `Free` a `Rounds` over a loader of
    `loopkit.data`, which gives each process as many batches as it is fast, and each batch to one process. Its epoch has
    no known length, and updates are counted in each process: a schedule over updates goes at each one's own pace.
    `Cadence` and `Free` wait for the device at each average, to measure.

    Args:
        when: How often: `EverySteps`, `Cadence` or `Free`.
        how: By which way: `Collective` or `ThroughHost`.
        moments: How the optimizers' states change at an average. ``"local"``: each process keeps its own.
            ``"average"``: the tensors that have the parameter's shape and are there in all processes are averaged as
            the parameters are; numbers of steps stay as they are. ``"reset"``: they are dropped.
        outer: Makes an optimizer over the averaged parameters: the difference from the last to the new average is its
            gradient, its result takes the average's place. Its state is equal in all processes, and is saved.
        shard: As in `Member`; `Cadence` and `Free` need it.
        tail: As in `Member`; for `EverySteps`, and for validation.
        backend: As in `Member`.
        timeout: As in `Member`.

    Raises:
        PluginError: Options that do not go together.
        WorldError: `Cadence` or `Free` meets data that it cannot share out.

    Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019); Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models" (2023), algorithm 1, for ``outer``.

    Example::

        AverageParameters(when=EverySteps(8))
        AverageParameters(when=Cadence(anchor=10), how=ThroughHost())
        AverageParameters(
            when=EverySteps(100),
            outer=lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
        )
    """

    name = "average_parameters"
    agrees_in_steps = False
    """Only at averages, where each request travels with the numbers."""
    owns = ("grads.sync", "params.sync")

    def __init__(
        self,
        when: EverySteps | Cadence = EverySteps(8),  # noqa: B008 - it is frozen
        how: Collective | ThroughHost = Collective(),
        *,
        moments: Literal["local", "average", "reset"] = "local",
        outer: MakeOptimizer | None = None,
        shard: bool = True,
        tail: str = "uneven",
        backend: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__(shard=shard, tail=tail, backend=backend, timeout=timeout)
        if not isinstance(when, (EverySteps, Cadence)):
            raise PluginError(f"AverageParameters: when is {when!r}: it is EverySteps(...), Cadence(...) or Free(...)")
        if not isinstance(how, (Collective, ThroughHost)):
            raise PluginError(f"AverageParameters: how is {how!r}: it is Collective(...) or ThroughHost(...)")
        checks.one_of("AverageParameters", ("local", "average", "reset"), moments=moments)
        if outer is not None and not callable(outer):
            raise PluginError(f"AverageParameters: outer is {outer!r}: it is a function params -> optimizer")
        if isinstance(when, Free) and how.delay == 0:
            raise PluginError(
                f"AverageParameters: Free(...) does not wait for an average, but how is {how!r}: give "
                f"Collective(delay=None) or ThroughHost()"
            )
        if isinstance(when, Cadence) and not shard:
            raise PluginError(
                f"AverageParameters: {type(when).__name__}(...) shares the data out itself, which shard=False forbids: "
                f"leave it out, or take EverySteps(...)"
            )
        self.when = when
        self.how = how
        self.moments = moments
        self.controller: Controller | None = None
        """The controller of the rounds, with its measurements; None with `EverySteps`, and for a single process."""
        self.outer = outer
        self._outer: OuterOptimizer | None = None
        self._groups: tuple[Any, Any] | None = None
        """For tensors, and for numbers."""
        self._equal = False
        """Whether all processes began with the same parameters."""
        self._pending: Average | None = None
        self._steps = 0
        """Since the last average, cancelled ones included."""
        self._samples = 0
        self._rounds: dict[int, Rounds] = {}
        self._round: Rounds | None = None
        """The batches of the running training epoch."""
        self._mark: float | None = None
        """When the time that counts for this process's speed began."""
        self._wall = self._held = self._exchange = 0.0
        self._divergence = -1.0
        self._meet = False
        """Whether to agree with the others when this round ends, because one of them asked for it."""
        self._loaded: Mapping[str, Any] | None = None

    @property
    def synced(self) -> bool:
        """Whether all processes have the same parameters now, so that all have the same state."""
        return self.world.size == 1 or (self._steps == 0 and self._pending is None)

    # The data and the beginning

    @hookimpl
    def setup_data(self, learner: Learner, phase: Phase, data: Any) -> Any:
        """Take this process's part of the data, round by round if the processes make different numbers of steps."""
        if self.world.size == 1 or not phase.training or not isinstance(self.when, Cadence):
            return super().setup_data(learner, phase, data)
        if isinstance(data, Rounds):
            return data
        if not isinstance(data, Loader):
            raise WorldError(
                f"{type(self.when).__name__}(...) shares out batches by their position, which {type(data).__name__} "
                f"cannot give: use a loader of loopkit.data for phase {phase.name!r}, or EverySteps(...)"
            )
        known = self._rounds.get(id(data))
        if known is None or known.source is not data:
            known = Rounds(data, self._control(), self.world.rank, self.world.size, learner.accumulate)
            self._rounds[id(data)] = known
        return known

    @hookimpl(before=("checkpoint",))
    def fit_begin(self, learner: Learner) -> None:
        """Compare the set-up."""
        super().fit_begin(learner)
        if self.world.size > 1:
            self._equal = self._loaded is not None  # may go on in the middle of a round

    @hookimpl
    def fit_end(self, result: FitResult) -> None:
        """Forget an average that a fit which failed or was interrupted has left behind."""
        super().fit_end(result)
        self._pending, self._steps, self._samples = None, 0, 0

    @hookimpl(updates=("params", "buffers"))
    def epoch_begin(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Begin with rank 0's parameters."""
        if not phase.training and self._round is not None:
            raise WorldError(
                f"phase {phase.name!r} begins in the middle of a training epoch, which the processes reach at "
                f"different times with {type(self.when).__name__}(...): validate between epochs "
                f"(validate=every(epochs=1)), or use EverySteps(...)"
            )
        if self.world.size == 1 or not phase.training:
            return
        self._round = None
        if isinstance(self.when, Cadence):
            if not isinstance(epoch.data, Rounds):
                raise WorldError(
                    f"{type(self.when).__name__}(...) needs to share out the data of phase {phase.name!r}: give fit, "
                    f"run or learner.epoch(data=...) a loader of loopkit.data, not your own batches; or "
                    f"use EverySteps(...)"
                )
            self._round = epoch.data
        if not self._equal:
            buckets.copy_state(learner.models.with_extras().values())
            self._equal = True
        self._restore_loaded(learner)
        if self.outer is not None and self._outer is None:
            self._outer = self._make_outer(self.outer, learner)
        self._mark = time.perf_counter()

    # Steps and averages

    @hookimpl(updates=("params", "buffers", "optimizer.state"))
    def step_end(self, learner: Learner, phase: Phase, step: Step) -> None:  # type: ignore[override]
        """Count, and average when it is time."""
        if self.world.size > 1 and phase.training:
            self._samples += step.samples
            self._after_step(learner, step.epoch)

    @hookimpl(updates=("params", "buffers", "optimizer.state"))
    def step_cancelled(self, learner: Learner, phase: Phase, epoch: Epoch, step: Step) -> None:
        """A cancelled step counts as a step, with no samples."""
        if self.world.size > 1 and phase.training:
            self._after_step(learner, step.epoch)

    @hookimpl(updates=("params", "buffers", "optimizer.state"))
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Average at the end of a training epoch, so that all processes continue with the same parameters."""
        if self.world.size == 1 or not phase.training:
            return
        self._take_time(learner)
        self._take_over(learner)
        self._begin(learner, epoch, background=False)
        self._mark, self._meet = None, False
        if self._round is not None:
            self._round.leave()
            self._round = None

    @hookimpl
    def phase_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Leave the time between two steps out of this process's speed."""
        if self._mark is not None:
            self._mark = time.perf_counter()

    def _after_step(self, learner: Learner, epoch: Epoch) -> None:
        self._steps += 1
        delay = self.how.delay
        if self._pending is not None and delay is not None and self._steps >= delay * learner.accumulate:
            self._take_time(learner)
            self._take_over(learner)
            self._agree_if_asked(epoch, isinstance(self.when, EverySteps))
        if self._round is not None:
            if self._round.ended and not self._round.last:
                self._end_round(learner, epoch)
        elif isinstance(self.when, EverySteps) and self._steps >= self.when.steps * learner.accumulate:
            self._take_over(learner)
            self._begin(learner, epoch, background=delay != 0)
            self._agree_if_asked(epoch, True)

    def _end_round(self, learner: Learner, epoch: Epoch) -> None:
        self._take_time(learner)
        self._take_over(learner)
        free = isinstance(self.when, Free)
        self._agree_if_asked(epoch, free)
        self._begin(learner, epoch, background=self.how.delay != 0)
        self._agree_if_asked(epoch, not free)
        self._mark = time.perf_counter()

    def _agree_if_asked(self, epoch: Epoch, here: bool) -> None:
        """Agree with the others if one of them asked for it, where all of them know that by now."""
        if self._meet and here:
            self._meet = False
            self.agree(epoch)

    def _begin(self, learner: Learner, epoch: Epoch, background: bool) -> None:
        """Begin an average of the current values; without a background, finish it as well."""
        begin = time.perf_counter()
        parts = self._parts(learner)
        through_host = isinstance(self.how, ThroughHost)
        tensors, numbers = self._both_groups()
        wanted = epoch.asks
        average = Average(
            parts.snapshot(through_host) if background or through_host else parts,
            [
                self._samples,
                self._steps / learner.accumulate,
                self._wall,
                self._held,
                self._exchange,
                self._divergence,
                float(wanted),
            ],
            group=numbers if through_host else tensors,
            control=numbers,
            after=None if self._outer is None else self._outer.step,
            measure=isinstance(self.when, Cadence) and self.when.guard is not None,
            background=background,
        )
        self._steps = self._samples = 0
        self._wall = self._held = 0.0
        self._pending = average
        waited = 0.0
        if not background:
            waited = average.exchange_ms
            self._adopt(learner, average, parts)
            self._synchronize(parts)
        elif isinstance(self.when, Cadence) and not isinstance(self.when, Free):
            asked = time.perf_counter()
            average.numbers()
            waited = 1e3 * (time.perf_counter() - asked)
            self._report(average.table)
        self._held += max(0.0, 1e3 * (time.perf_counter() - begin) - waited)

    def _take_over(self, learner: Learner) -> None:
        """End the average that is under way."""
        average = self._pending
        if average is None:
            return
        begin = time.perf_counter()
        average.wait()
        waited = 1e3 * (time.perf_counter() - begin)
        self._adopt(learner, average, self._parts(learner))
        took = 1e3 * (time.perf_counter() - begin)
        self._held += took - waited + min(waited, average.reduce_ms)
        self._mark = time.perf_counter()

    @torch.no_grad()
    def _adopt(self, learner: Learner, average: Average, live: Parts) -> None:
        """Put an average in place, and draw the consequences of its numbers."""
        self._pending = None
        self._exchange = average.exchange_ms
        self._divergence = -1.0 if average.divergence is None else average.divergence
        result = average.result
        if result is not None:
            params = result.params
            if self._steps:
                pairs = zip(params, average.parts.params, strict=True)
                params = [mean - old.to(mean.dtype) for mean, old in pairs]
            both = [key for key in result.others if key in live.others]
            made = Parts(params, {key: result.others[key] for key in both}, result.counts).tensors()
            targets = Parts(live.params, {key: live.others[key] for key in both}, live.counts).tensors()
            for index, (target, value) in enumerate(zip(targets, to_devices(made, targets), strict=True)):
                if self._steps and index < len(params):
                    target.add_(value)
                else:
                    target.copy_(value)
            if self.moments == "reset":
                for optimizer in learner.optimizers.values():
                    optimizer.state.clear()
        if not average.background or isinstance(self.when, Free):
            self._report(average.table)

    def _report(self, table: list[list[float]]) -> None:
        """Give the controller the measurements of all processes."""
        self._meet = self._meet or any(row[WANTED] for row in table)
        if self.controller is not None and any(row[UPDATES] for row in table):
            columns = list(zip(*table, strict=True))
            divergence = max((value if not math.isnan(value) else math.inf) for value in columns[DIVERGENCE])
            waits = 0.0 if isinstance(self.when, Free) else min(columns[EXCHANGE])
            self.controller.report(
                columns[WALL],
                columns[UPDATES],
                max(columns[HELD]) + waits,
                None if divergence < 0 else divergence,
            )

    def _take_time(self, learner: Learner) -> None:
        """Count the time since the last mark for this process's speed."""
        if isinstance(self.when, Cadence) and self._mark is not None:
            self._synchronize(self._parts(learner))
            now = time.perf_counter()
            self._wall += 1e3 * (now - self._mark)
            self._mark = now

    def _synchronize(self, parts: Parts) -> None:
        if isinstance(self.when, Cadence):
            devices.synchronize(tensor.device for tensor in parts.params)  # host sync: to measure, once per average

    # What is averaged

    def _parts(self, learner: Learner) -> Parts:
        return parts_of(learner, moments=self.moments == "average")

    def _make_outer(self, make: MakeOptimizer, learner: Learner) -> OuterOptimizer:
        return OuterOptimizer(make, self._parts(learner).params, host=isinstance(self.how, ThroughHost))

    def _both_groups(self) -> tuple[Any, Any]:
        if self._groups is None:
            limit = timedelta(seconds=self._timeout)
            beside = isinstance(self.how, Collective) and self.how.delay != 0  # steps may have collectives, too
            tensors = dist.new_group(timeout=limit) if beside else dist.group.WORLD
            self._groups = tensors, dist.new_group(backend="gloo", timeout=limit)
        return self._groups

    def _control(self) -> Controller:
        if self.controller is None:
            assert isinstance(self.when, Cadence)
            self.controller = Controller(self.when, self.world.size)
            if self._loaded is not None and self._loaded["controller"] is not None:
                self.controller.load_state_dict(self._loaded["controller"])
        return self.controller

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state that averaging resumes from; it waits for an average that is under way."""
        if self._loaded is not None:
            return copy.deepcopy(dict(self._loaded))
        pending = self._pending
        if pending is not None:
            pending.wait()
        return {
            "steps": self._steps,
            "samples": self._samples,
            "controller": None if self.controller is None else self.controller.state_dict(),
            "outer": None if self._outer is None else self._outer.state_dict(),
            "pending": None if pending is None else pending.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state_dict`, when the next training epoch begins."""
        self._loaded = copy.deepcopy(dict(state))
        self._steps, self._samples = state["steps"], state["samples"]
        self._outer, self._pending = None, None
        if self.controller is not None and state["controller"] is not None:
            self.controller.load_state_dict(state["controller"])

    def _restore_loaded(self, learner: Learner) -> None:
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self._steps, self._samples = state["steps"], state["samples"]
        if state["pending"] is not None:
            self._pending = Average.of(state["pending"])
        if state["outer"] is not None and self.outer is not None:
            self._outer = self._make_outer(self.outer, learner)
            self._outer.load_state_dict(state["outer"])
