"""Logs as `loopkit.logs.JsonLines` writes them, and a server in a process of its own."""

import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode, urlsplit

SECONDS = 60


class Writer:
    """Appends to a log."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self.step = 0
        self.time = 1763800000.0

    def raw(self, data):
        with self.path.open("ab") as file:
            file.write(data if isinstance(data, bytes) else data.encode())

    def line(self, **content):
        self.raw(json.dumps(content, separators=(",", ":")) + "\n")

    def begin(self, **about):
        self.line(kind="run", host=socket.gethostname(), pid=os.getpid(), time=round(time.time(), 3), **about)

    def end(self, **about):
        self.line(kind="end", **{"reason": "epochs", "error": None, "time": round(time.time(), 3), **about})

    def value(self, name, value, **about):
        self.together({name: value}, **about)

    def together(self, values, **about):
        place = {"phase": "train", "epoch": 0, "step": self.step, "update": self.step, "time": self.time}
        self.line(**{**place, **about}, values=values)

    def values(self, count, *names):
        """So many steps; a name that comes again is in a line of its own."""
        for _ in range(count):
            self.step += 1
            self.time = round(self.time + 0.013, 3)
            left = list(names or ("train/loss", "lr"))
            while left:
                self.together(dict.fromkeys(left, (self.step * 7919 % 1000) / 997))
                left = [name for place, name in enumerate(left) if name in left[:place]]

    def other(self, name, kind, **content):
        self.line(name=name, kind=kind, **content, phase="", epoch=0, step=self.step, update=self.step, time=self.time)

    def media(self, content, suffix, name="picture"):
        file = f"media/{hashlib.sha256(content).hexdigest()}{suffix}"
        path = self.path.parent / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self.other(name, "image", caption="", file=file)
        return file

    @property
    def size(self):
        return self.path.stat().st_size

    def cut(self, size):
        os.truncate(self.path, size)


def points(run):
    """All values of a run of a store, by name."""
    columns = {name: (each.step, each.value, each.time) for name, each in run.series.items()}
    return {
        name: [list(row) for row in zip(*(column.tolist() for column in each), strict=True)]
        for name, each in columns.items()
    }


def read(path):
    """The same, read from a log by `json` alone."""
    found = {}
    for line in Path(path).read_bytes().split(b"\n")[:-1]:
        said = json.loads(line)
        if "kind" not in said:
            for name, value in said["values"].items():
                found.setdefault(name, []).append([said["step"], float(value), said["time"]])
    return found


class Server:
    """``python -m loopkit_monitor.server``."""

    def __init__(self, root, *words, **limits):
        command = [sys.executable, "-P", "-m", "loopkit_monitor.server", str(root), *words]
        if limits:  # of connections, in the place of the usual ones
            code = "from loopkit_monitor import protocol, server; limits = eval(__import__('sys').argv.pop(1)); "
            code += "server.protocol_class = lambda: protocol.protocol_class(**limits); raise SystemExit(server.main())"
            command = [sys.executable, "-P", "-c", code, repr(limits), str(root), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline()
        if not self.said:
            self.process.wait(SECONDS)
            raise RuntimeError(self.process.stderr.read())
        self.listeners = []
        self.address = self.said.split()[-1]
        parts = urlsplit(self.address)
        self.host, self.port = parts.hostname, parts.port
        self.token = parts.query.partition("=")[2]
        self.cookie = ""
        if self.token:
            status, headers, _ = self.request(f"/?token={self.token}")
            assert status == 303
            self.cookie = headers["set-cookie"].partition(";")[0]

    def request(self, path, method="GET", headers=None):
        """One request; returns status, headers and content."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            connection.request(method, path, headers={"Cookie": self.cookie, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path, **query):
        """What an API answers."""
        status, _, content = self.request(f"{path}?{urlencode(query, doseq=True)}")
        assert status == 200, (status, content)
        return json.loads(content)

    def raw(self, data, patience=SECONDS):
        """All that is answered to some bytes, up to the end of the connection; if nothing comes, we end it."""
        with socket.create_connection((self.host, self.port), timeout=SECONDS) as connection:
            try:
                connection.sendall(data)
                connection.settimeout(patience)
                first = connection.recv(65536)
            except TimeoutError:
                connection.shutdown(socket.SHUT_WR)
                first = b""
            except OSError:
                return b""  # closed while it was sent
            connection.settimeout(SECONDS)
            return first + receive(connection)

    def connect(self, last=None, since=None):
        """Listen to events."""
        self.listeners.append(Listener(self, last, since))
        return self.listeners[-1]

    @property
    def memory(self):
        """Bytes of memory, and the most there were."""
        said = Path(f"/proc/{self.process.pid}/status").read_text()
        return tuple(int(said.partition(key)[2].split()[0]) * 1024 for key in ("VmRSS:", "VmHWM:"))

    def end(self):
        for listener in self.listeners:
            listener.close()
        self.process.terminate()
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()


def receive(connection):
    """All bytes until the end, or until none come any more."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


class Listener:
    """A connection to ``/events``."""

    def __init__(self, server, last=None, since=None):
        self.socket = socket.create_connection((server.host, server.port), timeout=SECONDS)
        query = "" if since is None else f"?since={since}"
        words = [f"GET /events{query} HTTP/1.1", f"Host: {server.host}:{server.port}", f"Cookie: {server.cookie}"]
        words += [] if last is None else [f"Last-Event-ID: {last}"]
        self.socket.sendall("\r\n".join([*words, "", ""]).encode())
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        while self.file.readline().strip():
            pass
        self.last = last

    def events(self):
        """The events that come."""
        pending = b""
        while True:
            while b"\n\n" in pending:
                frame, _, pending = pending.partition(b"\n\n")
                fields = dict(line.split(": ", 1) for line in frame.decode().split("\n") if line)
                if "event" in fields:
                    self.last = fields.get("id", self.last)
                    yield fields["event"], json.loads(fields["data"])
            size = self.file.readline()
            if not size.strip() or not int(size, 16):
                return
            pending += self.file.read(int(size, 16))
            self.file.readline()

    def close(self):
        self.file.close()
        self.socket.close()


def eventually(condition, seconds=SECONDS):
    """Wait until a condition holds; returns what it gave."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)
    return found
