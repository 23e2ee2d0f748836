"""Mixed precision: autocast around the step, and loss scaling where float16 needs it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.base import devices
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import nearest
from loopkit.errors import PhaseError, PluginError
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


class MixedPrecision(Shown):
    """Run every phase's step under autocast; with float16, scale the loss with torch's ``GradScaler``.

    Parameters stay float32. The scale goes into ``step.seed``, so ``step.loss`` is never scaled; gradients are unscaled
    at ``update_begin`` before any plugin reads them. An update whose gradients overflow is skipped: ``update_skipped``
    fires instead of ``update_end``, so neither schedules nor averages move. With several optimizers there is one
    scaler; it adapts once, at the end of a step in which an update was due and no other optimizer's window is open.

    A fused optimizer (``fused=True``) is given the flag and skips on the device, where no step waits for it; that such
    an update was skipped is not known to the host in time, so ``update_end`` fires and it counts as an update.

    Args:
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` (no autocast) or the torch dtype; ``"auto"`` is bfloat16
            where the device has it, else float16.
        scaling: Scale the loss; by default with float16 only.
        init_scale, growth_factor, backoff_factor, growth_interval: As in ``torch.amp.GradScaler``.
        min_scale: The scale never falls below it.

    Autocast casts a weight once a step, and again after a backward, an update, or a change in place of any weight of
    the models, or of modules that the phase holds. A change through ``.data`` between two forwards cannot be seen: call
    ``torch.clear_autocast_cache()`` after it. `SanityCheck` raises for one in the first step.

    A model of float64 parameters is warned of: autocast leaves them as they are.

    With scaling, each epoch of a training phase puts ``loss_scale`` and ``skipped`` (updates so far) into
    ``learner.metrics``.

    Raises:
        PluginError: An option is out of range, or the model's own parameters are half precision.
        PhaseError: An update with a closure meets scaling.
    """

    name = "mixed_precision"
    provides = "mixed_precision"
    owns = ("grads.scale",)
    syncs = ("update_begin",)
    """With scaling, and an optimizer that is not fused, it reads one flag per update."""

    def __init__(
        self,
        dtype: str | torch.dtype = "auto",
        *,
        scaling: bool | None = None,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 0.0,
    ) -> None:
        if dtype != "auto" and dtype not in (*DTYPES, *DTYPES.values()):
            hint = nearest(SHORT.get(dtype.lower(), dtype), DTYPES) if isinstance(dtype, str) else ""
            raise PluginError(f"MixedPrecision(dtype={dtype!r}): it is 'auto', {', '.join(map(repr, DTYPES))}{hint}")
        if not (0 < init_scale < math.inf and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise PluginError(
                f"MixedPrecision: init_scale={init_scale} must be above 0, growth_factor={growth_factor} above 1, "
                f"backoff_factor={backoff_factor} between 0 and 1, growth_interval={growth_interval} at least 1"
            )
        if not 0 <= min_scale <= init_scale:
            raise PluginError(f"MixedPrecision(min_scale={min_scale}): it is between 0 and init_scale={init_scale}")
        self._dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        self._scaling = scaling
        self._options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        self.min_scale = min_scale
        self.device = "cpu"
        """The kind of device that the models are on."""
        self.scaler: torch.amp.GradScaler | None = None
        """The scaler of the loss, if it is scaled."""
        self._state: dict[str, Any] = {}
        self._skipped = 0
        self._skipped_on_device: Tensor | None = None
        self._flagged: torch.optim.Optimizer | None = None
        """The fused optimizer that holds the flag of its update."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the forward pass; ``"auto"`` is decided when the model is known."""
        return self._dtype if isinstance(self._dtype, torch.dtype) else torch.bfloat16

    @property
    def own_updates(self) -> bool:
        """Whether it does its part where a phase updates in its own way: without scaling."""
        return self.scaler is None

    @property
    def loss_scale(self) -> float:
        """The scale now; reading it waits for the device."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    @property
    def skipped(self) -> int:
        """Updates skipped so far; with a fused optimizer, reading it waits for the device."""
        return self._skipped + (0 if self._skipped_on_device is None else int(self._skipped_on_device.item()))

    @hookimpl(reads=("model",), after=("device",))
    def setup_model(self, learner: Learner, name: str, model: nn.Module) -> nn.Module:
        """Raise for half-precision parameters; decide the dtype and make the scaler."""
        for path, p in model.named_parameters():
            if p.dtype in (torch.float16, torch.bfloat16):
                raise PluginError(
                    f"MixedPrecision: parameter {path!r} of model {name!r} is {p.dtype}; small updates of such a "
                    f"parameter are rounded away. Keep the model in float32 (no .half() or .bfloat16()): autocast "
                    f"casts what is fast in {self.dtype}"
                )
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if kinds == {torch.float64} and self._dtype != torch.float32:
            warn(
                f"MixedPrecision: the parameters of model {name!r} are float64, which autocast leaves as they are, so "
                f"it does not run in {self.dtype}: keep the model in float32, model.float(), or drop the plugin"
            )
        self.device = next((p.device.type for m in learner.models.values() for p in m.parameters()), "cpu")
        if self._dtype == "auto":
            self._dtype = torch.bfloat16 if devices.computes_bfloat16(self.device) else torch.float16
        if self.scaler is None and (self._scaling if self._scaling is not None else self.dtype == torch.float16):
            self.scaler = torch.amp.GradScaler(self.device, **self._options)
            if self._state:
                self.scaler.load_state_dict(self._state)
        return model

    @hookimpl
    def epoch_context(self, phase: Phase) -> AbstractContextManager[Any] | None:
        """Take the flag from a fused optimizer, whatever was raised."""
        if self.scaler is None or not phase.training:
            return None
        end = ExitStack()
        end.callback(self._take_flag)
        return end

    @hookimpl
    def step_context(self, step: Step) -> AbstractContextManager[Any] | None:
        """Autocast; an epoch inside the step of another keeps that one's cache of cast weights."""
        if self.dtype == torch.float32:
            return None
        keep = step.epoch.keep(self)
        if "autocast" not in keep:  # one for all steps: to make it takes as long as to enter it
            cached = None if step.epoch.depth == 0 else False
            keep["autocast"] = torch.autocast(self.device, self.dtype, cache_enabled=cached)
        return keep["autocast"]  # type: ignore[no-any-return]

    @hookimpl(reads=("loss",), traced=())  # with scaling there is the scale, a tensor that no recording knows
    def backward_begin(self, step: Step) -> None:
        """Scale what backward starts from."""
        if self.scaler is not None:
            seed = step.seed
            if not isinstance(seed, Tensor):
                dtype = torch.promote_types(step.loss.dtype, torch.float32)
                seed = torch.full((), seed, dtype=dtype, device=step.loss.device)
            step.seed = self.scaler.scale(seed)

    @hookimpl(writes=("grads",), after=("sync",), traced=())
    def update_begin(self, phase: Phase, step: Step) -> None:
        """Unscale the gradients, and vote to skip the update if they overflowed."""
        scaler = self.scaler
        optimizer = step.optimizer
        if scaler is None:
            return
        if step.closure is not None:
            raise PhaseError(
                f"phase {phase.name!r}: an update with a closure cannot be used with loss scaling, since the optimizer "
                f"evaluates the loss itself; use MixedPrecision('bfloat16')"
            )
        if scaler._scale is None:  # a resumed epoch ends without another backward
            scaler.scale(torch.zeros((), device=step.params[0].device))
        scaler.unscale_(optimizer)
        # taken away at once: the scaler refuses to unscale twice, and the scale may only be adapted some steps later
        flags = list(scaler._per_optimizer_states.pop(id(optimizer))["found_inf_per_device"].values())
        if not flags:  # there are no gradients
            return
        found = flags[0]
        for flag in flags[1:]:
            found = torch.maximum(found, devices.to_device(flag, found.device))
        store = step.epoch.store(self)  # above 0 if an update overflowed since the scale was adapted
        earlier = store.get("found")
        store["found"] = found if earlier is None else devices.to_device(earlier, found.device) + found
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = found  # type: ignore[attr-defined]
            self._flagged = optimizer
            late = self._skipped_on_device
            self._skipped_on_device = found if late is None else devices.to_device(late, found.device) + found
        elif found.item():  # host sync: whether the optimizer may run
            self._skipped += 1
            step.skip_update("the gradients overflowed")

    @hookimpl
    def update_end(self) -> None:
        """Take the flag from a fused optimizer."""
        self._take_flag()

    @hookimpl
    def update_skipped(self) -> None:
        """Take the flag from a fused optimizer, which another plugin has kept from its update."""
        self._take_flag()

    @hookimpl
    def step_end(self, step: Step) -> None:
        """Adapt the scale."""
        self._adapt(step.epoch)

    @hookimpl
    def step_cancelled(self, step: Step) -> None:
        """Adapt the scale to an overflow all the same."""
        self._adapt(step.epoch)

    @hookimpl(writes=("metrics.*/loss_scale", "metrics.*/skipped"))
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Adapt after an update that closed the epoch's last window; report."""
        if self.scaler is not None and phase.training:
            self._adapt(epoch)
            learner.metrics[f"{phase.name}/loss_scale"] = self.loss_scale
            learner.metrics[f"{phase.name}/skipped"] = float(self.skipped)

    def _adapt(self, epoch: Epoch) -> None:
        scaler = self.scaler
        if scaler is None or epoch.window_open or (found := epoch.store(self).pop("found", None)) is None:
            return
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {found.device: found}
        scaler.update()
        if self.min_scale and scaler._scale is not None:
            scaler._scale.clamp_(min=self.min_scale)

    def _take_flag(self) -> None:
        if self._flagged is not None:
            del self._flagged.found_inf  # type: ignore[attr-defined]
            self._flagged = None

    def options(self) -> dict[str, Any]:
        """The options it was made with."""
        return {"dtype": self._dtype, "scaling": self._scaling, **self._options, "min_scale": self.min_scale}

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state and the count of skipped updates."""
        return {
            "scaler": dict(self._state if self.scaler is None else self.scaler.state_dict()),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._skipped = state["skipped"]
        self._skipped_on_device = None
        self._state = dict(state["scaler"])
        if self.scaler is not None and self._state:
            self.scaler.load_state_dict(self._state)
