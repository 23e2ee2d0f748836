"""Graphs compiled in a separate process, and libraries kept for the next one."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopkit_whole_step import private
from loopkit_whole_step.handover import NotHandedOver, Written

PATIENCE = 900.0
"""Seconds for which a process may compile a graph."""
LOOK = 0.02
"""Seconds between two looks whether it is ready, while the training waits."""
START = """
import sys, types
sys.path[:] = {path!r}
package = sys.modules["loopkit_whole_step"] = types.ModuleType("loopkit_whole_step")
package.__path__ = [{package!r}]
from loopkit_whole_step.builder import main
main({folder!r}, {answers!r}, {parent!r})
"""
FILES = ("library.so", "constants.pt")


class Failed(Exception):
    """A graph that was not compiled."""


class Build:
    """A graph that is compiled, or was.

    Args:
        folder: Where it is compiled; empty if it is kept already.
        digest: The name under which its library is kept.
    """

    def __init__(self, folder: Path | None, digest: str) -> None:
        self.folder, self.digest, self.started = folder, digest, time.monotonic()
        self.call: Callable[..., Any] | None = None
        self.constants: list[Tensor] = []
        """The constants that it takes after the inputs."""
        self.seconds = 0.0
        """The processor time of compiling."""


class Worker:
    """A process that compiles graphs one after another, and the folder in which libraries are kept."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._finalizer: Any = None
        self._jobs = 0

    def start(self, written: Written) -> Build:
        """Load a graph's library if it is kept; otherwise let it be compiled.

        Raises:
            NotHandedOver: This system, or this kind of program, starts no such process.
            OSError: It cannot be started.
        """
        settings = private.settings()
        digest = _digest(written, settings)
        build = Build(None, digest)
        if (found := kept(digest)) is not None:
            build.call = found
            return build
        process = self.begin()
        self._jobs += 1
        build.folder = self._folder / str(self._jobs)
        build.folder.mkdir()
        (build.folder / "job").write_bytes(pickle.dumps((written, settings)))
        assert process.stdin is not None
        process.stdin.write(f"{build.folder}\n".encode())
        process.stdin.flush()
        return build

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the process, if it does not run.

        Raises:
            NotHandedOver: This system, or this kind of program, starts no such process.
            OSError: It cannot be started.
        """
        if os.name != "posix" or not sys.executable or getattr(sys, "frozen", False):
            raise NotHandedOver("no process of Python can be started here")
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._begin()
        return self._process

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start the process."""
        root = cache_folder()
        self._folder = Path(tempfile.mkdtemp(prefix="work-", dir=root))
        answers = str((root or self._folder) / "vector-units.json")
        about = {"path": sys.path, "package": str(Path(__file__).parent), "parent": os.getpid()}
        text = START.format(**about, folder=str(self._folder), answers=answers)
        places = {name: str(self._folder) for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "TMP", "TEMP")}
        with open(self._folder / "errors", "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", text],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **places, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, process, self._folder, os.getpid())
        return process

    def ready(self, build: Build) -> bool:
        """Whether a graph is compiled, or never will be."""
        if build.call is not None:
            return True
        assert build.folder is not None
        if self._process is None or self._process.poll() is not None:
            return True
        return (build.folder / "said.json").exists()

    def take(self, build: Build) -> Callable[..., Any]:
        """Wait for a graph and load it.

        Raises:
            Failed: The process has ended, or took too long, or the compiler failed.
            NotHandedOver: The graph has to be compiled in this process.
        """
        while not self.ready(build):
            if time.monotonic() - build.started > PATIENCE:
                self.close()
                raise Failed(f"it was not compiled within {PATIENCE:.0f} s")
            time.sleep(LOOK)
        if build.call is not None:
            return build.call
        assert build.folder is not None
        try:
            said = json.loads((build.folder / "said.json").read_text())
        except (OSError, ValueError):
            raise Failed(f"the process that compiles it has ended ({self._last_words()})") from None
        if "not" in said:
            raise NotHandedOver(said["not"])
        if "error" in said:
            raise Failed(f"it cannot be compiled ({said['error']})")
        build.seconds = said["seconds"]
        (build.folder / "job").unlink()
        try:
            build.call = _loaded(build.folder)
        except (OSError, ValueError, ImportError) as error:
            raise Failed(f"its library cannot be loaded ({error})") from None
        _keep(build.folder, build.digest)
        return build.call

    def _last_words(self) -> str:
        if self._process is None:
            return "it belonged to another learner"
        code = self._process.wait()
        if code < 0:
            return signal.Signals(-code).name
        lines = (self._folder / "errors").read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else f"exit code {code}"

    def __reduce__(self) -> tuple[type[Worker], tuple[()]]:
        """A copy has no process."""
        return Worker, ()

    def close(self) -> None:
        """End the process and remove its folder."""
        if self._finalizer is not None:
            self._finalizer()
        self._process, self._finalizer = None, None


def _end(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    """End a process and what it has started, and remove its folder."""
    if os.getpid() != owner:
        return  # a worker of a loader, say, that was forked
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


# Libraries that are kept


def cache_folder(make: bool = True) -> Path | None:
    """The folder of libraries, beside what inductor keeps; None if it is not this user's own, or cannot be written."""
    if os.name != "posix":
        return None
    try:
        given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        root = Path(given) if given else Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        folder = root / "loopkit_whole_step"
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022 or not os.access(folder, os.W_OK):
            return None
    except (OSError, KeyError):
        return None
    return folder


def is_known(name: str, before: float) -> bool:
    """Whether a library was kept, before a time, for a step of this name, which is known before it is recorded."""
    root = cache_folder(make=False)
    if root is None:
        return False
    try:
        return (root / "known" / name).stat().st_mtime <= before
    except OSError:
        return False


def remember(name: str) -> None:
    """Note that a library is kept for a step of this name."""
    root = cache_folder()
    if root is not None and not (root / "known" / name).exists():
        (root / "known").mkdir(exist_ok=True)
        (root / "known" / name).touch()


def kept(digest: str) -> Callable[..., Any] | None:
    """A library that is kept, loaded; None if there is none, or a damaged one, which is removed."""
    root = cache_folder(make=False)
    if root is None or not (folder := root / digest).is_dir():
        return None
    try:
        return _loaded(folder)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, EOFError, pickle.UnpicklingError):
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _loaded(folder: Path) -> Callable[..., Any]:
    """Load a library.

    Raises:
        ValueError: It is damaged.
    """
    said = json.loads((folder / "said.json").read_text())
    for name, digest in zip(FILES, said["digests"], strict=True):
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{name} is damaged")
    constants: list[Tensor] = torch.load(folder / "constants.pt", weights_only=True)
    return private.load_library(folder / "library.so", constants)


def _keep(folder: Path, digest: str) -> None:
    """Keep a library under its name; whoever comes first has it."""
    root = cache_folder()
    if root is not None and folder.is_relative_to(root):
        try:
            os.rename(folder, root / digest)
        except OSError:
            return  # another process was first


def _digest(written: Written, settings: dict[str, Any]) -> str:
    """A name that only the same graph has, compiled in the same way for the same kind of machine."""
    about = (written.nodes, written.kinds, sorted(settings.items()), _machine())
    return hashlib.sha256(repr(about).encode()).hexdigest()[:40]


@cache
def _machine() -> tuple[str, ...]:
    """Versions and kinds that a library depends on: torch, Python, the processor, the compiler and this package."""
    own = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = ""
    compiler = os.environ.get("CXX", "")
    python = f"{sys.implementation.cache_tag} {platform.machine()} {platform.libc_ver()}"
    return torch.__version__, python, flags, compiler, own.hexdigest()
