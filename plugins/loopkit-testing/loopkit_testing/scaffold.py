"""``loopkit new-plugin``, ``new-backend`` and ``new-phase``: working files to begin with."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from loopkit.commands import argument, say, standalone
from loopkit.errors import LoopkitError

TEMPLATES = Path(__file__).parent / "templates"
"""Whole files that work as they are, for something called ``my_name``."""
NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
LONGEST = 30
RENAMED = {"gitignore": ".gitignore"}


def _new(template: str, example: str, text: str) -> Callable[[Sequence[str]], int]:
    """The command that makes a distribution from this template; the text is its help."""

    def new(options: argparse.Namespace) -> int:
        made = write_plugin(options.name, options.directory, template)
        say(f"made {made}")
        say(f"next: cd {made} && pip install -e '.[test]' && ruff check . && mypy && pytest")
        return 0

    new.__doc__ = text
    return standalone(
        f"new-{template}",
        argument("name", metavar="NAME", help=f"such as {example}: lower case, digits, and - or _ between words"),
        argument("--directory", metavar="DIR", type=Path, default=Path(), help="where to make it (default: here)"),
    )(new)


new_plugin = _new(
    "plugin",
    "grad-noise",
    """Make a distribution with one small plugin that works: package, entry points, tests, README.

    It is the folder loopkit-NAME in DIR, which must not be there yet; no file is ever overwritten. The plugin is typed,
    tested by the whole contract, and found by its name once it is installed. Its licence is for you to choose.

    Exit code: 0.
    """,
)
new_backend = _new(
    "backend",
    "sqlite-log",
    """Make a distribution with a log backend that works: package, entry point, tests, README.

    It is the folder loopkit-NAME in DIR, as for new-plugin. The backend is tested by its whole contract, kills and
    resumes included, and its entry point gives it a name for lists and files of plugins.

    Exit code: 0.
    """,
)


@standalone(
    "new-phase",
    argument("name", metavar="NAME", help="such as penalty: lower case, digits, and - or _ between words"),
    argument("--directory", metavar="DIR", type=Path, default=Path(), help="where to write them (default: here)"),
)
def new_phase(options: argparse.Namespace) -> int:
    """Write a module with a phase that has its own event, a test of it, and an example that runs.

    They are NAME.py, test_NAME.py and example_NAME.py in DIR, which must be there; no file is ever overwritten.

    Exit code: 0.
    """
    module, test, example = write_phase(options.name, options.directory)
    for file in (module, test, example):
        say(f"made {file}")
    say(f"next: cd {options.directory} && python {example.name} && pytest {test.name}")
    return 0


def write_plugin(name: str, directory: Path, template: str = "plugin") -> Path:
    """Make the distribution of `new_plugin` or, from the template ``"backend"``, of `new_backend`; returns its folder.

    Raises:
        LoopkitError: The name is none, or means something already; or the folder is there.
        OSError: The folder cannot be made.
    """
    from loopkit.author import PROVIDES, STATES, plugins

    snake = _snake(name.removeprefix("loopkit-").removeprefix("loopkit_"), name)
    for words, what in ((STATES, "a state"), (PROVIDES, "what a plugin can provide")):
        if snake in words:
            raise LoopkitError(f"{name!r} is the name of {what} ({words[snake]}), not of one plugin: take another one")
    for row in plugins()[0]:
        if row.entry_point.name == snake:
            raise LoopkitError(f"{name!r} is a plugin already, {row.entry_point}: take another name")
    _free_module(f"loopkit_{snake}", name)
    target = directory / f"loopkit-{snake.replace('_', '-')}"
    _write(target, _files(template, snake))
    return target


def write_phase(name: str, directory: Path) -> tuple[Path, Path, Path]:
    """Write the files of `new_phase`: the module, its test, and its example.

    Raises:
        LoopkitError: The name is none, or means something already; or one of the files is there.
        OSError: A file cannot be written.
    """
    from loopkit.events import Event

    snake = _snake(name.removesuffix("-phase").removesuffix("_phase"), name)
    hook = f"{snake}_begin"
    if hook in Event.by_hook:
        raise LoopkitError(f"{name!r} would make an event with the hook {hook!r}, which is there: take another name")
    _free_module(snake, name)
    files = _files("phase", snake)
    _write(directory, files, new=False)
    module, test, example = (directory / f"{prefix}{snake}.py" for prefix in ("", "test_", "example_"))
    return module, test, example


def _snake(name: str, given: str) -> str:
    """The name as an identifier."""
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
        better = "-".join(words).lower()
        hint = f", such as {better!r}" if NAME.fullmatch(better) and len(better) <= LONGEST else ""
        raise LoopkitError(
            f"{given[:200]!r} is no name: it has lower-case letters and digits, with - or _ between words, begins with "
            f"a letter, and has at most {LONGEST} characters{hint}"
        )
    snake = name.replace("-", "_")
    if keyword.iskeyword(snake) or keyword.issoftkeyword(snake):
        raise LoopkitError(f"{given!r} is a word of Python's own: take another name")
    return snake


def _free_module(module: str, given: str) -> None:
    """Raise for a module that would hide another one, or be hidden."""
    if module in sys.stdlib_module_names:
        raise LoopkitError(f"{given!r}: Python has a module {module!r}, which it would hide: take another name")
    if find_spec(module) is not None:
        raise LoopkitError(f"{given!r}: a module {module!r} can be imported already: take another name")


def _files(template: str, snake: str) -> dict[Path, str]:
    """The files of a template by their paths, for this name."""
    camel = "".join(word.capitalize() for word in snake.split("_"))

    def named(text: str) -> str:
        for mine, theirs in (("my_name", snake), ("MyName", camel), ("my-name", snake.replace("_", "-"))):
            text = text.replace(mine, theirs)
        return text

    root = TEMPLATES / template
    found = [path for path in sorted(root.rglob("*")) if path.is_file() and not _is_cache(path.relative_to(root))]
    return {
        Path(named(str(path.relative_to(root).with_name(RENAMED.get(path.name, path.name))))): named(
            path.read_text(encoding="utf-8")
        )
        for path in found
    }


def _is_cache(path: Path) -> bool:
    """Whether a tool has left it there."""
    return any(part.startswith(".") or part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)


def _write(target: Path, files: Mapping[Path, str], new: bool = True) -> None:
    """Write all files below a folder, or none: a file that is there is left as it is, and so is all else."""
    for path in (target,) if new else (target / path for path in files):
        if path.exists() or path.is_symlink():
            raise LoopkitError(f"{path} is there already, and is left as it is: take another name, or --directory")
    if new:
        target.mkdir()
    written: list[Path] = []
    folders: list[Path] = [target] if new else []
    try:
        for path, text in files.items():
            for parent in reversed(path.parents[:-1]):
                if not (target / parent).exists():
                    (target / parent).mkdir()
                    folders.append(target / parent)
            with open(target / path, "x", encoding="utf-8", newline="\n") as file:
                written.append(target / path)
                file.write(text)
    except BaseException:
        for each in written:
            each.unlink()
        for folder in reversed(folders):
            folder.rmdir()
        raise
