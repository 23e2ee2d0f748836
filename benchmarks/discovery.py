"""What ``loopkit plugins`` takes beyond ``import loopkit``, with 200 more distributions installed.

    python benchmarks/discovery.py [--pairs 20] [--distributions 200] [--json FILE]

Whole processes, from their start to their end, interleaved: ``python -c "import loopkit"``, the same with
``gc.freeze()``, and the command. By the freeze the command spares itself the collection over the objects of torch with
which a process ends; against the import that is frozen, too, only what the command itself does is left. Processor time
is what counts on a machine that is not idle. The distributions are folders of metadata in a temporary directory on
PYTHONPATH; each has a plugin, which is declared.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

METADATA = """Metadata-Version: 2.4
Name: {name}
Version: 1.{number}
Summary: A plugin
Requires-Python: >=3.11
Requires-Dist: loopkit-engine>=0.1,<0.2
Description-Content-Type: text/markdown

{description}
"""
ENTRY_POINTS = """[console_scripts]
plugin-{number:03} = plugin_{number:03}.cli:main

[loopkit.plugins]
plugin_{number:03} = plugin_{number:03}.plugin:Plugin
"""


def install(directory: Path, count: int) -> None:
    """Write the metadata of distributions as pip does."""
    for number in range(count):
        name = f"plugin-{number:03}"
        folder = directory / f"{name.replace('-', '_')}-1.{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(METADATA.format(name=name, number=number, description="Words. " * 1000))
        (folder / "RECORD").write_text("plugin.py,sha256=0,0\n" * 50)
        (folder / "entry_points.txt").write_text(ENTRY_POINTS.format(number=number))


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """The time of a process, which must succeed, and of the processor."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(pairs: int, distributions: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of all sides, round by round; their order changes from round to round."""
    with tempfile.TemporaryDirectory() as directory:
        install(Path(directory), distributions)
        environment = {**os.environ, "PYTHONPATH": directory}
        sides = {
            "import": [sys.executable, "-c", "import loopkit"],
            "frozen": [sys.executable, "-c", "import gc, loopkit; gc.freeze()"],
            "command": [sys.executable, "-c", "from loopkit.commands.cli import main; main()", "plugins"],
        }
        listed = subprocess.run(sides["command"], env=environment, capture_output=True, text=True, check=True).stdout
        if listed.count("plugin_") != distributions:
            raise SystemExit(f"the command does not list the {distributions} plugins:\n{listed}")
        subprocess.run(sides["import"], env=environment, check=True)
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for pair in range(pairs):
            for side in list(sides) if pair % 2 else reversed(sides):
                times[side].append(seconds(sides[side], environment))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--distributions", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    times = measure(arguments.pairs, arguments.distributions)
    figures = {}
    for kind, at in (("", 0), ("processor_", 1)):
        mine = {side: [1e3 * each[at] for each in found] for side, found in times.items()}
        figures |= {f"{kind}{side}_ms": statistics.median(found) for side, found in mine.items()}
        for side in ("import", "frozen"):
            more = [command - other for command, other in zip(mine["command"], mine[side], strict=True)]
            figures[f"{kind}beyond_{side}_ms"] = statistics.median(more)
            figures[f"{kind}beyond_{side}_highest_ms"] = max(more)
    for name, value in figures.items():
        print(f"{name:<36} {value:8.1f}")
    about = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "pairs": arguments.pairs,
        "distributions": arguments.distributions,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
