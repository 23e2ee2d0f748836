"""Averages of the parameters over the updates, which take their place in epochs that do not train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from loopkit.base import checks, sharded
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import is_count, nearest, some
from loopkit.errors import EmptyDataError, PluginError
from loopkit.hooks import hookimpl
from loopkit.phases import PredictionPhase

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult


class WeightAverage(Shown):
    """Average the parameters over updates; validations use the average.

    Predictions use it, too. After an applied update of an optimizer that owns a parameter of a model, the whole model
    is averaged, by one foreach call for each device and dtype. The average is bitwise equal to torch's
    ``AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))``, or with ``decay=None`` of
    ``multi_avg_fn=get_swa_multi_avg_fn()``, from ``torch.optim.swa_utils``. ``AveragedModel(model)`` without it
    computes otherwise on the CPU, and differs by rounding. A skipped update does not move the average. With two
    optimizers over one model each of their updates counts.

    Args:
        decay: Exponential: ``average = decay * average + (1 - decay) * parameters``, from 0 to below 1. None: the equal
            average of all (stochastic weight averaging).
        warmup: Use ``min(decay, (1 + n) / (10 + n))`` after n averaged updates, so that the early average follows the
            parameters closely.
        start_update: Updates of the model before averaging starts.
        start_epoch: Training epochs before averaging starts, counted by ``learner.progress.epochs``.
        every: Average after every so many updates, or ``"epoch"``: at the end of each training epoch with an update.
        use_buffers: Average the floating buffers too, and keep copies of the others (counts). Without it the model's
            own buffers are used.
        update_bn: Data (or a function that returns it) with which the running statistics of batch norm are estimated
            again for the averaged parameters; usually the training data. With several models, a mapping from their
            names to such data.
        phases: Names of the phases in whose epochs the average stands in the place of the parameters; all that do not
            train by default. With ``()`` it does so only inside `averaged`, and in ``learner.evaluate(weights=...)``.
            Two averages need different ones.
        name: The plugin's name.

    The first average is a copy of the parameters; until then there is none, and epochs use the parameters themselves.

    In epochs of phases that do not train, the average is in the place of the parameters: each parameter keeps its
    identity, so optimizers do not notice, without a copy (of sharded ones, each process's part is copied). On leaving,
    whatever was raised, the parameters are back bitwise. A training phase inside such an epoch trains the
    parameters, not the average. Recorded addresses of parameters (CUDA graphs) are not valid during such an epoch.

    ``update_bn`` costs one forward pass over its data, in train mode, before the first use after the average has moved;
    a model without batch norm has no cost. It equals ``torch.optim.swa_utils.update_bn``, and leaves torch's random
    generators as they were; a loader that keeps its own count of epochs advances by one, so give it a separate one. The
    batches go through ``move_batch`` and the prediction phase's ``unpack`` and ``forward``, but not through contexts of
    plugins such as autocast. Under several processes each estimates from its own data.

    When the parameters were changed after a fit by anything else than an update, such as restoring the best ones, the
    average no longer belongs to them: the next epoch or fit drops it and starts again.

    Memory: one copy of the parameters, in their dtype; under float16 or bfloat16 a slow average is rounded away.

    Raises:
        PluginError: An option is out of range; the model's parameters are not the averaged ones.
        EmptyDataError: ``update_bn`` holds no batch.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); Izmailov et al.,
    "Averaging Weights Leads to Wider Optima and Better Generalization" (2018), algorithm 1; the warm-up is the one of
    TensorFlow's ``ExponentialMovingAverage(num_updates=...)``.

    Example::

        WeightAverage(0.999, warmup=True)
        WeightAverage(None, start_epoch=75, every="epoch", update_bn=train)
    """

    provides = "average"

    def __init__(
        self,
        decay: float | None = 0.999,
        *,
        warmup: bool = False,
        start_update: int = 0,
        start_epoch: int = 0,
        every: int | Literal["epoch"] = 1,
        use_buffers: bool = False,
        update_bn: Any = None,
        phases: Sequence[str] | None = None,
        name: str = "weight_average",
    ) -> None:
        _check_decay(decay, warmup)
        checks.whole("WeightAverage", 0, start_update=start_update, start_epoch=start_epoch)
        if every != "epoch" and not is_count(every):
            raise PluginError(f"WeightAverage: every is {every!r}: it is a number of updates, from 1, or 'epoch'")
        if isinstance(phases, str):
            raise PluginError(f"WeightAverage: phases is {phases!r}: give a list of names, phases=[{phases!r}]")
        if isinstance(update_bn, (bool, int, str, bytes, Tensor)):
            raise PluginError(
                f"WeightAverage: update_bn is {update_bn!r:.60}: it is an iterable of batches, or a function returning "
                f"one, such as the training data"
            )
        self.name = name
        self.decay = decay
        self.warmup = warmup
        self.start_update = start_update
        self.start_epoch = start_epoch
        self.every = every
        self.use_buffers = use_buffers
        self.update_bn = update_bn
        self.phases = None if phases is None else tuple(phases)
        self._models: dict[str, _Average] = {}
        self._owners: dict[str, list[str]] = {}
        """The models that an optimizer updates; of the epoch that runs."""
        self._placed: list[tuple[Tensor, Tensor]] | None = None
        """The exchanged tensors, while the average is in place."""
        self._move_batch: Callable[[Any, int], Any] | None = None
        self._versions: dict[str, list[int]] | None = None
        """The versions of the parameters when the last fit ended, until the next update."""

    def changed(self) -> tuple[str, ...]:
        """The states that it exchanges for an epoch."""
        if self.phases == ():
            return ()
        if self.update_bn is not None or self.use_buffers:
            return ("params", "buffers")
        return ("params",)

    def read(self) -> tuple[str, ...]:
        """The states that it averages."""
        return ("params", "buffers") if self.use_buffers else ("params",)

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Drop an average that no longer belongs to the parameters."""
        self._check(learner)
        self._versions = None

    @hookimpl
    def epoch_begin(self, learner: Learner) -> None:
        """Look up anew which parameters there are, and whose; drop an average that no longer belongs to them."""
        self._check(learner)
        self._owners = {}
        for average in self._models.values():
            average.forget()

    @hookimpl(reads=read)
    def update_end(self, learner: Learner, step: Step) -> None:
        """Average after an update."""
        self._versions = None
        for name in self._updated(learner, step):
            average = self._models.setdefault(name, _Average(name))
            average.updates += 1
            average.fresh = True
            count = average.updates - self.start_update
            if self.every != "epoch" and count > 0 and count % self.every == 0:
                self._average(learner, average)

    @hookimpl(reads=read)
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Average after an epoch."""
        if self.every != "epoch" or not phase.training:
            return
        for average in self._models.values():
            if average.fresh and average.updates > self.start_update:
                self._average(learner, average)

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Remember which parameters the average belongs to."""
        self._versions = _versions(learner)

    @hookimpl(updates=changed)
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> AbstractContextManager[None] | None:
        """The average, in an epoch that does not train."""
        self._move_batch = epoch.plan.move_batch
        serves = self.phases is None or phase.name in self.phases
        if phase.training or learner.models.weights.by or not serves:
            return None  # what stands in the weights' place was put there on purpose
        return self.averaged(learner)

    def owns(self) -> tuple[str, ...]:
        """The place of the weights, in the phases in which the average stands there."""
        if self.phases is None:
            return ("weights",)
        return tuple(f"weights.{phase}" for phase in self.phases)

    @property
    def in_place(self) -> bool:
        """Whether the average is in the place of the parameters now."""
        return self._placed is not None

    def averaged(self, learner: Learner) -> AbstractContextManager[None]:
        """Inside, the averaged parameters stand in the place of the models' own.

        Example::

            with learner.plugins["weight_average"].averaged(learner):
                torch.onnx.export(learner.model, ...)
        """
        if self.in_place:
            return nullcontext()
        return learner.models.weights.replaced(partial(self._place, learner), self._put_away, by=self.name)

    def model_state(self, learner: Learner, name: str | None = None) -> dict[str, Tensor]:
        """A copy of a model's ``state_dict`` with the average in it, for ``load_state_dict``.

        Args:
            learner: The learner.
            name: The model's name, if there are several.
        """
        if name is None and len(learner.models) > 1:
            raise PluginError(f"plugin {self.name!r}: choose a model's state:  {', '.join(learner.models)}")
        name = next(iter(learner.models)) if name is None else name
        if name not in learner.models:
            known = ", ".join(learner.models)
            raise PluginError(f"no model is called {name!r}{nearest(name, learner.models)}; there are: {known}")
        with self.averaged(learner):
            state = sharded.weights(learner.models[name])
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    def apply(self, learner: Learner) -> None:
        """Copy the average into the parameters (and buffers), for good; their old values are lost."""
        if self.in_place:
            raise PluginError(
                f"plugin {self.name!r}: apply in an epoch that has the average in place; call it after it"
            )
        self._check(learner)
        self._estimate_bn(learner)
        models = learner.models.with_extras()
        with torch.no_grad():
            for name, average in self._models.items():
                if not average.count:
                    continue
                for live, averaged in average.look_up(models[name], self.use_buffers):
                    live.copy_(averaged)

    def _average(self, learner: Learner, average: _Average) -> None:
        if learner.progress.epochs < self.start_epoch:
            return
        average.fresh = False
        n = average.count
        if self.decay is None:
            function = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        else:
            decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
            function = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average.move(learner.models.with_extras()[average.name], self.use_buffers, function)

    def _updated(self, learner: Learner, step: Step) -> list[str]:
        """The names of the models that own one of the optimizer's parameters."""
        names = self._owners.get(step.optimizer_name)
        if names is None:
            ids = {id(p) for p in step.params}
            names = []
            for name, model in learner.models.with_extras().items():
                if any(id(p) in ids for p in model.parameters()):
                    names.append(name)
            self._owners[step.optimizer_name] = names
        return names

    def _check(self, learner: Learner) -> None:
        """Drop the average if the parameters were changed since the fit ended."""
        if self._versions is not None and self._versions != _versions(learner):
            self._models = {}
            self._versions = None

    def _place(self, learner: Learner) -> None:
        """Put the average in place."""
        self._check(learner)
        self._estimate_bn(learner)
        models = learner.models.with_extras()
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for name, average in self._models.items():
            if not average.count:
                continue
            for live, averaged in average.look_up(models[name], self.use_buffers):
                pairs.setdefault(id(live), (live, averaged))  # once, if two models share it
        self._placed = list(pairs.values())
        sharded.exchange(self._placed)

    def _put_away(self) -> None:
        """Put the parameters back."""
        if self._placed is not None:
            placed = self._placed
            self._placed = None
            sharded.exchange(placed)

    @torch.no_grad()
    def _estimate_bn(self, learner: Learner) -> None:
        """Estimate batch-norm statistics of the averaged parameters, where that was not done since they moved."""
        for name, average in self._models.items():
            if not average.count or average.bn_count == average.count:
                continue
            if name not in learner.models:  # a loss or phase, through which no data goes
                continue
            data = self.update_bn
            if isinstance(data, Mapping):
                data = data.get(name)
            if data is not None:
                self._estimate_bn_of(learner, average, name, data)

    def _estimate_bn_of(self, learner: Learner, average: _Average, name: str, data: Any) -> None:
        model = learner.models[name]
        norms = {m: m.momentum for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
        if not norms:
            return
        average.bn = {}
        own: list[Tensor] = []
        for norm in norms:
            statistics = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
            own += [buffer for buffer in statistics if buffer is not None]
        estimated = [buffer.clone() for buffer in own]
        ids = {id(buffer) for buffer in own}
        pairs = [pair for pair in average.look_up(model, self.use_buffers) if id(pair[0]) not in ids]
        pairs += zip(own, estimated, strict=True)
        seeds = torch.random.fork_rng(devices=_devices(model), device_type=_device_type(model))
        with learner.models.in_train_mode(model), seeds:
            sharded.exchange(pairs)
            try:
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None
                self._forward(learner, name, data)
            finally:
                sharded.exchange(pairs)
                for norm, momentum in norms.items():
                    norm.momentum = momentum
        names = {id(buffer): key for key, buffer in model.named_buffers()}
        average.bn = {names[id(b)]: new for b, new in zip(own, estimated, strict=True)}
        average.bn_count = average.count

    def _forward(self, learner: Learner, name: str, data: Any) -> None:
        """Send the data through a model."""
        given = type(data).__name__
        move = self._move_batch
        phase: Any = learner.phases.get("predict")
        if not isinstance(phase, PredictionPhase):
            phase = PredictionPhase()
        if callable(data) and not hasattr(data, "__iter__"):
            data = data()
        count = 0
        for batch in data:
            moved = batch if move is None else move(batch, count)
            inputs = phase.unpack(moved)[0]
            if isinstance(learner.model, Mapping):
                learner.models[name](inputs)
            else:
                phase.forward(learner, inputs)
            count += 1
        if not count:
            raise EmptyDataError(
                f"plugin {self.name!r}: update_bn gave no batch for model {name!r} ({given}): give "
                f"something that can be iterated again, or a function that returns a new iterator"
            )

    def state_dict(self) -> dict[str, Any]:
        """The averages by model and name of the parameter, and their counts."""
        swapped = {id(averaged): live for live, averaged in self._placed or ()}
        return {name: average.state_dict(swapped) for name, average in self._models.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        if self.in_place:
            raise PluginError(f"plugin {self.name!r}: load_state_dict in an epoch that has the average in place")
        self._models = {name: _Average.of(name, values) for name, values in state.items()}
        self._owners = {}
        self._versions = None


def _check_decay(decay: float | None, warmup: bool) -> None:
    if decay is None:
        if warmup:
            raise PluginError("WeightAverage: warmup=True is for an exponential average; decay is None")
        return
    is_number = isinstance(decay, Real) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay < 1:
        raise PluginError(f"WeightAverage: decay is {decay!r}: it is from 0 to below 1, or None: all count equally")


class _Average:
    """The average of one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.updates = 0
        """The updates of the model since the plugin saw the first one."""
        self.count = 0
        """How many are in the average."""
        self.fresh = False
        """Whether there was an update since the last average."""
        self.tensors: dict[str, Tensor] = {}
        """Averaged parameters and buffers by name; while they are in place, the replaced tensors."""
        self.left: list[str] = []
        """Names of tensors that cannot be averaged, such as quantized weights: their class has no such arithmetic."""
        self.bn: dict[str, Tensor] = {}
        """Batch-norm statistics that go with them."""
        self.bn_count = 0
        """The count for which they were estimated."""
        self._pairs: list[tuple[Tensor, Tensor]] | None = None

    def forget(self) -> None:
        """Look the model's tensors up anew at the next use."""
        self._pairs = None

    def pairs(self, model: nn.Module, use_buffers: bool) -> list[tuple[Tensor, Tensor]]:
        """Each averaged tensor after the one of the model that it stands for; remembered, but for buffers."""
        if self._pairs is None or use_buffers:
            live = self._averaged(model, use_buffers)
            if live.keys() != self.tensors.keys():
                odd = [repr(key) for key in sorted(live.keys() ^ self.tensors.keys())]
                raise PluginError(
                    f"the average of model {self.name!r} and the model differ in {', '.join(odd[:3])}: the "
                    f"model was changed, or use_buffers was; start with a new plugin"
                )
            for key, tensor in live.items():
                averaged = self.tensors[key]
                if averaged.shape != tensor.shape:
                    raise PluginError(
                        f"the average of {key!r} of model {self.name!r} has shape {tuple(averaged.shape)}, the "
                        f"model's {tuple(tensor.shape)}: the model was changed; start with a new plugin"
                    )
                if averaged.device != tensor.device or averaged.dtype != tensor.dtype:
                    averaged = averaged.to(tensor.device, tensor.dtype)
                self.tensors[key] = sharded.like(averaged, tensor)
            self._pairs = [(tensor, self.tensors[key]) for key, tensor in live.items()]
        return self._pairs

    def _averaged(self, model: nn.Module, use_buffers: bool) -> dict[str, Tensor]:
        left = set(self.left)
        return {key: tensor for key, tensor in _live(model, use_buffers).items() if key not in left}

    def _begin(self, model: nn.Module, use_buffers: bool, function: Any) -> None:
        """Copy what can be averaged, and name the rest."""
        live = _live(model, use_buffers)
        self.left = [key for key, tensor in live.items() if not _can_move(tensor, function)]
        self.tensors = {key: tensor.detach().clone() for key, tensor in self._averaged(model, use_buffers).items()}
        self._pairs = None
        if self.left:
            classes = {type(live[key].detach()).__name__ for key in self.left}
            warn(
                f"WeightAverage leaves {some(self.left, 3)} of model {self.name!r} as they are, since torch cannot "
                f"average {' and '.join(sorted(classes))}; all other weights are averaged"
            )

    def look_up(self, model: nn.Module, use_buffers: bool) -> list[tuple[Tensor, Tensor]]:
        """The pairs of the model as it is now, with the batch-norm statistics that were estimated."""
        self.forget()
        found = self.pairs(model, use_buffers)
        if not self.bn:
            return found
        buffers = dict(model.named_buffers())
        ids = {id(buffers[key]) for key in self.bn}
        self.bn = {key: new.to(buffers[key].device) for key, new in self.bn.items()}
        pairs = [pair for pair in found if id(pair[0]) not in ids]
        pairs += [(buffers[key], new) for key, new in self.bn.items()]
        return pairs

    @torch.no_grad()
    def move(self, model: nn.Module, use_buffers: bool, function: Any) -> None:
        """Take in the model as it is now."""
        self.bn = {}
        if not self.count:
            self._begin(model, use_buffers, function)
        else:
            groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
            for live, averaged in self.pairs(model, use_buffers):
                averaged, live = sharded.part(averaged), sharded.part(live)
                if live.is_floating_point() or live.is_complex():
                    ours, theirs = groups.setdefault((live.device, live.dtype), ([], []))
                    ours.append(averaged)
                    theirs.append(live)
                else:
                    averaged.copy_(live)
            count = torch.tensor(self.count)  # on the CPU, so that reading it waits for nothing
            for ours, theirs in groups.values():
                function(ours, theirs, count)
        self.count += 1

    def state_dict(self, swapped: Mapping[int, Tensor]) -> dict[str, Any]:
        """The counts, and copies of the averages; where they are, by the id of the replaced tensor."""
        tensors = {key: swapped.get(id(tensor), tensor) for key, tensor in self.tensors.items()}
        state = {
            "updates": self.updates,
            "count": self.count,
            "fresh": self.fresh,
            "tensors": {key: tensor.detach().clone() for key, tensor in tensors.items()},
        }
        if self.left:
            state["left"] = list(self.left)
        return state

    @classmethod
    def of(cls, name: str, state: dict[str, Any]) -> _Average:
        """Made from the result of `state_dict`."""
        average = cls(name)
        average.updates = state["updates"]
        average.count = state["count"]
        average.fresh = state["fresh"]
        average.tensors = {key: tensor.detach().clone() for key, tensor in state["tensors"].items()}
        average.left = list(state.get("left", ()))
        return average


def _live(model: nn.Module, use_buffers: bool) -> dict[str, Tensor]:
    """The model's tensors that are averaged, by name, each once."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    if use_buffers:
        found.update(model.named_buffers())
    return found


def _can_move(tensor: Tensor, function: Any) -> bool:
    """Whether an average can take in a tensor; torch's own classes always can."""
    live = tensor.detach()
    if type(live) is Tensor or sharded.is_sharded(live):
        return True
    try:
        with torch.no_grad():
            function([live.clone()], [live], torch.tensor(1))
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _versions(learner: Learner) -> dict[str, list[int]]:
    """Return the versions of all parameters, which every in-place change raises."""
    found = {}
    for name, model in learner.models.with_extras().items():
        found[name] = [0 if is_lazy(p) or p.is_inference() else p._version for p in model.parameters()]
    return found


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters() if p.device.type != "cpu"), "cpu")


def _devices(model: nn.Module) -> list[int]:
    """The accelerators whose generators the model may use."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type != "cpu"})
