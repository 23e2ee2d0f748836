"""Data parallel training: gradients averaged over processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loopkit.base import checks
from loopkit.distributed.at_update import AtUpdate
from loopkit.distributed.buckets import BUCKET_BYTES, copy_buffers, copy_state
from loopkit.distributed.gradient_sync import GradientSync
from loopkit.distributed.in_backward import InBackward
from loopkit.distributed.member import Member
from loopkit.distributed.reducers import Reducers
from loopkit.distributed.weighting import Weighting
from loopkit.errors import PhaseError, PluginError, WorldError
from loopkit.groups import params_of
from loopkit.hooks import hookimpl
from loopkit.losses import is_sum
from loopkit.phases import TrainingPhase
from loopkit.plugin import provided

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

COMPRESSION = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


class DDP(Member):
    """Train one model in many processes, each on its part of every batch; the gradients are averaged.

    The script is the same for one process and for many: it is started by torchrun or `loopkit.launch`. A single process
    trains as if the plugin were not there.

    The average of the gradients is the gradient of the global batch, also if the processes have batches of unequal
    weight. If the weights are equal, it is bitwise the average of PyTorch's ``DistributedDataParallel``. Gradients are
    synced once for an update and are final from ``update_begin`` on: clipping, for example, sees the norm of the
    average.

    Args:
        overlap: Send gradients while the last backward of an update makes them: by PyTorch's reducer in phases that
            keep the steps of `TrainingPhase`, with one model and one optimizer. In others loopkit sends them itself, if
            an update of the epoch was made of one backward in its last step, and an update that differs is averaged
            anew. False: gradients are averaged at ``update_begin``; in these other phases the bits are the same.
        weighted: True: the average is ``sum(w g) / sum(w)`` over the processes, with the weights of their steps, at the
            price of one more reduction of one number for each update. ``"auto"``: the same, but without that reduction
            in steps of which it is known that their parts are equal: of data that loopkit has shared out, all but an
            uneven last one, unless the phase sets ``step.weight``. False: each process counts the same, as in PyTorch.
        compression: ``"fp16"`` or ``"bf16"``: gradients are sent in half precision.
        bucket_mb: Gradients are sent in buckets of about so many MiB; by default PyTorch's, 25 after a small first one.
        bucket_views: Gradients are views of the buckets of PyTorch's reducer, which saves a copy of them. The next
            update changes them, so a plugin that keeps gradients must then copy them.
        static_graph: The same parameters are used in the same order in each step (PyTorch's option).
        find_unused_parameters: Parameters may get no gradient in a step; otherwise that is an error that names them.
        fixed_buckets: PyTorch's reducer lays its buckets out anew after the first step, which changes the last bits of
            sums over more than two processes, in a resumed run again. With True it does not: a run that is resumed
            ends with the same bits, for a walk through the graph and one more reduction in each synced step. None: so
            it is with more than two processes and a plugin that provides ``"checkpoint"`` in the same list.
        sync_batch_norm: Batch norms compute their statistics over all processes (not on CPUs). Otherwise each uses its
            own batch, and the running statistics come from rank 0.
        broadcast_buffers: Copy the buffers of rank 0 to the others before each synced forward pass.
        shard, tail, backend, timeout: As in `Member`.

    Raises:
        PluginError: An option is out of range, or two exclude each other.
        WorldError: The processes cannot meet, differ, or a parameter got no gradient.
    """

    name = "ddp"
    owns = ("grads.sync",)

    def __init__(
        self,
        *,
        overlap: bool = True,
        weighted: bool | str = "auto",
        compression: str | None = None,
        bucket_mb: float | None = None,
        bucket_views: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        fixed_buckets: bool | None = None,
        sync_batch_norm: bool = False,
        broadcast_buffers: bool = True,
        shard: bool = True,
        tail: str = "uneven",
        backend: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__(shard=shard, tail=tail, backend=backend, timeout=timeout)
        if overlap not in (True, False):
            raise PluginError(f"DDP(overlap={overlap!r}): it is True or False")
        checks.one_of("DDP", (True, False, "auto"), weighted=weighted)
        checks.one_of("DDP", tuple(COMPRESSION), compression=compression)
        if bucket_mb is not None:
            checks.positive("DDP", "MiB", bucket_mb=bucket_mb)
        if static_graph and (find_unused_parameters or fixed_buckets):
            raise PluginError("DDP(static_graph=True) goes with neither find_unused_parameters nor fixed_buckets")
        if bucket_views and not overlap:
            raise PluginError("DDP(bucket_views=True) is of PyTorch's reducer, which DDP(overlap=False) leaves out")
        self.overlap = overlap
        self.weighted = weighted
        self._compression = compression
        self._bucket_mb = bucket_mb
        self._bucket_views = bucket_views
        self._static_graph = static_graph
        self._find_unused_parameters = find_unused_parameters
        self._fixed_buckets = fixed_buckets
        self._sync_batch_norm = sync_batch_norm
        self._broadcast_buffers = broadcast_buffers
        self._weighting = Weighting(weighted)
        bucket_bytes = BUCKET_BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        at_update = AtUpdate(self._weighting, find_unused_parameters, bucket_bytes, COMPRESSION[compression])
        self._at_update = at_update
        self._in_backward = InBackward(at_update)
        self._reducers = Reducers(at_update, find_unused_parameters)
        self._now: GradientSync = at_update
        """The strategy of the running step."""
        self._chosen: dict[int, tuple[Phase, GradientSync]] = {}
        """The strategy of each phase."""
        self._setup = Setup()

    def wrap(self, learner: Learner, name: str, model: nn.Module) -> nn.Module:
        """Start from the state of rank 0, and let calls of the model go through PyTorch's reducer where that syncs."""
        if self.weighted is True and is_sum(learner.loss_fn):
            raise PluginError("DDP(weighted=True) is for losses that are means, and the learner's is a sum")
        if self._sync_batch_norm:
            if any(p.device.type == "cpu" for p in model.parameters()):
                raise WorldError(
                    f"DDP(sync_batch_norm=True): model {name!r} is on a CPU, where PyTorch has no such batch norm: "
                    f"leave the option out, or move the model with ToDevice"
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        extras = learner.models.extras.modules.values() if name == next(iter(learner.models)) else ()
        copy_state([model, *extras])
        if not any(p.requires_grad for p in model.parameters()):
            return model
        counted = self._reducers.add(name, model)
        if self.overlap:
            counted.send_by(self._reducer(model, self._has_fixed_buckets(learner)))
        return counted

    def _has_fixed_buckets(self, learner: Learner) -> bool:
        if self._fixed_buckets is not None:
            return self._fixed_buckets
        if self.world.size <= 2 or self._static_graph:  # a sum of two numbers does not depend on their order
            return False
        return any(provided(plugin) == "checkpoint" for plugin in learner.plugins.values())

    def _reducer(self, model: nn.Module, fixed: bool) -> DistributedDataParallel:
        options: dict[str, Any] = {} if self._broadcast_buffers else {"broadcast_buffers": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer PyTorch has another name for that option
            reducer = DistributedDataParallel(
                model,
                bucket_cap_mb=self._bucket_mb,
                find_unused_parameters=self._find_unused_parameters or fixed,
                static_graph=self._static_graph,
                gradient_as_bucket_view=self._bucket_views,
                init_sync=False,  # `copy_state` has
                **options,
            )
        if self._compression is not None:
            on_cpu = any(p.device.type == "cpu" for p in model.parameters())
            reducer.register_comm_hook(None, _compress_hook(self._compression, on_cpu))
        return reducer

    def explain(self, phase: Phase, hook: str) -> str:
        """Where the gradients of a phase are synced; for ``learner.explain()``."""
        if not phase.training or hook != "update_begin":
            return ""
        strategy, why = self._choose(phase)
        if strategy is self._in_backward:
            return f"gradients are sent in the backward if it is the only one of its step, else here: {why}"
        where = "in the last backward of each update, by PyTorch's reducer" if strategy is self._reducers else "here"
        return f"gradients are averaged {where}: {why}"

    def _choose(self, phase: Phase) -> tuple[GradientSync, str]:
        """Return the strategy for a phase, and the reason in words."""
        setup = self._setup
        reason = self._reason_to_wait()
        if reason:
            return self._at_update, reason
        models = len(self._reducers.models)
        if models == 1 and not setup.beside and _calls_once(phase):
            return self._reducers, "the step calls the model once"
        why = f"{type(phase).__name__} has its own step" if models == 1 else "there are several models"
        if setup.beside:
            why = "the optimizer trains parameters beside the model's"
        if self._find_unused_parameters:
            return self._at_update, f"{why}, and parameters may get no gradient"
        return self._in_backward, why

    def _reason_to_wait(self) -> str:
        """Return the reason why gradients of all phases are averaged when an update begins, in words."""
        if self.world.size == 1:
            return "there is only one process, so it is idle"
        if not self.overlap:
            return "overlap=False"
        if self._setup.optimizers != 1:
            return "there are several optimizers"
        if self._setup.in_parts:
            return "a plugin takes each step in parts, with a backward for each"
        return ""

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Choose how gradients are synced."""
        if self.world.size == 1 or not phase.training:
            return
        own = set(map(id, self._reducers.params))
        self._setup = Setup(
            optimizers=len(learner.optimizers),
            beside=any(id(p) not in own for each in learner.optimizers.values() for p in params_of(each)),
            in_parts=any(provided(plugin) == "micro_batch" for plugin in learner.plugins.values()),
        )
        self._chosen[id(phase)] = phase, self._choose(phase)[0]
        self._in_backward.begin_epoch()
        self._weighting.begin_epoch(epoch)

    @hookimpl
    def step_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Set the strategy by whether this step's backward is the last one of an update."""
        if self.world.size == 1 or not phase.training:
            return
        self._reducers.reset()
        self._in_backward.reset()
        chosen = self._chosen[id(phase)][1]
        updates = _updates(step)
        in_hook = chosen is self._in_backward and len(self._epochs) > 1
        serves = chosen.begin(learner, phase, step, updates and not in_hook)
        self._now = chosen if serves else self._at_update
        if updates and self._broadcast_buffers and self._now is not self._reducers:
            copy_buffers(learner.models.with_extras().values())

    @hookimpl
    def step_cancelled(self, learner: Learner, phase: Phase, epoch: Epoch, step: Step) -> None:
        """Take back what the others expect of the backward that does not come."""
        self._now.cancel(phase)
        super().step_cancelled(learner, phase, epoch, step)

    def equal(self, learner: Learner) -> dict[str, Tensor]:
        """Parameters; buffers, if they are copied."""
        models = learner.models
        found: dict[str, Tensor] = dict(models.named_parameters())
        if self._broadcast_buffers:
            found |= dict(models.named_buffers())
        return found

    @hookimpl
    @contextmanager
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> Iterator[None]:
        """Keep what belongs to the step around, if a hook of that runs the epoch."""
        now = self._now
        with super().epoch_context(learner, phase, epoch), self._reducers.set_aside(), self._in_backward.set_aside():
            try:
                yield
            finally:
                self._now = now

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """For a plugin's own forward beside the step's: its gradients stay in this process."""
        with self._now.paused():
            yield

    @hookimpl
    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Give PyTorch's reducer the gradients of the whole window, where it syncs in this backward."""
        self._now.backward_begin(learner, phase, step)

    @hookimpl
    def backward_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Name the parameters that got no gradient, for which the others would wait."""
        self._now.backward_end(learner, phase, step)

    @hookimpl(writes=("grads",))
    def update_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """From here on the gradients are averaged over all processes."""
        if self.world.size == 1:
            return
        if step.closure is not None:
            raise PhaseError(
                f"phase {phase.name!r}: an optimizer that evaluates the loss itself decides by its own "
                f"process's loss, and the processes would part: use another optimizer under DDP"
            )
        self._now.update(learner, phase, step)

    @hookimpl(writes=("buffers",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Take the buffers of rank 0: the last step has changed each process's own."""
        if self.world.size > 1 and phase.training and self._broadcast_buffers:
            copy_buffers(learner.models.with_extras().values())


@dataclass(frozen=True)
class Setup:
    """The facts of an epoch that decide about its strategy."""

    optimizers: int = 1
    """The number of optimizers."""
    beside: bool = False
    """Whether an optimizer trains parameters that are none of the models', such as of a loss."""
    in_parts: bool = False
    """Whether a plugin takes steps in several backwards."""


def _calls_once(phase: Phase) -> bool:
    """Whether the step of a phase calls the model once."""
    kept = ("step", "forward", "loss")
    return isinstance(phase, TrainingPhase) and all(
        getattr(type(phase), part) is getattr(TrainingPhase, part) for part in kept
    )


def _updates(step: Step) -> bool:
    """Whether an update comes with this step."""
    windows = step.epoch.windows
    return bool(windows) and (step.last or any(window.count + 1 >= window.size for window in windows))


def _compress_hook(compression: str, on_cpu: bool) -> Callable[..., Any]:
    """Return PyTorch's hook that sends gradients in half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook: Callable[..., Any] = getattr(default_hooks, f"{compression}_compress_hook")
    if not on_cpu:
        return hook
    # PyTorch rejects bfloat16 by the hook's name in builds without NCCL; Gloo sums it
    return lambda group, bucket: hook(group, bucket)
