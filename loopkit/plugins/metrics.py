"""Metrics of each epoch, accumulated on the device and read once, at its end."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base.batches import describe, map_tensors
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.raw import plain
from loopkit.base.words import STATE, half_a_state
from loopkit.errors import PluginError, WorldError
from loopkit.hooks import hookimpl
from loopkit.logs.kinds import Table
from loopkit.losses import is_sum
from loopkit.metrics import FunctionMetric, Loss, Mean, Metric, MetricLike
from loopkit.plugins.late import read
from loopkit.plugins.merging import accumulated, apart, can_merge, merge, packed, to_host, ungrouped, unpacked

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


@dataclass
class _Running:
    """The metrics of an epoch that is running."""

    metrics: dict[str, Any]
    means: list[tuple[str, Mean]] = field(init=False)
    """Metrics of an attribute of the step."""
    own: list[tuple[str, Any]] = field(init=False)
    """Metrics of `loopkit.metrics` over outputs and targets, which keep no graph."""
    others: list[tuple[str, Any]] = field(init=False)
    fed: bool = False
    """Outputs and targets were taken in."""
    placed: bool = False
    """Whether loaded states and modules are on the device."""
    told: bool = False
    """Whether it has warned about metrics without a state."""

    def __post_init__(self) -> None:
        items = self.metrics.items()
        self.means = [(name, metric) for name, metric in items if isinstance(metric, Mean)]
        rest = [(name, metric) for name, metric in items if not isinstance(metric, Mean)]
        self.own = [(name, metric) for name, metric in rest if _needs_no_care(metric)]
        self.others = [(name, metric) for name, metric in rest if not _needs_no_care(metric)]

    def begin(self, saved: Any, sums: bool) -> None:
        """Start empty, or from the result of `state_dict`; ``sums``: the losses are sums."""
        self.fed = self.placed = False
        for _, mean in self.means:
            mean.sums = sums and isinstance(mean, Loss)
        for metric in self.metrics.values():
            metric.reset()
        if not isinstance(saved, dict):  # it is new, or another plugin in this one's place has kept something
            return
        self.fed = saved["fed"]
        self._tell_of_rest()
        states = saved["metrics"]
        for name in states.keys() & self.metrics.keys():
            metric = self.metrics[name]
            with _named(name):
                if hasattr(metric, "load_state_dict"):
                    metric.load_state_dict(states[name])
                else:
                    metric.merge([states[name]])

    def compute(self) -> dict[str, Any]:
        """The numbers and tables of the metrics that have taken something in, by name."""
        values: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            is_empty = metric.is_empty if isinstance(metric, Metric) else not self.fed
            if is_empty:
                continue
            with _named(name):
                value = metric.compute()
            values.update(_parted(name, value, getattr(metric, "labels", None)))
        return values

    def state_dict(self) -> dict[str, Any]:
        """The states of the metrics; metrics without ``state_dict`` are left out, with one warning."""
        self._tell_of_rest()
        states = {}
        for name, metric in self.metrics.items():
            if hasattr(metric, "state_dict"):
                states[name] = map_tensors(dict(metric.state_dict()), plain)
        return {"fed": self.fed, "metrics": states}

    def _tell_of_rest(self) -> None:
        """Warn of metrics that resume without their batches."""
        if not self.fed or self.told:
            return
        lacking = [f"{name!r} ({type(m).__name__})" for name, m in self.metrics.items() if not hasattr(m, "state_dict")]
        if lacking:
            self.told = True
            warn(
                f"metric {', '.join(lacking)} has no state_dict, and no checkpoint holds its values: in a "
                f"resumed epoch it covers only the rest. Give it state_dict and load_state_dict"
            )


class Metrics(Shown):
    """Accumulate metrics over each epoch of each phase; at its end put them into ``learner.metrics``.

    Args:
        metrics: Functions ``(outputs, targets) -> scalar or (batch,)``, or objects with
            ``update(outputs, targets)``, ``compute()`` and ``reset()``, torchmetrics objects included. Each phase
            has its own copy. The mean loss is always there as ``"loss"``.
        phase: The name of the one phase whose metrics these are. The plugin is then called ``"metrics_<phase>"`` and
            stands beside the ``Metrics`` of all phases, which has the loss.
        named: The same, under your own name.

    A metric is a number, ``"val/f1"``; or several: a vector is ``"val/f1/0"``, ``"val/f1/1"``, ... or has the names
    that the metric's ``labels`` list, a mapping has its own; or a matrix, which is logged as a `loopkit.logs.Table`, is
    in `tables`, and in no row; so is a table. Other values raise when the first epoch begins, if the
    metric has a value by then, else after its first step.

    A phase that does not put ``outputs`` and ``targets`` (or ``loss``) on its steps is left without the metrics that
    need them. An average counts each step with ``step.weight``, which is its number of samples unless the phase sets
    it, for example to a number of tokens.

    Where several processes train together, each accumulates its own batches. Their states are merged at the end of the
    epoch, by rank and in one exchange, so that all have the same values: of all batches, exactly for counts, and
    up to the order of the sums for means. Your own metric then needs ``merge``, as in `loopkit.metrics.Metric`.

    Raises:
        PluginError: Two metrics have one name, or something is no metric; when an epoch begins, no phase is called
            ``phase``, or there are several processes and no way to merge a metric.

    Example::

        Metrics(Accuracy(), F1(average="macro"), mae=lambda outputs, targets: (outputs - targets).abs())
    """

    name = "metrics"
    provides = "metrics"
    volatile = ("_*", "tables")

    def __init__(self, *metrics: Any, phase: str | None = None, **named: Any) -> None:
        given = [self._checked(metric, None) for metric in metrics]
        given += [self._checked(metric, name) for name, metric in named.items()]
        self._metrics = metrics
        self._named = named
        self.phase = phase
        self.tables: dict[str, Table] = {}
        """The last matrix of each metric that is one, as ``"val/confusion_matrix"``."""
        self.prototypes: dict[str, Any] = {"loss": Loss()} if phase is None else {}
        """The metrics by name; each phase has copies of them."""
        if phase is not None:
            self.name = f"metrics_{phase}"
            self.provides = ""
        self._tried: set[str] = set()
        """The phases whose metrics have shown that they can be logged."""
        for i, (name, metric) in enumerate(given):
            if name in (other for other, _ in given[:i]):
                raise PluginError(f"Metrics: two metrics are called {name!r}; name one: Metrics(other_{name}=...)")
            self.prototypes[name] = metric
        self._attributes = {each.attribute for each in self.prototypes.values() if isinstance(each, Mean)}
        """The step's attributes that it reads beside outputs and targets."""
        self._idle: dict[str, _Running] = {}
        """The running metrics of each phase's last epoch, for its next one."""
        self._open: dict[str, _Running] = {}
        """By phase: the metrics of its open epoch that began last."""

    @staticmethod
    def _checked(metric: Any, name: str | None) -> tuple[str, Any]:
        if isinstance(metric, type):
            raise PluginError(f"Metrics: {metric.__name__} is a class; give an instance, {metric.__name__}()")
        if isinstance(metric, (Mean, MetricLike)):
            methods = [each for each in STATE if callable(getattr(metric, each, None))]
            half = half_a_state(methods)
            if isinstance(metric, Metric) and type(metric).state_dict is Metric.state_dict:
                metric.state_dict()  # raises where the class's __init__ does not call that of Metric
            if half and not hasattr(metric, "merge"):  # which takes the place of load_state_dict
                raise PluginError(f"Metrics: {metric!r} {half}")
            name = name or getattr(metric, "name", None)
            if not isinstance(name, str):
                name = type(metric).__name__.lower()
            return name, metric
        if not callable(metric):
            given = f"{name}={metric!r}" if name else repr(metric)
            hint = "; an argument's name names a metric, Metrics(top5=TopK(5))" if name else "; Accuracy() is one"
            raise PluginError(f"Metrics({given}): it is neither a function nor has it update, compute and reset{hint}")
        metric = FunctionMetric(metric, name)
        if metric.name == "<lambda>":
            raise PluginError("Metrics: a lambda has no name; give it one, Metrics(mae=lambda outputs, targets: ...)")
        return metric.name, metric

    def names(self) -> tuple[str, ...]:
        """The names that it puts into ``learner.metrics``, with ``*`` for the phase."""
        found: list[str] = []
        for name, metric in self.prototypes.items():
            if hasattr(metric, "keys"):
                found += metric.keys()
                continue
            found.append(name)
            if not isinstance(metric, Metric) or metric.several:
                found.append(f"{name}/*")
        return tuple(f"metrics.{self.phase or '*'}/{name}" for name in found)

    def higher_is_better(self, metric: str) -> bool | None:
        """Whether higher values of a metric, such as ``"val/f1"``, are better; None if it is unknown."""
        phase, _, key = metric.partition("/")
        if self.phase not in (None, phase):
            return None
        parts: dict[str, Any] = {}
        for name, each in self.prototypes.items():
            if hasattr(each, "items"):
                parts.update(each.items())
            else:
                parts[name] = each
        found = parts.get(key)
        if found is None:  # one value of several
            found = parts.get(key.partition("/")[0])
        return getattr(found, "higher_is_better", None)

    @hookimpl
    def epoch_begin(self, learner: Learner, epoch: Epoch) -> None:
        """Start empty, or resume from the saved state."""
        if self.phase not in (None, *learner.phases):
            known = ", ".join(learner.phases)
            raise PluginError(f"Metrics: no phase is called {self.phase!r}; they are {known}")
        if not self._tried:
            self._try_all()
        now = self._begin(learner, epoch)
        if learner.world.size > 1:
            for name, metric in now.metrics.items():
                if not can_merge(metric):
                    raise PluginError(_unmergeable(name, metric, learner.world.size))

    def _try_all(self) -> None:
        """Raise for values of your own metrics that cannot be logged."""
        for name, metric in self.prototypes.items():
            if not _needs_no_care(metric) and not isinstance(metric, (Mean, FunctionMetric)):
                _try(name, metric)

    def _begin(self, learner: Learner, epoch: Epoch) -> _Running:
        now = self._idle.pop(epoch.name, None)
        if now is None:
            given = self.prototypes if self.phase in (None, epoch.name) else {}
            now = _Running({name: _copied(metric) for name, metric in given.items()})
        store = epoch.store(self)
        now.begin(store.get("so_far"), is_sum(learner.loss_fn))
        keep = epoch.keep(self)
        store["so_far"] = keep["now"] = now
        keep["around"] = self._open.get(epoch.name)
        self._open[epoch.name] = now
        return now

    def traced_metrics(self, learner: Learner, epoch: Epoch) -> list[Metric] | None:
        """The metrics of an epoch, which a recorded ``step_end`` feeds; None if one of them has to be called."""
        now = epoch.keep(self).get("now") or self._begin(learner, epoch)
        metrics = list(now.metrics.values())
        own = all(isinstance(metric, Metric) and type(metric).tensors is not Metric.tensors for metric in metrics)
        return metrics if own else None

    @hookimpl(reads=("loss", "outputs", "targets", "step"), traced=())
    def step_end(self, learner: Learner, step: Step) -> None:
        """Take in one step."""
        name = ""
        made = vars(step)  # to ask the step for what it has not costs 3 us
        if not made["samples"] or (made.get("targets") is None and self._attributes.isdisjoint(made)):
            return  # an empty batch has no mean, and a prediction no targets
        now = step.epoch.keep(self).get("now") or self._begin(learner, step.epoch)
        try:
            if not now.placed:
                _place(now.metrics, made.get("outputs"), made.get("loss"))
                now.placed = True
            for name, mean in now.means:  # noqa: B007 - the error names it
                if (value := made.get(mean.attribute)) is not None:
                    mean.add(value, step.weight)
        except Exception as error:
            _note(error, name, made)
            raise
        if now.others or now.own:
            self._feed(now, step, made)

    def _feed(self, now: _Running, step: Step, made: Mapping[str, Any]) -> None:
        """Give outputs and targets to the metrics that take both."""
        outputs = made.get("outputs")
        targets = made.get("targets")
        if outputs is None or targets is None:
            return
        now.fed = True
        name = ""
        try:
            for name, metric in now.own:  # noqa: B007 - the error names it
                metric.update(outputs, targets)
            if now.others:
                # without their graph, which a metric that keeps all outputs would keep alive
                outputs, targets = (map_tensors(each, Tensor.detach) for each in (outputs, targets))
                with torch.no_grad():
                    for name, metric in now.others:
                        self._feed_other(name, metric, (outputs, targets), step)
                self._tried.add(step.epoch.name)
        except Exception as error:
            _note(error, name, made)
            raise

    def _feed_other(self, name: str, metric: Any, pair: tuple[Any, Any], step: Step) -> None:
        if isinstance(metric, FunctionMetric):
            metric.update(*pair, step.weight)
            return
        metric.update(*pair)
        if step.epoch.name not in self._tried:
            _try(name, metric, fed=True)

    @hookimpl(writes=lambda plugin: plugin.names())
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Read the values of this epoch."""
        now = epoch.keep(self).get("now") or self._begin(learner, epoch)
        if learner.world.size > 1 and now.metrics:
            self._merge(learner, phase, now)
        prefix = f"{phase.name}/"
        values = now.compute()
        for name in [name for name, value in values.items() if isinstance(value, Table)]:
            table = values.pop(name)
            self.tables[f"{prefix}{name}"] = table
            learner.log(f"{prefix}{name}", table)
        learner.metrics.update({f"{prefix}{name}": value for name, value in read(values).items()})
        self._idle[phase.name] = now
        around = epoch.keep(self)["around"]
        if around is None:
            self._open.pop(phase.name, None)
        else:  # a hook ran the phase inside itself
            self._open[phase.name] = around

    def _merge(self, learner: Learner, phase: Phase, now: _Running) -> None:
        """Hold what all processes have accumulated, in each of them."""
        mine: dict[str, Any] = {"phase": phase.name, "fed": now.fed, "metrics": {}}
        for name, metric in now.metrics.items():
            with _named(name):
                mine["metrics"][name] = accumulated(metric)
        states = [unpacked(state) for state in learner.world.gather(packed(mine))]
        for rank, state in enumerate(states):
            if (state["phase"], state["metrics"].keys()) != (phase.name, now.metrics.keys()):
                raise WorldError(
                    f"rank {learner.world.rank} ends an epoch of phase {phase.name!r} with the metrics "
                    f"{', '.join(now.metrics)}; rank {rank} one of {state['phase']!r} with "
                    f"{', '.join(state['metrics'])}: they cannot be merged. Run the same epochs, with the same "
                    f"metrics, in all processes"
                )
        now.fed = any(state["fed"] for state in states)
        for name, metric in now.metrics.items():
            if now.fed or isinstance(metric, Metric):
                with _named(name):
                    merge(metric, [state["metrics"][name] for state in states])

    def peek(self, phase: str) -> dict[str, Tensor | float]:
        """Return the values so far of a phase's open epoch, in this process, unread: they may be on their way.

        Args:
            phase: The phase's name. Without an open epoch of it there are no values.
        """
        now = self._open.get(phase)
        if now is None:
            return {}
        values = {}
        for name, metric in now.metrics.items():
            if isinstance(metric, Metric) and not metric.is_empty:
                value = metric.compute()
                if _is_number(value):
                    values[name] = value
        return values

    def reshard_store(self, stores: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The store from which one of ``size`` processes resumes, made of another number of processes' stores.

        Rank 0 resumes from all of them merged, the others from empty metrics. Merged at the end of the epoch, they
        make the whole.

        Args:
            stores: The stores that each process saved for the epoch, by rank.
            rank: The process that it is for.
            size: How many there are now.

        Raises:
            PluginError: A metric cannot be merged.
        """
        saved = [to_host(store["so_far"]) for store in stores if store]
        if not saved:
            return {}
        parts = saved if rank == 0 else []
        fed = any(part["fed"] for part in parts)
        metrics = {}
        for name in saved[0]["metrics"]:
            if name in self.prototypes:
                states = [part["metrics"][name] for part in parts]
                metrics[name] = self._together(name, states)
        return {"so_far": {"fed": fed, "metrics": metrics}}

    def _together(self, name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of a metric that holds what these hold; an empty one if there are none."""
        if len(parts) == 1:
            return parts[0]
        metric = _copied(self.prototypes[name])
        metric.reset()
        if parts:
            if not can_merge(metric):
                raise PluginError(_unmergeable(name, metric, len(parts)))
            with _named(name):
                merge(metric, parts, goes_on=True)
        return dict(metric.state_dict())


def _unmergeable(name: str, metric: Any, processes: int) -> str:
    return (
        f"metric {name!r} ({type(metric).__name__}) cannot be merged, and each of {processes} processes sees a part of "
        f"the batches: give it state_dict() and merge(states), which makes it hold what all the processes' states hold"
    )


@contextmanager
def _named(metric: str) -> Iterator[None]:
    """Note on an error which metric raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"metric {metric!r} raised this")
        raise


def _parted(name: str, value: Any, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """The numbers of a metric, by name, and its matrices as tables."""
    if _is_number(value) or isinstance(value, Table):
        return {name: value}
    if isinstance(value, Mapping):
        parted: dict[str, Any] = {}
        for each, inner in value.items():
            parted.update(_parted(each, inner, labels))
        return parted
    if not _is_array(value):
        raise PluginError(
            f"metric {name!r} is {describe(value)}: a metric is a number, a vector or mapping of numbers, or a matrix"
        )
    names = _labels(name, value.shape[-1], labels)
    if value.ndim == 1:
        return {f"{name}/{label}": part for label, part in zip(names, value.unbind(), strict=True)}
    return {name: _table(value, names)}


def _is_array(value: Any) -> bool:
    """Whether it is a vector or matrix of real numbers that is not empty."""
    return isinstance(value, Tensor) and value.ndim in (1, 2) and value.numel() > 0 and not value.is_complex()


def _labels(metric: str, count: int, given: Sequence[str] | None) -> list[str]:
    """The labels of a vector, or of a matrix's columns; by default their numbers."""
    if given is None:
        return [str(i) for i in range(count)]
    labels = [*given]
    if len(labels) != count:
        raise PluginError(f"metric {metric!r} has {count} values, and {len(labels)} labels: give one for each")
    return labels


def _table(matrix: Tensor, names: list[str]) -> Table:
    """A matrix with its columns' names, which are also the rows' if there are as many."""
    rows = matrix.tolist()  # host sync: a table is read at the epoch's end
    sides = names
    if len(rows) != len(names):
        sides = [str(i) for i in range(len(rows))]
    named_rows = [[side, *row] for side, row in zip(sides, rows, strict=True)]
    return Table(["", *names], named_rows)


def _try(name: str, metric: Any, fed: bool = False) -> None:
    """Raise for a value that cannot be logged before the epoch's end: of one step, or of none if that is enough."""
    try:
        tried = copy.deepcopy(metric)
    except Exception:
        return  # it holds what cannot be copied; the epoch's end looks at its value
    apart(tried)
    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
            value = tried.compute()
    except Exception:
        return  # it needs more than that
    if fed:
        _parted(name, value, getattr(metric, "labels", None))
    elif not _is_blank(value):
        _parted(name, value)


def _is_blank(value: Any) -> bool:
    """Whether a value is still undefined, before any batch."""
    if isinstance(value, Mapping):
        return not value or any(map(_is_blank, value.values()))
    return value is None or (isinstance(value, Tensor) and not value.numel())


def _copied(metric: Any) -> Any:
    metric = ungrouped(copy.deepcopy(metric))
    parts: list[Any] = [metric]
    if isinstance(metric, torch.nn.Module):
        parts = list(metric.modules())
    for each in parts:
        if callable(getattr(each, "persistent", None)):
            each.persistent(True)  # else the state_dict of a torchmetrics object is empty
    return metric


def _needs_no_care(metric: Any) -> bool:
    return type(metric).__module__ == Metric.__module__ and not isinstance(metric, FunctionMetric)


def _place(metrics: dict[str, Any], outputs: Any, loss: Any) -> None:
    """Move the metrics that can be moved to where the outputs are."""
    like = outputs if isinstance(outputs, Tensor) else loss
    if isinstance(like, Tensor):
        for metric in metrics.values():
            if callable(getattr(metric, "to", None)):
                metric.to(like.device)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _note(error: Exception, name: str, made: Mapping[str, Any]) -> None:
    """Say which metric raised an error, and for which values."""
    who = f"metric {name!r}" if name else "the metrics"
    outputs = describe(made.get("outputs"))
    targets = describe(made.get("targets"))
    error.add_note(f"{who} raised this; outputs: {outputs}, targets: {targets}")
