"""A simulated accelerator, ``sim``: two devices in the host's memory, with the CPU's kernels, on which late is late.

What it shows:

- A copy to pinned memory without waiting holds NaN (-1 for integers) until its stream, or an event after it on its own
  device, was waited for. A copy from pinned memory reads that memory when its turn comes.
- What was computed on, or copied by, a side stream is not there for others until they wait for it: they find old bytes.
- An event is not over when it is asked first. New memory holds NaN.
- Each wait of the host is counted, and warns at its line in `told`.
- Memory can be limited; tensors of two devices do not mix. An event of one is not recorded on a stream of the other.
- As on MPS, if a test asks for it: copies from and to unpinned memory are late, too; there is no float64.

What it cannot show: a side stream that reads too early what the default stream has still to write, or that overwrites
what others still read; memory that is freed while another stream uses it (``record_stream``); what CUDA's kernels,
graphs and NCCL do; speed. After one stream has waited for a side stream, all see what that wrote.

The compiler ``g++`` builds the library once, in some 20 seconds, and again when its source or torch changes, in
``build`` beside this file. With ``LOOPKIT_DEVICES=1`` a test that cannot have the devices fails; else it is skipped.
"""

import fcntl
import functools
import os
import shutil
import subprocess
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from distributed.processes import run

from loopkit.base import devices

SOURCE = Path(__file__).parent / "sim" / "device.cpp"
BUILT = Path(__file__).parent / "build"


def give_up(why: str) -> NoReturn:
    """Skip the test, or fail it where the environment asks for the devices."""
    if os.environ.get("LOOPKIT_DEVICES") == "1":
        pytest.fail(why)
    pytest.skip(why)


@functools.cache
def build() -> Path:
    """The library, built if it is not there."""
    if shutil.which("g++") is None:
        give_up("the simulated device needs g++")
    library = BUILT / f"sim-{torch.__version__}.so"
    BUILT.mkdir(exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one builds
        if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
            home, draft = Path(torch.__file__).parent, BUILT / "draft.so"
            places = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}", f"-L{home / 'lib'}"]
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            options = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", abi, *places]
            command = ["g++", *options, str(SOURCE), "-o", str(draft), "-lc10", "-ltorch_cpu", "-ltorch"]
            made = subprocess.run(command, capture_output=True, text=True, timeout=240)
            if made.returncode:
                pytest.fail(f"the simulated device cannot be built: {made.stdout[-3000:]}{made.stderr[-3000:]}")
            draft.replace(library)
    return library


class Sim(types.ModuleType):
    """``torch.sim``."""

    def __init__(self) -> None:
        super().__init__("torch.sim")

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Its kernels draw from the CPU's generator."""

    def get_rng_state(self, device: Any = "sim") -> torch.Tensor:
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state() for _ in range(2)]

    def set_rng_state(self, state: torch.Tensor, device: Any = "sim") -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def load(late: bool = True, like_mps: bool = False) -> None:
    """Make this process have the devices; the arguments are those of `simulated`."""
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(str(build()))
    torch._register_device_module("sim", Sim())
    if late:
        devices.LATE.add("sim")
    if like_mps:
        devices.NARROW.add("sim")
        torch.ops.sim.float64(False)
        torch.ops.sim.late_unpinned(True)


def simulated(late: bool = True, like_mps: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test in a forked process that has the devices, so that no other test meets them.

    Args:
        late: Whether loopkit may read from them late, as from CUDA; else it waits, as for MPS and XPU.
        like_mps: Whether they have no float64, and copies without waiting are late from and to any memory.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def inside(**given: Any) -> None:
            build()

            def child(rank: int) -> tuple[str, str]:
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                    os.environ.pop(name, None)
                load(late, like_mps)
                try:
                    test(**given)
                except RuntimeError as error:
                    if "device_ready_queues_" not in str(error):
                        raise
                    return "autograd began in this process before the device was there: run tests/devices alone", ""
                except pytest.skip.Exception as skipped:  # of a distribution that is missing
                    return "", str(skipped)
                return "", ""

            refused, skipped = run(child, 1, timeout=60)[0]
            if refused:
                give_up(refused)
            if skipped:
                pytest.skip(skipped)

        return inside

    return decorate


def apart(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test in a forked process without the devices: where autograd has begun, later tests cannot have them."""

    @functools.wraps(test)
    def inside(**given: Any) -> None:
        run(lambda rank: test(**given), 1, timeout=60, env=dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK")))

    return inside


def waits() -> int:
    """How often the host has waited."""
    return torch.ops.sim.waits()


@contextmanager
def told() -> Iterator[list[tuple[str, int, str]]]:
    """The waits of the host meanwhile: file, line, and for what."""
    lines: list[tuple[str, int, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.ops.sim.tell(True)
        try:
            yield lines
        finally:
            torch.ops.sim.tell(False)
            lines += [(Path(w.filename).name, w.lineno, str(w.message).partition(" (Triggered")[0]) for w in caught]
