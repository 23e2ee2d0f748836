"""HTTP connections that idle clients cannot hold for long."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BoundedProtocol"]


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol, with limits for what it waits for.

    A connection that has no request under way has to send one within some seconds. If too many are waiting so, the one
    that waits longest is closed: hundreds of slow clients only close each other's connections. A client that does not
    read what it asked for is closed, too.
    """

    header_seconds: ClassVar[float] = 10.0
    """For the first byte of a connection, or the last answer, to the end of the next request's header."""
    stalled_seconds: ClassVar[float] = 20.0
    """For a client to read again."""
    most_waiting: ClassVar[int] = 64
    most_connections: ClassVar[int] = 256
    waiting: ClassVar[dict[BoundedProtocol, asyncio.TimerHandle]] = {}
    """Connections without a request, the oldest first; a subclass for each server has its own."""
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
        else:
            self._settle()

    def data_received(self, data: bytes) -> None:
        """Stop waiting, if that is the rest of a request's header."""
        super().data_received(data)
        self._settle()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._forget()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(self.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client keeps up again."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _settle(self) -> None:
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._forget()
        elif self not in self.waiting:
            if len(self.waiting) >= self.most_waiting:
                oldest = next(iter(self.waiting))
                oldest._forget()  # it is lost some time later
                oldest.transport.abort()
            self.waiting[self] = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _forget(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()


def protocol_class(**limits: Any) -> type[BoundedProtocol]:
    """A protocol of one server's own."""
    return type("Protocol", (BoundedProtocol,), {"waiting": {}, **limits})
