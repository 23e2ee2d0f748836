import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import SECONDS, Server, eventually, points

from loopkit_monitor.events import Live
from loopkit_monitor.page import MODULES
from loopkit_monitor.server import Options, _listen
from loopkit_monitor.store import Store


def test_the_command_becomes_a_server_without_torch(tmp_path, writer):
    writer.begin()
    writer.values(3)
    words = [sys.executable, "-m", "loopkit", "monitor", str(tmp_path / "runs")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[-1]
            assert address.startswith("http://127.0.0.1:")
            served = http.client.HTTPConnection(address.partition("?")[0].split("/")[2], timeout=SECONDS)
            served.request("GET", "/")
            assert served.getresponse().status in (401, 403)  # without the token; from here on it takes signals
            served.close()
            with open(f"/proc/{process.pid}/maps") as maps:
                assert "libtorch" not in maps.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "there is no"),
        ([".", "--port", "PORT"], "cannot be listened on"),
        ([".", "--host", "0.0.0.0", "--no-token"], "needs a token"),
        ([".", "--idle", "0"], "a number of seconds above 0"),
        ([".", "--host", "no.such.host.invalid", "--port", "70000"], "error"),
    ],
)
def test_what_cannot_be_started_says_why(tmp_path, shared, words, said):
    words = [word.replace("PORT", str(shared.port)) for word in words]
    command = [sys.executable, "-P", "-m", "loopkit_monitor.server", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_answer_in_parts_does_not_wait_for_acknowledgements(tmp_path):
    with (
        _listen(Options(tmp_path, token="t" * 16)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as taken,
    ):
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_it_ends_when_nobody_asks_and_no_run_is_live(serve, tmp_path, writer):
    writer.begin()
    writer.end()
    server = serve(tmp_path / "runs", "--idle", "0.5")
    assert server.process.wait(SECONDS) == 0
    assert "no request for 0.5 s, and no run is live" in server.process.stderr.read()


def test_it_stays_while_a_run_is_live_or_somebody_listens(tmp_path, writer):
    class Counting(Store):
        polls = 0

        def poll(self):
            self.polls += 1
            return super().poll()

    async def look():
        store = Counting(tmp_path / "runs")
        live = Live(store)
        idle = asyncio.create_task(live.idle(0.001))

        async def stays():
            seen = store.polls
            while store.polls < seen + 3:
                await asyncio.sleep(0.01)
            assert not idle.done()

        await stays()
        stream = live.stream(None)
        await anext(stream)
        writer.end()
        await stays()
        await stream.aclose()
        await idle
        live.close()

    writer.begin()
    asyncio.run(asyncio.wait_for(look(), SECONDS))


def test_the_folder_that_it_is_started_in_is_not_imported_from(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('imported')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code = "import sys; from loopkit.commands.cli import main; sys.exit(main(['monitor', 'none']))"
    words = [sys.executable, "-P", "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert "there is no none" in ended.stderr


def test_answers_are_those_of_the_views(shared):
    said = shared.get("/api/run", id="a")
    assert said["hyperparameters"] == {"lr": 0.1}
    assert shared.get("/api/runs")["runs"][0]["id"] == "a"
    series = shared.get("/api/series", id="a", name=["lr", "train/loss"], points=10, **{"from": 3, "to": 40})["series"]
    assert all(len(each["step"]) <= 10 and each["total"] == 38 for each in series.values())


@pytest.mark.parametrize(
    "path",
    [
        "/api/run", "/api/run?id=a&id=b", "/api/series", "/api/series?id=a&points=x", "/api/series?id=a&points=1",
        "/api/series?id=a&points=1e3", "/api/series?id=a&points=100000", "/api/series?id=a&from=1.5",
        "/api/series?id=a&to=" + "9" * 20, "/api/media?id=a", "/api/media?id=a&name=x&index=-1",
        "/api/media?id=a&name=x&limit=0", "/api/file?id=a",
        "/api/series?id=a&points=%C2%B2", "/api/series?id=a&points=5&points=6",
    ],
)  # fmt: skip
def test_questions_that_are_none_are_refused(shared, path):
    status, _, content = shared.request(path)
    assert status == 400
    assert content


@pytest.mark.parametrize("path", ["/api/run?id=none", "/api/series?id=none", "/api/media?id=none&name=x"])
def test_a_run_that_is_none_is_not_found(shared, path):
    assert shared.request(path)[0] == 404


def test_the_page_and_its_parts_are_served(shared):
    status, headers, content = shared.request("/")
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert b"<script>" not in content  # which the policy would not let run
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/", "/static", "/index.html"):
        assert shared.request(path)[0] == 404


def test_page_asks_for_all_scripts_at_once(shared):
    named = re.findall(r"<([^>]*)>; rel=modulepreload", shared.request("/")[1]["link"])
    assert [Path(each).name for each in named] == [*MODULES]
    assert all(shared.request(f"/{each}")[0] == 200 for each in named)


def test_a_folder_that_vanishes_and_comes_back(serve, tmp_path, writer):
    writer.values(3)
    server = serve(tmp_path / "runs")
    assert server.get("/api/run", id="a")["step"] == 3
    (tmp_path / "runs").rename(tmp_path / "gone")
    eventually(lambda: server.request("/api/run?id=a")[0] == 404)
    assert server.get("/api/runs")["runs"] == []
    (tmp_path / "gone").rename(tmp_path / "runs")
    eventually(lambda: server.request("/api/run?id=a")[0] == 200)


@pytest.mark.slow
def test_a_million_points_take_little_memory(serve, tmp_path, writer):
    with writer.path.open("w") as file:
        for step in range(500_000):
            place = f'"phase": "train", "epoch": 0, "step": {step}, "update": {step}, "time": 1763800000.000'
            file.write(f'{{{place}, "values": {{"lr": {step / 7!r}, "train/loss": {step / 9!r}}}}}\n')
    server = serve(tmp_path / "runs")
    said = server.get("/api/series", id="a", name=["lr", "train/loss"])["series"]
    assert said["lr"]["total"] == 500_000
    listeners = [server.connect() for _ in range(10)]
    writer.step = 500_000
    writer.values(10_000)
    server.get("/api/run", id="a")
    server.get("/api/series", id="a", name=["lr", "train/loss"], points=20_000)
    assert server.memory[1] < 150 << 20
    for each in listeners:
        each.close()


def test_streams_that_are_asked_for_at_once_are_bounded_and_give_their_places_back(serve, tmp_path, writer):
    writer.begin()
    server = serve(tmp_path / "runs", most_waiting=300)

    host = f"{server.host}:{server.port}"
    words = f"GET /events HTTP/1.1\r\nHost: {host}\r\nCookie: {server.cookie}\r\n\r\n".encode()

    def ask(count):
        found = []
        for _ in range(count):
            found.append(socket.create_connection((server.host, server.port), timeout=SECONDS))
            found[-1].sendall(words)
        return found, [each.recv(12).decode() for each in found]

    opened, answers = ask(100)
    assert Counter(answers) == {"HTTP/1.1 200": 64, "HTTP/1.1 503": 36}
    for each in opened:
        each.close()

    def again():
        more, answers = ask(64)
        for each in more:
            each.close()
        return set(answers) == {"HTTP/1.1 200"}

    eventually(again)


def test_an_address_of_ipv6_works(tmp_path, writer):
    writer.values(1)
    try:
        server = Server(tmp_path / "runs", "--host", "::1")
    except RuntimeError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        assert server.address.startswith("http://[::1]:")
        assert server.get("/api/run", id="a")["step"] == 1
    finally:
        server.end()


def test_reading_changes_nothing(serve, tmp_path, writer):
    writer.begin()
    writer.values(5)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
    server = serve(tmp_path / "runs")
    server.get("/api/run", id="a")
    server.get("/api/series", id="a", name="lr")
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after
    store = Store(tmp_path / "runs")
    store.poll()
    assert json.dumps(points(store.get("a")))
