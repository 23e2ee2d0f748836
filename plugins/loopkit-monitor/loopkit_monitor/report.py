"""A log as files to keep: a page, a table, pictures."""

from __future__ import annotations

import base64
import csv
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit_monitor import views
from loopkit_monitor.lines import Values, parse_values
from loopkit_monitor.page import embed
from loopkit_monitor.store import Run, Store, pieces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["collect", "write_csv", "write_html", "write_png"]

POINTS = 2_000
"""The most points of a curve."""
WEIGHTS = (0.6, 0.9, 0.97, 0.99, 0.999)
"""The weights of the smoothed curves that a page holds for a curve with points left out."""
SMOOTH_POINTS = 400
"""The points of a smoothed curve."""
MOST_POINTS = 1_000_000
"""The most points of all curves together."""
FEWEST_POINTS = 50
"""The fewest points of a curve, however many curves there are."""
ITEMS = 20
"""The latest pictures, texts and the like of each name."""
MOST_BYTES = 50 << 20
"""The most bytes of all files together."""
TYPES = {".png": "image/png", ".wav": "audio/wav"}
"""Files that a page shows; all others are saved by it."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""With which a cell begins that a spreadsheet runs."""
COLUMNS = ("run", "name", "value", "phase", "epoch", "step", "update", "time")
ENDINGS = {"step": "each step", "running": "so far"}
"""The name of the values of a running epoch."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b0508c", "#a87900", "#3a9bd6", "#6b5b95", "#55554f")
"""The colors of the page."""
LINES = ("-", "--", ":", "-.")
UNITS = (
    (re.compile(r"resources/(process|gpu\d+)_memory|(.*/)?peak_memory"), "MiB", 2.0**-20),
    (re.compile(r"resources/.*"), "%", 1.0),
    (re.compile(r"run/time_left"), "seconds", 1.0),
)
"""The units of charts, each with its factor."""


def collect(store: Store) -> dict[str, Any]:
    """All that the page shows of the runs of a store, in the form that `loopkit_monitor.page.embed` takes.

    Long curves keep their extremes; of pictures, sounds and files the latest are kept.
    """
    store.poll()
    ids = [run["id"] for run in views.runs(store)["runs"]]
    details = {id: views.run(store, id) for id in ids}
    listed = views.runs(store)  # now that all of each log is read
    for run in (*listed["runs"], *details.values()):
        run["name"] = run["name"] if run["id"] != "." else store.folder.root.name
    names = {id: [name["name"] for name in details[id]["names"] if name["kind"] == "value"] for id in ids}
    curves = sum(map(len, names.values()))
    points = max(min(POINTS, MOST_POINTS // max(curves, 1)), FEWEST_POINTS)
    room = MOST_BYTES
    media: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, str]] = {}
    for id in ids:
        media[id], files[id] = {}, {}
        for each in details[id]["names"]:
            if each["kind"] == "value" or each["name"].startswith("run/"):
                continue
            found = views.media(store, id, each["name"], limit=ITEMS)
            kept = []
            for item in reversed(found["items"]):
                if isinstance(file := item.get("file"), str):
                    if file not in files[id]:
                        url = _data_url(store, store.get(id), file, room)
                        if url is None:
                            continue
                        files[id][file] = url
                        room -= len(url)
                kept.append(item)
            kept.reverse()
            first = kept[0]["index"] if kept else found["total"]
            media[id][each["name"]] = {**found, "items": kept, "first": first}
    series = {id: views.series(store, id, names[id], points)["series"] for id in ids}
    for id, found in series.items():
        for name, curve in found.items():
            if curve["total"] > len(curve["step"]):
                curve["smooths"] = _smooths(store, id, name)
    return {"runs": listed, "details": details, "series": series, "media": media, "files": files}


def _smooths(store: Store, id: str, name: str) -> dict[str, Any]:
    """A few means of a long curve, of all of its points, by their weight."""
    return {
        str(weight): views.series(store, id, [name], SMOOTH_POINTS, smooth=weight)["series"][name]["smooth"]
        for weight in WEIGHTS
    }


def write_html(store: Store, path: Path) -> None:
    """Write the page with its data in it, at once or not at all; it opens from a disk, without requests.

    Raises:
        OSError: It cannot be written.
    """
    _write(path, embed(collect(store)))


def write_csv(store: Store, path: Path) -> int:
    """Write every scalar of the runs as a row of a table, with its entry in the log; returns the number of rows.

    Infinite and undefined numbers are ``inf``, ``-inf`` and ``nan``. Text that a spreadsheet would run as a formula has
    a ``'`` before it.

    Raises:
        OSError: It cannot be written.
    """
    store.poll()
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    try:
        with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
            table.writerow(COLUMNS)
            for id in sorted(store.runs):
                name = store.folder.root.name if id == "." else id
                for said in _scalars(store, store.runs[id]):
                    row = [_cell(each) for each in (name, *said)]
                    # A bare \r ends a row for most readers, and Python before 3.13 does not quote it.
                    (quoted if any("\r" in each for each in row if isinstance(each, str)) else table).writerow(row)
                    count += 1
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return count


def write_png(store: Store, directory: Path) -> list[Path]:
    """Draw each chart of the runs into its own file; returns the files.

    A chart has one name in all phases and runs; the values within an epoch have their own
    chart. It needs matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    store.poll()
    charts: dict[str, list[tuple[str, str, str]]] = {}
    for id in sorted(store.runs):
        run = store.get(id)
        phases = {series.phase for series in run.series.values()} - {""}
        for name in run.series:
            if not name.startswith("final/"):  # the last of a curve that is there
                chart, label = _place(name, phases)
                charts.setdefault(chart, []).append((id, label, name))
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    taken: set[str] = set()
    for chart, curves in sorted(charts.items()):
        figure = _draw(chart, [(store.get(id), label, name) for id, label, name in curves], len(store.runs) > 1)
        path = directory / f"{_file_name(chart, taken)}.png"
        figure.savefig(path, format="png")
        written.append(path)
    return written


def _place(name: str, phases: set[str]) -> tuple[str, str]:
    """In which chart a curve is, and what it is called there."""
    parts = name.split("/")
    label = [parts.pop(0)] if len(parts) > 1 and parts[0] in phases else []
    ending = parts.pop() if len(parts) > 1 and parts[-1] in ENDINGS else ""
    label += [ENDINGS[ending]] if ending else []
    return "/".join(parts) + (" within the epoch" if ending else ""), " ".join(label)


def _draw(title: str, curves: list[tuple[Run, str, str]], several: bool) -> Figure:
    """A chart; runs have a color each if there are several, and labels a kind of line, else labels have colors."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit, factor = next(((unit, factor) for form, unit, factor in UNITS if form.fullmatch(title)), ("", 1.0))
    runs = list(dict.fromkeys(run.id for run, _, _ in curves))
    labels = list(dict.fromkeys(label for _, label, _ in curves))
    for run, label, name in curves:
        series = run.series[name]
        line = labels.index(label)
        color = runs.index(run.id) if several else line
        axes.plot(
            series.step,
            np.where(np.isfinite(series.value), series.value, np.nan) * factor,
            label=_shown(f"{run.id} {label}".strip() if several else label or name),
            color=COLORS[color % len(COLORS)],
            linestyle=LINES[line % len(LINES)] if several else "-",
            linewidth=1.2,
            marker="o" if len(series) == 1 else "",
        )
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if unit == "%":
        axes.set_ylim(bottom=0)
    axes.set_title(_shown(title), parse_math=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        legend = axes.legend(frameon=False, fontsize="small")
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def _shown(text: str, longest: int = 60) -> str:
    """A label: in one line, and not one that matplotlib leaves out because it begins with ``_``."""
    line = "".join(each if each.isprintable() else " " for each in text)[:longest]
    return f" {line}" if line.startswith("_") else line


def _file_name(text: str, taken: set[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("._")[:80] or "chart"
    name, number = plain, 1
    while name.lower() in taken:
        number += 1
        name = f"{plain}_{number}"
    taken.add(name.lower())
    return name


def _scalars(store: Store, run: Run) -> Iterator[tuple[str | float, ...]]:
    """All values with their places, in the order of the columns."""
    with os.fdopen(store.folder.open(run.path), "rb") as log:
        for _, data in pieces(log.fileno(), 0, os.fstat(log.fileno()).st_size):
            for line in data.split(b"\n"):
                if isinstance(said := parse_values(line), Values):
                    for name, value in said.values.items():
                        yield name, value, said.phase, said.epoch, said.step, said.update, said.time


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA) and not _is_number(value):
        return f"'{value}"
    return repr(value) if isinstance(value, float) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _data_url(store: Store, run: Run, file: str, room: int) -> str | None:
    """A file that a log names, as a URL that has all of it; None if it is not there, or too large."""
    if file not in run.files or not file.startswith("media/"):
        return None
    try:
        with os.fdopen(store.folder.open(run.folder + file), "rb") as opened:
            about = os.fstat(opened.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size * 4 > room * 3 - 300:
                return None
            content = base64.b64encode(opened.read()).decode()
    except OSError:
        return None
    return f"data:{TYPES.get(Path(file).suffix.lower(), 'application/octet-stream')};base64,{content}"


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
