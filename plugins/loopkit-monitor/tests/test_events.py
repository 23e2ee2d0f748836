"""The stream of changes: who loses the connection, however often, misses nothing and gets nothing twice."""

import random
import threading
import time

import pytest
from support import SECONDS, eventually, read


class Page:
    """What a page does with answers and events, as its own code does."""

    def __init__(self, server, id):
        self.server, self.id = server, id
        self.load()

    def load(self):
        names = [each["name"] for each in self.server.get("/api/run", id=self.id)["names"] if each["kind"] == "value"]
        said = self.server.get("/api/series", id=self.id, name=names, points=20_000) if names else {"series": {}}
        self.points = {
            name: [list(row) for row in zip(each["step"], each["value"], each["time"], strict=True)]
            for name, each in said["series"].items()
        }
        self.seq = said.get("seq") or self.server.get("/api/run", id=self.id)["seq"]
        self.status = None
        self.last = self.seq

    def take(self, event, data, id):
        """Apply an event."""
        self.last = id
        if event == "reset":
            self.load()
        elif event == "change" and data["run"] == self.id and number(id) > number(self.seq):
            self.status = data["status"]
            if data.get("reload"):
                self.load()
                return
            if "cut" in data:
                self.points = {name: [r for r in rows if r[0] <= data["cut"]] for name, rows in self.points.items()}
            for name, rows in data.get("series", {}).items():
                self.points.setdefault(name, []).extend(rows)

    def listen(self, done, order=None):
        """Listen until a condition holds; if given chances, end some connections early, and go on where they were."""
        end = time.monotonic() + SECONDS
        while not done(self):
            assert time.monotonic() < end
            listener = self.server.connect(last=self.last)
            left = order.randrange(1, 6) if order is not None else 10**9
            try:
                for event, data in listener.events():
                    self.take(event, data, listener.last)
                    left -= 1
                    if left <= 0 or done(self):
                        break
            finally:
                listener.close()


def number(seq):
    return int(seq.rpartition(".")[2])


def held(points):
    return {name: rows for name, rows in points.items() if rows}


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_who_comes_back_misses_nothing_and_repeats_nothing(serve, tmp_path, writer, seed):
    order = random.Random(seed)
    writer.begin()
    writer.values(5)
    server = serve(tmp_path / "runs")
    page, other = Page(server, "a"), Page(server, "a")
    ended = threading.Event()

    def train():
        sizes = [(writer.size, writer.step)]
        for _ in range(60):
            if order.random() < 0.1:
                size, writer.step = order.choice(sizes)
                sizes = [each for each in sizes if each[0] <= size]
                writer.cut(size)
                writer.time += 1
                writer.begin(resumed=True)
            writer.values(order.randrange(1, 30), *order.choice([("lr",), ("train/loss", "lr")]))
            writer.raw(b"")
            sizes.append((writer.size, writer.step))
            time.sleep(0.03)
        writer.end()
        ended.set()

    def has_all(page):
        return ended.is_set() and page.status == "finished" and held(page.points) == read(writer.path)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        page.listen(has_all, random.Random(seed))
    finally:
        trainer.join()
    other.listen(has_all)
    fresh = Page(server, "a")
    assert held(fresh.points) == held(page.points) == held(other.points)


def test_a_value_comes_unasked(serve, tmp_path, writer):
    writer.begin()
    writer.values(3)
    server = serve(tmp_path / "runs")
    server.get("/api/run", id="a")
    listener = server.connect()
    events = listener.events()
    assert next(events)[0] == "ping"
    writer.values(1)
    event, data = next(each for each in events if each[0] != "ping")
    assert (event, data["run"], data["series"]["lr"][0][0]) == ("change", "a", 4)
    listener.close()


def test_a_server_that_was_started_again_says_reset(serve, tmp_path, writer):
    writer.values(3)
    token = str(tmp_path / "token")
    first = serve(tmp_path / "runs", "--token-file", token)
    page = Page(first, "a")
    first.end()
    writer.values(2)
    second = serve(tmp_path / "runs", "--token-file", token)
    page.server = second
    listener = second.connect(last=page.last)
    event, data = next(listener.events())
    assert event == "reset"
    page.take(event, data, listener.last)
    assert held(page.points) == read(writer.path)
    writer.values(2)
    page.listen(lambda page: held(page.points) == read(writer.path))
    listener.close()


@pytest.mark.parametrize(
    "last", ["", "x", "1.1", ".", "BOOT.", "BOOT.-1", "BOOT.99999999999999999999", "BOOT.x", "BOOT.\xb2", "<>"]
)
def test_an_id_that_is_none_is_answered_with_a_reset(shared, last):
    boot = shared.get("/api/runs")["seq"].partition(".")[0]
    listener = shared.connect(last=last.replace("BOOT", boot).encode().decode("latin-1"))
    assert next(listener.events())[0] == ("reset" if last else "ping")
    listener.close()


def test_the_header_wins_over_the_address(shared):
    seq = shared.get("/api/runs")["seq"]
    listener = shared.connect(last="x.1", since=seq)
    assert next(listener.events())[0] == "reset"
    listener.close()


def test_a_run_that_comes_goes_and_ends_is_told_of(serve, tmp_path, writer):
    writer.values(1)
    server = serve(tmp_path / "runs")
    listener = server.connect()
    events = listener.events()
    next(events)
    other = type(writer)(tmp_path / "runs" / "b" / "log.jsonl")
    other.begin()
    assert next(data for event, data in events if event == "change")["new"]
    other.end(error="ValueError: no", reason="error")
    assert any(data["status"] == "crashed" for event, data in events if event == "change" and not data.get("new"))
    other.path.unlink()
    assert next(data for event, data in events if data.get("removed"))["run"] == "b"
    listener.close()


def test_nothing_is_read_when_nobody_listens(serve, tmp_path, writer):
    writer.values(1)
    server = serve(tmp_path / "runs")
    listener = server.connect()
    next(listener.events())
    listener.close()

    def rests():
        before = ticks(server)
        time.sleep(0.7)
        return ticks(server) == before

    eventually(rests)


def ticks(server):
    """The time that the server has worked, in ticks of the system."""
    with open(f"/proc/{server.process.pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
