"""The command ``loopkit``. A subcommand is one function, registered by `command`; its docstring is its help.

A function imports what it needs itself, so that ``loopkit --help`` waits for none of it. It returns the exit code.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loopkit.errors import CheckpointError, LoopkitError

if TYPE_CHECKING:
    from loopkit.checkpoint.storage import Manifest

__all__ = ["Argument", "argument", "command", "main", "say"]

GROUPS = {"checkpoint": "Look at saved checkpoints."}
"""First words of subcommands of two words, and what they are for."""
METRICS = 3
"""How many metrics a line of a list shows."""
Function = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Argument:
    """What ``ArgumentParser.add_argument`` is called with; made by `argument`."""

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


def command(words: str, *arguments: Argument) -> Callable[[Function], Function]:
    """Register a function as a subcommand.

    Args:
        words: Its name, of one word, or of two, of which the first is in `GROUPS`.
        arguments: What it takes.
    """

    def register(function: Function) -> Function:
        COMMANDS.append(Command(tuple(words.split()), arguments, function))
        return function

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code.

    Args:
        argv: The words after ``loopkit``; by default those of this process.

    Returns:
        What the subcommand's help says; 2 after an error, 130 after Ctrl-C.
    """
    try:
        try:
            options = _parser().parse_args(argv)
        except SystemExit as exit:  # after --help, and after a usage error, which it has written
            code = exit.code if isinstance(exit.code, int) else 2
        else:
            code = options.function(options)
        say(end="")  # writes out what is buffered
        return int(code)
    except KeyboardInterrupt:
        return 130
    except (LoopkitError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        say(f"loopkit: error: {' '.join(line.strip() for line in lines)}", sys.stderr)
        for note in getattr(error, "__notes__", ()):
            say(note, sys.stderr)
        return 2


def say(text: str = "", file: TextIO | None = None, end: str = "\n") -> None:
    """Write a line to standard output, or to another stream, at once.

    If nobody reads it any more, what is written is lost without an error. What the stream cannot encode comes as an
    escape sequence.
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


def _silence(stream: TextIO) -> None:
    """Let a stream that is broken write to nowhere, or Python complains of it when it ends."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # it has no file, or a closed one


class _Parser(argparse.ArgumentParser):
    """Writes through `say`."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            say(message, sys.stderr if file is None else file, end="")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="loopkit", description="Tools for runs of loopkit.")
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
        sub = groups[group].add_parser(
            each.words[-1],
            help=_brief(text).replace("%", "%%"),
            description=text.replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for arg in each.arguments:
            sub.add_argument(*arg.names, **arg.options)
        sub.set_defaults(function=each.function)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from importlib.metadata import version

        say(f"loopkit {version('loopkit')}")
        parser.exit()


def _brief(text: str) -> str:
    line = text.partition("\n")[0].rstrip(".:")
    return line[:1].lower() + line[1:]


# --------------------------------------------------------------------------------------------------------- checkpoints


@command("checkpoint list", argument("directory", metavar="DIR", type=Path, help="a directory of checkpoints"))
def list_checkpoints(options: argparse.Namespace) -> int:
    """List the checkpoints of a directory, the newest first, and say which is the best.

    Manifests and sizes are looked at; `loopkit checkpoint verify` compares contents. Exit code: 0, or 1 if there is
    no whole checkpoint.
    """
    from loopkit.checkpoint.bundle import best, monitored
    from loopkit.checkpoint.storage import listing

    directory = _existing(options.directory)
    found = listing(directory)
    rows = {manifest.path: _row(manifest) for manifest in found}
    if rows:
        for line in _table([HEADINGS, *rows.values()]):
            say(line)
    if any(map(monitored, found)):
        top = best(directory)
        said = monitored(top)
        say(f"best: {_plain(top.path.name)}" + (f", {_plain(said[0])} {said[2]:.6g}" if said else ""))
    for path, error in found.problems.items():
        say(f"damaged: {_plain(path.name)}: {_plain(str(error), 1000)}")
    if not found:
        say(f"{_plain(str(directory), 1000)} holds no {'whole ' if found.problems else ''}checkpoint")
    return 0 if found else 1


@command(
    "checkpoint inspect",
    argument("path", metavar="PATH", type=Path, help="a checkpoint, a directory of them, or a .safetensors file"),
)
def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Say what is in a checkpoint, in the newest one of a directory, or in a .safetensors file.

    Exit code: 0.
    """
    from loopkit.checkpoint.inspection import inspect

    say(str(inspect(_existing(options.path))))
    return 0


@command("checkpoint verify", argument("path", metavar="PATH", type=Path, help="a checkpoint, or a directory of them"))
def verify_checkpoint(options: argparse.Namespace) -> int:
    """Read every byte of a checkpoint, or of all in a directory, and compare it with its digest.

    Exit code: 0 if all is as it was written, 1 if something is damaged or there is no checkpoint.
    """
    from loopkit.checkpoint.storage import MANIFEST, listing, verify

    path = _existing(options.path)
    found = None if os.path.lexists(path / MANIFEST) else listing(path)
    paths = [path] if found is None else sorted([*(m.path for m in found), *found.problems], reverse=True)
    whole = bool(paths)
    for each in paths:
        try:
            if found is not None and each in found.problems:
                raise found.problems[each]
            manifest = verify(each)
        except CheckpointError as error:
            say(f"{_plain(str(each), 1000)}: DAMAGED: {_plain(str(error), 1000)}")
            whole = False
        else:
            say(f"{_plain(str(each), 1000)}: whole, {len(manifest.files)} files, {_size(manifest)}")
    if not paths:
        say(f"{_plain(str(path), 1000)} is no checkpoint, and holds none")
    return 0 if whole else 1


@command(
    "checkpoint diff",
    argument("one", metavar="A", type=Path, help="a checkpoint, or a directory of them, of which the newest is taken"),
    argument("other", metavar="B", type=Path, help="likewise"),
    argument("--all", action="store_true", help="list every difference, not the first one alone"),
    argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="leave out what has this key, at any depth; 'seconds' are measured times (may be given again)",
    ),
)
def diff_checkpoints(options: argparse.Namespace) -> int:
    """Compare two saved states bit by bit: the first difference, and how many there are in each part.

    Exit code: 0 if they are equal, 1 if they differ, 2 if one cannot be read.
    """
    from loopkit.checkpoint.bundle import find, read_state
    from loopkit.checkpoint.diff import count, differences

    manifests = [find(_existing(path).absolute()) for path in (options.one, options.other)]
    one, other = map(read_state, manifests)
    found = differences(one, other, ignore=options.ignore)
    if not found:
        say("equal in every bit")
        return 0
    for difference in found if options.all else found[:1]:
        say(str(difference))
    counts = ", ".join(f"{part} {number:,}" for part, number in count(found).items())
    say(f"{len(found):,} item{'s differ' if len(found) > 1 else ' differs'}: {counts}")
    return 1


# ----------------------------------------------------------------------------------------------------------------- runs


@command(
    "verify-resume",
    argument("target", metavar="SCRIPT.py:FUNCTION", help="a function that returns (learner, fit)"),
    argument("--kill-at", metavar="STEP", type=int, nargs="+", default=[], help="steps to kill at (default: a few)"),
    argument("--signal", choices=("KILL", "TERM"), default="KILL", help="how to kill (default: KILL)"),
    argument("--epochs", metavar="N", type=int, help="epochs of the fit, in place of those that the function gives"),
    argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=["seconds"],
        help="leave out what has this key in a state, as 'seconds' always is: measured times (may be given again)",
    ),
    argument("--timeout", metavar="SECONDS", type=float, default=600.0, help="for each process (default: 600)"),
)
def verify_resume(options: argparse.Namespace) -> int:
    """Prove that a run with its plugins resumes exactly: kill it, resume it, and compare every bit.

    FUNCTION takes no arguments and returns (learner, fit): a new Learner, and the arguments of its fit as a dict:

        def make_learner():
            learner = Learner(model(), nn.MSELoss(), sgd, plugins=[MyPlugin()], seed=0)
            return learner, {"train": train, "val": val, "epochs": 3}

    The script runs as by `python SCRIPT.py`, but is not __main__. The fit runs whole, twice, and is then killed at
    each STEP and resumed, each time in a process of its own. A checkpoint is saved at every update, in a temporary
    directory; the learner's own plugin for checkpoints is left out. On a difference, the first plugin whose state
    differs is named.

    Exit code: 0 if every bit of the final states is the same, 1 if not, 2 if the run fails by itself.
    """
    from loopkit.verify_resume import verify_resume as outcomes

    problems = 0
    for outcome in outcomes(
        options.target,
        kill_at=options.kill_at,
        signal_name=options.signal,
        epochs=options.epochs,
        ignore=options.ignore,
        timeout=options.timeout,
    ):
        say(str(outcome))
        problems += bool(outcome.problem)
    say("NOT VERIFIED: this run does not resume exactly" if problems else "verified: this run resumes exactly")
    return 1 if problems else 0


@command(
    "replay",
    argument("path", metavar="PATH", type=Path, help="what the note on the error names"),
    argument("target", metavar="SCRIPT.py:FUNCTION", help="a function that returns the learner, as for verify-resume"),
    argument("--debugger", action="store_true", help="start pdb where the error is raised"),
    argument("--no-anomaly", action="store_true", help="run without torch's anomaly detection"),
)
def replay_bundle(options: argparse.Namespace) -> int:
    """Run a failed step again from what the plugin ReplayBundle wrote.

    FUNCTION takes no arguments and returns a Learner made as for the failed run, or (learner, fit) as for
    verify-resume.

    Exit code: 1 if the step fails again, 0 if it does not, 2 if it cannot be run.
    """
    import pdb
    import traceback

    from loopkit.checkpoint.storage import read_manifest
    from loopkit.hooks import hookimpl
    from loopkit.plugins.replay_bundle import replay
    from loopkit.verify_resume import made

    class Begun:
        """Tells a failure of the step from one on the way there."""

        name = "!replay_begun"
        seen = False

        @hookimpl(writes=("*",))
        def epoch_begin(self) -> None:
            self.seen = True

    path = _existing(options.path).absolute()
    recorded = read_manifest(path).about.get("error")
    learner, _ = made(options.target)
    begun = Begun()
    learner.add(begun)
    try:
        replay(path, learner, anomaly=not options.no_anomaly)
    except Exception as error:
        if not begun.seen:
            raise
        say("".join(traceback.format_exception(error)), sys.stderr, end="")
        if f"{type(error).__name__}: {error}" == recorded:
            say("the step fails again as recorded")
        else:
            say(f"the step fails, but not as recorded: {_plain(str(recorded), 1000)}")
        if options.debugger:
            pdb.post_mortem(error.__traceback__)
        return 1
    say(f"the step does not fail; recorded was: {_plain(str(recorded), 1000)}")
    return 0


# ------------------------------------------------------------------------------------------------------------- tables

HEADINGS = ("number", "name", "epoch", "step", "reason", "time", "size", "metrics")


def _row(manifest: Manifest) -> tuple[str, ...]:
    about = manifest.about
    progress, metrics = about.get("progress"), about.get("metrics")
    counts = progress if isinstance(progress, Mapping) else {}
    values = list(metrics.items()) if isinstance(metrics, Mapping) else []
    few = [f"{name} {_short(value)}" for name, value in values[:METRICS]] + ["..."] * (len(values) > METRICS)
    cells = (
        manifest.number,
        manifest.path.name,
        counts.get("epochs", "-"),
        counts.get("steps", "-"),
        about.get("reason", "-"),
        about.get("time", "-"),
        _size(manifest),
        " ".join(few) or "-",
    )
    return tuple(_plain(str(cell), 80) for cell in cells)


def _short(value: Any) -> str:
    """A metric, saved by ``repr``, with four digits."""
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return _plain(str(value), 20)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _size(manifest: Manifest) -> str:
    from loopkit.checkpoint.inspection import in_bytes

    return in_bytes(sum(info.size for info in manifest.files.values()))


def _plain(text: str, longest: int = 200) -> str:
    from loopkit.checkpoint.structure import plain

    return plain(text, longest)


def _existing(path: Path) -> Path:
    """The path, if something is there."""
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no {path}: give the path of what is there")
    return path
