"""What the page, the report and the tests see of a store, as plain data that is JSON.

Every name and text in it comes from a log, and is data: nobody may take it for markup.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopkit_monitor.downsample import extremes
from loopkit_monitor.series import References
from loopkit_monitor.store import Run, Store

__all__ = ["encode", "media", "run", "runs", "series"]

LATEST = {"plan": "run/plan", "model": "run/model", "cost": "run/cost", "profile": "run/module_profile"}
"""Parts of a run, and under which name they are logged; the last one counts."""
MOST_LISTED = 500
"""Checkpoints and warnings that are shown, the latest."""
MOST_BYTES = 8 << 20
"""Of the lines in one answer."""
DEFAULT_POINTS = 2_000
MOST_POINTS = 100_000
"""Of all curves in one answer; if there are many, each has fewer."""
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
        "best": {name: extent for name, each in found.series.items() if (extent := _extent(each.value))},
        **{part: _without_helpers(store.record(found, name)) for part, name in LATEST.items()},
        "checkpoints": _listed(store, found, "run/checkpoint"),
        "warnings": _listed(store, found, "run/warning"),
        "end": found.end,
        "epochs": found.epochs,
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
) -> dict[str, Any]:
    """Curves of a run, of no more points than are asked for, with all that stands out.

    Args:
        names: Those that the run does not have are left out.
        points: Of each curve; at least 5.
        low: The first step; by default, the first one there is.
        high: The last step.

    Raises:
        UnknownRun: There is no run of that id.
    """
    found = store.get(id)
    made = {}
    points = max(min(points, MOST_POINTS // max(len(names), 1)), 5)
    for name in dict.fromkeys(names):
        each = found.series.get(name)
        if each is None:
            continue
        total = each.total
        if low is None and high is None:
            chosen = extremes(each.value, points)
        else:
            inside = np.ones(len(each), bool)
            if low is not None:
                inside &= each.step >= low
            if high is not None:
                inside &= each.step <= high
            chosen = np.flatnonzero(inside)
            total = total if len(chosen) == len(each) else len(chosen)
            chosen = chosen[extremes(each.value[chosen], points)]
        made[name] = {
            "step": each.step[chosen].tolist(),
            "value": _numbers(each.value[chosen]),
            "time": each.time[chosen].tolist(),
            "total": total,
        }
    return {"id": id, "series": made, "seq": seq(store)}


def media(store: Store, id: str, name: str, index: int | None = None, limit: int = 50) -> dict[str, Any]:
    """What was logged under a name that is no scalar: the latest, or one.

    Args:
        index: Which one, from 0; by default, as many of the latest as ``limit`` says.

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
    """What the run was made with, and what was logged as such since."""
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


def _extent(values: NDArray[np.float64]) -> list[float]:
    """The lowest and the highest of those that are finite; none if there is none."""
    finite = values[np.isfinite(values)]
    return [float(finite.min()), float(finite.max())] if len(finite) else []


def _brief(run: Run) -> dict[str, Any]:
    summary = run.summary()
    id = summary.pop("run")
    end = run.end or {}
    return {
        "id": id,
        "name": run.name,
        **summary,
        "started": run.started,
        "fits": len(run.runs),
        "total_steps": run.total_steps,
        "reason": end.get("reason"),
        "error": end.get("error"),
    }


def _without_helpers(said: dict[str, Any] | None) -> dict[str, Any] | None:
    """A plan, or what plugins cost, without the helpers of plugins: what these take belongs to the plugin."""
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
