"""Sixty runs of six kinds: crashed, resumed, with media, seeds, live and archived; as logs, made at once."""

import hashlib
import json
import math
import os
import random
import socket
import struct
import time
import zlib
from pathlib import Path

EPOCHS, STEPS = 8, 20
CLASSES = ("cat", "dog", "owl")


def png(shade, size=12):
    """A small picture."""
    rows = b"".join(b"\0" + bytes((shade * (x + y)) % 256 for x in range(size)) for y in range(size))

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class RunLog:
    """A log of one run, as `JsonLines` writes it."""

    def __init__(self, path, begun, epochs=EPOCHS, **hyperparameters):
        self.path, self.time, self.lines = Path(path), begun, []
        self.planned = {"epochs": epochs, "steps": epochs * STEPS, "updates": epochs * STEPS}
        size = 100 * hyperparameters.get("width", 1)
        model = {"model.parameters": size, "model.trained_parameters": size}
        self.about = {**model, **hyperparameters, **{f"plugins.p{at}.option": at for at in range(15)}}
        self.begin(0, 0)

    def begin(self, epoch, step, resumed=False):
        self.line(
            kind="run", resumed=resumed, fit=1, epoch=epoch, step=step, epochs_from=1, seed=self.about.get("seed", 0),
            planned=self.planned, git={"commit": "0f" * 20, "dirty": self.about.get("lr", 0) > 0.1}, host="elsewhere",
            pid=1, hyperparameters=self.about, time=self.time,
        )  # fmt: skip
        modes = {"train/loss": "min", "val/loss": "min", "val/dice": "max"}
        self.line(kind="directions", modes=modes, time=self.time)

    def line(self, **said):
        self.lines.append(json.dumps(said, separators=(",", ":")))

    def values(self, epoch, step, phase="train", **values):
        at = {"phase": phase, "epoch": epoch, "step": step, "update": step, "time": round(self.time, 3)}
        self.line(**at, values={name.replace("__", "/"): value for name, value in values.items()})

    def other(self, name, kind, epoch, step, **said):
        at = {"phase": "val", "epoch": epoch, "step": step, "update": step, "time": round(self.time, 3)}
        self.line(name=name, kind=kind, **said, **at)

    def train(self, order, goal, slope, first=1, last=EPOCHS, end=True):
        for epoch in range(first, last + 1):
            for step in range((epoch - 1) * STEPS + 1, epoch * STEPS + 1):
                self.time += 0.5
                loss = goal + math.exp(-slope * step / STEPS) + 0.05 * abs(order.gauss(0, 1))
                self.values(epoch, step, **{"train/loss/step": round(loss, 5), "lr": self.about.get("lr", 0.1)})
            loss = goal + math.exp(-slope * epoch)
            self.values(epoch, step, **{"train/loss": round(loss, 5)})
            self.values(epoch, step, "val", **{"val/loss": round(1.1 * loss, 5), "val/dice": round(1 - loss / 2, 5)})
        if end:
            self.line(kind="end", epoch=last, step=step, reason="epochs", error=None, notes=[], time=self.time)

    def media(self, epoch):
        folder = self.path.parent / "media"
        folder.mkdir(parents=True, exist_ok=True)
        content = png(7 * epoch + len(self.path.parent.name))
        file = f"media/{hashlib.sha256(content).hexdigest()}.png"
        (self.path.parent / file).write_bytes(content)
        self.other("val/samples", "image", epoch, epoch * STEPS, caption=f"epoch {epoch}", file=file)
        rows = [[name, *(8 + epoch if name == other else 4 for other in CLASSES)] for name in CLASSES]
        self.other("val/confusion", "table", epoch, epoch * STEPS, columns=["", *CLASSES], rows=rows)
        counts = [round(100 * math.exp(-(((at - 8 - epoch) / 4) ** 2))) for at in range(20)]
        self.other("weights", "histogram", epoch, epoch * STEPS, counts=counts, edges=[at / 10 - 1 for at in range(21)])
        self.other(
            "remarks", "text", epoch, epoch * STEPS, text=f"# Epoch {epoch}\n\n- **good**: `dice`\n- *bad*: none"
        )

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join(self.lines) + "\n")
        os.utime(self.path, (self.time, self.time))


def write_runs(root, now=None):
    """Make the runs; returns the name of the best one, by its dice."""
    root, now, order = Path(root), time.time() if now is None else now, random.Random(0)
    dice = {}
    for number in range(60):
        lr, width = 10 ** (-4 + 4 * ((number * 0.618) % 1)), (16, 64, 256)[number % 3]
        goal = 0.1 + 0.15 * abs(math.log10(lr) + 2) + 0.05 * (width == 16) + 0.01 * order.random()
        kind = ("seed", "sweep", "crash", "resume", "media", "old")[number // 10]
        name = f"{kind}-{number % 10:02}"
        about = {"lr": round(lr, 6), "width": width, "seed": number % 10}
        if kind == "seed":
            about["lr"] = (0.003, 0.03)[number % 2]
            goal = 0.12 + 0.2 * (number % 2) + 0.02 * order.random()
        log = RunLog(root / name / "log.jsonl", now - 86400 * (60 - number) / 8, **about)
        slope = 0.4 + 0.3 * order.random()
        if kind == "crash":
            log.train(order, goal, slope, last=3, end=False)
            note = "loopkit: in step_begin of plugin 'stumbles', phase 'train', epoch 4, step 17"
            error = {"error": "RuntimeError: the disk is gone", "notes": [note], "traceback": "  File train.py\n"}
            log.line(kind="end", epoch=3, step=77, reason="error", **error, time=log.time)
        elif kind == "resume":
            log.train(order, goal, slope, last=4, end=False)
            log.time += 3600
            log.begin(4, 4 * STEPS, resumed=True)
            log.train(order, goal, slope, first=5)
        else:
            log.train(order, goal, slope)
        if kind == "media":
            for epoch in (2, 4, 6, 8):
                log.media(epoch)
        log.write()
        if kind == "old":
            (log.path.parent / "monitor.json").write_text('{"archived": true, "tags": ["old"]}')
        elif kind != "crash":
            dice[name] = 1 - (goal + math.exp(-slope * EPOCHS)) / 2
    live = RunLog(root / "now" / "live" / "log.jsonl", now, epochs=20, lr=0.02, width=64, seed=0)
    live.lines[0] = live.lines[0].replace('"elsewhere","pid":1', f'"{socket.gethostname()}","pid":{os.getpid()}')
    live.train(order, 0.3, 0.4, last=3, end=False)
    live.write()
    return max(dice, key=dice.get)
