"""The file ``run-ID.wandb``: how many rows it has, and where it can be cut."""

from __future__ import annotations

import os
import struct
from pathlib import Path

__all__ = ["BEGIN", "LogFile", "cut"]

BLOCK = 32 * 1024
"""The file is in blocks of so many bytes; no chunk goes from one to the next."""
HEAD = struct.Struct("<IHB")
"""The head of a chunk: checksum, length, and whether it is a whole record or its first, middle or last part."""
BEGIN, WHOLE, LAST = 7, 1, 4
"""The bytes before the first block's records, and the types of chunks at which a record ends."""


class LogFile:
    """Follows a file that another process appends to.

    Args:
        path: The file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = BEGIN
        """The bytes up to the end of the last record that is whole."""
        self.rows = 0
        """How many records up to there are rows of the history."""

    def read(self) -> None:
        """Read to the end of the file."""
        from wandb.proto.wandb_internal_pb2 import Record

        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            at, record = self.end, b""
            while True:
                if BLOCK - at % BLOCK < HEAD.size:  # what is left of a block is too small for a chunk
                    at += BLOCK - at % BLOCK
                file.seek(at)
                head = file.read(HEAD.size)
                _, length, kind = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0, 0)
                body = file.read(length)
                if not kind or len(body) < length:
                    return
                at, record = at + HEAD.size + length, record + body
                if kind in (WHOLE, LAST):
                    self.rows += Record.FromString(record).WhichOneof("record_type") == "history"
                    self.end, record = at, b""

    def sync(self) -> None:
        """Let what is there survive a crash of the machine."""
        handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cut(path: Path, size: int) -> str:
    """Cut a file where a record ended; returns what is wrong with it, if something is."""
    if not path.exists():
        return f"{path} is gone"
    there = path.stat().st_size
    if there < size:
        return f"{path} ends at byte {there:,}, before byte {size:,}"
    os.truncate(path, size)
    return ""
