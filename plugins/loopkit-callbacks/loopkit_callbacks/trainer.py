"""The facades that a callback of Lightning is given in the places of its trainer and its module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit_callbacks.common import Metrics, lacks

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["Module", "Now", "Trainer"]


@dataclass
class Now:
    """The source of the facades' answers; the adapter keeps it up to date."""

    callback: str
    """The callback, for messages."""
    root: str
    """The package that it comes from, ``"lightning.pytorch"`` or ``"pytorch_lightning"``."""
    log_every_n_steps: int
    learner: Learner = field(init=False)
    phase: Phase | None = None
    """The phase of the hook that is running."""
    index: int = 0
    """Its step, from 0 in the epoch."""
    updates: int = 0
    """The updates before that step."""
    metrics: Callable[[], dict[str, float]] = dict
    """The metrics that the callback may see, by the names that it uses."""
    after_validation: bool = False
    """Whether a validation makes what the callback monitors."""
    epoch_ends: bool = False
    """Whether a training epoch is over, and its ``on_train_epoch_end`` is still to come."""
    asked: bool = False
    """Whether the callback has asked for the end of the fit."""

    @property
    def stops(self) -> bool:
        """Whether a stop of the fit is in force."""
        return self.learner.current is not None and self.learner.current.stopped


class Facade:
    """Has what its class defines; any other attribute is an error that names the callback and the attribute."""

    _called = ""
    """The name in Lightning."""

    def __init__(self, now: Now) -> None:
        vars(self)["_now"] = now

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise lacks(self._now.callback, f"{self._called}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(getattr(type(self), name, None), "fset", None) is None:
            raise lacks(self._now.callback, f"{self._called}.{name} = ...")
        super().__setattr__(name, value)

    _now: Now


class Logger(Facade):
    """Takes what a callback logs, and logs it with the learner."""

    _called = "trainer.logger"
    group_separator = "/"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """``learner.log`` of each; the record's step is the learner's own."""
        for name, value in metrics.items():
            self._now.learner.log(name, value)


class Strategy(Facade):
    """Where the model is. Decisions are each process's own: the learner agrees with the others on what ends a fit."""

    _called = "trainer.strategy"

    @property
    def root_device(self) -> torch.device:
        """The device of the first parameter."""
        models = self._now.learner.models.values()
        return next((p.device for model in models for p in model.parameters()), torch.device("cpu"))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The decision."""
        return bool(decision)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """The value."""
        return value


class Accelerator(Facade):
    """The statistics of a device."""

    _called = "trainer.accelerator"
    classes: Mapping[str, str] = {"cpu": "CPUAccelerator", "cuda": "CUDAAccelerator", "mps": "MPSAccelerator"}

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """The statistics of Lightning's own accelerator for such a device."""
        if device.type not in self.classes:
            raise lacks(self._now.callback, f"{self._called} on {device}", f"it knows {', '.join(self.classes)}")
        accelerators = import_module(f"{self._now.root}.accelerators")
        stats: dict[str, Any] = getattr(accelerators, self.classes[device.type])().get_device_stats(device)
        return stats


class Trainer(Facade):
    """A trainer for callbacks, answered by the learner; ``should_stop = True`` asks for the end of the fit."""

    _called = "trainer"

    sanity_checking = False
    fast_dev_run = False
    val_check_interval = 1.0

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """1: check at the end of the epoch; None: check after each validation."""
        return None if self._now.after_validation else 1

    @property
    def should_stop(self) -> bool:
        """Whether the end of the fit was asked for."""
        return self._now.asked or self._now.stops

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self._now.asked = True
        elif self.should_stop:
            raise lacks(self._now.callback, "trainer.should_stop = False", "a request to end the fit stands")

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Metrics by the names that the callback uses, float32 scalars on the CPU; a new dict each time."""
        found = {name: torch.tensor(value, dtype=torch.float32) for name, value in self._now.metrics().items()}
        return Metrics(self._now.callback, found)

    @property
    def current_epoch(self) -> int:
        """The training epochs that are over, their ``on_train_epoch_end`` included."""
        return self._now.learner.progress.epochs - self._now.epoch_ends

    @property
    def global_step(self) -> int:
        """The updates so far."""
        return self._now.learner.progress.updates

    @property
    def max_epochs(self) -> int | None:
        """The epochs that are planned, if that is known."""
        fit = self._now.learner.current
        return None if fit is None else fit.result.planned.epochs

    @property
    def num_training_batches(self) -> int | float:
        """The steps of the epoch that is running, infinity if that is not known."""
        fit = self._now.learner.current
        epoch = None if fit is None else fit.epoch
        return float("inf") if epoch is None or epoch.length is None else epoch.length

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The learner's optimizers."""
        return list(self._now.learner.optimizers.values())

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """None: a plugin schedules the learning rate."""
        return []

    @property
    def loggers(self) -> list[Logger]:
        """One, which logs with the learner."""
        return [Logger(self._now)]

    @property
    def logger(self) -> Logger:
        """The same."""
        return Logger(self._now)

    @property
    def strategy(self) -> Strategy:
        """Where the model is, and what the processes decide."""
        return Strategy(self._now)

    @property
    def accelerator(self) -> Accelerator:
        """The statistics of the device."""
        return Accelerator(self._now)

    @property
    def log_every_n_steps(self) -> int:
        """As given to the adapter."""
        return self._now.log_every_n_steps

    @property
    def global_rank(self) -> int:
        """Which of the processes this is."""
        return self._now.learner.world.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._now.learner.world.size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process."""
        return self._now.learner.world.rank == 0

    @property
    def training(self) -> bool:
        """Whether a training epoch is running."""
        return self._now.phase is not None and self._now.phase.training

    @property
    def state(self) -> SimpleNamespace:
        """``state.fn``: fitting, or validating where no fit is running."""
        functions = import_module(f"{self._now.root}.trainer.states").TrainerFn
        return SimpleNamespace(fn=functions.FITTING if self._now.learner.current is not None else functions.VALIDATING)

    @property
    def fit_loop(self) -> SimpleNamespace:
        """``fit_loop.epoch_loop._batches_that_stepped``: the updates before the step that is running."""
        return SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=self._now.updates))

    @property
    def _logger_connector(self) -> SimpleNamespace:
        """``should_update_logs``: whether the step that is running is one to log at."""
        now = self._now
        step = (now.updates if now.phase is None or now.phase.training else now.index) + 1
        every = now.log_every_n_steps
        return SimpleNamespace(should_update_logs=bool(every) and (step % every == 0 or self.should_stop))


class Module(Facade):
    """A LightningModule for callbacks: its logging, counters and parameters."""

    _called = "pl_module"

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """``learner.log`` of the value as it is: no mean over the epoch or over processes is made.

        The options for such a mean have no effect.
        """
        for option, given in {"on_epoch": on_epoch, "sync_dist": sync_dist}.items():
            if given:
                instead = "metrics given to loopkit.plugins.Metrics are means over the epoch and all processes"
                raise lacks(self._now.callback, f"pl_module.log({name!r}, ..., {option}=True)", instead)
        if logger is None or logger:
            self._now.learner.log(name, value)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """`log` of each."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    @property
    def trainer(self) -> Trainer:
        """The facade of the trainer."""
        return Trainer(self._now)

    @property
    def current_epoch(self) -> int:
        """As the trainer's."""
        return self.trainer.current_epoch

    @property
    def global_step(self) -> int:
        """As the trainer's."""
        return self.trainer.global_step

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.trainer.strategy.root_device

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all models."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Them with their names, which begin with the model's if there are several."""
        models = self._now.learner.models
        for name, model in models.items():
            yield from model.named_parameters(prefix=name if len(models) > 1 else "")
