"""Draw docs/images/gate.png from what the gate has measured so far: ``python docs/make_gate_plot.py [FILE]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "gate.jsonl"
PICTURE = DOCS / "images" / "gate.png"


def draw(runs: list[dict[str, Any]]) -> Figure:
    """Of each ratio a row: its share of the bound in each run, the newest run darkest, and where the gate fails."""
    titles = list(dict.fromkeys(title for run in runs for title in run["ratios"]))
    figure = Figure(figsize=(8, 0.24 * len(titles) + 0.9), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs, 1):
        points = [(row["ratio"] / row["bound"], titles.index(title)) for title, row in run["ratios"].items()]
        axes.scatter(
            *zip(*points, strict=True), s=14, color="tab:blue", alpha=min(1.0, 0.2 + 0.8 * number / len(runs)), lw=0
        )
    axes.axvline(1.0, color="gray", lw=1)
    axes.axvline(1.15, color="tab:red", lw=1)
    axes.set_yticks(range(len(titles)), titles, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio / its bound; the gate fails beyond 1.15", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    return figure


def main() -> None:
    """Draw the file's runs, or those of the gate's own file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    figure = draw([json.loads(line) for line in path.read_text().splitlines()])
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    main()
