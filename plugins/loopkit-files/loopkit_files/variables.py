"""The folder of a run: ``run = "runs/a"`` at the top of a file, which other values name as ``${run}``."""

from __future__ import annotations

import re
from typing import Any

from loopkit_files.calls import Report, article
from loopkit_files.lines import Place

__all__ = ["RUN", "filled"]

RUN = "run"
NAMED = re.compile(r"\$\{([^{}]*)\}")


def filled(values: dict[str, Any], report: Report) -> dict[str, Any]:
    """The values with the folder of the run in the place of each ``${run}``, and without ``run`` itself.

    Args:
        values: The tables by name, and perhaps ``run``.
        report: Gets the problems: another variable, ``${run}`` without ``run``, ``run`` that no value names.
    """
    folder = values.get(RUN)
    if folder is not None and not (isinstance(folder, str) and folder):
        report((RUN,), f'run is {article(folder)}, {folder!r:.60}: it is the folder of the run, run = "runs/a"')
        folder = "."
    found: list[Place] = []

    def fill(value: Any, place: Place) -> Any:
        if isinstance(value, dict):
            return {key: fill(item, (*place, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item, (*place, i)) for i, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        for name in NAMED.findall(value):
            if name != RUN:
                report(place, f"there is no variable {name!r}: ${{run}} is the only one, the folder of the run")
            elif folder is None:
                report(place, '${run} is not set: write run = "runs/a" at the top of the file, or --set run=runs/a')
            found.append(place)
        return value.replace("${run}", folder or "")

    tables = {key: fill(value, (key,)) for key, value in values.items() if key != RUN}
    if folder is not None and not found:
        report((RUN,), "run is set, and no value names it: write ${run} where a path begins with the folder of the run")
    return tables
