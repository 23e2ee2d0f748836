"""Who may ask the server for anything."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["POLICY", "Guard"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
LONGEST_HEADERS = 16 << 10
"""Bytes of a request's target and headers."""
MOST_FIELDS = 200
"""The most fields of a query."""
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.ASCII | re.IGNORECASE)
READING = ("GET", "HEAD")
WRITING = ("/api/note",)
"""Paths to which the page posts; all others are read-only."""
LONGEST_CONTENT = 64 << 10
"""Bytes of a posted note."""


class Guard:
    """Lets through what the user's own page asks for, and rejects all else before it is looked at.

    - ``Host`` is a name of this server; so a foreign name that was made to lead here (DNS rebinding) is of no use.
    - ``Origin``, if it is sent, is the page's own.
    - ``GET`` and ``HEAD`` only, without content; and ``POST`` of a short JSON note, with an ``Origin``.
    - The token was given once, in the address of the page; afterwards a cookie holds it.

    Args:
        app: The guarded application.
        names: Host names of this server. Addresses are written as in a URL: ``[::1]``.
        token: None if none is required.
        cookie: The name of the cookie.
    """

    def __init__(self, app: ASGIApp, *, names: Collection[str], token: str | None, cookie: str) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)
        self._token = None if token is None else token.encode()
        self._cookie = cookie
        # What the cookie holds is made of the token, but does not tell it.
        self._pass = None if self._token is None else hmac.new(self._token, b"cookie", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let through."""
        if scope["type"] != "http":  # nothing else is served
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope)
        if answer is None and self._pass is not None:
            answer = self._entry(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that the page does not make; None for its own."""
        headers = Headers(scope=scope)
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > LONGEST_HEADERS:
            return _refuse(431, "the request is too long")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0], scope):
            return _refuse(403, "that is no name of this server; loopkit monitor --allow-host NAME adds one")
        origins = headers.getlist("origin")
        if origins and origins != [f"http://{hosts[0]}"]:
            return _refuse(403, "other pages may not ask")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/":
            return _refuse(403, "other pages may not ask")
        if scope["method"] == "POST" and scope["path"] in WRITING:
            return _refusal_to_write(headers, bool(origins))
        if scope["method"] not in READING:
            return _refuse(405, "this address is read-only", allow=", ".join(READING))
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            return _refuse(413, "send no content")
        if not scope["path"].startswith("/") or scope["query_string"].count(b"&") >= MOST_FIELDS:
            return _refuse(400, "that is no path of this server")
        return None

    def _is_own(self, host: str, scope: Scope) -> bool:
        match = HOST.fullmatch(host)
        if match is None or int(match[2] or 0) > 65535:
            return False
        server = scope.get("server")
        here = "" if not server else f"[{server[0]}]" if ":" in server[0] else server[0]
        return match[1].lower() in self._names or match[1].lower() == here

    def _entry(self, scope: Scope) -> Response | None:
        """The answer to a request without the token, or the first one with it; None for others."""
        assert self._token is not None
        assert self._pass is not None
        query = scope["query_string"].decode("latin-1")
        given = parse_qs(query, keep_blank_values=True).get("token") if scope["path"] == "/" else None
        if given is not None:
            if len(given) != 1 or not hmac.compare_digest(given[0].encode("utf-8", "replace"), self._token):
                return _refuse(
                    403, "that is not the token of this server: open the address that loopkit monitor has printed last"
                )
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, self._pass, httponly=True, samesite="strict", path="/")
            return answer
        for header in Headers(scope=scope).getlist("cookie"):
            for pair in header.split(";"):
                name, _, value = pair.strip().partition("=")
                if name == self._cookie and hmac.compare_digest(value.encode("utf-8", "replace"), self._pass.encode()):
                    return None
        return _refuse(401, "open the address that loopkit monitor has printed, with its token")


def _refusal_to_write(headers: Headers, has_origin: bool) -> Response | None:
    """The answer to a request that writes and does not come from the page."""
    length = headers.get("content-length", "")
    if not has_origin:
        return _refuse(403, "only the page itself writes notes")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return _refuse(415, "a note is JSON")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal() and len(length) < 9):
        return _refuse(411, "give the length of the note")
    return _refuse(413, "the note is too long") if int(length) > LONGEST_CONTENT else None


def _refuse(status: int, why: str, **headers: str) -> Response:
    return PlainTextResponse(f"{why}\n", status, {**headers, "connection": "close"})
