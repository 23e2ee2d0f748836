"""Data parallel training: gradients averaged over processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loopkit.base import devices
from loopkit.base.notes import say
from loopkit.base.words import some
from loopkit.data.shards import Parts, parts_of
from loopkit.distributed.buckets import BUCKET_BYTES, Overlap, average, copy_buffers, copy_state
from loopkit.distributed.member import Member
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
    synced once for an update and are final from ``update_begin`` on: clipping, say, sees the norm of the average.

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
        bucket_views: Gradients are views of what PyTorch's reducer sends, which saves a copy of them. The next update
            changes them, so a plugin that keeps gradients must then copy them.
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
        if weighted not in (True, False, "auto"):
            raise PluginError(f"DDP(weighted={weighted!r}): it is True, False or 'auto'")
        if compression not in COMPRESSION:
            raise PluginError(f"DDP(compression={compression!r}): it is None, 'fp16' or 'bf16'")
        if bucket_mb is not None and not bucket_mb > 0:
            raise PluginError(f"DDP(bucket_mb={bucket_mb!r}): it is a number of MiB above 0")
        if static_graph and (find_unused_parameters or fixed_buckets):
            raise PluginError("DDP(static_graph=True) goes with neither find_unused_parameters nor fixed_buckets")
        if bucket_views and not overlap:
            raise PluginError("DDP(bucket_views=True) is of PyTorch's reducer, which DDP(overlap=False) leaves out")
        self.overlap = overlap
        self.weighted = weighted
        self._compression = compression
        self._bucket_mb = bucket_mb
        self._bucket_views = bucket_views
        self._bucket_bytes = BUCKET_BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        self._static_graph = static_graph
        self._find_unused_parameters = find_unused_parameters
        self._fixed_buckets = fixed_buckets
        self._sync_batch_norm = sync_batch_norm
        self._broadcast_buffers = broadcast_buffers
        self._synced: dict[str, _Synced] = {}
        self._params: list[nn.Parameter] = []
        self._reducible = 0
        """How many of them had a gradient when the reducers were made."""
        self._phases: dict[int, tuple[Phase, bool | None]] = {}
        """Whether the reducer serves a phase; None: its updates show whether their backward can send."""
        self._overlaps: dict[int, Overlap | None] = {}
        """The overlap that sends during a phase's backward, by phase; None: no overlap in this epoch."""
        self.overlap_now: Overlap | None = None
        """The overlap that sends during this step's backward, which ends with an update."""
        self._backwards = 0
        """The backwards of this step."""
        self._told: set[int] = set()
        """Phases with a line on why their backward sends nothing."""
        self._sets_weight: dict[str, bool] = {}
        """Whether a phase sets ``step.weight``, in any process."""
        self.reducing = False
        """Whether the reducer syncs in the backward of this step."""
        self._reduced = False
        """Whether it has."""
        self._void = False
        """Whether the weights of an update were found to sum to 0 over all processes."""
        self._without: dict[tuple[str, str], set[int]] = {}
        """Which parameters of an optimizer get no gradient in any process, by phase and optimizer."""
        self._optimizers = 1
        self._beside = False
        """Whether an optimizer trains parameters that are none of the models', such as of a loss."""
        self._in_parts = False
        """Whether a plugin takes steps in several backwards."""

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
        self._params += model.parameters()
        self._reducible = sum(p.requires_grad for p in self._params)
        fixed = self._fixed_buckets
        if fixed is None:  # a sum of two numbers does not depend on their order
            saves = any(provided(plugin) == "checkpoint" for plugin in learner.plugins.values())
            fixed = saves and self.world.size > 2 and not self._static_graph
        self._synced[name] = _Synced(self, model, self._reducer(model, fixed) if self.overlap else None)
        return self._synced[name]

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
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            reducer.register_comm_hook(None, getattr(default_hooks, f"{self._compression}_compress_hook"))
        return reducer

    def explain(self, phase: Phase, hook: str) -> str:
        """Where the gradients of a phase are synced; for ``learner.explain()``."""
        if not phase.training or hook != "update_begin":
            return ""
        reducing, why = self._choose(phase)
        if reducing is None:
            return f"gradients are sent in the backward if it is the only one of its step, else here: {why}"
        where = "in the last backward of each update, by PyTorch's reducer" if reducing else "here"
        return f"gradients are averaged {where}: {why}"

    def _choose(self, phase: Phase) -> tuple[bool | None, str]:
        if self.world.size == 1:
            return False, "there is one process alone, so nothing is done"
        if not self.overlap:
            return False, "overlap=False"
        if self._optimizers != 1:
            return False, "there are several optimizers"
        if self._in_parts:
            return False, "a plugin takes each step in parts, with a backward for each"
        if len(self._synced) == 1 and isinstance(phase, TrainingPhase) and not self._beside:
            if all(getattr(type(phase), part) is getattr(TrainingPhase, part) for part in ("step", "forward", "loss")):
                return True, "the step calls the model once"
        why = f"{type(phase).__name__} has a step of its own" if len(self._synced) == 1 else "there are several models"
        why = "the optimizer trains parameters beside the model's" if self._beside else why
        if self._find_unused_parameters:
            return False, f"{why}, and parameters may get no gradient"
        return None, why

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Choose how gradients are synced."""
        if self.world.size > 1 and phase.training:
            own = set(map(id, self._params))
            self._optimizers = len(learner.optimizers)
            self._beside = any(id(p) not in own for each in learner.optimizers.values() for p in params_of(each))
            self._in_parts = any(provided(plugin) == "micro_batch" for plugin in learner.plugins.values())
            self._phases[id(phase)] = phase, self._choose(phase)[0]
            self._overlaps = {key: overlap for key, overlap in self._overlaps.items() if overlap is not None}
            epoch.keep(self)["parts"] = None if epoch.resumed else parts_of(epoch.data)

    @hookimpl
    def step_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Tell the reducer whether this step's backward is the last one of an update."""
        if self.world.size == 1 or not phase.training:
            return
        self.reducing = self._reduced = False
        self.overlap_now = None
        self._backwards = 0
        for synced in self._synced.values():
            synced.calls = 0
        if not _updates(step):
            return
        self.reducing = self._phases[id(phase)][1] is True
        self._begin_overlap(learner, phase, step)
        if self.reducing and sum(p.requires_grad for p in self._params) != self._reducible:
            self.reducing = False  # parameters were frozen or thawed since the reducer was made
        if not self.reducing and self._broadcast_buffers:
            copy_buffers(learner.models.with_extras().values())

    def _begin_overlap(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Send gradients in this step's backward, if the phase has come to that."""
        if len(self._epochs) > 1:
            return
        overlap = self._overlaps.get(id(phase))
        if overlap is None or not overlap.serves or self._is_weighted(learner, phase, step):
            return
        self.overlap_now = overlap
        overlap.begin(all(window.seed is not None for window in step.window_state))

    @hookimpl
    def step_cancelled(self, learner: Learner, phase: Phase, epoch: Epoch, step: Step) -> None:
        """Take back what the reducer expects of the backward that does not come."""
        if self.reducing and not self._reduced and phase.training:
            if any(synced.calls for synced in self._synced.values()):
                _disarm(self._params)
            self.reducing = False
        if self.overlap_now is not None:
            self.overlap_now.cancel()
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
        outer = self._reduced, self.overlap_now, self._backwards
        counts = [each.calls for each in self._synced.values()]
        with super().epoch_context(learner, phase, epoch), self.unsynced():
            try:
                yield
            finally:
                if self.overlap_now is not None:
                    self.overlap_now.listening = False
                self._reduced, self.overlap_now, self._backwards = outer
                for synced, count in zip(self._synced.values(), counts, strict=True):
                    synced.calls = count

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """For a plugin's own forward beside the step's: its gradients stay in this process."""
        outer = self.reducing
        self.reducing = False
        listening = [each for each in (self.overlap_now,) if each is not None and each.listening]
        for overlap in listening:
            overlap.listening = False
        try:
            yield
        finally:
            self.reducing = outer
            for overlap in listening:
                overlap.listening = True

    @hookimpl
    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Where the reducer syncs in this backward: give it the gradients of the whole window."""
        self._backwards += 1
        if not self.reducing:
            return
        calls = {name: synced.calls for name, synced in self._synced.items()}
        if self._reduced or any(count != 1 for count in calls.values()):
            self.reducing = False
            counted = ", ".join(f"model {name!r} was called {count} times" for name, count in calls.items())
            raise PhaseError(
                f"DDP: phase {phase.name!r} cannot be served by PyTorch's reducer, which "
                f"takes one call of each model before one backward in a step: {counted}"
                f"{', and this is a second backward' * self._reduced} (step {step.index}). Give DDP(overlap=False), "
                f"which averages at update_begin"
            )
        for window in step.epoch.windows:
            weight = window.total + step.weight if window.weighted and window.count else step.weight
            count = window.count + 1 if window.weighted else 1
            weighs = self._weighs(learner, phase, step, weight, count)
            share = self._share(weight, step.loss.device) if weighs else 1.0
            step.seed = step.seed * window.settle(step, step.weight, share)

    @hookimpl
    def backward_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Name the parameters that got no gradient, for which the others would wait."""
        if self.overlap_now is not None:
            self.overlap_now.complete()
        if not self.reducing:
            return
        self._reduced = True
        if not self._find_unused_parameters and any(p.grad is None and p.requires_grad for p in self._params):
            unused = [path for path, p in learner.models.named_parameters() if p.requires_grad and p.grad is None]
            raise WorldError(
                f"no gradient came for {_listed(unused)} in phase {phase.name!r}, step {step.index}: give "
                f"DDP(find_unused_parameters=True) if that is meant, or DDP(overlap=False) where a backward is for "
                f"some parameters alone, or freeze them (requires_grad=False) before the learner is built"
            )

    @hookimpl(writes=("grads",))
    def update_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """From here on the gradients are averaged over all processes."""
        if self.world.size == 1:
            return
        if step.closure is not None:
            raise PhaseError(
                f"phase {phase.name!r}: an optimizer that evaluates the loss itself decides by the loss of its own "
                f"process, and the processes would part: use another optimizer under DDP"
            )
        if self.reducing and self._reduced:
            self._skip_void(step)
            return
        params = self._with_gradient(phase, step)
        grads = [p.grad for p in params if p.grad is not None]
        window = step.epoch.window(step.optimizer_name)
        weight = window.total if window.weighted else window.last.weight
        weighs = self._weighs(learner, phase, step, weight, window.count if window.weighted else 1)
        if self._sent(phase, step, grads):
            return
        if grads and weighs:
            devices.scale(grads, self._share(weight, grads[0].device).to(grads[0].dtype))
            self._skip_void(step)
        average(grads, self.world.size, bucket_bytes=self._bucket_bytes, dtype=COMPRESSION[self._compression])
        if grads and not weighs:
            self._try_overlap(phase, step, params)

    def _with_gradient(self, phase: Phase, step: Step) -> list[Tensor]:
        """The parameters that get a gradient in any process, the last first; zeros where it is another process."""
        without = self._without_gradient(phase, step)
        params = [p for index, p in enumerate(step.params) if p.requires_grad and index not in without][::-1]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return params

    def _without_gradient(self, phase: Phase, step: Step) -> set[int]:
        """The parameters, by index, that get no gradient in any process."""
        missing = {index for index, p in enumerate(step.params) if p.requires_grad and p.grad is None}
        if self._find_unused_parameters:
            return set.intersection(*self.world.gather(missing))
        key = phase.name, step.optimizer_name
        if key not in self._without:
            gathered = self.world.gather(missing)
            self._without[key] = gathered[0]
            missing = next((each for each in gathered if each != gathered[0]), missing)
        without = self._without[key]
        changed = sorted(missing ^ without)
        if changed:
            shape = tuple(step.params[changed[0]].shape)
            raise WorldError(
                f"parameter {changed[0]} (shape {shape}) of optimizer {step.optimizer_name!r} gets a gradient in "
                f"some updates or processes, and in others it gets none (phase {phase.name!r}, step {step.index}): "
                f"give DDP(find_unused_parameters=True) if that is meant"
            )
        return without

    def _try_overlap(self, phase: Phase, step: Step, params: list[Tensor]) -> None:
        """Send gradients in the backward from the next update on, if each process made one backward in this one."""
        if self._phases[id(phase)][1] is not None or id(phase) in self._overlaps:
            return
        odd = self.world.gather("" if self._backwards == 1 else f"made {self._backwards} backwards")
        if any(odd):
            self._serve(phase, step, None, odd)
        else:
            dtype = COMPRESSION[self._compression]
            self._serve(phase, step, Overlap(params, self.world.size, self._bucket_bytes, dtype), odd)

    def _skip_void(self, step: Step) -> None:
        """Skip an update whose weights sum to 0 over all processes; on an accelerator nobody reads them."""
        if self._void:
            step.skip_update("the weights of all processes sum to 0")
            self._void = False

    def _sent(self, phase: Phase, step: Step, grads: list[Tensor]) -> bool:
        """Whether the backward of this step has sent the gradients; then they are averages from here on."""
        overlap = self.overlap_now
        if overlap is None or not overlap.sends:
            return False
        odd, marked = overlap.finish(grads)
        if marked is None and odd:
            raise PhaseError(
                f"DDP: phase {phase.name!r}, step {step.index}, {odd}, where gradients are sent in the backward. Give "
                f"DDP(overlap=False), which averages at update_begin"
            )
        if marked and any(said := self.world.gather(odd)):
            overlap.remove()
            self._serve(phase, step, None, said)
            return False
        overlap.take()
        return True

    def _serve(self, phase: Phase, step: Step, overlap: Overlap | None, said: list[str]) -> None:
        """Let gradients be sent in the backward of a phase, or not for the rest of the epoch."""
        self._overlaps[id(phase)] = overlap
        if any(said) and self.world.rank == 0 and id(phase) not in self._told:
            self._told.add(id(phase))
            which = next(f"step {step.index} of rank {rank} {odd}" for rank, odd in enumerate(said) if odd)
            say(f"phase {phase.name!r}: gradients are averaged after the backward for now: {which}")

    def _weighs(self, learner: Learner, phase: Phase, step: Step, weight: float | Tensor, steps: int) -> bool:
        """Whether the average of an update goes by weights; all processes decide alike."""
        parts: Parts | None = step.epoch.keep(self)["parts"]
        if self.weighted == "auto" and not is_sum(learner.loss_fn) and parts is not None:
            known = parts.each * (steps - 1) + (parts.last if step.last else parts.each)
            other = isinstance(weight, Tensor) or weight != known
            if phase.name not in self._sets_weight:
                self._sets_weight[phase.name] = self.world.highest(float(other)) == [1.0]
            if other and not self._sets_weight[phase.name]:
                raise WorldError(
                    f"the weight of {steps} steps is {weight} in phase {phase.name!r}, step {step.index}, where "
                    f"{known} samples were shared out, as many as there were in the first update: the other processes "
                    f"do not know of it. Give DDP(weighted=True)"
                )
        return self._is_weighted(learner, phase, step)

    def _is_weighted(self, learner: Learner, phase: Phase, step: Step) -> bool:
        """Whether the average of a step's update goes by weights, as far as all know before it."""
        if self.weighted != "auto" or is_sum(learner.loss_fn):
            return self.weighted is True
        parts: Parts | None = step.epoch.keep(self)["parts"]
        return parts is None or self._sets_weight.get(phase.name, False) or (step.last and not parts.even)

    def _share(self, weight: float | Tensor, device: torch.device) -> Tensor:
        """The factor for a mean over processes by weights, ``size * w / sum(w)``: one reduction of one number."""
        mine = devices.scalar(weight, device, torch.float32).reshape(1)
        total = mine.clone()
        dist.all_reduce(total)
        self._void = total.is_cpu and not total.any()
        total += total.eq(0)  # where no process has anything that counts, the gradients are 0
        return (mine * self.world.size / total).squeeze()  # exactly 1 if all are equal

    @hookimpl(writes=("buffers",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Take the buffers of rank 0: the last step has changed each process's own."""
        if self.world.size > 1 and phase.training and self._broadcast_buffers:
            copy_buffers(learner.models.with_extras().values())


class _Synced(nn.Module):
    """Calls of a model, through PyTorch's reducer in the steps whose backward syncs."""

    def __init__(self, plugin: DDP, model: nn.Module, reducer: DistributedDataParallel | None) -> None:
        super().__init__()
        self.calls = 0
        """In this step."""
        self._plugin = plugin
        self._inner = (model,)  # in a tuple, so that they are no submodules
        self._reducer = (reducer,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (reducer,) = self._reducer
        if not self._plugin.reducing or not torch.is_grad_enabled() or reducer is None:
            return self._inner[0](*args, **kwargs)
        self.calls += 1
        return reducer(*args, **kwargs)


def _updates(step: Step) -> bool:
    """Whether an update comes with this step."""
    windows = step.epoch.windows
    return bool(windows) and (step.last or any(window.count + 1 >= window.size for window in windows))


def _disarm(params: list[nn.Parameter]) -> None:
    """A backward of zeros, for which a reducer waits after its forward; gradients stay as they are."""
    trained = [p for p in params if p.requires_grad]
    grads = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    with torch.enable_grad():
        zero = torch.stack([p.flatten()[:1].sum() * 0 for p in trained if p.numel()]).sum()
    zero.backward()  # type: ignore[no-untyped-call]
    for p, grad in zip(trained, grads, strict=True):
        p.grad = grad


def _listed(names: list[str], most: int = 5) -> str:
    return f"parameter{'s' * (len(names) > 1)} {some(names, most)}"
