"""Views of a store for the page, the report and the tests, as plain JSON data.

Every name and text in them comes from a log and is data: never render it as markup.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopkit_monitor.downsample import extremes, extremes_of
from loopkit_monitor.notes import Notes
from loopkit_monitor.series import References, Series
from loopkit_monitor.smoothing import Means
from loopkit_monitor.store import Run, Store, UnknownRun

__all__ = ["curves", "encode", "media", "note", "rows", "run", "runs", "series"]

LATEST = {"plan": "run/plan", "model": "run/model", "cost": "run/cost", "profile": "run/module_profile"}
"""Parts of a run, and under which name they are logged; the last one counts."""
MOST_LISTED = 500
"""Checkpoints and warnings that are shown, the latest."""
MOST_BYTES = 8 << 20
"""The most bytes of the lines in one answer."""
DEFAULT_POINTS = 2_000
MOST_COLUMNS = 400
"""Names of which the table has a value of a run."""
MOST_POINTS = 100_000
"""The most points of all curves in one answer; with many curves each has fewer."""
HELPER = "~"
"""With this begins the name of a plugin that another one has added for itself, as ``"~monitor"``."""
ESCAPED = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def encode(data: Any) -> bytes:
    """As JSON in ASCII, which can stand in HTML as well: ``<``, ``>`` and ``&`` are escaped.

    Infinite and undefined numbers are the strings ``"inf"``, ``"-inf"`` and ``"nan"``, as in the log.
    """
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPED).encode("ascii")


def runs(store: Store) -> dict[str, Any]:
    """All runs, the latest first; how many older ones are left out; whether all of the folder was searched."""
    found = sorted(store.runs.values(), key=lambda run: (run.updated, run.id), reverse=True)
    return {
        "runs": [_brief(each) for each in found],
        "left_out": store.left_out,
        "searched": store.folder.searched,
        "seq": seq(store),
    }


def rows(store: Store, since: int = -1) -> dict[str, Any]:
    """The table's rows for the runs that changed after a change: parameters, the last and the best values.

    Args:
        since: The number of a change; by default, all runs are in it.
    """
    found = [_row(store, each) for each in store.runs.values() if each.changed > since]
    return {
        "rows": found,
        "ids": list(store.runs),
        "behind": store.behind,
        "left_out": store.left_out,
        "searched": store.folder.searched,
        "last": store.last_id,
        "seq": seq(store),
    }


def _row(store: Store, run: Run) -> dict[str, Any]:
    planned = run.header.get("planned")
    return {
        **_brief(run),
        "planned_epochs": planned.get("epochs") if isinstance(planned, dict) else None,
        "whole": run.whole,
        "modes": run.modes,
        "extents": {name: run.extents[name] for name in itertools.islice(run.extents, MOST_COLUMNS)},
        "last": {name: run.last[name] for name in itertools.islice(run.last, MOST_COLUMNS)},
        "hyperparameters": hyperparameters(store, run),
        "git": run.header.get("git"),
    }


def note(store: Store, id: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change what is noted about a run.

    Raises:
        UnknownRun: There is none.
        NotesError: That cannot be noted.
        OSError: It cannot be written.
    """
    made = store.note(id, changes)
    return {"id": id, "notes": _notes(made), "seq": seq(store)}


def curves(
    store: Store, ids: Sequence[str], names: Sequence[str], points: int = DEFAULT_POINTS, smooth: float = 0.0
) -> dict[str, Any]:
    """Curves of several runs, each as by `series`; runs that are gone are left out."""
    made = {}
    for id in dict.fromkeys(ids):
        try:
            made[id] = series(store, id, names, points, smooth=smooth)["series"]
        except UnknownRun:
            continue
    return {"curves": made, "seq": seq(store)}


def run(store: Store, id: str) -> dict[str, Any]:
    """All of one run but its points and media.

    Raises:
        UnknownRun: There is none of that id.
    """
    found = store.get(id)
    header = {key: value for key, value in found.header.items() if key not in ("kind", "config", "hyperparameters")}
    names = [
        {"name": name, "phase": each.phase, "kind": "value", "count": each.total} for name, each in found.series.items()
    ] + [
        {"name": name, "phase": each.phase, "kind": each.kind, "count": each.total}
        for name, each in found.references.items()
    ]
    return {
        **_brief(found),
        "header": header,
        "starts": [{key: start.get(key) for key in ("time", "resumed", "step", "epoch")} for start in found.runs],
        "config": found.header.get("config"),
        "hyperparameters": hyperparameters(store, found),
        "names": names,
        "best": {name: [low, high, at, other] for name, (low, at, high, other) in found.extents.items()},
        "modes": found.modes,
        "sampled": found.sampled,
        "read": found.read,
        **{part: _without_helpers(store.record(found, name)) for part, name in LATEST.items()},
        "checkpoints": _listed(store, found, "run/checkpoint"),
        "warnings": _listed(store, found, "run/warning"),
        "end": found.end,
        "epochs": found.complete_epochs,
        "counts_from_one": found.counts_from_one,
        "foreign": found.foreign,
        "seq": seq(store),
    }


def series(
    store: Store,
    id: str,
    names: Sequence[str],
    points: int = DEFAULT_POINTS,
    low: float | None = None,
    high: float | None = None,
    smooth: float = 0.0,
) -> dict[str, Any]:
    """Curves of a run, of no more points than are asked for, with all that stands out.

    With ``smooth``, each has the exponential mean of all of its points, too, thinned after it is made: ``"smooth"`` has
    its steps, times and values, and ``"mean"`` what it takes to continue it.

    Args:
        names: Names that the run does not have are left out.
        points: Of each curve; at least 5.
        low: The first step; by default, the first one there is.
        high: The last step.
        smooth: The weight of the past in the mean; 0 for none.

    Raises:
        UnknownRun: There is no run of that id.
    """
    found = store.get(id)
    made: dict[str, dict[str, Any]] = {}
    points = max(min(points, MOST_POINTS // max(len(names), 1)), 5)
    for name in dict.fromkeys(names):
        each = found.series.get(name)
        if each is None:
            continue
        inside = _between(each, low, high)
        whole = _count(inside) == len(each)
        made[name] = {
            **_thinned(each, inside, points, 0.0),
            "total": each.total if whole else _count(inside),
            "exact": each.exact and not found.sampled,
        }
        if smooth:
            made[name]["smooth"] = _thinned(each, inside, points, smooth)
            if whole:
                mean = _MEANS.last(each, smooth)
                made[name]["mean"] = [mean.sum, mean.count]
    return {"id": id, "series": made, "seq": seq(store)}


_MEANS = Means()
Inside = slice | NDArray[np.int64]
"""Points of a series: all between two indices, or the ones at some indices."""


def _between(series: Series, low: float | None, high: float | None) -> Inside:
    """The points between two steps."""
    if series.rises:
        return series.between(low, high)
    step = series.step
    inside = np.ones(len(step), bool)
    if low is not None:
        inside &= step >= low
    if high is not None:
        inside &= step <= high
    return np.flatnonzero(inside)


def _count(inside: Inside) -> int:
    return max(inside.stop - inside.start, 0) if isinstance(inside, slice) else len(inside)


def _thinned(series: Series, inside: Inside, points: int, smooth: float) -> dict[str, Any]:
    """Some of these points, or of their means, with the lowest and highest of each part."""
    if isinstance(inside, slice):
        begin, end = inside.start, inside.stop
        blocks: Iterable[np.ndarray] = (
            _MEANS.blocks(series, smooth, begin, end) if smooth else series.blocks(begin, end)
        )
        chosen, values = extremes_of(blocks, _count(inside), points, undefined=series.undefined)
        chosen += begin
    else:
        blocks = _MEANS.blocks(series, smooth, 0, len(series)) if smooth else [series.value]
        every = np.concatenate([np.empty(0), *blocks])
        picked = extremes(every[inside], points)
        chosen, values = inside[picked], every[inside[picked]]
    step, time = series.at(chosen)
    return {"step": step.tolist(), "value": _numbers(values), "time": time.tolist()}


def media(store: Store, id: str, name: str, index: int | None = None, limit: int = 50) -> dict[str, Any]:
    """The values logged under a name that is no scalar: the latest ones, or one.

    Args:
        index: Which one, from 0; by default, the latest ``limit`` ones.

    Raises:
        UnknownRun: There is no run of that id.
    """
    found = store.get(id)
    there = found.references.get(name)
    if there is None:
        return {"id": id, "name": name, "kind": None, "total": 0, "first": 0, "items": [], "seq": seq(store)}
    first = there.total - len(there.begin)
    latest = range(max(there.total - limit, first), there.total)
    items = []
    for each in latest[-_fitting(there, len(latest)) :] if index is None else [index]:
        said = store.record(found, name, each - first) if each >= first else None
        if said is not None:
            items.append({"index": each, **{key: value for key, value in said.items() if key != "index"}})
    about = {"id": id, "name": name, "kind": there.kind, "total": there.total, "first": first}
    return {**about, "items": items, "seq": seq(store)}


def hyperparameters(store: Store, run: Run) -> dict[str, Any]:
    """The hyperparameters that the run was made with, and those logged since."""
    found: dict[str, Any] = {}
    given = run.header.get("hyperparameters")
    if isinstance(given, Mapping):
        found.update(given)
    for name, each in run.references.items():
        if each.kind == "hyperparameters" and (said := store.record(run, name)) is not None:
            values = said.get("values")
            if isinstance(values, Mapping):
                found.update(values)
    return found


def seq(store: Store) -> str:
    """Up to which change an answer of now knows."""
    return f"{store.boot}.{store.last_id}"


def _notes(notes: Notes) -> dict[str, Any]:
    return {"name": notes.name, "note": notes.note, "tags": list(notes.tags), "archived": notes.archived}


def _brief(run: Run) -> dict[str, Any]:
    summary = run.summary()
    id = summary.pop("run")
    end = run.end or {}
    return {
        "id": id,
        "name": run.notes.name or run.name,
        **summary,
        "notes": _notes(run.notes),
        "started": run.started,
        "fits": len(run.runs),
        "total_steps": run.total_steps,
        "reason": end.get("reason"),
        "error": end.get("error"),
    }


def _without_helpers(said: dict[str, Any] | None) -> dict[str, Any] | None:
    """A plan, or the plugins' cost, without the helpers of plugins: their time belongs to the plugin."""
    columns, rows = (said or {}).get("columns"), (said or {}).get("rows")
    if said is None or not isinstance(columns, list) or not isinstance(rows, list):
        return said
    if not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        return said
    if not all(name in columns for name in ("phase", "hook", "plugin")):
        return said
    named = [dict(zip(map(str, columns), row, strict=True)) for row in rows]
    kept = [row for row in named if not str(row["plugin"]).startswith(HELPER)]
    places: Counter[tuple[str, str]] = Counter()
    for row in kept if "position" in columns else ():
        place = str(row["phase"]), str(row["hook"])
        places[place] += 1
        row["position"] = places[place]
        reasons = str(row.get("reasons", "")).split("; ")
        row["reasons"] = "; ".join(why for why in reasons if f"'{HELPER}" not in why)
    for row in named if "seconds" in columns else ():
        if str(row["plugin"]).startswith(HELPER):
            row["plugin"] = str(row["plugin"]).removeprefix(HELPER)
            at = [row[name] for name in ("phase", "hook", "plugin")]
            same = next((each for each in kept if [each[name] for name in ("phase", "hook", "plugin")] == at), None)
            if same is None:
                kept.append(row)
            elif isinstance(row["seconds"], float) and isinstance(same["seconds"], float):
                same["seconds"] += row["seconds"]  # the calls stay those of the plugin
    return {**said, "rows": [[row[name] for name in map(str, columns)] for row in kept]}


def _listed(store: Store, run: Run, name: str) -> list[dict[str, Any]]:
    found = run.references.get(name)
    if found is None:
        return []
    count = len(found.begin)
    indices = range(count - _fitting(found, min(count, MOST_LISTED)), count)
    said = [store.record(run, name, index) for index in indices]
    return [{key: value for key, value in each.items() if key not in ("name", "kind")} for each in said if each]


def _fitting(found: References, most: int) -> int:
    """How many of the latest lines are not too long together; at least one."""
    sizes = itertools.accumulate(itertools.islice(reversed(found.length), most))
    return max(sum(size <= MOST_BYTES for size in sizes), 1)


def _numbers(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | str]:
    if np.isfinite(values).all():
        return values.tolist()  # type: ignore[no-any-return]
    return [value if math.isfinite(value) else str(value) for value in values.tolist()]


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else str(data)
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
