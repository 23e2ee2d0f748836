"""How soon the page of a long run opens, and in how much memory: ``python benchmarks/monitor.py``.

A log of a million points, as `JsonLines` writes them (five in a line, 60 MB), is in the page cache; the server has not
read it. The page opens when `/api/run` and `/api/series` have answered, in full: 2,000 points of each of the five
curves, for which every line is read. A folder of 1,001 runs, of 144 kB each, is listed when the first `/api/runs` has
answered, from the moment that the server has printed its address. Each round starts servers of its own. What is
measured over loopback, by the clock, includes what else the machine does; beside it is the time that the server's
process worked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np

NAMES = ("train/loss/step", "train/loss/running", "lr", "train/grad_norm", "run/throughput/steps_per_second")


def write_log(path, points):
    """A log of so many values, all of them float32."""
    order = random.Random(0)
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        file.write('{"kind":"run","step":0,"time":1763800000.0}\n')
        for step in range(1, points // len(NAMES) + 1):
            place = {"phase": "train", "epoch": step // 5000, "step": step, "update": step}
            values = {name: float(np.float32(order.random() * 2)) for name in NAMES}
            said = {**place, "time": round(1763800000 + step * 0.013, 3), "values": values}
            file.write(json.dumps(said, separators=(",", ":")) + "\n")


class Server:
    """A server, and a connection to it."""

    def __init__(self, root):
        command = [sys.executable, "-P", "-m", "loopkit_monitor.server", str(root)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        address = urlsplit(self.process.stdout.readline().split()[-1])
        self.connection = HTTPConnection(address.hostname, address.port, timeout=120)
        self.cookie = ""
        self.cookie = self.ask(f"/?{address.query}")[0]["Set-Cookie"].partition(";")[0]

    def ask(self, path):
        self.connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        return answer.headers, answer.read()

    def get(self, path, **query):
        return json.loads(self.ask(f"{path}?{urlencode(query, doseq=True)}")[1])

    def list(self):
        """Seconds until the page has all runs."""
        begin = time.perf_counter()
        self.runs = len(self.get("/api/runs")["runs"])
        return time.perf_counter() - begin

    def open(self):
        """Seconds until the page has what it shows."""
        begin = time.perf_counter()
        run = self.get("/api/run", id="a")
        names = [each["name"] for each in run["names"]]
        series = self.get("/api/series", id="a", name=names)["series"]
        seconds = time.perf_counter() - begin
        assert sum(each["total"] for each in series.values()) == sum(each["count"] for each in run["names"])
        assert all(len(each["step"]) <= 2000 for each in series.values())
        return seconds

    def worked(self):
        """Seconds that its process worked."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self):
        """The most memory that it had, in MB."""
        said = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(said.partition("VmHWM:")[2].split()[0]) / 1024

    def end(self):
        self.connection.close()
        self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1001)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        log, listed = Path(folder) / "runs" / "a" / "log.jsonl", Path(folder) / "many"
        write_log(log, given.points)
        write_log(listed / "r0" / "log.jsonl", 2400)
        for number in range(1, given.runs):
            shutil.copytree(listed / "r0", listed / f"r{number}")
        size = log.stat().st_size
        log.read_bytes()
        for _ in range(given.rounds):
            server = Server(log.parent.parent)
            server.list()
            before = server.worked()
            cold = server.open()
            row = {"cold": cold, "worked": server.worked() - before, "warm": server.open(), "MB": server.memory()}
            server.end()
            server = Server(listed)
            row |= {"list": server.list(), "listed": server.worked(), "list_MB": server.memory()}
            assert server.runs == given.runs
            server.end()
            rows.append(row)
    print(f"{given.points:,} points, {size / 1e6:.0f} MB, {given.rounds} rounds    best  median")
    for key, said in (
        ("cold", "opens, s, by the clock"),
        ("worked", "opens, s, of its process"),
        ("warm", "opens again, s"),
        ("MB", "most memory, MB"),
        ("list", f"lists {given.runs:,} runs, s, by the clock"),
        ("listed", "starts and lists them, s, of its process"),
        ("list_MB", "most memory, MB"),
    ):
        found = [row[key] for row in rows]
        print(f"{said:<42}{min(found):8.2f}{statistics.median(found):8.2f}")
    if given.json:
        found = {"points": given.points, "bytes": size, "runs": given.runs, "load": os.getloadavg(), "rounds": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
