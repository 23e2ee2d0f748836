"""A chart in a notebook that grows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from loopkit.base.notes import shown, warn

REDRAW_SECONDS = 0.5


class LiveChart:
    """Charts of a history's rows in a cell's output, drawn again in the same place as rows are added."""

    def __init__(self) -> None:
        self._handle: Any = None
        """The place of the charts in the output; None before they are drawn."""
        self._due = 0.0
        self._failed = False

    def draw(self, rows: Sequence[Mapping[str, Any]], *, at_once: bool = False) -> None:
        """Draw the rows, twice a second at most, unless it is to be done at once; an error ends it with a warning."""
        now = time.monotonic()
        if self._failed or not rows or (now < self._due and not at_once):
            return
        self._due = now + REDRAW_SECONDS
        try:
            self._draw(rows)
        except Exception as error:
            self._failed = True
            warn(f"Progress(chart=True): drawing the chart raised {shown(error)}, so it is switched off for this fit")

    def _draw(self, rows: Sequence[Mapping[str, Any]]) -> None:
        from loopkit.base.drawing import charts

        shell: Any = import_module("IPython.display")  # there is one where a kernel runs
        content = shell.HTML(charts(rows, "updates"))
        if self._handle is None:
            self._handle = shell.display(content, display_id=True)
        else:
            self._handle.update(content)
