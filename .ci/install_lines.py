"""Resolve every install line of README, pages and READMEs of distributions, in an environment without loopkit.

``python .ci/install_lines.py``: each line runs as ``pip install --dry-run`` in the root of the clone, in a fresh
environment that has what others need of the active one: packages of others, and no distribution of this project. So pip
finds `loopkit-engine` and the distributions only in the line itself; whatever of them comes from an index is an error.
README's two commands run in full elsewhere.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from each_alone import normalized, share

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md")]
CODE = re.compile(r"^```sh\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"(?:python3? -m )?pip install ([^#&|;\n]+)")


def lines() -> dict[str, list[str]]:
    """The arguments of each install line, and the pages that have it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for block, span in CODE.findall((ROOT / page).read_text()):
            for arguments in LINE.findall(block or span):
                found.setdefault(" ".join(arguments.split()), []).append(str((ROOT / page).relative_to(ROOT)))
    return found


def problems(arguments: str, python: Path, report: Path) -> Iterator[str]:
    """What is wrong with a line."""
    words = shlex.split(arguments)
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--dry-run", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--report", report, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        yield "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))
        return
    for item in json.loads(report.read_text())["install"]:
        name = normalized(item["metadata"]["name"])
        if name.startswith("loopkit") and "dir_info" not in item["download_info"]:
            yield f"{name} would come from {item['download_info']['url']}"


def main() -> int:
    """Try all of them."""
    found = lines()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        share(Path(sysconfig.get_path("purelib")), home / "shared")
        venv.create(home / "venv", symlinks=True)
        site = next((home / "venv" / "lib").glob("python*/site-packages"))
        (site / "shared.pth").write_text(f"{home / 'shared'}\n")
        for arguments, pages in found.items():
            for problem in problems(arguments, home / "venv" / "bin" / "python", home / "report.json"):
                wrong += 1
                print(f"{', '.join(pages)}: pip install {arguments}: {problem}")
    print(f"{len(found)} install lines, {wrong} problems")
    return bool(wrong) or len(found) < 40


if __name__ == "__main__":
    sys.exit(main())
