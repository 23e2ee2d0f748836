"""The arguments of the commands, without the code that runs them: they can be checked without importing it."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

__all__ = ["await_ctrl_c", "heed_ctrl_c", "monitor", "watch"]


def monitor(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a parser the words of ``loopkit monitor``."""
    parser.description = "Show runs in a page, while they run and afterwards."
    add = parser.add_argument
    add("root", type=Path, help="the folder of the runs, or one of them")
    add("--host", default="127.0.0.1", help="the address to listen on (default: only this machine)")
    add("--port", type=int, default=0, help="(default: one that is free)")
    add("--token-file", type=Path, help="where the token is kept, so that it stays the same; made if absent")
    add("--no-token", action="store_true", help="let all users of this machine see the runs")
    add(
        "--allow-host", action="append", default=[], metavar="NAME", help="another name that the server is asked for by"
    )
    add("--idle", type=float, metavar="SECONDS", help="end after so long without a request and a live run")
    return _with_example(parser, "loopkit monitor runs")


def watch(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a parser the words of ``loopkit watch``."""
    parser.description = "Show a run in the terminal, or all of them, until it has ended."
    parser.add_argument("run", type=Path, help="the folder of a run, or a log; of several runs, the latest is shown")
    parser.add_argument("--all", action="store_true", help="show all runs of the folder, with a line for each")
    parser.add_argument("--once", action="store_true", help="show what there is, and do not wait for more")
    return _with_example(parser, "loopkit watch runs/a")


def _with_example(parser: argparse.ArgumentParser, example: str) -> argparse.ArgumentParser:
    parser.epilog = f"Example: {example}"
    return parser


def await_ctrl_c() -> None:
    """Put Ctrl-C off until `heed_ctrl_c`, also in the program that takes the place of this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def heed_ctrl_c() -> None:
    """Let a Ctrl-C that was put off come now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
