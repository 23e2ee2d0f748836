"""A folder of an object store: its objects can be written, listed, read and removed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Literal

from loopkit.author import FileInfo, streams
from loopkit.errors import LoopkitError, PluginError

Verify = Literal["size", "digest"]
"""The check after an upload: compare the sizes in the store's listing, or read all bytes again."""


class RemoteError(LoopkitError, OSError):
    """A store does not do what it was asked for, or does not hold what it should."""


class Changed(RemoteError):
    """A file to upload differs from its manifest: it is damaged here."""


class Store:
    """Objects below a URL, by their paths, such as ``"000001-step-4/model.safetensors"``.

    Whatever the file system raises becomes a `RemoteError`.

    Args:
        url: A URL that ``fsspec`` knows, such as ``"s3://bucket/runs/a"``.
        options: For the file system, such as credentials.
        stopped: Asked between two pieces: an upload that is no longer needed ends there.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        from fsspec.core import url_to_fs  # 0.1 s, in no process that does not upload

        try:
            self._fs, root = url_to_fs(url, **(options or {}))
        except (ImportError, ValueError) as error:
            raise PluginError(
                f"the store {hidden(url)} cannot be used: {error}. Give a URL such as 's3://bucket/runs/a', and "
                f"install the package for it (s3fs, gcsfs, adlfs)"
            ) from error
        self.url, self._root, self._stopped = hidden(url), root.rstrip("/"), stopped

    def __str__(self) -> str:
        return self.url

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _asking(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:
            raise RemoteError(f"cannot {what} {self.url}/{path}: {type(error).__name__}: {error}") from error

    def sizes(self, path: str = "") -> dict[str, int | None]:
        """The entries directly below a folder: bytes of objects, None for folders. Empty if there is no such folder."""
        with self._asking("list", path):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(path), detail=True)
            except FileNotFoundError:
                return {}
            names = {str(each["name"]).rstrip("/").rpartition("/")[2]: each for each in found}
            return {name: None if each["type"] == "directory" else each["size"] for name, each in names.items()}

    def read(self, path: str) -> bytes:
        """All of a small object."""
        with self._asking("read", path):
            return bytes(self._fs.cat_file(self._path(path)))

    def pieces(self, path: str) -> Iterator[bytes]:
        """An object, part by part."""
        with self._asking("read", path), self._fs.open(self._path(path), "rb") as file:
            while piece := file.read(streams.PIECE):
                yield piece

    def digest(self, path: str) -> FileInfo:
        """The size and the digest of an object, read again."""
        size, sha256 = 0, hashlib.sha256()
        for piece in self.pieces(path):
            size += len(piece)
            sha256.update(piece)
        return FileInfo(size, sha256.hexdigest())

    def write(self, path: str, source: BinaryIO, size: int) -> FileInfo:
        """Put so many bytes of an open file into an object -> what they were. Whether they arrived is not known yet."""
        left, sha256 = size, hashlib.sha256()
        with self._asking("write", path):
            with suppress(FileExistsError):
                self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)
            with self._fs.open(self._path(path), "wb") as file:
                while left and (piece := source.read(min(left, streams.PIECE))):
                    if self._stopped():
                        raise RemoteError(f"the upload of {self.url}/{path} was given up")
                    file.write(piece)
                    sha256.update(piece)
                    left -= len(piece)
        return FileInfo(size - left, sha256.hexdigest())

    def put(self, path: str, data: bytes) -> None:
        """Write a small object, and read it again.

        Raises:
            RemoteError: It does not hold that.
        """
        with self._asking("write", path):
            self._fs.pipe_file(self._path(path), data)
            self._fs.invalidate_cache()
        if (found := self.read(path)) != data:
            raise RemoteError(
                f"{self.url}/{path} holds {len(found)} other bytes than the {len(data)} that were written"
            )

    def check(self, folder: str, said: Mapping[str, FileInfo], verify: Verify) -> None:
        """See that a folder holds these objects.

        Raises:
            RemoteError: One is missing, or has another size or digest.
        """
        sizes = self.sizes(folder)
        for name, info in said.items():
            if sizes.get(name) != info.size:
                held = "is not there" if name not in sizes else f"has {sizes[name]} bytes"
                raise RemoteError(f"{self.url}/{folder}/{name} {held} after {info.size} bytes were written")
            if verify == "digest" and (found := self.digest(f"{folder}/{name}")) != info:
                raise RemoteError(
                    f"{self.url}/{folder}/{name} has SHA-256 {found.sha256} after {info.sha256} was written"
                )

    def remove(self, path: str, recursive: bool = False) -> None:
        """Remove an object, or a folder with its contents, if it exists."""
        with self._asking("remove", path), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._path(path), recursive=recursive)


def hidden(url: str) -> str:
    """A URL without the password in it."""
    head, mark, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{head}{mark}{user.partition(':')[0]}{at}{host}" if at else url
