"""How the monitor and TensorBoard stand large logs: ``python benchmarks/monitor_scale.py [--json FILE]``.

Both read the same values, each in the form that it writes itself: `log.jsonl`, and files of events. *Long* is one run
of a million steps with 20 metrics, 20 million points. *Many* is this run among 1,000 runs of 12 metrics, 200 steps.

The figures are seconds by the clock, in a Chromium of 1440 x 900 pixels:

- *chart, all read*: from the address to the first drawn chart, when the server has read the log.
- *chart, started*: from the start of the server's process to the first drawn chart. The page of TensorBoard is opened
  as soon as its server knows a metric.
- *zoom*: from the end of a drag in a chart of the long run to the charts in sight, drawn with the points of that
  range. TensorBoard enlarges the points that it has, so that it has no figure.

*processor, all read* are the seconds of a processor that a server's processes take until they have read the log.
Memory is the most resident memory of a server's processes, added up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, sync_playwright

METRICS = tuple(f"train/metric_{number:02}" for number in range(20))
SHORT = tuple(f"train/metric_{number:02}" for number in range(12))
BEGIN = 1763800000.0
AT_ONCE = 50_000
"""Steps that are written at once."""
PATIENCE = 600
"""Seconds."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
CHARTS = {
    "monitor": """() => [...document.querySelectorAll('.charts .chart')].some(
        (chart) => !chart.classList.contains('waiting') && chart.querySelector('canvas')?.width > 0)""",
    "tensorboard": """() => [...document.querySelectorAll('scalar-card')].some(
        (card) => !card.querySelector('mat-spinner')
            && card.querySelector('line-chart canvas, line-chart svg path'))""",
}
"""Whether a chart is drawn."""
QUIET = 250
"""Milliseconds after the last answer in which no other one comes."""
AFTER_ZOOM = """(quiet) => {
    window.zoomed = new Promise((done) => {
        const begin = performance.now();
        let timer = null;
        const end = () => done(Math.max(performance.now() - begin - quiet, 0));
        const settle = () => requestAnimationFrame(() => requestAnimationFrame(end));
        const wait = () => { clearTimeout(timer); timer = setTimeout(settle, quiet); };
        const heard = (list) => { if (list.getEntries().some((each) => each.name.includes('/api/'))) wait(); };
        new PerformanceObserver(heard).observe({ type: 'resource' });
        wait();
    });
}"""
"""From now on, wait until the answers to a zoom have come and are drawn."""


def values(order: np.random.Generator, steps: int, count: int) -> np.ndarray:
    """Random curves that fall, of float32, ``(steps, count)``."""
    fall = 1.0 / (1.0 + np.arange(steps)[:, None] / steps)
    return (fall + 0.1 * order.random((steps, count))).astype(np.float32).round(5)


def write_log(path: Path, names: tuple[str, ...], columns: np.ndarray) -> None:
    """A log as `JsonLines` writes it, with all values of a step in a line."""
    path.parent.mkdir(parents=True)
    form = '{"phase":"train","epoch":%d,"step":%d,"update":%d,"time":%.3f,"values":{'
    form += ",".join(f'"{name}":%.5f' for name in names) + "}}\n"
    with path.open("w") as file:
        file.write('{"kind":"run","step":0,"epochs_from":1,"time":1763800000.0}\n')
        for begin in range(0, len(columns), AT_ONCE):
            part = columns[begin : begin + AT_ONCE].tolist()
            for step, row in enumerate(part, begin + 1):
                file.write(form % (step // 5000 + 1, step, step, BEGIN + step * 0.013, *row))
        file.write('{"kind":"end","reason":"epochs","error":null,"time":1763899999.0}\n')


def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


TABLE = _crc_table()


def checksums(rows: np.ndarray) -> np.ndarray:
    """The masked CRC-32C of each row of bytes, as in files of events."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in range(rows.shape[1]):
        crc = TABLE[(crc ^ rows[:, column]) & 0xFF] ^ (crc >> 8)
    crc ^= np.uint32(0xFFFFFFFF)
    return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)


def records(events: np.ndarray) -> np.ndarray:
    """Events as records of a file: the length, its checksum, the event, its checksum."""
    length = np.frombuffer(struct.pack("<Q", events.shape[1]), np.uint8)[None]
    head = np.concatenate([length[0], checksums(length).view(np.uint8)])
    tail = checksums(events).view(np.uint8).reshape(-1, 4)
    return np.concatenate([np.broadcast_to(head, (len(events), 12)), events, tail], axis=1)


def _field(number: int, kind: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    return bytes([number << 3 | kind]) + (length if kind == 2 else b"") + content


def write_events(path: Path, names: tuple[str, ...], columns: np.ndarray) -> None:
    """The same as a file of events, with one event a step."""
    path.parent.mkdir(parents=True)
    blank = b"".join(_field(1, 2, _field(1, 2, name.encode()) + _field(2, 5, bytes(4))) for name in names)
    event = _field(1, 1, bytes(8)) + _field(2, 0, b"\x80\x80\x00") + _field(5, 2, blank)
    form = np.frombuffer(event, np.uint8)
    ends = [event.index(name.encode()) + len(name) + 1 for name in names]
    version = np.frombuffer(_field(1, 1, struct.pack("<d", BEGIN)) + _field(3, 2, b"brain.Event:2"), np.uint8)
    with path.open("wb") as file:
        file.write(records(version[None]).tobytes())
        for begin in range(0, len(columns), AT_ONCE):
            part = columns[begin : begin + AT_ONCE]
            steps = np.arange(begin + 1, begin + len(part) + 1)
            rows = np.repeat(form[None], len(part), axis=0)
            rows[:, 1:9] = (BEGIN + steps * 0.013).astype("<f8").view(np.uint8).reshape(-1, 8)
            for place, shift in enumerate((0, 7, 14)):
                rows[:, 10 + place] = (steps >> shift & 127) | (128 if shift < 14 else 0)
            for column, end in enumerate(ends):
                rows[:, end : end + 4] = np.ascontiguousarray(part[:, column]).view(np.uint8).reshape(-1, 4)
            file.write(records(rows).tobytes())


def make(folder: Path, points: int, runs: int) -> None:
    """Write the logs of both."""
    order = np.random.default_rng(0)
    columns = values(order, points, len(METRICS))
    write_log(folder / "long" / "monitor" / "long" / "log.jsonl", METRICS, columns)
    write_events(folder / "long" / "tensorboard" / "long" / "events.out.tfevents.1763800000.x", METRICS, columns)
    for number in range(runs):
        columns = values(order, 200, len(SHORT))
        name = f"run-{number:04}"
        write_log(folder / "many" / "monitor" / name / "log.jsonl", SHORT, columns)
        write_events(folder / "many" / "tensorboard" / name / "events.out.tfevents.1763800000.x", SHORT, columns)
    for side, file in (("monitor", "log.jsonl"), ("tensorboard", "events.out.tfevents.1763800000.x")):
        (folder / "many" / side / "long").mkdir()
        os.link(folder / "long" / side / "long" / file, folder / "many" / side / "long" / file)


class Server:
    """One of the two servers, and what it takes."""

    def __init__(self, side: str, root: Path) -> None:
        self.begun = time.perf_counter()
        command = [sys.executable, "-P", "-m", "loopkit_monitor.server", str(root), "--no-token"]
        if side == "tensorboard":
            command = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(root), "--port", "0"]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.side, self.process = side, subprocess.Popen(command, text=True, **pipe)
        assert self.process.stdout is not None
        self.address = ""
        while not self.address:
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"{side} did not start")
            found = [word for word in line.split() if word.startswith("http://") and word[8].isalnum()]
            if found and ("loopkit" in line or "Press" in line):
                self.address = found[0].rstrip("/")

    def get(self, path: str) -> Any:
        """An answer of the server."""
        with urllib.request.urlopen(self.address + path, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def until(self, condition: str, wanted: Any) -> float:
        """Seconds from the start until the server knows so much."""
        asked = getattr(self, f"_{condition}")
        while not asked(wanted):
            if time.perf_counter() - self.begun > PATIENCE:
                raise RuntimeError(f"{self.side}: not {condition} within {PATIENCE} s")
            time.sleep(0.05)
        return time.perf_counter() - self.begun

    def _named(self, runs: int) -> bool:
        """Whether it knows the metrics of so many runs."""
        if self.side == "monitor":
            return True  # the page is opened at once
        return len(self.get("/data/plugin/scalars/tags")) >= runs

    def _whole(self, last: int) -> bool:
        """Whether it has read all."""
        if self.side == "monitor":
            return not self.get("/api/rows?since=999999999")["behind"]
        tags = self.get("/data/plugin/scalars/tags")
        if "long" not in tags:
            return False
        return bool(self.get(f"/data/plugin/scalars/scalars?run=long&tag={METRICS[0]}")[-1][1] >= last)

    def _pids(self) -> list[int]:
        """Its processes."""
        pids = [self.process.pid]
        for pid in pids:
            with suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return pids

    def processor(self) -> float:
        """Seconds of a processor that its processes took."""
        found = 0
        for pid in self._pids():
            with suppress(OSError):
                times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found += int(times[11]) + int(times[12])
        return found / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """The most memory of its processes, in MiB."""
        found = 0.0
        for pid in self._pids():
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                found += int(status.partition("VmHWM:")[2].split()[0]) / 1024
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def first_chart(page: Page, server: Server, choose: bool = False) -> float:
    """Seconds from the address to the first chart; ``choose`` picks a run where none is chosen at first."""
    begin = time.perf_counter()
    page.goto(server.address + ("/#timeseries" if server.side == "tensorboard" else "/"), wait_until="commit")
    if choose and server.side == "tensorboard":
        page.locator("tb-data-table mat-checkbox input, runs-data-table mat-checkbox input").nth(1).click()
    page.wait_for_function(CHARTS[server.side], polling="raf")
    return time.perf_counter() - begin


def zoom(page: Page, from_part: float, to_part: float) -> float:
    """Seconds from the end of a drag to charts that have the points of the range."""
    page.wait_for_load_state("networkidle")
    box = page.locator(".chart .layer").first.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 50 + (box["width"] - 60) * from_part, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 50 + (box["width"] - 60) * to_part, y, steps=4)
    page.evaluate(AFTER_ZOOM, QUIET)
    page.mouse.up()
    milliseconds: float = page.evaluate("() => window.zoomed")
    return milliseconds / 1000


def measure(side: str, root: Path, what: str, points: int, runs: int, page: Page) -> dict[str, float]:
    """One round of one side."""
    server = Server(side, root)
    row: dict[str, float] = {}
    try:
        named = 1 if what == "long" else runs + 1
        server.until("named", named)
        first_chart(page, server, choose=what == "many")
        row["chart, started"] = time.perf_counter() - server.begun
        row["all read"] = server.until("whole", points)
        row["processor, all read"] = server.processor()
        page.goto("about:blank")
        row["chart, all read"] = first_chart(page, server, choose=what == "many")
        if side == "monitor":
            page.goto(server.address + "/#/?show=none&on=long")
            page.wait_for_function(CHARTS[side], polling="raf")
            row["zoom"] = zoom(page, 0.3, 0.5)
            row["zoom again"] = zoom(page, 0.2, 0.4)
        page.wait_for_timeout(1000)
        row["memory, MiB"] = server.memory()
        page.goto("about:blank")
    finally:
        server.end()
    return row


def report(rows: dict[str, dict[str, list[dict[str, float]]]]) -> list[str]:
    """The medians of both sides and their ratios, as lines."""
    lines = []
    for what, sides in rows.items():
        lines.append(f"{what:<24}{'monitor':>10}{'tensorboard':>13}{'ratio':>8}")
        for key in sides["monitor"][0]:
            own, other = (
                statistics.median(row[key] for row in sides[side]) if key in sides[side][0] else None
                for side in ("monitor", "tensorboard")
            )
            beside = "" if other is None else f"{other:13.2f}{own / other:8.2f}"
            lines.append(f"{key:<24}{own:10.2f}{beside}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a folder for the logs, which is used again if it is there")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as started:
        folder = given.keep or Path(scratch)
        if not (folder / "long").exists():
            make(folder, given.points, given.runs)
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for what in ("long", "many"):
            sides = rows[what] = {"monitor": [], "tensorboard": []}
            for _ in range(given.rounds):
                for side, found in sides.items():
                    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
                    page.set_default_timeout(PATIENCE * 1000)
                    found.append(measure(side, folder / what / side, what, given.points, given.runs, page))
                    page.context.close()
                    print(what, side, {key: round(value, 3) for key, value in found[-1].items()}, flush=True)
        browser.close()
    print("\n".join(report(rows)))
    if given.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()}
        found = {"points": given.points, "runs": given.runs, **machine, "rounds": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
