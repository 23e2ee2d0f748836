"""The server of the page.

It runs in its own process, ``python -P -m loopkit_monitor.server ROOT``, which ``loopkit monitor`` becomes. It only
reads logs, and the files that they name.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import math
import os
import secrets
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from loopkit_monitor import arguments, views
from loopkit_monitor.events import Live
from loopkit_monitor.guard import Guard
from loopkit_monitor.notes import NotesError
from loopkit_monitor.page import MODULES
from loopkit_monitor.protocol import protocol_class
from loopkit_monitor.store import Store, UnknownRun

__all__ = ["Options", "ServerError", "main", "make_app", "serve"]

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
PRELOAD = {"link": ", ".join(f"<static/{name}>; rel=modulepreload" for name in MODULES)}
"""With the page: a browser asks for all scripts at once, and not for each when the one that imports it was read."""
SHOWN = {".png": "image/png", ".wav": "audio/wav"}
"""Files of runs that a page shows; all others are saved."""
MOST_STREAMS = 64
MOST_SERIES = 200
MOST_POINTS = 20_000
MOST_ITEMS = 500
HEAVIEST = 0.99999
"""The largest weight of the past in a smoothed curve."""
AHEAD = 0.2
"""Seconds of a poll in which runs are read that were not asked for yet, until a request comes."""
SHORTEST_TOKEN = 16
STEPS = 2**53
BLOCK = 256 << 10
EVERYWHERE = ("0.0.0.0", "::", "")
"""Hosts that stand for all addresses of the machine; they are no names of it."""


class ServerError(Exception):
    """The server cannot be started as it is asked to."""


@dataclass(frozen=True)
class Options:
    """The options of the server.

    Args:
        root: The folder of the runs.
        host: The address to listen on.
        port: 0 for any that is free.
        token: The token that the address must have; None for none, on this machine only.
        names: Further host names under which it is asked for.
        idle: Seconds after which it ends without a request and a live run; None for never.
    """

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    names: tuple[str, ...] = ()
    idle: float | None = None

    def __post_init__(self) -> None:
        if self.idle is not None and not self.idle > 0:
            raise ServerError(f"--idle is {self.idle}: it is a number of seconds above 0; leave it out for never")
        if self.token is None and not _is_loopback(self.host):
            raise ServerError(
                f"--host {self.host} can be reached from other machines: it needs a token; leave out --no-token"
            )
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not _is_plain(self.token)):
            raise ServerError(
                f"the token has {len(self.token)} characters: it has at least {SHORTEST_TOKEN}, of letters, digits, - "
                f"and _; remove its file, and a new one is made"
            )

    @property
    def all_names(self) -> list[str]:
        """The host names of the server, as they are in a URL."""
        if _is_loopback(self.host):
            return ["127.0.0.1", "localhost", "[::1]", _in_url(self.host), *self.names]
        return [socket.gethostname(), *self.names, *([] if self.host in EVERYWHERE else [_in_url(self.host)])]

    def address(self, port: int) -> str:
        """The address that the user opens."""
        host = socket.gethostname() if self.host in EVERYWHERE else _in_url(self.host)
        return f"http://{host}:{port}/" + ("" if self.token is None else f"?token={self.token}")


def make_app(store: Store, options: Options, port: int, end: Callable[[], None] = lambda: None) -> Starlette:
    """The application.

    Args:
        store: The store to show; only the server may use it meanwhile.
        port: On which it is served.
        end: Called when it was idle for the ``idle`` seconds of the options.
    """
    live = Live(store)
    places = _Places()
    files = _static_files()

    async def page(request: Request) -> Response:
        path = request.path_params.get("path", "index.html")
        if path not in files:
            raise HTTPException(404)
        return Response(
            files[path], headers=PRELOAD if path == "index.html" else None, media_type=TYPES[Path(path).suffix]
        )

    async def runs(request: Request) -> Response:
        return await _answer(views.runs)

    async def run(request: Request) -> Response:
        return await _answer(views.run, _one(request, "id"))

    async def series(request: Request) -> Response:
        names = request.query_params.getlist("name")
        if len(names) > MOST_SERIES:
            raise HTTPException(400, f"more than {MOST_SERIES} names")
        points = _integer(request, "points", views.DEFAULT_POINTS, 5, MOST_POINTS)
        low, high = (_integer(request, key, None, -STEPS, STEPS) for key in ("from", "to"))
        return await _answer(views.series, _one(request, "id"), names, points, low, high, _weight(request))

    async def rows(request: Request) -> Response:
        return await _answer(views.rows, _integer(request, "since", -1, -1, STEPS))

    async def curves(request: Request) -> Response:
        ids, names = (request.query_params.getlist(key) for key in ("id", "name"))
        if len(ids) > MOST_SERIES or len(names) > MOST_SERIES:
            raise HTTPException(400, f"more than {MOST_SERIES} names")
        points = _integer(request, "points", views.DEFAULT_POINTS, 5, MOST_POINTS)
        return await _answer(views.curves, ids, names, points, _weight(request))

    async def note(request: Request) -> Response:
        try:
            given = json.loads(await request.body())
            id, changes = given["id"], given["changes"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise HTTPException(400, "a note is JSON with an id and changes") from None
        if not isinstance(id, str) or not isinstance(changes, dict):
            raise HTTPException(400, "a note is JSON with an id and changes")
        try:
            return await _answer(views.note, id, changes)
        except NotesError as error:
            raise HTTPException(400, str(error)) from None
        except OSError as error:
            raise HTTPException(409, f"the notes cannot be written beside the log: {error.strerror}") from None

    async def media(request: Request) -> Response:
        index = _integer(request, "index", None, 0, STEPS)
        limit = _integer(request, "limit", 50, 1, MOST_ITEMS)
        return await _answer(views.media, _one(request, "id"), _one(request, "name"), index, limit)

    async def file(request: Request) -> Response:
        named = _one(request, "file")
        try:
            opened = await live.ask(_open_file, _one(request, "id"), named)
        except (UnknownRun, OSError):
            raise HTTPException(404) from None
        suffix = Path(named).suffix.lower()
        headers = {"content-length": str(os.fstat(opened).st_size), "content-security-policy": "sandbox"}
        if suffix not in SHOWN:
            headers["content-disposition"] = "attachment"
        content = _Content(opened)
        if request.method == "HEAD":
            content.close()
            return Response(headers=headers, media_type=SHOWN.get(suffix, "application/octet-stream"))
        return StreamingResponse(content, headers=headers, media_type=SHOWN.get(suffix, "application/octet-stream"))

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        last = request.headers.get("last-event-id") or request.query_params.get("since")
        return _Events(live.stream(last), places)

    async def end_when_idle(seconds: float) -> None:
        await live.idle(seconds)
        print(f"no request for {seconds:g} s, and no run is live", file=sys.stderr, flush=True)
        end()

    async def _answer(view: Callable[..., Any], *arguments: Any) -> Response:
        def encoded(store: Store) -> bytes:
            return views.encode(view(store, *arguments))

        try:
            return Response(await live.ask(encoded), media_type="application/json")
        except UnknownRun:
            raise HTTPException(404, "there is no such run") from None

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(live.ask(lambda store: None))]  # the runs are found while the page is opened
        if options.idle is not None:
            tasks.append(asyncio.create_task(end_when_idle(options.idle)))
        yield
        for task in tasks:
            task.cancel()
        live.close()

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{path:path}", page),
            Route("/api/runs", runs),
            Route("/api/run", run),
            Route("/api/rows", rows),
            Route("/api/curves", curves),
            Route("/api/note", note, methods=["POST"]),
            Route("/api/series", series),
            Route("/api/media", media),
            Route("/api/file", file),
            Route("/events", events),
        ],
        middleware=[
            Middleware(Guard, names=options.all_names, token=options.token, cookie=f"loopkit-monitor-{port}"),
        ],
        exception_handlers={HTTPException: _say},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _say(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code)


def _one(request: Request, key: str) -> str:
    """A part of the query that has to be there once."""
    found = request.query_params.getlist(key)
    if len(found) != 1:
        raise HTTPException(400, f"give one {key}")
    return found[0]


def _integer(request: Request, key: str, default: Any, low: int, high: int) -> Any:
    """A number of the query."""
    found = request.query_params.getlist(key)
    if not found:
        return default
    digits = found[0].removeprefix("-")
    if len(found) > 1 or not (digits.isascii() and digits.isdecimal() and len(digits) < 17):
        raise HTTPException(400, f"{key} is a whole number")
    if not low <= (value := int(found[0])) <= high:
        raise HTTPException(400, f"{key} is from {low} to {high}")
    return value


def _weight(request: Request) -> float:
    """The weight of the past in a smoothed curve, of the query."""
    found = request.query_params.getlist("smooth")
    try:
        weight = float(found[0]) if found else 0.0
    except ValueError:
        weight = math.nan
    if len(found) > 1 or not 0 <= weight <= HEAVIEST:
        raise HTTPException(400, f"smooth is from 0 to {HEAVIEST}")
    return weight


def _static_files() -> dict[str, bytes]:
    """The files of the page, by path. Only these are served, so no path leads out of the folder."""
    found = (path for path in STATIC.rglob("*") if path.is_file() and path.suffix in TYPES)
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in found}


def _open_file(store: Store, id: str, file: str) -> int:
    """Open a file beside a log that the log names."""
    run = store.get(id)
    if file not in run.files or not file.startswith("media/"):
        raise FileNotFoundError(file)
    return store.folder.open(run.folder + file)


class _Content:
    """The bytes of an open file, in blocks; it is closed in any case."""

    def __init__(self, file: int) -> None:
        self._file = os.fdopen(file, "rb", buffering=0)
        self._left = os.fstat(file).st_size

    def __iter__(self) -> Iterator[bytes]:
        with self._file:
            while self._left and (block := self._file.read(min(BLOCK, self._left))):
                self._left -= len(block)
                yield block

    def close(self) -> None:
        self._file.close()


@dataclass
class _Places:
    """For how many more streams there is a place."""

    left: int = MOST_STREAMS


class _Events(StreamingResponse):
    """A stream of changes, which has a place from the moment when it is seen that there is one."""

    def __init__(self, changes: AsyncIterator[bytes], places: _Places) -> None:
        super().__init__(changes, media_type="text/event-stream")
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._places.left <= 0:
            full = PlainTextResponse("too many pages are open\n", 503, {"retry-after": "5"})
            await full(scope, receive, send)
            return
        self._places.left -= 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._places.left += 1


# --------------------------------------------------------------------------------------------------------- the process


def serve(options: Options, say: Callable[[str], None] | None = None) -> None:
    """Serve until the process is stopped.

    Args:
        say: Called with the address when connections are taken; by default, it is printed.

    Raises:
        ServerError: The folder is not there, or the port is taken.
    """
    try:
        store = Store(options.root, ahead=AHEAD)
        listening = _listen(options)
    except OSError as error:
        raise ServerError(str(error)) from error
    port = listening.getsockname()[1]

    def end() -> None:
        server.should_exit = True

    config = uvicorn.Config(
        make_app(store, options, port, end),
        http=protocol_class(),
        ws="none",
        lifespan="on",
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16 << 10,
    )
    server = uvicorn.Server(config)
    with listening:
        (say or _print)(options.address(port))
        server.run(sockets=[listening])


def _listen(options: Options) -> socket.socket:
    host = "127.0.0.1" if options.host == "localhost" else options.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, options.port), family=family, backlog=512)
    except OSError as error:
        raise ServerError(
            f"port {options.port} of {options.host} cannot be listened on: {error.strerror or error}; --port 0 takes "
            f"one that is free"
        ) from error
    # Connections take it over. asyncio does not set it for them, and an answer in two parts then waits 40 ms.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def main(words: Sequence[str] | None = None, prog: str = "loopkit monitor") -> int:
    """Start the server; returns the exit code."""
    given = arguments.monitor(argparse.ArgumentParser(prog=prog)).parse_args(words)
    try:
        arguments.heed_ctrl_c()
        if given.no_token:
            token = None
        elif given.token_file is not None:
            token = kept_token(given.token_file)
        else:
            token = secrets.token_urlsafe(32)
        serve(Options(given.root, given.host, given.port, token, tuple(given.allow_host), given.idle))
    except (ServerError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass  # which is how it is ended
    return 0


def kept_token(path: Path) -> str:
    """The token in a file, which is made if it is not there.

    Raises:
        ServerError: Others can read it.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        with path.open() as kept:
            about = os.fstat(kept.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
                raise ServerError(f"{path} can be read by others: chmod 600 it, or name another file") from None
            return kept.read(1000).strip()
    with os.fdopen(file, "w") as made:
        token = secrets.token_urlsafe(32)
        made.write(f"{token}\n")
    return token


def _print(address: str) -> None:
    print(f"loopkit monitor: {address}", flush=True)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.replace("-", "").replace("_", "").isalnum()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    raise SystemExit(main())
