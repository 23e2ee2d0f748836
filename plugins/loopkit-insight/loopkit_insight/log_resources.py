"""Log how busy the machine is."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from loopkit.author import Shown, checks
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner

__all__ = ["LogResources"]

PREFIX = "resources/"


class LogResources(Shown):
    """Log the use of processors, memory and GPUs every so many seconds.

    - ``"resources/cpu"``: of all processors together, in percent; ``"resources/process_cpu"``: of this process, in
      percent of one processor.
    - ``"resources/memory"``: in use in the machine, in percent; ``"resources/process_memory"``: held in main memory by
      this process, in bytes, without its loaders' workers.
    - ``"resources/gpu0"``: the share of the time in which it computed, in percent; ``"resources/gpu0_memory"``: in use
      on it by all processes, in bytes. They are of the GPUs that this process can see, by torch's numbers, once it
      uses one.

    A separate thread reads them, with psutil and, where there are NVIDIA GPUs and nvidia-ml-py, through NVML; values
    that a GPU does not report are left out. It is logged at the end of the next step or epoch, only the latest. Each
    process looks for itself, and of several the first one's is written.

    Args:
        every: Seconds, above 0. A shorter fit has none.
        name: The plugin's name.

    Raises:
        ImportError: psutil is not installed.
        PluginError: ``every`` is no number above 0.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a"), LogResources(every=30)])
    """

    provides = "observer"
    volatile = ("_sampler", *(PREFIX + name for name in ("cpu", "process_cpu", "memory", "process_memory")))

    def __init__(self, every: float = 10.0, name: str = "log_resources") -> None:
        checks.positive("LogResources", "seconds", every=every)
        try:
            import psutil  # noqa: F401 - the thread uses it
        except ImportError as error:
            raise ImportError("LogResources needs psutil: pip install 'loopkit-insight[resources]'") from error
        self.name = name
        self.every = every
        self._sampler: _Sampler | None = None

    @hookimpl
    def fit_begin(self) -> None:
        """Start the thread."""
        self._sampler = _Sampler(float(self.every))

    @hookimpl
    def step_end(self, learner: Learner) -> None:
        """Log what was seen since the last time."""
        if self._sampler is not None and self._sampler.news:
            self._log(learner, self._sampler)

    @hookimpl
    def phase_end(self, learner: Learner) -> None:
        """Likewise: its steps may be long, and the end of the epoch as well."""
        if self._sampler is not None and self._sampler.news:
            self._log(learner, self._sampler)

    @hookimpl
    def fit_end(self) -> None:
        """End the thread."""
        if self._sampler is not None:
            self._sampler.end()
            self._sampler = None

    def _log(self, learner: Learner, sampler: _Sampler) -> None:
        sampler.news = False
        learner.log({PREFIX + name: value for name, value in sampler.latest.items()})
        if (error := sampler.error) is not None:
            warnings.warn(
                f"plugin {self.name!r} has stopped looking: {type(error).__name__}: {error}; the fit continues",
                stacklevel=2,
            )


class _Sampler:
    """A thread that looks from time to time, until `end`."""

    def __init__(self, every: float) -> None:
        self.news = False
        """The following two have new values."""
        self.latest: dict[str, float] = {}
        """The last values."""
        self.error: Exception | None = None
        """The error that ended the thread."""
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loopkit-resources", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            gauges = _Gauges()
            while not self._over.wait(self._every):
                self.latest = gauges.read()
                self.news = True
        except Exception as error:
            self.latest, self.error = {}, error
            self.news = True

    def end(self) -> None:
        """End the thread, and wait for it: its work takes milliseconds."""
        self._over.set()
        self._thread.join(10.0)


class _Gauges:
    """The gauges of this machine."""

    def __init__(self) -> None:
        import psutil

        process = psutil.Process()
        self._host: dict[str, Callable[[], float]] = {
            "cpu": psutil.cpu_percent,
            "process_cpu": process.cpu_percent,
            "memory": lambda: psutil.virtual_memory().percent,
            "process_memory": lambda: process.memory_info().rss,
        }
        self._gpus: dict[str, Callable[[], float]] | None = None
        self.read()  # processors tell what they did since the last time

    def read(self) -> dict[str, float]:
        """All values by name, as far as the GPUs report them."""
        found = {name: float(gauge()) for name, gauge in self._host.items()}
        if self._gpus is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # looking must not initialise it
            self._gpus = {}
            for number in range(torch.cuda.device_count()):
                self._gpus[f"gpu{number}"] = partial(torch.cuda.utilization, number)
                self._gpus[f"gpu{number}_memory"] = partial(torch.cuda.device_memory_used, number)
        gauges = self._gpus or {}
        for name, gauge in list(gauges.items()):
            try:
                found[name] = float(gauge())
            except Exception:  # no nvidia-ml-py, or an error of NVML for what this GPU or its driver does not tell
                gauges.pop(name)
        return found
