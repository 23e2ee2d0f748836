"""Record README's terminal: ``python docs/make_recording.py`` writes docs/images/resume.svg.

A script trains, Ctrl-C stops it, the same command resumes it, and a second run is not disturbed. The picture plays the
lines at the times at which they came.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from make_pictures import CHARACTER, IMAGES, LINE, MARGIN, NO_BREAK, spawn

SCRIPT = Path(__file__).resolve().parent / "recorded.py"
SHOWN = ("python train.py runs/a", "python train.py runs/a", "python train.py runs/undisturbed")
STOP_AT = re.compile(rb"3/6 train: +[4-8]\d%")
"""Ctrl-C is pressed when the bar of the third epoch shows about half of its steps."""
BETWEEN = 0.8
"""Seconds between two commands, and the longest that a picture shows of a start."""
COMMAND, DIM, LAST = "#8aa4ff", "#9a9c9f", "#7fd48a"
Row = tuple[float, str, str]
"""When a line is there, its text and its color."""


def record(typed: str, folder: Path, at: float, interrupt: bool) -> list[Row]:
    """Run a command in a terminal; returns its lines, the command's first."""
    process, screen = spawn(typed.split(), folder)
    text = b""
    rows: list[Row] = [(at, f"$ {typed}", COMMAND)]
    last = time.monotonic()
    while part := _read(screen):
        text += part
        if interrupt and STOP_AT.search(text):
            os.write(screen, b"\x03")
            interrupt = False
        *whole, rest = text.split(b"\n")
        at += min(time.monotonic() - last, BETWEEN)
        last = time.monotonic()
        rows += [(at, line, color) for line, color in map(_seen, whole) if line]
        text = rest
    os.waitpid(process, 0)
    return rows


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 65536)
    except OSError:  # the terminal is gone with the command
        return b""


def _seen(line: bytes) -> tuple[str, str]:
    """The text that a line leaves on a terminal, and its color; empty for the frames of a traceback."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.decode()).rstrip("\r").rpartition("\r")[2].rstrip()
    if text.startswith(("Traceback", "  File", "    ")) and "/6" not in text:
        return "", ""
    if text.startswith("finished"):
        return text, LAST
    return text, DIM if text.startswith("loopkit") else ""


def draw(rows: list[Row]) -> str:
    """The rows as an SVG that plays once, and shows all of them where nothing is animated."""
    width = 2 * MARGIN + max(len(text) for _, text, _ in rows) * CHARACTER
    height = 2 * MARGIN + len(rows) * LINE
    font = "ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#1b1d20"/>',
        f'<g font-family="{font}" font-size="12">',
    ]
    lines = [
        f'<text x="{MARGIN}" y="{MARGIN + 12 + at * LINE}" fill="{color or "#e6e6e3"}">'
        + (f'<set attributeName="visibility" to="hidden" begin="0s" end="{seconds:.2f}s"/>' if at else "")
        + f"{escape(text).replace(' ', NO_BREAK)}</text>"
        for at, (seconds, text, color) in enumerate(rows)
    ]
    return "\n".join([*head, *lines, "</g>", "</svg>\n"])


def main() -> None:
    """Run the three commands, and draw what they left."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(SCRIPT, folder / "train.py")
        for number, typed in enumerate(SHOWN):
            at = rows[-1][0] + BETWEEN if rows else BETWEEN
            rows += record(typed, folder, at, interrupt=number == 0)
        rows = [(at, text.replace(f"{folder}/", ""), color) for at, text, color in rows]
    (IMAGES / "resume.svg").write_text(draw(rows))
    ends = [text for _, text, _ in rows if text.startswith("finished")]
    numbers = [re.sub(r" in \d.*? s;", ";", end) for end in ends]
    sys.exit(None if len(numbers) == 2 and numbers[0] == numbers[1] else f"the two ends differ: {numbers}")


if __name__ == "__main__":
    main()
