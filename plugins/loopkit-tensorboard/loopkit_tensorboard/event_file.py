"""Event files: messages in frames of length and checksums, as TensorBoard reads them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import google_crc32c

__all__ = ["EventFile", "whole"]

LENGTH = struct.Struct("<Q")
CHECKSUM = struct.Struct("<I")
HEAD = LENGTH.size + CHECKSUM.size


class EventFile:
    """A new event file. Each append is written as a whole or, if the disk is full, not at all.

    Args:
        path: The file; it must not exist.

    Raises:
        OSError: It exists, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes written."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def append(self, events: Iterable[bytes]) -> None:
        """Write events, as messages, after the existing ones.

        Raises:
            OSError: The system failed; the file is as it was, if the system lets us.
        """
        rest = memoryview(b"".join(map(_frame, events)))
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += size

    def sync(self) -> None:
        """Make what was written survive a crash of the machine."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close it; twice is once."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def whole(path: Path, limit: int) -> int:
    """How many of the first ``limit`` bytes of an event file are whole records with the right checksums."""
    size = 0
    with path.open("rb") as file:
        while True:
            head = file.read(HEAD)
            if len(head) < HEAD or head[LENGTH.size :] != _checksum(head[: LENGTH.size]):
                return size
            (length,) = LENGTH.unpack_from(head)
            end = size + HEAD + length + CHECKSUM.size
            if end > limit:
                return size
            data = file.read(length)
            if len(data) < length or file.read(CHECKSUM.size) != _checksum(data):
                return size
            size = end


def _frame(data: bytes) -> bytes:
    length = LENGTH.pack(len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted, so that it differs from the CRC of data that hold a CRC."""
    crc: int = google_crc32c.value(data)
    return CHECKSUM.pack((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
