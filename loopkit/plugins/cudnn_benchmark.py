"""The fastest convolutions, found by trying them."""

from __future__ import annotations

import torch

from loopkit.errors import PluginError
from loopkit.hooks import hookimpl

__all__ = ["CudnnBenchmark"]


class CudnnBenchmark:
    """Let cuDNN try its algorithms for each new shape of a convolution during a fit, and take the fastest.

    The first step with each shape is slow, so it pays where shapes repeat. Which algorithm wins can differ from run
    to run, and so can rounding. The setting is the process's; ``fit_end`` puts it back. On the CPU it changes nothing.

    Raises:
        PluginError: At ``fit_begin``, deterministic algorithms are asked for.
    """

    name = "cudnn_benchmark"

    def __init__(self) -> None:
        self._before: bool | None = None

    @hookimpl
    def fit_begin(self) -> None:
        """Switch the search on."""
        if torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
            raise PluginError(
                "plugin 'cudnn_benchmark': torch was asked for deterministic algorithms, and a search for the fastest "
                "ones gives others from run to run: leave out CudnnBenchmark() or deterministic=True"
            )
        self._before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True

    @hookimpl
    def fit_end(self) -> None:
        """Put the setting back."""
        if self._before is not None:
            torch.backends.cudnn.benchmark = self._before
            self._before = None
