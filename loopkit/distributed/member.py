"""Member: the base of all plugins that sync processes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.base import checks
from loopkit.base.facts import fact, hashed
from loopkit.base.options import Shown, options_of
from loopkit.base.world import World, join
from loopkit.checkpoint.structure import structure
from loopkit.data.place import TAILS
from loopkit.data.shards import facts_of, shard
from loopkit.distributed import places
from loopkit.distributed.checksum import checksums, combined
from loopkit.distributed.watch import Watch, hook_of, is_collective_error
from loopkit.errors import PeerError, PluginError, WorldError
from loopkit.hooks import hookimpl
from loopkit.losses import is_sum
from loopkit.plugin import has_a_say, unwrapped

if TYPE_CHECKING:
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

AGREED_EVERY = 1.0
"""Seconds, about, between two agreements in an epoch."""
FEWEST = 2
MOST = 1000
"""Steps between two agreements."""
VOUCHED_EVERY = 100
"""Steps, at least, between two comparisons of parameters."""


@dataclass(slots=True)
class _Pace:
    """How often the processes agree in an epoch."""

    left: int
    """Steps until the next agreement."""
    every: int
    since: float


class Member(Shown):
    """The base of plugins that sync, such as `DDP`: one of the processes that train one model together.

    It joins the others, gives each its part of the data, raises if processes differ, lets all act together on stops,
    cancels, saves and signals, and names the one that failed where another one only waits for it.
    For a single process it is idle.

    Args:
        shard: Give each process its part of the data. Without, every process is to bring its own.
        tail: The treatment of samples that are left over: see `loopkit.data.shards.shard`.
        backend: Of ``torch.distributed``; chosen by the device if it is not given.
        timeout: Seconds that a process waits for the others.
    """

    provides = "sync"
    removable = False
    agrees_in_steps = True
    """Whether all processes make the same steps, so that they can agree on something after any of them."""
    volatile = ("_*", "world")

    def __init__(self, *, shard: bool = True, tail: str = "uneven", backend: str | None = None, timeout: float = 300.0):
        checks.one_of(type(self).__name__, TAILS, tail=tail)
        checks.positive(type(self).__name__, "seconds", timeout=timeout, infinite=True)
        self.world = World()
        self._shard = shard
        self._tail = tail
        self._backend = backend
        self._timeout = timeout
        self._watch: Watch | None = None
        self._failure: Callable[[], BaseException | None] = lambda: None
        """A function that returns the error of the fit."""
        self._said: set[str] = set()
        self._seed = 0
        """The seed of rank 0, for the order of the user's own loaders."""
        self._paces: dict[str, int] = {}
        """Steps between two agreements at the end of the last epoch of a phase, with which the next one begins."""
        self._epochs: list[Epoch] = []
        """The running epochs, the outermost first."""
        self._over = "", 0, False
        """The epoch that ended last, its steps, and whether its data ended."""
        self._cancelled = ""
        """Where a step was cancelled last."""
        self._data: dict[str, str] = {}
        """The options that must be equal of the data shared out since the last fit began."""
        self._vouched: int | None = None
        """At how many steps the checksum of equal tensors was made."""

    @property
    def own_updates(self) -> bool:
        """Whether it does its part where a phase updates in its own way: only for a single process."""
        return self.world.size == 1

    def join(self, learner: Learner) -> bool:
        """Join the other processes; returns whether there are any."""
        if learner.world is not self.world or self.world.size == 1:
            self.world = learner.world = join(self._backend, timeout=self._timeout)
            self.world.in_step = self.agrees_in_steps
            self._seed = self.world.share(torch.initial_seed() % 2**32)
            places.lay_out(self.world)
        return self.world.size > 1

    @hookimpl(updates=("model",), after=("device", "memory_format", "freeze", "compile"))
    def setup_model(self, learner: Learner, name: str, model: nn.Module) -> nn.Module:
        """Join the others, and let the model take part."""
        if not self.join(learner):
            return self.alone(model)
        self._compare_models(f"model {name!r}", model)
        if name == next(iter(learner.models)):
            for owner, extra in learner.models.extras.modules.items():
                self._compare_models(owner, extra)
        return self.wrap(learner, name, model)

    def alone(self, model: nn.Module) -> nn.Module:
        """Let a model take part; there are no other processes."""
        return model

    def place(self) -> tuple[int, int]:
        """Which part of the data is this process's, and of how many."""
        return self.world.rank, self.world.size

    def wrap(self, learner: Learner, name: str, model: nn.Module) -> nn.Module:
        """Let a model take part; there are other processes."""
        return model

    @hookimpl
    def setup_data(self, learner: Learner, phase: Phase, data: Any) -> Any:
        """Take this process's part of the data."""
        epoch = learner.progress.epochs
        if self.world.size == 1 or not self._shard:
            return data
        of = f"of the data of phase {phase.name!r}"
        self._data |= {f"{key} {of}": told for key, told in facts_of(data).items()}
        tail = self._tail if phase.training else "uneven"  # each sample is counted, and once
        rank, size = self.place()
        part, said = shard(data, rank, size, tail, seed=self._seed, epoch=epoch, training=phase.training)
        if said and said not in self._said and self.world.rank == 0:
            print(f"loopkit: phase {phase.name!r}: {said}", file=sys.stderr)
        self._said.add(said)
        return part

    @hookimpl(before=("checkpoint",))  # and so, turned round, after it in fit_end
    def fit_begin(self, learner: Learner) -> None:
        """Watch the others from now on; raise for processes that differ."""
        if self.world.size == 1:
            return
        self._start_watch(learner)
        try:
            self._compare(learner)
        except BaseException:
            self._stop_watch()
            raise

    @hookimpl(reads=("params", "buffers"))
    def phase_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Let the agreement at the end of the epoch compare what is to be equal, at most once in 100 steps."""
        if self.world.size == 1 or not phase.training:
            return
        steps = learner.progress.steps
        last = self._vouched
        if last is not None and last <= steps < last + VOUCHED_EVERY:
            return
        self._vouched = steps
        tensors = self.equal(learner)
        if tensors:
            sums = dict(zip(tensors, checksums(tensors.values()), strict=True))
            self.world.vouch(combined(list(sums.values())), lambda: self._parted(epoch, sums))

    def equal(self, learner: Learner) -> dict[str, Tensor]:
        """The tensors that are equal in all processes at the end of a training epoch, by name."""
        return {}

    def _parted(self, epoch: Epoch, sums: dict[str, int]) -> str:
        odd = self.world.odd(sums)
        assert odd is not None
        rank, theirs, first = odd
        name = next(name for name in first if first[name] != theirs[name])
        return (
            f"the processes have parted: {name} of rank {rank} differs from rank 0 (at the end of "
            f"{epoch.where()}). Each process changes it in another way, such as by a plugin with random "
            f"numbers of its own, or by code that asks for the rank"
        )

    @hookimpl
    def fit_end(self, result: FitResult) -> None:
        """Watch no more."""
        if self._watch is None:
            return
        failure = self._failure()
        if failure is not None:
            self._watch.fail(failure)
        self._stop_watch()

    @hookimpl
    @contextmanager
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> Iterator[None]:
        """Name the process that failed, where this one only waits for it."""
        if self.world.size == 1:
            yield
            return
        alone = self._watch is None
        watch = self._watch or self._start_watch(learner)
        every = self._paces.get(phase.name, FEWEST)
        pace = _Pace(every, every, time.monotonic())
        epoch.keep(self)["pace"] = pace
        self._epochs.append(epoch)
        places.enter(self.world, self._epochs)
        try:
            yield
            self._paces[phase.name] = pace.every
            self._over = self._reach()
        except Exception as error:
            blamed = self._blame(error)
            watch.fail(error)
            if blamed is not None:
                raise blamed from error
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            watch.fail(error)
            raise
        finally:
            self._epochs.remove(epoch)
            places.enter(self.world, self._epochs)
            if alone:
                self._stop_watch()

    @hookimpl
    def step_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Agree with the others, about once a second."""
        self._count_step(learner, phase, epoch)

    @hookimpl
    def step_cancelled(self, learner: Learner, phase: Phase, epoch: Epoch, step: Step) -> None:
        """A cancelled step counts, too: the others may not have cancelled it."""
        self._cancelled = epoch.where(step)
        self._count_step(learner, phase, epoch)

    def _count_step(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        if self.world.size == 1 or not self.agrees_in_steps or not epoch.agrees:
            return
        pace: _Pace = epoch.keep(self)["pace"]
        pace.left -= 1
        if pace.left <= 0 and (not phase.training or epoch.steps % learner.accumulate == 0):  # no window is open
            took = time.monotonic() - pace.since
            every = int(pace.every * AGREED_EVERY / took) if took else MOST
            wish = min(max(every, FEWEST), MOST, 2 * pace.every)
            pace.every = -int(self.agree(epoch, -wish)[0])
            pace.left = pace.every
            pace.since = time.monotonic()

    def agree(self, epoch: Epoch, *numbers: float) -> list[float]:
        """Let all processes act on what any of them asks for; returns the highest of each number."""
        return epoch.agree(*numbers)

    def _start_watch(self, learner: Learner) -> Watch:
        main = threading.get_ident()

        def where() -> str:
            place = places.BETWEEN
            if self._epochs:
                epoch = self._epochs[-1]
                place = epoch.where(epoch.current)
            hook = hook_of(main, learner.plugins)
            if hook:
                place = f"{hook}, {place}"
            if self._cancelled:
                place += f" (after it cancelled a step: {self._cancelled})"
            return place

        self._over = "", 0, False
        self._watch = Watch(self.world, where, steps=self._reach)
        self._watch.start()
        self._failure = lambda: None if learner.current is None else learner.current.failure
        self.world.blame = self._blame
        return self._watch

    def _reach(self) -> tuple[str, int, bool]:
        """The epoch that runs or ended last, its steps so far, and whether its data ended."""
        if not self._epochs:
            return self._over
        epoch = self._epochs[-1]
        closing = not epoch.at_edge and (epoch.current is None or epoch.current.ended)
        return epoch.where(), epoch.steps, closing and not self._cancelled

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self.world.blame = None
            self._failure = lambda: None
            self._watch.stop()
            self._watch = None

    def _blame(self, error: BaseException) -> PeerError | None:
        """Who is the cause of an error; None if it does not come from a collective."""
        if self._watch is None or not is_collective_error(error):
            return None
        blamed = self._watch.blame(error)
        if blamed is not None:
            self._watch.fail(blamed)
        return blamed

    def _compare(self, learner: Learner) -> None:
        """Raise for processes that are set up in another way."""
        data = self._data
        self._data = {}
        odd = self.world.odd({**_setup(learner), **data})
        if odd is None:
            return
        rank, theirs, first = odd
        part = next(part for part in {**first, **theirs} if first.get(part) != theirs.get(part))
        there = theirs.get(part, "nothing")
        here = first.get(part, "nothing")
        raise WorldError(
            f"rank {rank} is not set up as rank 0: its {part} differs ({there} there, {here} "
            f"on rank 0). Run the same script with the same arguments in every process"
        )

    def _refuse_lazy(self, what: str, model: nn.Module) -> None:
        """Check that the shapes of a model are known before a first batch.

        Raises:
            PluginError: It has lazy parameters.
        """
        lazy = [path for path, tensor in _named_tensors(model) if is_lazy(tensor)]
        if lazy:
            raise PluginError(
                f"{type(self).__name__}: {lazy[0]!r} of {what} is lazy, so it cannot be sent yet: run a "
                f"batch through the model before Learner(...), with torch.no_grad(): model(inputs)"
            )

    def _compare_models(self, what: str, model: nn.Module) -> None:
        """Raise for different models before anything of them is sent, where PyTorch would fail without saying why."""
        self._refuse_lazy(what, model)
        odd = self.world.odd([_kind(path, tensor) for path, tensor in _named_tensors(model)])
        if odd is None:
            return
        rank, theirs, first = odd
        here = f"{len(first)} tensors"
        there = f"{len(theirs)} tensors"
        for one, other in zip(first, theirs, strict=False):
            if one != other:
                here = one
                there = other
                break
        raise WorldError(
            f"{what} of rank {rank} differs from rank 0: {there} there, {here} on rank 0. Build the "
            f"same model in every process"
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _kind(path: str, tensor: Tensor) -> tuple[str, tuple[int, ...], str, bool]:
    """All of a tensor that must be the same in all processes, but its values."""
    return path, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def _described(optimizer: torch.optim.Optimizer) -> tuple[str, list[dict[str, Any]]]:
    """The class and the groups of an optimizer, with the number of parameters instead of them."""
    groups = [
        {key: len(value) if key == "params" else repr(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return type(optimizer).__qualname__, groups


def _options(plugins: Mapping[str, Any]) -> dict[str, str]:
    """The options of plugins that must be the same in all processes."""
    found = {}
    for name, plugin in plugins.items():
        per_process = getattr(plugin, "per_process", ())
        for option, value in options_of(plugin).items():
            if option not in per_process:
                found[f"option {option} of plugin {name!r}"] = fact(value)
    return found


def _setup(learner: Learner) -> dict[str, str]:
    """The setup that must be the same in all processes before the first step, part by part."""
    plugins = {name: unwrapped(plugin) for name, plugin in learner.plugins.items() if has_a_say(plugin)}
    classes = [f"{name} ({type(each).__module__}.{type(each).__qualname__})" for name, each in plugins.items()]
    order = [[name for name in chain if name in plugins] for chain in learner.options.order]
    models = {name: structure(model).hash for name, model in learner.models.items()}
    trained = {}
    for name, model in learner.models.with_extras().items():
        trained[name] = [p.requires_grad for p in model.parameters()]
    optimizers = {name: _described(optimizer) for name, optimizer in learner.optimizers.items()}
    losses = "sums" if is_sum(learner.loss_fn) else "means"
    progress = learner.progress
    fit = learner.current
    return {
        "list of plugins": ", ".join(classes),
        **_options(plugins),
        "order of plugins": fact([chain for chain in order if len(chain) > 1]),
        "model": str(models),
        "choice of trained parameters": hashed(trained),
        "optimizer": str(optimizers),
        "loss": fact(learner.loss_fn),
        **{f"phase {name!r}": fact(phase) for name, phase in learner.phases.items()},
        "accumulation": f"{learner.accumulate} steps, {losses}",
        "progress": f"{progress.epochs} epochs, {progress.steps} steps",  # each has samples of its own
        "limit of the fit": "" if fit is None else fact(fit.limits.saved()),
    }
