"""Surroundings: the changes by contexts, for a fit that an interrupt has kept from leaving one."""

from __future__ import annotations

import torch

DEVICES = ("cpu", "cuda")


class Surroundings:
    """The settings of torch at the begin of a fit, such as autocast and gradients; `restore` puts them back.

    Args:
        hooks: How many hooks are running around the fit.
    """

    def __init__(self, hooks: int) -> None:
        self.hooks = hooks
        self._grad = torch.is_grad_enabled()
        self._casts = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES
        ]
        self._nesting = _nesting()

    def restore(self) -> None:
        """Undo the changes of contexts that were never left."""
        torch.set_grad_enabled(self._grad)
        for device, enabled, dtype in self._casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        for _ in range(_nesting() - self._nesting):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _nesting() -> int:
    """How many autocast contexts are open."""
    nesting: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting - 1
