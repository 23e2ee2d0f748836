"""Who is let in: by raw sockets, as an attacker would ask."""

import json
import os
import random
import re
import select
import signal
import socket
import stat
import subprocess
import sys

import psutil
import pytest
from support import SECONDS, Writer, eventually, receive
from test_folder import TRAVERSALS

from loopkit_monitor.guard import POLICY
from loopkit_monitor.server import Options, ServerError, kept_token

pytestmark = pytest.mark.clock

STATUSES = range(200, 600)


def ask(server, path="/api/runs", *, method="GET", version="1.1", host=None, cookie=True, headers=(), body=b""):
    """The answer to a request that is written by hand: its status and all of its bytes."""
    lines = [f"{method} {path} HTTP/{version}".encode("latin-1")]
    if host is not False:
        lines.append(b"Host: " + (f"{server.host}:{server.port}" if host is None else host).encode("latin-1"))
    if cookie:
        lines.append(b"Cookie: " + server.cookie.encode())
    lines += [each.encode("latin-1") for each in headers]
    answer = server.raw(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
    return (int(answer[9:12]) if answer else None), answer


# ------------------------------------------------------------------------------------------------------ host and origin

OWN = [
    "127.0.0.1:{port}",
    "localhost:{port}",
    "[::1]:{port}",
    "LocalHost:{port}",
    "127.0.0.1",
    "localhost",
    "localhost:8080",
]
FOREIGN = [
    "evil.example", "evil.example:{port}", "localhost.evil:{port}", "127.0.0.1.evil.example", "127.0.0.2:{port}",
    "0.0.0.0:{port}", "localhost.", "127.0.0.1:99999", "127.0.0.1:{port}x", "127.0.0.1:", "user@127.0.0.1:{port}", "",
    "127.0.0.1:{port}, evil.example", "127.1", "2130706433", "0x7f000001", "[::]:{port}", "[::1", "::1", "[127.0.0.1]",
    "localhost/evil", "localhost:{port}/", "localhost\tevil", "127.0.0.1 evil", "l\xf6calhost", "*", "http://localhost",
]  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_own_names_are_let_in(shared, host):
    assert ask(shared, host=host.format(port=shared.port))[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/nowhere", "/?token=TOKEN"])
def test_foreign_names_are_refused_before_anything_else(shared, host, path):
    status, answer = ask(shared, path.replace("TOKEN", shared.token), host=host.format(port=shared.port))
    assert status in (400, 403)
    assert b"set-cookie" not in answer.lower()


def test_no_name_and_two_names_are_refused(shared):
    assert ask(shared, host=False)[0] == 400
    assert ask(shared, host=False, version="1.0")[0] == 403
    assert ask(shared, headers=["Host: evil.example"])[0] == 400
    assert ask(shared, f"http://evil.example:{shared.port}/api/runs")[0] in (400, 403, 404)
    assert ask(shared, headers=["X-Forwarded-Host: evil.example"])[0] == 200
    assert ask(shared, host="evil.example", headers=[f"X-Forwarded-Host: localhost:{shared.port}"])[0] == 403


def test_a_name_can_be_added(serve, tmp_path):
    server = serve(tmp_path, "--allow-host", "Box.example")
    assert ask(server, host="box.example:1234")[0] == 200
    assert ask(server, host="other.example")[0] == 403


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "https://127.0.0.1:{port}", "http://127.0.0.1:{other}", "http://localhost:{port}",
     "http://127.0.0.1", "file://", "http://127.0.0.1:{port}.evil.example", "http://127.0.0.1:{port}/", "*"],
)  # fmt: skip
def test_foreign_origins_are_refused(shared, origin):
    status, answer = ask(shared, headers=[f"Origin: {origin.format(port=shared.port, other=shared.port + 1)}"])
    assert status == 403
    assert b"access-control" not in answer.lower()


def test_a_wrong_token_is_told_where_the_right_one_is(shared):
    status, answer = ask(shared, "/?token=wrong", cookie=False)
    assert status == 403
    assert b"that is not the token of this server: open the address that loopkit monitor has printed last" in answer


def test_the_own_origin_is_let_in_and_nothing_is_shared(shared):
    status, answer = ask(shared, headers=[f"Origin: http://127.0.0.1:{shared.port}"])
    assert status == 200
    assert b"access-control" not in answer.lower()
    assert ask(shared, headers=[f"Origin: http://127.0.0.1:{shared.port}", "Origin: http://evil.example"])[0] == 403


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_what_other_pages_embed_is_refused(shared, site, status):
    assert ask(shared, headers=[f"Sec-Fetch-Site: {site}"])[0] == status


# -------------------------------------------------------------------------------------------------- methods and content


@pytest.mark.parametrize(
    "method",
    ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "MKCOL", "COPY", "MOVE", "LOCK",
     "PURGE", "get", "Get", "FOO", "GETGET", "QUERY"],
)  # fmt: skip
def test_nothing_but_reading_is_allowed(shared, method):
    for path in ("/", "/api/runs", "/events", "/nowhere"):
        assert ask(shared, path, method=method)[0] == 405


def test_head_answers_without_content(shared):
    for path in ("/api/runs", "/events", "/api/run?id=a", "/api/run?id=none"):
        status, answer = ask(shared, path, method="HEAD")
        assert status in (200, 404)
        assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "headers", [["Content-Length: 5"], ["Transfer-Encoding: chunked"], ["Content-Length: 99999999999"]]
)
def test_content_is_not_read(shared, headers):
    assert ask(shared, headers=headers, body=b"5\r\nhello\r\n0\r\n\r\n")[0] == 413


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_no_other_protocol_is_spoken(shared, upgrade):
    status, _ = ask(shared, headers=[f"Upgrade: {upgrade}", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA=="])
    assert status == 200


# ---------------------------------------------------------------------------------------------------------------- token


def test_the_token_opens_the_page_and_a_cookie_keeps_it_open(shared):
    status, answer = ask(shared, f"/?token={shared.token}", cookie=False)
    head = answer.decode("latin-1").lower()
    assert status == 303
    assert "\r\nlocation: /\r\n" in head
    (cookie,) = re.findall(r"set-cookie: (.*)\r\n", head)
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "domain" not in cookie
    assert shared.token not in answer.decode("latin-1")
    assert len(shared.token) >= 43


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/api/run?id=a", "/events", "/static/app.js", "/api/file?id=a&file=x", "/x"]
)
def test_nothing_is_told_without_the_cookie(shared, path):
    assert ask(shared, path, cookie=False)[0] == 401
    name = shared.cookie.partition("=")[0]
    for wrong in ("", shared.token, "x" * 64, shared.cookie.partition("=")[2][:-1], "\xe9"):
        assert ask(shared, path, cookie=False, headers=[f"Cookie: {name}={wrong}"])[0] == 401
    assert ask(shared, path, cookie=False, headers=[f"Cookie: other={shared.cookie.partition('=')[2]}"])[0] == 401


@pytest.mark.parametrize(
    "query", ["token=", "token=x", "token=%00", "token=%C3%A9", "token=TOKEN&token=TOKEN", "token=TOKENx"]
)
def test_wrong_tokens_are_refused(shared, query):
    query = query.replace("TOKEN", shared.token)
    assert ask(shared, f"/?{query}", cookie=False)[0] == 403
    assert ask(shared, f"/api/runs?{query}", cookie=False)[0] == 401


def test_a_token_in_a_file_stays_the_same(serve, tmp_path):
    path = tmp_path / "token"
    first, second = serve(tmp_path, "--token-file", str(path)), serve(tmp_path, "--token-file", str(path))
    assert first.token == second.token == path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(ServerError, match="can be read by others"):
        kept_token(path)


def test_a_short_token_is_refused(tmp_path):
    with pytest.raises(ServerError, match="at least 16"):
        Options(tmp_path, token="short")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "box.example", "127.0.0.1.evil.example"])
def test_nothing_but_this_machine_is_served_without_a_token(tmp_path, host):
    with pytest.raises(ServerError, match="needs a token"):
        Options(tmp_path, host=host, token=None)
    assert Options(tmp_path, host="127.0.0.1", token=None).token is None
    words = [sys.executable, "-m", "loopkit_monitor.server", str(tmp_path), "--host", host, "--no-token"]
    if host == "0.0.0.0":
        ended = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        assert ended.returncode == 2
        assert "needs a token" in ended.stderr


def test_on_this_machine_the_token_can_be_left_out(serve, tmp_path):
    server = serve(tmp_path, "--no-token")
    assert ask(server, cookie=False)[0] == 200
    assert ask(server, cookie=False, host="evil.example")[0] == 403


def test_a_server_for_all_is_asked_for_by_its_names(serve, tmp_path):
    server = serve(tmp_path, "--host", "0.0.0.0")
    for host, status in ((socket.gethostname(), 200), ("127.0.0.1", 200), ("0.0.0.0", 403), ("evil.example", 403)):
        assert ask(server, host=f"{host}:{server.port}")[0] == status
    assert ask(server, cookie=False)[0] == 401


def test_it_listens_on_this_machine_alone(shared):
    others = {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as connection:
            connection.settimeout(2)
            assert connection.connect_ex((address, shared.port)) != 0


# -------------------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "path", ["/api/runs", "/nowhere", "/api/run?id=none", "/?token=x", "/api/series?id=a&name=lr", "/static/none"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_every_answer_says_what_a_browser_may_do_with_it(shared, path, method):
    _, answer = ask(shared, path, method=method)
    head = answer.partition(b"\r\n\r\n")[0].decode("latin-1").lower().split("\r\n")[1:]
    found = dict(line.split(": ", 1) for line in head)
    assert found["content-security-policy"] == POLICY.lower()
    assert "'unsafe" not in POLICY
    assert found["x-content-type-options"] == "nosniff"
    assert found["referrer-policy"] == "no-referrer"
    assert found["cache-control"] == "no-store"
    assert found["x-frame-options"] == "deny"
    assert "server" not in found
    assert not [name for name in found if name.startswith("access-control")]


# ---------------------------------------------------------------------------------------------------------------- files


def quoted(path):
    """A path in a query, every byte of it escaped."""
    return "".join(f"%{byte:02X}" for byte in path.encode())


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_way_leads_out_of_the_runs(shared, path):
    for way in (
        f"id=a&file={quoted(path)}",
        f"id=a&file={quoted('media/' + path)}",
        f"id={quoted(path)}&file=secret.txt",
    ):
        assert ask(shared, f"/api/file?{way}")[0] == 404
    plain = path.replace("\0", "%00").replace(" ", "%20")
    for way in (quoted(path), plain.encode("utf-8").decode("latin-1").replace("\u2025", "")):
        for begin in ("/static/", "/", "/api/"):
            status, answer = ask(shared, f"{begin}{way}")
            assert status in (400, 403, 404) or path in ("", ".", "..", "a/..") or begin + way == "/"
            assert b"root:" not in answer
            assert not answer.endswith(b"secret")


def test_only_files_that_the_log_names_are_sent(shared):
    media = shared.get("/api/media", id="a", name="picture")
    image, page = [item["file"] for item in media["items"]]
    status, headers, content = shared.request(f"/api/file?id=a&file={image}")
    assert (status, headers["content-type"], content) == (200, "image/png", b"\x89PNG picture")
    assert "content-disposition" not in headers
    status, headers, content = shared.request(f"/api/file?id=a&file={page}")
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    assert headers["content-disposition"] == "attachment"
    assert headers["content-security-policy"] == "sandbox"
    for other in ("log.jsonl", "media", f"media/../{image}", image.upper(), "media/" + "0" * 64 + ".png"):
        assert shared.request(f"/api/file?id=a&file={other}")[0] == 404


def test_a_log_cannot_name_what_is_not_beside_it(serve, tmp_path, writer):
    (tmp_path / "secret.png").write_text("secret")
    os.symlink(tmp_path / "secret.png", writer.path.parent / "media.png")
    (writer.path.parent / "media").mkdir()
    os.symlink(tmp_path / "secret.png", writer.path.parent / "media" / "link.png")
    os.mkfifo(writer.path.parent / "media" / "pipe.png")
    named = [
        "../../secret.png",
        str(tmp_path / "secret.png"),
        "media/link.png",
        "media/../../../secret.png",
        "media.png",
    ]
    named += ["media/pipe.png", "media/", "media", "log.jsonl", "media/./x.png"]
    for name in named:
        writer.other("picture", "image", file=name)
    server = serve(tmp_path / "runs")
    assert server.get("/api/media", id="a", name="picture")["total"] == len(named)
    for name in named:
        assert ask(server, f"/api/file?id=a&file={quoted(name)}")[0] == 404


# ------------------------------------------------------------------------------------------------------ bounded clients


@pytest.mark.parametrize("size", [17_000, 70_000, 300_000, 3_000_000])
def test_requests_that_are_too_long_are_refused(shared, size):
    for path, headers in (("/" + "a" * size, ()), ("/?" + "a" * size, ()), ("/api/runs", [f"X: {'a' * size}"])):
        assert ask(shared, path, headers=headers)[0] in (None, 400, 414, 431)
    assert ask(shared, headers=["X: y"] * (size // 6))[0] in (None, 400, 431)
    assert ask(shared, "/api/runs?" + "a=1&" * 300)[0] == 400
    assert ask(shared)[0] == 200


def test_two_hundred_slow_connections_keep_nobody_out(serve, tmp_path, writer):
    writer.values(3)
    server = serve(tmp_path / "runs", header_seconds=2.0)
    slow = [socket.create_connection((server.host, server.port), timeout=SECONDS) for _ in range(200)]
    try:
        for turn in range(10):
            for connection in slow:
                try:
                    connection.sendall(b"GET / HTTP/1.1\r\n"[turn : turn + 1])
                except OSError:
                    pass  # closed by the server
            assert server.get("/api/run", id="a")["step"] == 3
        for connection in slow:
            connection.settimeout(None)
            receive(connection)  # ends: all were closed
    finally:
        for connection in slow:
            connection.close()


def test_connections_that_come_all_at_once_are_bounded(serve, tmp_path):
    server = serve(tmp_path, header_seconds=600.0, most_waiting=8)
    server.process.send_signal(signal.SIGSTOP)
    waiting = [socket.create_connection((server.host, server.port), timeout=SECONDS) for _ in range(100)]
    try:
        server.process.send_signal(signal.SIGCONT)
        eventually(lambda: len(select.select(waiting, [], [], 0)[0]) == 92)  # these were closed
        assert server.request("/")[0] == 200
    finally:
        for connection in waiting:
            connection.close()


def test_a_second_request_may_not_be_slow_either(serve, tmp_path):
    server = serve(tmp_path, header_seconds=2.0)
    with socket.create_connection((server.host, server.port), timeout=SECONDS) as connection:
        connection.sendall(f"GET /x HTTP/1.1\r\nHost: localhost\r\nCookie: {server.cookie}\r\n\r\nGET".encode())
        connection.settimeout(None)
        assert receive(connection).startswith(b"HTTP/1.1 404")  # and ends


def test_who_does_not_read_is_let_go(serve, tmp_path, writer):
    writer.media(os.urandom(30_000_000), ".bin")
    server = serve(tmp_path / "runs", stalled_seconds=0.5)
    file = server.get("/api/media", id="a", name="picture")["items"][0]["file"]
    served = psutil.Process(server.process.pid)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(SECONDS)
        connection.connect((server.host, server.port))
        connection.sendall(
            f"GET /api/file?id=a&file={file} HTTP/1.1\r\nHost: localhost\r\nCookie: {server.cookie}\r\n\r\n".encode()
        )
        connection.recv(1, socket.MSG_PEEK)  # it is being sent
        eventually(lambda: not [each for each in served.net_connections() if each.raddr == connection.getsockname()])
        assert len(receive(connection)) < 30_000_000
    assert server.memory[1] < 150 << 20


def test_streams_are_bounded(serve, tmp_path):
    server = serve(tmp_path)
    listeners = [server.connect() for _ in range(64)]
    assert [each.status for each in listeners] == [200] * 64
    refused = server.connect()
    assert refused.status == 503
    for each in [*listeners, refused]:
        each.close()

    def again():
        listener = server.connect()
        listener.close()
        return listener.status == 200

    eventually(again)


def test_an_answer_of_any_length_ends_with_the_client(serve, tmp_path, writer):
    writer.values(2000)
    server = serve(tmp_path / "runs")
    for _ in range(50):
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(
                f"GET /api/series?id=a&name=lr HTTP/1.1\r\nHost: localhost\r\nCookie: {server.cookie}\r\n\r\n".encode()
            )
    assert server.get("/api/runs")["runs"]
    assert server.process.poll() is None


# ----------------------------------------------------------------------------------------------------------------- fuzz

PARTS = [
    b"GET", b"HEAD", b"POST", b" ", b"/", b"/api/series", b"/api/run?id=a", b"/api/file?id=a&file=", b"/events",
    b"?", b"&", b"%", b"%2e%2e/", b"%00", b"../", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"\r\n", b"\n", b"\r",
    b"Host: localhost\r\n", b"Host:", b":", b"Cookie: COOKIE\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"\0", b"\xff\xfe", b"points=-1",
    b"points=99999999999999999999", b"name=" + b"a" * 500, b"Range: bytes=0-", b"Expect: 100-continue\r\n",
    b"\r\n\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Origin: null\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00",
]  # fmt: skip


QUERIES = [b"a", b"lr", b"-5", b"1e9", b"%FF", b"", b"2000", b"9" * 30, b"picture", b"%3Cscript%3E", b"x.-1", b"\xe9"]


def fuzzed(order, cookie):
    """A request that is wrong somewhere, or nothing like one."""
    kind = order.randrange(4)
    if kind == 0:
        return order.randbytes(order.randrange(1, 300))
    if kind == 1:
        made = b"".join(order.choice(PARTS) for _ in range(order.randrange(1, 15)))
    else:
        path = b"".join(order.choice(PARTS[3:14]) for _ in range(order.randrange(1, 6))).replace(b" ", b"")
        query = b"&".join(
            order.choice([b"id", b"name", b"points", b"from", b"to", b"index", b"limit", b"file", b"since"])
            + b"="
            + order.choice(
                [
                    b"a",
                    b"lr",
                    b"-5",
                    b"1e9",
                    b"%FF",
                    b"",
                    b"2000",
                    b"9" * 30,
                    b"picture",
                    b"%3Cscript%3E",
                    b"x.-1",
                    b"\xe9",
                ]
            )
            for _ in range(order.randrange(5))
        )
        target = order.choice([path, b"/api/" + order.choice([b"runs", b"run", b"series", b"media", b"file"])])
        made = b"GET " + target + b"?" + query + b" HTTP/1.1\r\nHost: localhost\r\nCookie: COOKIE\r\n"
        made += order.choice([b"", b"", order.choice(PARTS)]) + b"Connection: close\r\n\r\n"
    made = made.replace(b"COOKIE", cookie.encode()).replace(b"/events", order.choice([b"/event", b"/events/"]))
    if kind == 3:
        changed = bytearray(made)
        for _ in range(order.randrange(1, 4)):
            changed[order.randrange(len(changed))] = order.randrange(256)
        made = bytes(changed)
    return made


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_whatever_is_asked_the_server_lives(serve, tmp_path, writer, count):
    writer.begin()
    writer.values(20)
    writer.media(b"x", ".png")
    server = serve(tmp_path / "runs", header_seconds=1.0)
    order = random.Random(0)
    seen = set()
    for _ in range(count):
        data = fuzzed(order, server.cookie)
        answer = server.raw(data, patience=0.01)
        if answer:
            assert re.match(rb"HTTP/1\.1 [1-5][0-9][0-9] ", answer), (data, answer[:100])
            status = int(answer[9:12])
            assert status in STATUSES or status == 100, data
            assert status != 500, (data, answer)
            seen.add(status)
    assert {200, 400, 404} <= seen
    assert server.get("/api/run", id="a")["step"] == 20
    assert server.process.poll() is None
    assert server.memory[1] < 150 << 20


# ------------------------------------------------------------------------------------------------------------- payloads

PAYLOADS = [
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>", "<!--<script>", "-->", "]]>", "<![CDATA[", "\"><script>alert(1)</script>",
    "'><script>alert(1)</script>", "javascript:alert(1)", "<iframe src=javascript:alert(1)>",
    "<a href=\"javascript:alert(1)\">x</a>", "<body onload=alert(1)>", "<style>*{}</style>",
    "<link rel=stylesheet href=//evil>", "<base href=//evil/>", "<meta http-equiv=refresh content=0>",
    "<object data=x>", "<embed src=x>", "<form action=//evil>", "<input autofocus onfocus=alert(1)>",
    "<details open ontoggle=alert(1)>", "<math><mi xlink:href=x>", "{{constructor.constructor('alert(1)')()}}",
    "${alert(1)}", "`${alert(1)}`", "\u2028alert(1)\u2029", "\\u003cscript\\u003e", "&lt;script&gt;",
    "&#60;script&#62;", "%3Cscript%3E", "<scr\0ipt>", "<ScRiPt>", "<script\n>", "\ud800<script>", "\x1b]0;x\x07",
    "__proto__", "constructor", "+ADw-script+AD4-", "\r\nSet-Cookie: a=b\r\n\r\n<script>",
    "data: x\n\nevent: reset\ndata: y",
]  # fmt: skip


def test_there_are_forty_payloads():
    assert len(set(PAYLOADS)) >= 40


def test_every_text_of_a_log_comes_as_json_without_markup(serve, tmp_path):
    for number, payload in enumerate(PAYLOADS):
        writer = Writer(tmp_path / "runs" / f"r{number}" / "log.jsonl")
        about = {"argv": [payload], "config": payload, "loopkit": payload, payload: payload}
        writer.begin(hyperparameters={payload: payload, "lr": number}, **about)
        writer.values(1, payload, f"train/{payload}")
        writer.value("x", 1.0, phase=payload)
        writer.other(payload, "text", text=payload)
        writer.other("run/warning", "text", text=payload)
        writer.other("run/checkpoint", "text", text=payload)
        writer.other("run/plan", "table", columns=[payload], rows=[[payload]])
        writer.other("run/model", "graph", modules=[{"name": payload, "type": payload}])
        writer.other("run/cost", payload, columns=[payload], rows=[[payload]])
        writer.end(error=payload, message=payload, by=payload, reason=payload)
    server = serve(tmp_path / "runs")
    listener = server.connect(since="0.0")
    for number, payload in enumerate(PAYLOADS):
        id = f"r{number}"
        said = server.get("/api/run", id=id)
        assert said["hyperparameters"][payload] == said["config"] == said["end"]["by"] == said["error"] == payload
        assert (
            said["warnings"][0]["text"] == said["plan"]["rows"][0][0] == said["model"]["modules"][0]["type"] == payload
        )
        if not re.search("[\ud800-\udfff]", payload):
            assert payload in server.get("/api/series", id=id, name=payload)["series"]
            assert server.get("/api/media", id=id, name=payload)["items"][0]["text"] == payload
        for path in (
            f"/api/run?id={id}",
            f"/api/run?id={quoted(payload) if payload.isprintable() else 'x'}",
            "/api/runs",
        ):
            _, headers, content = server.request(path)
            assert not set(b"<>&") & set(content)
            assert headers["content-type"] in ("application/json", "text/plain; charset=utf-8")
            assert content.isascii()
            assert "set-cookie" not in headers
    writer.values(1, *PAYLOADS)
    events = []
    for event, data in listener.events():
        events.append(event)
        if event == "change" and "series" in data and data["run"] == id:
            assert set(data["series"]) == set(PAYLOADS)
            break
    assert set(events) == {"reset", "change"}
    listener.close()
    assert json.loads(json.dumps(events))
