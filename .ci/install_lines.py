"""Resolve every install line of README, pages and READMEs of distributions, in an environment without loopkit.

``python .ci/install_lines.py WHEELS SITE``: each line runs as ``pip install --dry-run`` in the root of the clone, in a
fresh environment that sees the packages of others in SITE, a site-packages, and no distribution of this project. So
pip finds `loopkit-engine` and the distributions only in the line itself; if one comes from an index, that is an error.
A folder of the clone is given as its wheel in WHEELS: pip would make its metadata in each line again.
README's two commands run in full elsewhere.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from each_alone import normalized, share

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md")]
CODE = re.compile(r"^```sh\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"(?:python3? -m )?pip install ([^#&|;\n]+)")
FOLDER = re.compile(r"(\.|plugins/[\w-]+)(\[.*\])?")


def lines() -> dict[str, list[str]]:
    """The arguments of each install line, and the pages that have it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for block, span in CODE.findall((ROOT / page).read_text()):
            for arguments in LINE.findall(block or span):
                found.setdefault(" ".join(arguments.split()), []).append(str((ROOT / page).relative_to(ROOT)))
    return found


def by_folder(wheels: Path) -> dict[str, Path]:
    """The wheels of the core and of each distribution, by their folders in the clone."""
    built = {normalized(each.name.partition("-")[0]): each for each in wheels.glob("loopkit*.whl")}
    return {"." if name == "loopkit-engine" else f"plugins/{name}": wheel for name, wheel in built.items()}


def with_wheels(words: list[str], built: dict[str, Path], made: Path) -> list[str]:
    """Put wheels in the place of folders, in a line's words and in the files of requirements that it names."""
    found = []
    before = ""
    for word in words:
        folder = FOLDER.fullmatch(word)
        if before == "-r":
            lines = [
                with_wheels(shlex.split(line, comments=True), built, made)
                for line in (ROOT / word).read_text().splitlines()
            ]
            made.write_text("\n".join(map(shlex.join, lines)) + "\n")
            found.append(str(made))
        elif folder is not None:
            found.append(f"{built[folder[1]]}{folder[2] or ''}")
        elif word != "-e":
            found.append(word)
        before = word
    return found


def problems(words: list[str], wheels: Path, python: Path, report: Path) -> Iterator[str]:
    """What is wrong with a line."""
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--dry-run", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--report", report, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        yield "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))
        return
    for item in json.loads(report.read_text())["install"]:
        name = normalized(item["metadata"]["name"])
        url = item["download_info"]["url"]
        if name.startswith("loopkit") and not url.startswith(wheels.as_uri()):
            yield f"{name} would come from {url}"


def main(wheels: Path, site: Path) -> int:
    """Try all of them."""
    found = lines()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        share(site, home / "shared")
        venv.create(home / "venv", symlinks=True)
        own = next((home / "venv" / "lib").glob("python*/site-packages"))
        (own / "shared.pth").write_text(f"{home / 'shared'}\n")
        built = by_folder(wheels)
        for arguments, pages in found.items():
            words = with_wheels(shlex.split(arguments), built, home / "requirements.txt")
            for problem in problems(words, wheels, home / "venv" / "bin" / "python", home / "report.json"):
                wrong += 1
                print(f"{', '.join(pages)}: pip install {arguments}: {problem}")
    print(f"{len(found)} install lines, {wrong} problems")
    return bool(wrong) or len(found) < 40


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
