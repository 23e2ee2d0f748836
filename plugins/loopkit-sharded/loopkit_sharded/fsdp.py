"""Sharding of parameters, gradients and optimizer states over processes, by torch's ``fully_shard``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.author import Member, buckets, devices, is_count, named_parameters, nearest, sharded
from loopkit.errors import CancelStep, PhaseError, PluginError, WorldError
from loopkit.hooks import hookimpl
from loopkit_sharded.unsummed import Unsummed, summed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

Wrap = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


class FSDP(Member):
    """Train one model with processes that each hold a part of all parameters.

    They hold a part of every gradient and moment, too. The models are sharded in place by
    ``torch.distributed.fsdp.fully_shard``, parameter by parameter along the first dimension, over all processes: rank
    0's values count. A unit is whole for the time of its use: a module that ``wrap`` names, or the rest of
    the model. Gradients are the means over the processes. The optimizer has to be given as a factory, which then gets
    the sharded parameters. Training equals, bitwise, the loop that is written by hand with ``fully_shard``.

    ``learner.state_dict()`` is a collective here: every process must call it, and gets whole tensors in main memory. It
    is the state that a learner without this plugin has, so a run can resume with another number of processes, or one.
    Where the model does not fit into the main memory of each process, that cannot be done.

    Args:
        wrap: The modules that are separate units, such as the blocks of a transformer: classes, or a function of
            a module's path and the module. None: the whole model is one unit, which saves the least memory.
        mixed_precision: The dtype in which units compute; gradients are summed and outputs are in float32. Or a
            ``torch.distributed.fsdp.MixedPrecisionPolicy`` for all units. With float16, add
            ``MixedPrecision("float32", scaling=True)``, which scales the loss.
        reshard_after_forward: Let go of a unit's whole parameters between forward and backward: less memory, one more
            collective for each unit. The last unit, the rest of the model, keeps them.
        sync_each_step: When an update takes several steps, sum gradients over the processes in each of them, not only
            in the
            last: less memory, more communication. It also makes a run that resumes with a state from between
            such steps bitwise the one that was not interrupted; without, it differs in how that update is rounded.
        mesh: Over which processes to shard, all of them by default. ``(2, 4)``: two copies of the model, each sharded
            over four processes; gradients are averaged over both. Or a ``DeviceMesh`` of one or two such dimensions.
        init: For models on the meta device: a function that fills a module's own parameters and buffers, such as
            ``lambda module: module.reset_parameters()``. It is called for each module that has some, unit by unit, so
            that no process holds more than one unsharded unit.
        offload: Keep parameters, gradients and moments in main memory; units are on the device while they compute.
        shard, tail, backend, timeout: As in `Member`.
        name: The plugin's name.

    A model that is sharded already, by ``fully_shard`` or ``parallelize_module`` (tensor parallel), is taken as it is:
    what its gradients need over the processes is up to it. Data are shared out along ``mesh``: ``mesh["dp"]`` of a mesh
    ``("dp", "tp")``, so that processes which hold parts of one layer get the same batch. Give no ``wrap`` then.

    Each process counts the same in the mean, also in a last batch whose parts differ by one sample (``tail="uneven"``);
    among the steps of an update each has its weight. With ``sync_each_step`` these must be the same in all processes.
    Buffers are each process's own while training. Epochs that do not train begin with the buffers of rank 0. Optimizers
    that work number by number (SGD, Adam, AdamW, RMSprop) take sharded parameters; torch 2.13's Adafactor and Muon do
    not.

    Raises:
        PluginError: An option is out of range; ``wrap`` fits no module; the model cannot be sharded; the optimizer was
            made of parameters that were not sharded yet.
        PhaseError: No gradient came to an optimizer, such as after ``step.backward(loss, name)``.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).

    Example::

        Learner(model, loss_fn, torch.optim.AdamW, plugins=[FSDP(wrap=nn.TransformerEncoderLayer)])
    """

    owns = ("grads.sync",)
    per_process = ("mesh",)

    def __init__(
        self,
        wrap: Wrap | None = None,
        *,
        mixed_precision: torch.dtype | MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool = True,
        sync_each_step: bool = False,
        mesh: DeviceMesh | tuple[int, ...] | None = None,
        init: Callable[[nn.Module], Any] | None = None,
        offload: bool = False,
        shard: bool = True,
        tail: str = "uneven",
        backend: str | None = None,
        timeout: float = 300.0,
        name: str = "fsdp",
    ) -> None:
        super().__init__(shard=shard, tail=tail, backend=backend, timeout=timeout)
        classes = wrap if isinstance(wrap, tuple) else (wrap,)
        if isinstance(wrap, (tuple, type)) and not all(
            isinstance(c, type) and issubclass(c, nn.Module) for c in classes
        ):
            raise PluginError(f"FSDP(wrap={wrap!r}): it holds classes of modules, such as nn.TransformerEncoderLayer")
        if wrap is not None and wrap != classes and not callable(wrap):
            raise PluginError(
                f"FSDP(wrap={wrap!r}): it is a class, a tuple of them, or a function (path, module) -> bool"
            )
        if isinstance(mixed_precision, (str, type)) or (
            isinstance(mixed_precision, torch.dtype) and not mixed_precision.is_floating_point
        ):
            hint = nearest(mixed_precision, ["torch.bfloat16"]) if isinstance(mixed_precision, str) else ""
            raise PluginError(
                f"FSDP(mixed_precision={mixed_precision!r}): it is a dtype such as torch.bfloat16{hint}, or a "
                f"MixedPrecisionPolicy"
            )
        if isinstance(mesh, tuple) and not (len(mesh) in (1, 2) and all(map(is_count, mesh))):
            raise PluginError(f"FSDP(mesh={mesh!r}): it is one or two numbers of processes, such as (2, 4)")
        if init is not None and not callable(init):
            raise PluginError(f"FSDP(init={init!r}): it is a function that fills a module's own parameters")
        self.name = name
        self._mesh = mesh
        self._init = init
        self._offload = offload
        self._wrap = wrap
        self._mixed_precision = mixed_precision
        self._reshard_after_forward = reshard_after_forward
        self._sync_each_step = sync_each_step
        self._each_step = sync_each_step
        """Whether gradients are summed in each step, asked for or not."""
        self._meshes: dict[str, DeviceMesh] = {}
        self._roots: list[Any] = []
        """The models."""
        self._taken: set[str] = set()
        """The names of models that were sharded before."""
        self._synced: list[Any] = []
        """Modules that sum gradients for themselves and all in them."""
        self._sharded: list[Any] = []
        """The models and their units."""
        self._unsummed = Unsummed()
        self._syncing = True
        """Whether backward sums gradients over the processes."""
        self._factor: float | Tensor | None = None
        """The factor of the window's gradients in this step, once it has begun to sum them."""

    def alone(self, model: nn.Module) -> nn.Module:
        """Fill a model that is on the meta device."""
        if self._init is not None:
            self._fill(model, devices.local_device().type)
        return model

    def wrap(self, learner: Learner, name: str, model: nn.Module) -> nn.Module:
        """Shard a model, or take it as it is if it is sharded already."""
        from torch.distributed.fsdp import fully_shard

        if any(map(sharded.is_sharded, model.parameters())) and self._wrap is None and self._init is None:
            return self._take(name, model)
        if learner.optimizers:
            raise PluginError(
                f"plugin {self.name!r} is added to a learner whose optimizers hold the whole parameters: give "
                f"Learner(plugins=[FSDP(...)]), with optimizers as factories"
            )
        units = self._find_units(name, model)
        device = _check(self.name, name, model, units, self._init is not None)
        mesh = self._mesh_on(device)
        policy, outer = self._policies()
        last = None if self._reshard_after_forward else False  # None: it is kept until its backward, which comes next
        more = {"offload_policy": self._offload_policy()} if self._offload else {}
        if self._init is None:
            buckets.copy_state([model])
        for unit in (*units, model):
            if self._init is not None:
                self._fill(unit, device)
                buckets.copy_state([unit])
            reshard, how = (last, outer) if unit is model else (self._reshard_after_forward, policy)
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=how, **more)
        self._roots.append(model)
        self._synced.append(model)
        self._sharded += [*units, model]
        return model

    def _take(self, name: str, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule

        if self._mixed_precision is not None or self._offload:
            raise PluginError(f"plugin {self.name!r}: {ALREADY.format(name=name)}")
        within = [module for module in model.modules() if isinstance(module, FSDPModule)]
        inner = {id(child) for module in within for child in module.modules() if child is not module}
        self._roots.append(model)
        self._taken.add(name)
        self._synced += [module for module in within if id(module) not in inner]
        self._sharded += within
        self._each_step = True  # whole gradients that are not summed can themselves be sharded
        return model

    def _fill(self, unit: nn.Module, device: str) -> None:
        """Give what is on the meta device memory and values."""
        assert self._init is not None
        with torch.no_grad():
            for module in unit.modules():
                own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                if any(tensor.is_meta for tensor in own):
                    module.to_empty(device=device, recurse=False)
                    self._init(module)

    def _offload_policy(self) -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return CPUOffloadPolicy(devices.accelerator() is not None)  # pinned, for copies to one

    def _find_units(self, name: str, model: nn.Module) -> list[nn.Module]:
        """The modules to shard by themselves, inner ones first."""
        chosen = self._wrap
        if chosen is None:
            return []
        if isinstance(chosen, (type, tuple)):
            found = [module for module in model.modules() if isinstance(module, chosen)]
        else:
            found = [module for path, module in model.named_modules() if path and chosen(path, module)]
        found = [module for module in found if module is not model and any(True for _ in module.parameters())]
        if not found:
            kinds = sorted({type(module).__name__ for module in model.modules()})
            raise PluginError(
                f"plugin {self.name!r}: wrap fits no module with parameters inside of model {name!r}, which is made of "
                f"{', '.join(kinds)}. Leave wrap out to shard it in one piece"
            )
        return found[::-1]

    def _policies(self) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        """The policy of the units, and of the rest of the model."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given = self._mixed_precision
        if given is None:
            return MixedPrecisionPolicy(), MixedPrecisionPolicy()
        if not isinstance(given, torch.dtype):
            return given, given
        inner = MixedPrecisionPolicy(param_dtype=given, reduce_dtype=torch.float32)
        return inner, MixedPrecisionPolicy(given, torch.float32, output_dtype=torch.float32)

    def _mesh_on(self, device: str) -> DeviceMesh:
        """The given mesh; by default all processes, in one line."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        given = self._mesh
        if isinstance(given, DeviceMesh):
            if given.ndim > 2 or given.device_type != device:
                raise PluginError(f"plugin {self.name!r}: mesh is {given}: give one or two dimensions, on {device}")
            self._each_step |= given.size() != self.world.size  # what is not summed is summed over all
            return given
        sizes = given or (self.world.size,)
        if math.prod(sizes) != self.world.size:
            raise PluginError(f"plugin {self.name!r}: mesh is {sizes}, and there are {self.world.size} processes")
        if device not in self._meshes:
            names = ("copies", "parts")[-len(sizes) :]
            self._meshes[device] = init_device_mesh(device, sizes, mesh_dim_names=names)
        return self._meshes[device]

    def place(self) -> tuple[int, int]:
        """This process's place along the mesh, and its length."""
        mesh, number = self._mesh, 0
        if mesh is None or isinstance(mesh, tuple):
            return super().place()
        if (place := mesh.get_coordinate()) is None:
            raise PluginError(f"plugin {self.name!r}: rank {self.world.rank} is not in mesh {mesh}: each must be")
        for at, size in zip(place, mesh.shape, strict=True):
            number = number * size + at
        return number, mesh.size()

    @hookimpl
    def setup_data(self, learner: Learner, phase: Phase, data: Any) -> Any:
        """Take this process's part of the data."""
        if phase.name == "predict" and self._shard and self.place()[1] != self.world.size:
            raise PluginError(
                f"plugin {self.name!r}: predict, where several processes have the same batch: outputs would come "
                f"several times. Take learner.predict_batches with your own data, and shard=False"
            )
        return super().setup_data(learner, phase, data)

    @hookimpl(before=("checkpoint",))
    def fit_begin(self, learner: Learner) -> None:
        """Raise for optimizers of other parameters; begin as all members do."""
        self._check_optimizers(learner)
        super().fit_begin(learner)

    @hookimpl(writes=("buffers",))
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Raise for optimizers of other parameters; take the buffers of rank 0, where the phase does not train."""
        if self.world.size == 1:
            return
        if phase.training:
            self._check_optimizers(learner)
        else:
            buckets.copy_buffers(self._roots)

    def equal(self, learner: Learner) -> dict[str, Tensor]:
        """The parameters of which each process holds the whole."""
        own = {name: model for name, model in learner.models.items() if name not in self._taken}
        return {name: p for name, p in named_parameters(own) if not sharded.is_sharded(p)}

    def _check_optimizers(self, learner: Learner) -> None:
        for name, optimizer in learner.optimizers.items() if self._roots else ():
            own = {id(p) for model in learner.models.with_extras().values() for p in model.parameters()}
            strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
            if strange:
                raise PluginError(
                    f"plugin {self.name!r}: {len(strange)} parameters of optimizer {name!r} are none of the models', "
                    f"whose parameters became sharded ones after it was made. Give the learner a function that makes "
                    f"it: optimizer=lambda params: {type(optimizer).__name__}(params, ...)"
                )

    @hookimpl(writes=("params",))  # outside of all that looks at the parameters or changes them
    @contextmanager
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> Iterator[None]:
        """Begin with sharded parameters, whatever was run in between."""
        self._reshard()
        with (
            super().epoch_context(learner, phase, epoch),
            learner.models.weights.replaced(self._unsummed.hide, self._show),
        ):
            yield

    @hookimpl
    def step_context(self, learner: Learner, phase: Phase, step: Step) -> AbstractContextManager[None] | None:
        """Sum gradients only in the last step of a window; leave sharded parameters behind."""
        return self._around(learner, phase, step) if self._roots else None

    @contextmanager
    def _around(self, learner: Learner, phase: Phase, step: Step) -> Iterator[None]:
        epoch = step.epoch
        if phase.training:
            if self._unsummed.some and not epoch.window_open:  # the window was dropped
                self._unsummed.take()
            self._factor = None
            due = step.last or all(window.count + 1 >= window.size for window in epoch.windows)
            self._set_syncing(due or self._each_step)
        try:
            yield
        except BaseException as error:
            for model in self._synced:  # forward or backward may have been left in the middle
                if hasattr(model, "reset_iter_state"):
                    model.reset_iter_state()
                elif isinstance(error, CancelStep):
                    raise PluginError(
                        f"FSDP cannot cancel a step with torch {torch.__version__}, whose FSDPModule has no "
                        f"reset_iter_state: take torch 2.13"
                    ) from error
            if self._factor is not None and not step.had_backward:
                self._unsummed.scale(1 / self._factor)
            raise
        if not step.had_backward:
            self._reshard()

    @hookimpl(phase="training")
    def backward_begin(self, step: Step) -> None:
        """If this backward sums gradients: first, make them each process's gradients of the whole window."""
        if not self._roots or not self._syncing or self._sync_each_step:
            return
        if self._factor is None:  # else it is a further backward of the step
            factors = [window.settle(step, step.weight) for window in step.epoch.windows]
            self._factor = factors[0]  # the windows are in step
            self._unsummed.scale(self._factor)
        step.seed = step.seed * self._factor

    def _compare_weights(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Raise for gradients that were summed before all weights of their window were known, if these differ."""
        factor = float(step.epoch.window(step.optimizer_name).factor())  # host sync: a weight that is a tensor
        most, least = learner.world.highest(factor, -factor)
        if most != -least:
            raise WorldError(
                f"the steps of an update have weights that differ from process to process (phase {phase.name!r}, step "
                f"{step.index}), and were summed over the processes before all were known: give "
                f"{type(self).__name__}(sync_each_step=False)"
            )

    @hookimpl(writes=("grads",))
    def update_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Sum what is not summed yet, as when an epoch ends in the middle of a window."""
        if not self._roots:
            return
        if self._sync_each_step:
            self._compare_weights(learner, phase, step)
        if self._unsummed.some:
            factors: dict[int, float | Tensor] = {}
            for window in step.epoch.windows:
                if window.count:
                    factors |= dict.fromkeys(map(id, window.params), window.take_factor())
            grads = [(p, grad * factors.get(id(p), 1.0)) for p, grad in self._unsummed.take()]
            for p, grad in summed(grads):
                p.grad = grad if p.grad is None else p.grad + grad
        if all(p.grad is None for p in step.params):
            raise PhaseError(
                f"no gradient came to any parameter of optimizer {step.optimizer_name!r} in phase {phase.name!r}, step "
                f"{step.index}. Sharded parameters get theirs from step.backward(loss), not from one with a name"
            )

    def _show(self) -> None:
        """For whoever saves: parameters are sharded, and gradients that are not summed yet are, until hidden again."""
        self._reshard()
        self._unsummed.show()

    def _set_syncing(self, syncing: bool) -> None:
        if not syncing:
            self._unsummed.begin(self._sharded, self._policies()[0].reduce_dtype)
        self._unsummed.set_syncing(syncing)
        if syncing != self._syncing:
            self._syncing = syncing
            for model in self._synced:
                model.set_requires_gradient_sync(syncing)

    def _reshard(self) -> None:
        for module in self._sharded:
            module.reshard()


ALREADY = (
    "model {name!r} is sharded already, or shares a module with one that is: leave out wrap, mixed_precision, init and "
    "offload to take it as it is, or give another model"
)


def _check(plugin: str, name: str, model: nn.Module, units: list[nn.Module], fills: bool) -> str:
    """Check that the models can be sharded; returns the type of the device."""
    where = f"plugin {plugin!r}: model {name!r}"
    if any(sharded.is_sharded(p) for p in model.parameters()):
        raise PluginError(f"plugin {plugin!r}: {ALREADY.format(name=name)}")
    kinds = set()
    for path, p in model.named_parameters():
        kinds.add(devices.local_device().type if p.is_meta and fills else p.device.type)
        if p.is_meta and not fills:
            raise PluginError(
                f"{where}: parameter {path!r} is on the meta device: give FSDP(init=...), which fills it, or make the "
                f"model on a real one"
            )
        if not p.is_contiguous():
            raise PluginError(
                f"{where}: parameter {path!r} is not contiguous, which fully_shard does not take: leave out "
                f"ChannelsLast, or call .contiguous() on it"
            )
    if len(kinds) != 1:
        raise PluginError(f"{where} has parameters on {', '.join(sorted(kinds)) or 'no device'}: they must be on one")
    owner: dict[int, nn.Module] = {}
    names = {id(p): path for path, p in model.named_parameters()}
    for unit in [*units, model]:
        inside = [inner for inner in units if inner is not unit and inner in unit.modules()]
        others = {id(module) for inner in inside for module in inner.modules()}
        for module in unit.modules():
            for p in module.parameters(recurse=False) if id(module) not in others else ():
                other = owner.setdefault(id(p), unit)
                if other is not unit:
                    raise PluginError(
                        f"{where}: parameter {names[id(p)]!r} of a unit ({type(other).__name__}) is used by another "
                        f"one, too ({type(unit).__name__}): choose wrap so that tied parameters are in one unit"
                    )
    return kinds.pop()
