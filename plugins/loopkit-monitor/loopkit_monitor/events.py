"""The stream of changes that the page listens to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from loopkit_monitor.store import Change, Store
from loopkit_monitor.views import encode, seq

__all__ = ["Live"]

POLL_SECONDS = 0.25
BUSY_SECONDS = 0.005
"""Between two polls while runs are read ahead: others get their answers in between."""
PING_SECONDS = 15.0
LOOK_SECONDS = 60.0
"""Between two checks for a live run, while there are no requests."""
MOST_FRAMES = 200
"""Changes that are sent at a time."""
Result = TypeVar("Result")


class Live:
    """A store that is read in its own thread, and sends its changes in streams.

    Only that thread touches the store, so that an answer and the number of the last change that it includes
    fit together. It reads while there are listeners or requests, else it rests, or checks now and then for a live run.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "store")
        self._listeners = 0
        self._poller: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._polled = float("-inf")
        self._used = float("-inf")
        self._waiting = 0
        """Requests that wait for an answer; runs are read ahead while there are none."""
        store.awaited = lambda: self._waiting > (0 if self._listeners else 1)

    async def ask(self, view: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function of the store, after reading what is new."""
        self._used = asyncio.get_running_loop().time()
        self._waiting += 1
        try:
            return await self._call(view, *arguments)
        finally:
            self._waiting -= 1

    async def _call(self, view: Callable[..., Result], *arguments: Any) -> Result:
        loop = asyncio.get_running_loop()

        def call() -> Result:
            if loop.time() - self._polled >= (BUSY_SECONDS if self._store.behind else POLL_SECONDS / 2):
                self._store.poll()
                self._polled = loop.time()
            return view(self._store, *arguments)

        return await loop.run_in_executor(self._thread, call)

    async def stream(self, last: str | None) -> AsyncIterator[bytes]:
        """Frames of changes after one of an id, or after now."""
        self._listeners += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            frame, at = await self.ask(_begin, last)
            yield frame
            while True:
                news = self._news
                frames, at = await self.ask(_after, at)
                if frames:
                    yield b"".join(frames)
                if len(frames) < MOST_FRAMES:
                    try:
                        await asyncio.wait_for(news.wait(), PING_SECONDS)
                    except TimeoutError:
                        yield b"event: ping\ndata: {}\n\n"
        finally:
            self._listeners -= 1

    async def _poll(self) -> None:
        """Read new lines as long as there are listeners."""
        known = -1
        while self._listeners:
            self._used = asyncio.get_running_loop().time()
            last = await self._call(lambda store: store.last_id)
            if last != known:
                known, self._news, news = last, asyncio.Event(), self._news
                news.set()
            await asyncio.sleep(BUSY_SECONDS if self._store.behind else POLL_SECONDS)

    async def idle(self, seconds: float) -> None:
        """Wait until there were no listeners, requests and live runs for so long."""
        loop = asyncio.get_running_loop()
        self._used = loop.time()
        while loop.time() - self._used < seconds:
            await asyncio.sleep(min(seconds / 4, LOOK_SECONDS))
            if self._listeners or await self._call(_is_live):
                self._used = loop.time()

    def close(self) -> None:
        """Stop."""
        if self._poller is not None:
            self._poller.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_live(store: Store) -> bool:
    return any(run.status == "live" for run in store.runs.values())


def _begin(store: Store, last: str | None) -> tuple[bytes, int]:
    """The first frame of a stream, and the number of the change that it resumes from."""
    if last is None:
        return b"retry: 1000\n" + _frame("ping", store.last_id, store, b"{}"), store.last_id
    boot, _, number = last.partition(".")
    at = int(number[:18]) if boot == store.boot and number.isascii() and number.isdecimal() else -1
    if store.since(at) is not None:
        return b"retry: 1000\n\n", at
    return b"retry: 1000\n" + _reset(store), store.last_id


def _after(store: Store, last: int) -> tuple[list[bytes], int]:
    """Frames of the changes after a number, and the number of the last of them."""
    changes = store.since(last)
    if changes is None:
        return [_reset(store)], store.last_id
    changes = changes[:MOST_FRAMES]
    return [_change(change, store) for change in changes], changes[-1].id if changes else last


def _change(change: Change, store: Store) -> bytes:
    if change.frame is None:  # made once for all who listen
        change.frame = _frame("change", change.id, store, encode(change.data))
    return change.frame


def _reset(store: Store) -> bytes:
    return _frame("reset", store.last_id, store, encode({"seq": seq(store)}))


def _frame(event: str, id: int, store: Store, data: bytes) -> bytes:
    return f"id: {store.boot}.{id}\nevent: {event}\ndata: ".encode() + data + b"\n\n"
