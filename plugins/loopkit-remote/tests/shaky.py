"""A file system in memory that is slow, fails, cuts off and loses what is written, as the test says."""

import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

URL = "shaky://runs/a"


class Shaky(MemoryFileSystem):
    """In the place of an object store; its trouble is that of the class."""

    protocol = "shaky"
    cachable = False
    store, pseudo_dirs = {}, [""]
    calls = 0
    fail_at = frozenset()
    """The calls that fail, by their numbers."""
    error = ConnectionError
    cut_at = lost_at = flipped_at = frozenset()
    """The writes, by their numbers, of which half arrives, nothing, or as much of something else."""
    writes = 0
    gate = None
    """What each call waits for."""

    @classmethod
    def reset(cls):
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.calls, cls.writes, cls.error = 0, 0, ConnectionError
        cls.fail_at = cls.cut_at = cls.lost_at = cls.flipped_at = frozenset()
        cls.gate = None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("shaky://"))

    @classmethod
    def _call(cls):
        if cls.gate is not None:
            cls.gate.wait(20)
        cls.calls += 1
        if cls.calls in cls.fail_at:
            raise cls.error(f"call {cls.calls}")

    @classmethod
    def _write(cls, path, data):
        """What arrives."""
        cls.writes += 1
        if cls.writes in cls.lost_at:
            return None
        if cls.writes in cls.flipped_at:
            return bytes(255 - byte for byte in data)
        return data[: len(data) // 2] if cls.writes in cls.cut_at else data

    def ls(self, path, detail=True, **options):
        self._call()
        return super().ls(path, detail, **options)

    def cat_file(self, path, start=None, end=None, **options):
        self._call()
        return super().cat_file(path, start, end, **options)

    def rm(self, path, recursive=False, maxdepth=None):
        self._call()
        super().rm(path, recursive, maxdepth)

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._call()
        self._arrived(path, value)

    def open(self, path, mode="rb", **options):
        self._call()
        if mode == "rb":
            return super().open(path, mode, **options)
        return Written(self, path)

    def _arrived(self, path, data):
        path = self._strip_protocol(path)
        self.store.pop(path, None)
        if (kept := self._write(path, data)) is not None:
            self.store[path] = MemoryFile(self, path, bytes(kept))


class Written:
    def __init__(self, fs, path):
        self.fs, self.path, self.data = fs, path, b""

    def write(self, data):
        self.data += data

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None or not issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.fs._arrived(self.path, self.data)


fsspec.register_implementation("shaky", Shaky, clobber=True)


@pytest.fixture
def shaky(monkeypatch):
    """The file system, empty and without trouble; waits between attempts are short."""
    monkeypatch.setattr("loopkit_remote.transfer.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("loopkit_remote.transfer.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr("loopkit_remote.uploading.LOOK", 0.01)
    Shaky.reset()
    yield Shaky
    if Shaky.gate is not None:
        Shaky.gate.set()
    for thread in threading.enumerate():
        if thread.name == "loopkit-upload":
            thread.join(20)
    Shaky.reset()
