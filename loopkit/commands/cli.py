"""The command ``loopkit``.

A subcommand is a function in `loopkit.commands`, registered by `command`; its docstring is its help. It imports what it
needs itself, so that ``loopkit --help`` waits for none of it, and returns the exit code. Other distributions add theirs
by entry points (`loopkit.found.discovery.load_command`); `standalone` makes one of such a function.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn, TextIO

from loopkit.base import interrupts
from loopkit.base.words import nearest
from loopkit.errors import CheckpointError, LoopkitError

GROUPS = {"checkpoint": "Look at saved checkpoints."}
"""First words of subcommands of two words, and what they are for."""
Function = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Argument:
    """The arguments of ``ArgumentParser.add_argument``; made by `argument`."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    words: tuple[str, ...]
    arguments: tuple[Argument, ...]
    function: Function


COMMANDS: list[Command] = []


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a subcommand, given as to ``ArgumentParser.add_argument``."""
    return Argument(names, options)


ASSIGNMENT = "KEY=VALUE"
"""The placeholder of options that take a key and its value in one word."""
JSON = argument("--json", action="store_true", help="print JSON, for scripts")


def command(words: str, *arguments: Argument) -> Callable[[Function], Function]:
    """Register a function as a subcommand.

    Args:
        words: Its name, of one word, or of two, of which the first is in `GROUPS`.
        arguments: The arguments of its parser.
    """

    def register(function: Function) -> Function:
        COMMANDS.append(Command(tuple(words.split()), arguments, function))
        return function

    return register


def standalone(name: str, *arguments: Argument) -> Callable[[Function], Callable[[Sequence[str]], int]]:
    """Make a function the subcommand of another distribution, which is called with a list of words.

    Its docstring is its help. The entry point of the distribution names it.

    Args:
        name: Its name, the same as the entry point's.
        arguments: The arguments of its parser.
    """

    def make(function: Function) -> Callable[[Sequence[str]], int]:
        def run(words: Sequence[str]) -> int:
            parser = Parser(prog=f"loopkit {name}")
            _describe(parser, function, arguments)
            return function(parser.parse_args(words))

        return run

    return make


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code.

    Args:
        argv: The words after ``loopkit``; by default from ``sys.argv``.

    Returns:
        The subcommand's exit code; 2 after an error, 130 after Ctrl-C.
    """
    if argv is None:
        argv = sys.argv[1:]
        gc.freeze()  # what was imported stays: a full collection over the objects of torch takes 80 ms
    try:
        interrupts.as_usual()
        try:
            code: Any = _run(list(argv))
        except SystemExit as exit:  # after --help, and after a usage error, which it has written
            code = exit.code
            if code is not None and not isinstance(code, int):
                say(str(code), sys.stderr)
                code = 1
        say(end="")  # writes out what is buffered
        return code or 0
    except KeyboardInterrupt:
        say(interrupts.LINE, sys.stderr)
        return interrupts.CODE
    except (LoopkitError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        say(f"loopkit: error: {' '.join(line.strip() for line in lines)}", sys.stderr)
        for note in getattr(error, "__notes__", ()):
            say(note, sys.stderr)
        return 2
    finally:
        interrupts.in_one_line()  # while Python ends


def _run(words: list[str]) -> int | None:
    """Run the subcommand that the words name: one of `COMMANDS`, or one that another distribution adds."""
    parser = _parser()
    own = {command.words[0] for command in COMMANDS}
    if not words or words[0] in ("-h", "--help"):
        say(_help())
        return 0
    if words and not words[0].startswith("-") and words[0] not in own:
        from loopkit.found.discovery import load_command

        if (function := load_command(words[0])) is not None:
            return function(words[1:])
        raise _unknown(words[0], own)
    options = parser.parse_args(words)
    code: int = options.function(options)
    return code


def _unknown(word: str, own: Collection[str]) -> LoopkitError:
    """The error for a word that is no subcommand."""
    from loopkit.found.discovery import SUBCOMMANDS
    from loopkit.found.installed import COMMANDS as GROUP
    from loopkit.found.installed import installed

    known = [*own, *SUBCOMMANDS, *(each.name for each in installed().of(GROUP))]
    return LoopkitError(f"there is no command {word!r:.80}{nearest(word, known)}: `loopkit --help` lists them")


def listed() -> dict[str, str]:
    """All subcommands that are installed, by their first word, and what each does."""
    return {**_own(), **{name: about for name, (about, _) in _added(_own()).items()}}


def _own() -> dict[str, str]:
    """The first words of the subcommands of loopkit itself, and what they are for."""
    import_module("loopkit.commands")  # registers them
    found: dict[str, str] = {}
    for each in COMMANDS:
        first = each.words[0]
        about = GROUPS[first] if len(each.words) > 1 else inspect.getdoc(each.function) or ""
        found.setdefault(first, _brief(about))
    return found


def _added(own: Collection[str]) -> dict[str, tuple[str, str]]:
    """The subcommands of other distributions: the first line of each, and its distribution."""
    from loopkit.found.discovery import first_line
    from loopkit.found.installed import COMMANDS as GROUP
    from loopkit.found.installed import installed

    found = sorted((each for each in installed().of(GROUP) if each.name not in own), key=lambda each: each.name)
    return {each.name: (_brief(first_line(each).replace("`", "")), each.distribution) for each in found}


def _help() -> str:
    """The help: a line for each subcommand."""
    own = _own()
    added = _added(own)
    widest = max(map(len, [*own, *added]))
    longest = columns(100) or 100

    def line(name: str, about: str, end: str = "") -> str:
        begin = f"  {plain(name):<{widest}}  "
        return begin + shorten(plain(about), max(longest - len(begin) - len(end), 20), placeholder=" ...") + end

    lines = ["usage: loopkit COMMAND ...", "", "Tools for runs of loopkit.", "", "commands:"]
    lines += [line(name, about) for name, about in own.items()]
    if added:
        lines += [
            "",
            "from other distributions:",
            *(line(name, about, f" ({plain(home)})") for name, (about, home) in added.items()),
        ]
    options = {"-h, --help": "show this help", "--version": "print the version"}
    lines += ["", "options:", *(line(name, about) for name, about in options.items())]
    return "\n".join([*lines, "", "`loopkit COMMAND --help` shows what a command takes."])


def say(text: str = "", file: TextIO | None = None, end: str = "\n") -> None:
    """Write a line to standard output, or to another stream, at once.

    If the reader is gone, the text is lost without an error. Characters that the stream cannot encode become
    escape sequences.
    """
    stream = sys.stdout if file is None else file
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write((text + end).encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError) as error:
        _silence(stream)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
            raise  # such as a full disk


def say_json(value: Any) -> None:
    """Write a value as JSON; types that JSON does not have are written as text."""
    say(json.dumps(value, indent=2, default=str))


def _silence(stream: TextIO) -> None:
    """Let a stream that is broken write to nowhere, or Python complains of it when it ends."""
    with suppress(OSError, ValueError):  # it has no file, or a closed one
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Parser(argparse.ArgumentParser):
    """A parser of words that writes through `say`, and offers the nearest spelling of options and subcommands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does; words that are left over are an error, with the nearest spelling."""
        self._words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(args, namespace)
        self._check_assignments()
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0], self._option_string_actions)}")
        return found, unknown

    def _check_assignments(self) -> None:
        """Exit with 2 for ``--set key value``, where an option takes ``KEY=VALUE``."""
        options = {name for name, each in self._option_string_actions.items() if each.metavar == ASSIGNMENT}
        for at, option in enumerate(self._words):
            key = self._words[at + 1] if at + 1 < len(self._words) else "="
            values = [word for word in self._words[at + 2 : at + 4] if word != "="]
            value = values[0].removeprefix("=") if values else "--"
            if option in options and "=" not in key and not value.startswith("--"):
                self.error(f"{option} {key} has no '=': write {option} {key}={value}")

    def error(self, message: str) -> NoReturn:
        """Exit with 2. Where something is required, an option that was misspelt may be why."""
        if "are required" in message:
            known = [*self._option_string_actions]
            options = [word for word in self._words if word.startswith("--") and "=" not in word]
            wrong = [word for word in options if not any(each.startswith(word) for each in known)]
            message += "".join(f"; there is no option {word!r}{nearest(word, known)}" for word in wrong[:1])
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            close = nearest(value, action.choices)
            raise argparse.ArgumentError(action, f"there is no {value!r}{close}: one of {', '.join(action.choices)}")

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            say(message, sys.stderr if file is None else file, end="")


def _parser() -> argparse.ArgumentParser:
    import_module("loopkit.commands")  # registers them

    parser = Parser(prog="loopkit", description="Tools for runs of loopkit.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[tuple[str, ...], Any] = {(): top}
    for each in COMMANDS:
        group = each.words[:-1]
        if group not in groups:
            about = GROUPS[group[0]]
            made = top.add_parser(group[0], help=_brief(about), description=about)
            groups[group] = made.add_subparsers(metavar="COMMAND", required=True)
        text = inspect.getdoc(each.function) or ""
        sub = groups[group].add_parser(each.words[-1], help=_brief(text).replace("%", "%%"))
        _describe(sub, each.function, each.arguments)
        sub.set_defaults(function=each.function)
    return parser


def _describe(parser: argparse.ArgumentParser, function: Function, arguments: Iterable[Argument]) -> None:
    """Give a parser a subcommand's help, its docstring, and its arguments."""
    parser.description = (inspect.getdoc(function) or "").replace("%", "%%")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for each in arguments:
        parser.add_argument(*each.names, **each.options)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from loopkit.base.version import __version__
        from loopkit.found.namesake import cure

        say(f"loopkit {__version__}")
        if (text := cure()) is not None:
            say(f"loopkit: {text}", sys.stderr)
        parser.exit()


def _brief(text: str) -> str:
    line = text.partition("\n")[0].rstrip(".:")
    return line[:1].lower() + line[1:]


def plain(text: str, longest: int = 200) -> str:
    """The text without what cannot be printed, shortened."""
    from loopkit.checkpoint.structure import plain as shown

    return shown(text, longest)


def table(rows: Sequence[Sequence[str]], otherwise: int | None = None) -> list[str]:
    """Rows of cells as lines, with columns as wide as they need. A terminal is not left; ``otherwise`` is for none."""
    longest = columns(otherwise)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if longest is None:
        return lines
    return [line if len(line) <= longest else line[: max(longest - 3, 0)] + "..." for line in lines]


def columns(otherwise: int | None = None) -> int | None:
    """The columns of the terminal; ``otherwise`` where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else otherwise


def reporting(make: Callable[[], str], put: Callable[[str], object] = say) -> int:
    """Make a text by code of the user, with the working directory in the path of modules.

    Args:
        make: Runs code of the user.
        put: Gets the text, if it is not empty.

    Returns:
        The exit code: 0, or 2 after an error of the user's code, which is written with its traceback.

    Raises:
        LoopkitError: ``make`` raised it.
    """
    if os.getcwd() not in map(os.path.abspath, sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        text = make()
    except LoopkitError:
        raise
    except Exception as error:
        say("".join(traceback.format_exception(error)), sys.stderr, end="")
        return 2
    if text:
        put(text)
    return 0


def existing(path: Path) -> Path:
    """The path, if something is there."""
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no {path}: give the path of a checkpoint, or of a folder of them")
    return path
