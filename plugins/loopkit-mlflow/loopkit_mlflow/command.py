"""``loopkit mlflow``: send what a run has left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from loopkit.author import Lock
from loopkit.commands import Parser
from loopkit.errors import CheckpointError, LoopkitError
from loopkit_mlflow.client import Denied, ServerError
from loopkit_mlflow.sender import FIRST_PAUSE, LONGEST_PAUSE, Sender
from loopkit_mlflow.spool import Spool, find
from loopkit_mlflow.store import connect

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run the command; returns 0 if the server has everything, 1 if something is left, 2 if it cannot begin."""
    parser = Parser(prog="loopkit mlflow", description="What runs with the backend MLflow have left.")
    commands = parser.add_subparsers(dest="command", required=True)
    send = commands.add_parser("send", help="send what the server does not have yet")
    send.add_argument("spool", type=Path, help="a spool, or the directory of several")
    send.add_argument("--uri", help="the server's address, if it has a new one")
    send.add_argument("--refused", action="store_true", help="send rejected items again")
    send.add_argument("--patience", type=float, default=30.0, metavar="SECONDS", help="give up after (default: 30)")
    show = commands.add_parser("show", help="list the rest, without asking the server")
    show.add_argument("spool", type=Path, help="a spool, or the directory of several")
    given = parser.parse_args(list(words))
    try:
        directories = find(given.spool)
    except LoopkitError as error:
        print(f"loopkit mlflow: {error}", file=sys.stderr)
        return 2
    if given.command == "show":
        return max(_each(directory, _show) for directory in directories)
    send_one = partial(_send, uri=given.uri, refused=given.refused, patience=given.patience)
    return max(_each(directory, send_one) for directory in directories)


def _each(directory: Path, function: Callable[[Spool], int]) -> int:
    """One spool after another: one that is damaged does not hold up those after it."""
    try:
        return function(Spool(directory))
    except (LoopkitError, OSError) as error:
        print(f"loopkit mlflow: {error}", file=sys.stderr)
        return 2


def _show(spool: Spool) -> int:
    left, refused = spool.left, spool.refused
    run = spool.sent.run_id or "not made yet"
    print(
        f"{spool.directory}: experiment {spool.header.experiment!r}, run {run}: {left} to send, {len(refused)} rejected"
    )
    for each in refused:
        item = each["item"]
        print(f"  rejected: {each['kind']} {item.get('key') or item.get('path')!r}: {each['why']}")
    return 1 if left or refused else 0


def _send(spool: Spool, uri: str | None, refused: bool, patience: float) -> int:
    """Send a spool; one that is locked, or that the server cannot take now, is left as it is."""
    lock = Lock(spool.directory)
    try:
        lock.acquire()
    except CheckpointError as error:
        print(f"{spool.directory}: not sent: {error}", file=sys.stderr)
        return 1
    client = connect(uri or spool.header.uri)
    try:
        sender = Sender(spool, client)
        sent = _send_patiently(sender, patience)
        if refused:
            sender.send_refused()
        print(f"{spool.directory}: sent {sent} to run {sender.run_id} on {client.uri}, {spool.left} left")
    except ServerError as error:
        print(f"{spool.directory}: {spool.left} left: {error}", file=sys.stderr)
    finally:
        client.close()
        lock.release()
    return 1 if spool.left or spool.refused else 0


def _send_patiently(sender: Sender, patience: float) -> int:
    """Send all; give up if nothing could be sent for so many seconds."""
    sent, pause, since = 0, FIRST_PAUSE, time.monotonic()
    while True:
        try:
            now = sender.send()
        except Denied:
            raise
        except ServerError:
            if time.monotonic() + pause - since > patience:
                raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            continue
        if not now:
            return sent
        sent, pause, since = sent + now, FIRST_PAUSE, time.monotonic()
