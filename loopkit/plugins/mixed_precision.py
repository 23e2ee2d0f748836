"""Mixed precision: autocast around the step, and loss scaling where float16 needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.errors import PhaseError, PluginError
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.step import Step

__all__ = ["MixedPrecision"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class MixedPrecision:
    """Run every phase's step under autocast; with float16, scale the loss with torch's ``GradScaler``.

    Parameters stay float32. The scale goes into ``step.seed``, so ``step.loss`` is never scaled; gradients are unscaled
    at ``update_begin`` before any plugin reads them. An update whose gradients overflow is skipped: ``update_skipped``
    fires instead of ``update_end``, so neither schedules nor averages move. With several optimizers there is one
    scaler; it adapts once, at the end of a step in which an update was due and no other optimizer's window is open.

    Args:
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` (no autocast) or the torch dtype; ``"auto"`` is bfloat16
            where the device has it, else float16.
        scaling: Scale the loss; by default with float16 only.
        init_scale, growth_factor, backoff_factor, growth_interval: As in ``torch.amp.GradScaler``.
        min_scale: The scale never falls below it.

    With scaling, each pass of a training phase puts ``loss_scale`` and ``skipped`` (updates so far) into
    ``learner.metrics``.

    Raises:
        PluginError: An option is out of range, or the model's own parameters are half precision.
        PhaseError: An update with a closure meets scaling.
    """

    name = "mixed_precision"
    provides = "mixed_precision"
    owns = ("grads.scale",)
    syncs = ("update_begin",)
    """With scaling it reads one flag per update."""

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
            raise PluginError(f"MixedPrecision(dtype={dtype!r}): it is 'auto', {', '.join(map(repr, DTYPES))}")
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise PluginError(
                f"MixedPrecision: init_scale={init_scale} must be above 0, growth_factor={growth_factor} above 1, "
                f"backoff_factor={backoff_factor} between 0 and 1, growth_interval={growth_interval} at least 1"
            )
        if not 0 <= min_scale <= init_scale:
            raise PluginError(f"MixedPrecision(min_scale={min_scale}): it is between 0 and init_scale={init_scale}")
        self._dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        self._wanted = scaling
        self._options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        self._min_scale = min_scale
        self._device = "cpu"
        self._scaler: torch.amp.GradScaler | None = None
        self._state: dict[str, Any] = {}
        self._unscaled = False
        self.skipped = 0
        """Updates skipped so far."""

    @property
    def dtype(self) -> torch.dtype:
        """What the forward pass is cast to; ``"auto"`` is decided when the model is known."""
        return self._dtype if isinstance(self._dtype, torch.dtype) else torch.bfloat16

    @property
    def loss_scale(self) -> float:
        """The scale now; reading it waits for the device."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    @hookimpl(reads=("model",), after=("device",))
    def setup_model(self, name: str, model: nn.Module) -> nn.Module:
        """Refuse half-precision parameters; decide the dtype and make the scaler."""
        for path, p in model.named_parameters():
            if p.dtype in (torch.float16, torch.bfloat16):
                raise PluginError(
                    f"MixedPrecision: parameter {path!r} of model {name!r} is {p.dtype}; small updates of such a "
                    f"parameter are rounded away. Keep the model in float32 (no .half() or .bfloat16()): autocast "
                    f"casts what is fast in {self.dtype}"
                )
            self._device = p.device.type
        if self._dtype == "auto":
            without = self._device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
            self._dtype = torch.float16 if without else torch.bfloat16
        if self._scaler is None and (self._wanted if self._wanted is not None else self.dtype == torch.float16):
            self._scaler = torch.amp.GradScaler(self._device, **self._options)
            if self._state:
                self._scaler.load_state_dict(self._state)
        return model

    @hookimpl
    def step_context(self) -> AbstractContextManager[Any] | None:
        """Autocast."""
        return None if self.dtype == torch.float32 else torch.autocast(self._device, self.dtype)

    @hookimpl
    def backward_begin(self, step: Step) -> None:
        """Scale what backward starts from."""
        if self._scaler is not None:
            seed = step.seed
            if not isinstance(seed, Tensor):
                seed = torch.full((), seed, dtype=torch.float32, device=step.loss.device)
            step.seed = self._scaler.scale(seed)

    @hookimpl(writes=("grads",), after=("sync",))
    def update_begin(self, phase: Phase, step: Step) -> None:
        """Unscale the gradients, and vote to skip the update if they overflowed."""
        scaler = self._scaler
        if scaler is None:
            return
        if step.closure is not None:
            raise PhaseError(
                f"phase {phase.name!r}: an update with a closure cannot be used with loss scaling, since the optimizer "
                f"evaluates the loss itself; use MixedPrecision('bfloat16')"
            )
        states = scaler._per_optimizer_states
        key = id(step.optimizer)
        if key in states and states[key]["found_inf_per_device"]:
            states[len(states)] = states.pop(key)  # an earlier update of this step; it counts for the scale, too
        scaler.unscale_(step.optimizer)
        self._unscaled = True
        found = states[key]["found_inf_per_device"].values()
        if any(flag.item() for flag in found):  # host sync: whether the optimizer may run
            self.skipped += 1
            step.skip_update("the gradients overflowed")

    @hookimpl
    def step_end(self, learner: Learner) -> None:
        """Adapt the scale."""
        if self._unscaled and learner.running is not None and not learner.running.window_open:
            self._adapt()

    @hookimpl
    def step_cancelled(self) -> None:
        """Forget what was unscaled in this step."""
        self._forget()

    @hookimpl(writes=("metrics.*/loss_scale", "metrics.*/skipped"))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Adapt after an update that closed the epoch's last window; report."""
        if self._scaler is not None and phase.training:
            if self._unscaled:
                self._adapt()
            learner.metrics[f"{phase.name}/loss_scale"] = self.loss_scale
            learner.metrics[f"{phase.name}/skipped"] = float(self.skipped)

    @hookimpl
    def epoch_begin(self, phase: Phase) -> None:
        """Forget what a failed epoch left."""
        if phase.training:
            self._forget()

    def _adapt(self) -> None:
        scaler = self._scaler
        assert scaler is not None
        if any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values()):
            scaler.update()
        if self._min_scale and scaler._scale is not None:
            scaler._scale.clamp_(min=self._min_scale)
        self._unscaled = False

    def _forget(self) -> None:
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()
            self._unscaled = False

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state and the count of skipped updates."""
        return {"scaler": {} if self._scaler is None else dict(self._scaler.state_dict()), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.skipped = state["skipped"]
        self._state = dict(state["scaler"])
        if self._scaler is not None and self._state:
            self._scaler.load_state_dict(self._state)
