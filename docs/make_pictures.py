"""Make the pictures of what commands and pages look like: ``python docs/make_pictures.py``.

Commands are drawn as text in an SVG, pages of the monitor are photographed by a browser. The commands and the pages of
one run are of real runs, which this makes first; the workspace is that of the sixty runs through which the tests of
loopkit-monitor walk. The page docs/pictures.md is written, too.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
IMAGES = DOCS / "images"
PAGE = DOCS / "pictures.md"
COLUMNS = 100
"""Of the terminal."""
TALLEST = 40
"""Lines that a picture shows of a command."""
NO_BREAK = "\u00a0"
"""SVG would make one of several other spaces."""
CHARACTER, LINE, MARGIN = 7.2, 16, 12
RUNS = '''
import sys
import torch
from sklearn.datasets import load_digits
from torch import nn
from loopkit import Learner, data, every, metrics, plugins
from loopkit.plugins import Checkpoint, ClipGradNorm, EarlyStopping, LogMetrics, Metrics, Schedule, WeightAverage
from loopkit.schedules import cosine, warmup
from loopkit_insight import Cost, LogGradients, LogPredictions, LogResources, ModuleProfile
from loopkit_monitor import Monitor

images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
x, y = images.float() / 16, labels


def make(lr=0.1, hidden=256, *more, standard=True):
    torch.manual_seed(0)
    train = data.TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True)
    val = data.TensorLoader(x[1400:], y[1400:], batch_size=200)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    stack = [Metrics(metrics.Accuracy()), ClipGradNorm(1.0), Schedule(warmup(20, then=cosine())), *more]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=stack), train, val


class Stumbles:
    """Has a plugin that fails."""

    from loopkit import hookimpl

    @hookimpl
    def step_begin(self, learner):
        if learner.progress.steps == 150:
            raise RuntimeError("the disk of the data set is gone")
'''
TRAIN = (
    RUNS
    + """
def main():
    for number in range(30):
        lr, hidden = 10 ** (-3 + 3 * ((number * 0.618) % 1)), (8, 32, 128)[number % 3]
        learner, train, val = make(lr, hidden, Monitor(f"sweep/run-{number:02}"), LogMetrics(every=20))
        learner.fit(train, val, epochs=3)
    for name, lr, hidden in (("wide", 0.1, 256), ("narrow", 0.1, 16), ("slow", 0.01, 256)):
        more = [Monitor(f"digits/{name}"), LogMetrics(every=4), LogGradients(every=4), LogResources(every=0.1),
                LogPredictions(), Checkpoint(f"digits/{name}/checkpoints", best="val/accuracy", keep=2),
                Cost(), ModuleProfile()]
        learner, train, val = make(lr, hidden, *more)
        learner.fit(train, val, epochs=12)
    learner, train, val = make(0.1, 256, Monitor("digits/fails"), LogMetrics(every=4), Stumbles())
    try:
        learner.fit(train, val, epochs=12)
    except RuntimeError:
        pass


main()
"""
)
FIT = (
    RUNS
    + """
learner, train, val = make()
print(learner.fit(train, val, epochs=8))
"""
)
PLAN = (
    RUNS
    + """
from loopkit.plugins import MixedPrecision
more = [MixedPrecision("bfloat16"), WeightAverage(decay=0.99), EarlyStopping("val/loss", patience=5, restore_best=True)]
learner, train, val = make(0.1, 256, *more, Checkpoint("runs/a"))
print(learner.explain())
"""
)
SUMMARY = (
    RUNS
    + """
from loopkit_insight import summarize
learner, train, val = make()
print(summarize(learner, next(iter(train))))
"""
)
RECORD = (
    RUNS
    + """
from loopkit.logs import read_log
learner, train, val = make()
print(learner)
print(read_log("digits/wide"))
"""
)
COMMANDS: tuple[tuple[str, str, str, str], ...] = (
    ("fit", "A fit in a terminal", "python train.py", FIT),
    ("explain", "The plan of the plugins: `learner.explain()`", "python explain.py", PLAN),
    ("summary", "A model before training: `summarize(learner, batch)`", "python summary.py", SUMMARY),
    ("log", 'A learner, and a log: `read_log("digits/wide")`', "python log.py", RECORD),
    ("command-plugins", "Installed plugins", "loopkit plugins", ""),
    ("command-plugin", "One plugin", "loopkit plugins early_stopping", ""),
    ("command-hooks", "All hooks", "loopkit hooks", ""),
    ("command-checkpoints", "Checkpoints of a run", "loopkit checkpoint list digits/wide/checkpoints", ""),
    ("command-runs", "The runs of a folder", "loopkit runs digits", ""),
    ("command-watch", "A run in the terminal, during training or later", "loopkit watch digits/wide --once", ""),
    ("command-report", "A report of runs in one HTML file", "loopkit report digits -o report.html", ""),
    ("command-help", "All commands", "loopkit --help", ""),
)
"""Name of the picture, what it shows, what is typed, and the script that is run if the words are none of loopkit."""
PAGES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "monitor-metrics",
        "Compare runs",
        "/run/digits%2Fwide/metrics?with=digits%2Fnarrow&with=digits%2Fslow",
        {},
    ),
    ("monitor-updates", "Learning rates and gradients", "/run/digits%2Fwide/updates", {}),
    ("monitor-system", "CPU, GPU and memory", "/run/digits%2Fwide/system", {}),
    (
        "monitor-parameters",
        "Hyperparameters, with differences",
        "/run/digits%2Fwide/parameters?with=digits%2Fnarrow",
        {},
    ),
    (
        "monitor-plan",
        "The plan of the plugins, with their costs",
        "/run/digits%2Fwide/plan",
        {"viewport": {"width": 1240, "height": 1600}},
    ),
    ("monitor-model", "The model", "/run/digits%2Fwide/model", {}),
    ("monitor-checkpoints", "Checkpoints", "/run/digits%2Fwide/checkpoints", {}),
    ("monitor-media", "Logged images and tables", "/run/digits%2Fwide/media", {}),
    ("monitor-messages", "Starts, ends and warnings", "/run/digits%2Fwide/messages", {}),
    (
        "monitor-error",
        "A run that an error ended, in dark colors",
        "/run/digits%2Ffails/metrics",
        {"color_scheme": "dark"},
    ),
    (
        "monitor-phone-dark",
        "A run on a phone, in dark colors",
        "/run/digits%2Fwide/metrics",
        {"color_scheme": "dark", "viewport": {"width": 390, "height": 700}},
    ),
)
"""Name of the picture, what it shows, the page's address and how the browser is."""
WALK = ROOT / "plugins" / "loopkit-monitor" / "tests" / "test_workspace.py"
PICTURED = "best_of or seeds_are or views_compare or values_are or crash or compared_on_a_phone"
"""Its tests that take pictures."""
WALKED = (
    ("monitor-runs", "The workspace: sixty runs, the best first, with charts"),
    ("monitor-workspace", "Two runs, with the values under the pointer"),
    ("monitor-seeds", "Seeds, grouped by the learning rate: mean and standard deviation"),
    ("monitor-settings", "Settings that differ, side by side"),
    ("monitor-parallel", "Parallel coordinates, with a brush"),
    ("monitor-scatter", "Scatter plot of a hyperparameter and a metric"),
    ("monitor-compared-media", "Confusion matrices of two runs and three steps"),
    ("monitor-histograms", "Histograms over time"),
    ("monitor-crash", "A crashed run"),
    ("monitor-phone", "Choose runs on a phone"),
    ("monitor-phone-charts", "Compare two runs on a phone"),
)
"""Name of each picture of the walk, and what it shows."""


def spawn(command: list[str], folder: Path) -> tuple[int, int]:
    """Start a command in a terminal of its own; returns its process and the terminal's descriptor."""
    process, screen = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS)})
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    return process, screen


def in_terminal(command: list[str], folder: Path) -> str:
    """The text that a command leaves on a terminal."""
    process, screen = spawn(command, folder)
    parts = []
    try:
        while part := os.read(screen, 65536):
            parts.append(part)
    except OSError:
        pass  # the terminal is gone with the command
    os.waitpid(process, 0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")).rstrip()


def draw(typed: str, text: str) -> str:
    """A terminal's content as SVG."""
    lines = [line[at : at + COLUMNS] for line in text.splitlines() for at in range(0, max(len(line), 1), COLUMNS)]
    if len(lines) > TALLEST:
        lines = [*lines[: TALLEST - 1], f"... {len(lines) - TALLEST + 1} lines more"]
    width = 2 * MARGIN + max(map(len, [f"$ {typed}", *lines])) * CHARACTER
    height = 2 * MARGIN + (len(lines) + 1) * LINE
    rows = [(f"$ {typed}", ' fill="#8aa4ff"'), *((line, "") for line in lines)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#1b1d20"/>',
            '<g font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="12" fill="#e6e6e3">',
            *(
                f'<text x="{MARGIN}" y="{MARGIN + 12 + at * LINE}" textLength="{len(line) * CHARACTER:.1f}"{more}>'
                f"{escape(line).replace(' ', NO_BREAK)}</text>"
                for at, (line, more) in enumerate(rows)
                if line.strip()
            ),
            "</g>",
            "</svg>\n",
        ]
    )


def photograph(runs: Path) -> None:
    """The monitor's pages."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-P", "-m", "loopkit_monitor.server", str(runs), "--no-token"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[-1]
    flags = ["--headless", "--no-sandbox", "--disable-gpu"]
    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
            for name, _, path, options in PAGES:
                context = browser.new_context(**{"viewport": {"width": 1240, "height": 700}, **options})
                page = context.new_page()
                page.goto(f"{address.rstrip('/')}/#{path}")
                page.wait_for_selector("main > *", state="attached")
                page.wait_for_timeout(1500)  # until all is drawn
                keep(name, page.screenshot())
                context.close()
            browser.close()
    finally:
        server.terminate()
        server.wait()


def keep(name: str, content: bytes) -> None:
    """Save a picture, as small as it can be."""
    from PIL import Image

    made = (
        Image.open(io.BytesIO(content))
        .convert("RGB")
        .quantize(255, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    )
    made.save(IMAGES / f"{name}.png", optimize=True)


def walk(folder: Path) -> None:
    """Walk through the workspace, as its tests do, and keep the pictures of it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", PICTURED, WALK.name]
    made = {**os.environ, "LOOPKIT_PICTURES": str(folder)}
    subprocess.run(command, cwd=WALK.parent, env=made, check=True)
    for name, _ in WALKED:
        keep(name, (folder / f"{name}.png").read_bytes())


def page() -> str:
    """The page that shows all of them."""
    parts = [
        "# Screenshots: terminal and monitor",
        "<!-- made by docs/make_pictures.py -->",
        "Each command in a terminal of 100 columns, and each page of the monitor. You can make the pictures again with "
        "`python docs/make_pictures.py`.",
        "## Commands and tables",
    ]
    parts += [f"{title}\n\n![{title}](images/{name}.svg)" for name, title, _, _ in COMMANDS]
    parts += [
        "## The monitor",
        "`loopkit monitor runs` serves these pages: see [loopkit-monitor](../plugins/loopkit-monitor/README.md).",
    ]
    pages = [*WALKED, *((name, title) for name, title, _, _ in PAGES)]
    parts += [f"{title}\n\n![{title}](images/{name}.png)" for name, title in pages]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Train, look, draw."""
    with tempfile.TemporaryDirectory() as made:
        runs = Path(made)
        (runs / "make.py").write_text(TRAIN)
        subprocess.run([sys.executable, "make.py"], cwd=runs, check=True)
        for name, _, typed, script in COMMANDS:
            if script:
                (runs / typed.split()[1]).write_text(script)
            text = in_terminal(typed.split(), runs)
            (IMAGES / f"{name}.svg").write_text(draw(typed, text))
        (runs / "report.html").unlink(missing_ok=True)
        photograph(runs)
        (runs / "walk").mkdir()
        walk(runs / "walk")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
