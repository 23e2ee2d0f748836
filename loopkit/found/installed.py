"""The entry points of installed distributions, read from their metadata, without an import.

``importlib.metadata`` finds the same, but parses whole metadata for a version, and stops at a broken file.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from loopkit.base.version import DISTRIBUTION, __version__
from loopkit.errors import PluginError

PLUGINS = "loopkit.plugins"
"""The group of plugins: ``name = module:class``, or a function that makes one."""
COMMANDS = "loopkit.commands"
"""The group of subcommands: ``name = module:function``; it takes a list of words and returns the exit code."""

INSTALLED = ".dist-info"
SOURCE = ".egg-info"
"""The endings of folders of metadata: of installations, and of source trees, where they may be out of date."""
REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?", re.ASCII)
NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class EntryPoint:
    """One line of an ``entry_points.txt``."""

    group: str
    name: str
    value: str
    """``module:object``."""
    distribution: str
    """The name of the distribution, as its metadata spell it."""
    version: str

    @property
    def full_name(self) -> str:
        """``distribution:name``, unique among plugins of the same name."""
        return f"{self.distribution}:{self.name}"

    @property
    def module(self) -> str:
        """The module that `load` imports."""
        return self.value.partition(":")[0]

    def is_called(self, word: str) -> bool:
        """Whether ``word`` is its name or its full name. ``loopkit:name`` is a plugin of loopkit itself, too."""
        distribution, colon, name = word.rpartition(":")
        if name != self.name:
            return False
        return not colon or called_now(distribution) == normalized(self.distribution)

    def load(self) -> Any:
        """Import its module and return the object.

        Raises:
            PluginError: The module has no such object.
            BaseException: Whatever the module raises, with a note that names the distribution.
        """
        try:
            found: Any = import_module(self.module)
        except BaseException as error:
            error.add_note(f"loopkit: importing {self.module} for {self}")
            raise
        for attribute in filter(None, self.value.partition(":")[2].split(".")):
            try:
                found = getattr(found, attribute)
            except AttributeError as error:
                from loopkit.base.words import nearest

                raise PluginError(
                    f"{self}: there is no {self.value}{nearest(attribute, dir(found))}; another version of the "
                    f"distribution may have it: pip install --upgrade {self.distribution}"
                ) from error
        return found

    def __str__(self) -> str:
        return f"{self.name!r} of {self.distribution} {self.version}"


@dataclass(frozen=True)
class Installed:
    """The entry points and distributions that `installed` found."""

    entry_points: tuple[EntryPoint, ...]
    problems: tuple[str, ...]
    """Messages about unreadable metadata."""
    distributions: dict[str, str]
    """The folders of metadata, by the normalized name of the distribution."""

    def of(self, group: str) -> list[EntryPoint]:
        """The entry points of a group, by name and distribution."""
        found = [each for each in self.entry_points if each.group == group]
        return sorted(found, key=lambda each: (each.name, normalized(each.distribution)))


def installed(path: Iterable[str] | None = None) -> Installed:
    """Find the entry points of the groups that begin with ``loopkit.``.

    Without a ``path``, loopkit's own plugins are among them, which are none in its metadata.

    Of distributions of the same name the first on the path counts, as for imports; the metadata of a source tree, such
    as that in the working directory, count only if it is not installed. Eggs are not looked into.

    Args:
        path: Folders in which there are distributions; by default ``sys.path``.
    """
    found: list[EntryPoint] = []
    problems: list[str] = []
    candidates = [
        each for base in dict.fromkeys(sys.path if path is None else path) for each in _metadata(base, problems)
    ]
    folders: dict[str, str] = {}
    for folder, name in sorted(candidates, key=lambda candidate: candidate[1].endswith(SOURCE)):
        key = normalized(name.removesuffix(INSTALLED).removesuffix(SOURCE).partition("-")[0])
        if key in folders or not _is_whole(folder):
            continue
        folders[key] = folder
        try:
            found += _entry_points(folder, problems)
        except (OSError, UnicodeDecodeError) as error:
            why = "is not UTF-8" if isinstance(error, ValueError) else f"cannot be read: {error.strerror}"
            problems.append(f"{folder}: its metadata {why}")
    if path is None:  # an older installation of loopkit may have listed its own
        own = [each for each in found if each.group == PLUGINS and called_now(each.distribution) == DISTRIBUTION]
        found = [*_own(), *(each for each in found if each not in own)]
    return Installed(tuple(found), tuple(problems), folders)


def _metadata(base: str, problems: list[str]) -> list[tuple[str, str]]:
    """The folders of metadata in one folder of the path, each with its name."""
    try:
        with os.scandir(base or ".") as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith((INSTALLED, SOURCE)))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return []  # a zip file, the name of a path hook
    except OSError as error:
        problems.append(f"{base} cannot be read: {error.strerror}")
        return []
    return [(os.path.join(base, name), name) for name in names]


@cache
def _own() -> tuple[EntryPoint, ...]:
    """The plugins of loopkit itself: the classes that ``loopkit/plugins/__init__.py`` imports from its modules."""
    from loopkit.events import snake_case

    source = Path(__file__).parents[1] / "plugins" / "__init__.py"
    return tuple(
        EntryPoint(PLUGINS, snake_case(each.name), f"{node.module}:{each.name}", DISTRIBUTION, __version__)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loopkit.plugins.")
        for each in node.names
        if each.name[0].isupper()
    )


@cache
def plugin_names() -> frozenset[str]:
    """The names of the installed plugins, as of the first call; only for spelling."""
    return frozenset(each.name for each in installed().of(PLUGINS))


def normalized(distribution: str) -> str:
    """The name of a distribution as indexes compare it: ``Loopkit_Ray`` -> ``loopkit-ray``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def called_now(distribution: str) -> str:
    """The normalized name of a distribution; for ``loopkit``, as older metadata call loopkit itself, its name now."""
    name = normalized(distribution)
    return DISTRIBUTION if name == "loopkit" else name


def name_and_version(folder: str) -> tuple[str, str]:
    """The name and the version of a distribution, as the metadata in a folder have them."""
    data = b""
    for file in ("METADATA", "PKG-INFO"):
        with suppress(FileNotFoundError):
            data = _read(os.path.join(folder, file))
            break
    name, _, version = os.path.splitext(os.path.basename(folder))[0].partition("-")
    fields = {"Name": name, "Version": version or "unknown"}
    header = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[0]  # the description follows
    for line in header.decode("utf-8", "replace").splitlines():
        field, _, value = line.partition(":")
        if field in fields and value.strip().isprintable():
            fields[field] = value.strip() or fields[field]
    return fields["Name"], fields["Version"]


def _is_whole(folder: str) -> bool:
    """Whether there are metadata; an interrupted installation may leave none."""
    return any(os.path.exists(os.path.join(folder, file)) for file in ("METADATA", "PKG-INFO"))


def _entry_points(folder: str, problems: list[str]) -> Iterator[EntryPoint]:
    file = os.path.join(folder, "entry_points.txt")
    try:
        data = _read(file)
    except (FileNotFoundError, NotADirectoryError):
        return
    if b"loopkit." not in data:
        return
    distribution, version = name_and_version(folder)
    seen: set[tuple[str, str]] = set()
    group = ""
    for number, line in enumerate(data.decode("utf-8-sig").splitlines(), 1):
        line = line.strip()
        if line.startswith("["):
            group = line[1:-1].strip() if line.endswith("]") else ""
            wrong = "" if group else "is no [group]"
        elif line and line[0] not in "#;" and group.startswith("loopkit."):
            name, _, value = (part.strip() for part in line.partition("="))
            value = re.sub(r"\s*\[[^]]*\]$", "", value)  # extras that it needs, an old form
            value = re.sub(r"\s*:\s*", ":", value)
            if not NAME.fullmatch(name) or not REFERENCE.fullmatch(value):
                wrong = "is not name = module:object"
            elif (group, name) in seen:
                wrong = f"names {name!r} a second time"
            else:
                wrong = ""
                seen.add((group, name))
                yield EntryPoint(group, name, value, distribution, version)
        else:
            continue
        if wrong:
            problems.append(f"{file}, line {number}: {line!r:.80} {wrong}")


def _read(file: str) -> bytes:
    with open(file, "rb", buffering=0) as stream:
        return stream.read()
