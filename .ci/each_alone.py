"""Install each distribution from a folder of wheels, and from nothing else, in a fresh environment; import it there.

``python .ci/each_alone.py WHEELS SITE``: pip has no index. Packages of others are visible from SITE, the site-packages
of an environment that has them, without any distribution of this project. The folder also gets a wheel of another
library called ``loopkit``, as the package index has one: nothing may take it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

OTHER = "loopkit-1.0.1"
PARALLEL = 2
QUIET = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
QUIET |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def normalized(name: str) -> str:
    """A name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make_other(wheels: Path) -> None:
    """A wheel of another library called loopkit, newer than this one."""
    about = f"{OTHER}.dist-info"
    files = {
        "loopkit/__init__.py": "class Controller: ...\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: loopkit\nVersion: 1.0.1\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    with ZipFile(wheels / f"{OTHER}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def requirements(wheel: Path) -> set[str]:
    """The distributions of this project that a wheel requires, without those of its extras."""
    with ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    required = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    return {normalized(each) for each in required if normalized(each).startswith("loopkit")}


def with_requirements(name: str, needs: dict[str, set[str]]) -> set[str]:
    """A distribution and all of the project that it comes to require."""
    found = {name}
    for other in needs[name]:
        found |= with_requirements(other, needs)
    return found


def share(site: Path, folder: Path) -> None:
    """Link what an environment has, but the distributions of this project, into a folder."""
    folder.mkdir()
    for entry in site.iterdir():
        if not entry.name.lower().startswith(("loopkit", "__editable__", "__pycache__")) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)


def try_alone(name: str, expected: set[str], wheels: Path, shared: Path, made: Path) -> str:
    """Install one distribution; return what is wrong, or an empty string."""
    home = made / name
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "shared.pth").write_text(f"{shared}\n")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", "--no-index"]
    package = "loopkit" if name == "loopkit-engine" else name.replace("-", "_")
    look = f"import {package}, loopkit.found.namesake as n; assert n.namesake() is None; print(n.__file__)"
    for command in ([*install, "--find-links", wheels, name], [python, "-W", "error", "-c", look]):
        done = subprocess.run(command, env=QUIET, cwd=made, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{name}: {done.stdout}{done.stderr}"
    there = {normalized(each.name.partition("-")[0]) for each in site.glob("loopkit*.dist-info")}
    if there != expected:
        return f"{name} installed {sorted(there)}, and requires {sorted(expected)}"
    if not done.stdout.startswith(str(site)):
        return f"{name}: loopkit is that of {done.stdout}"
    return ""


def main(wheels: Path, site: Path) -> int:
    """Try all of them."""
    needs = {normalized(wheel.name.partition("-")[0]): requirements(wheel) for wheel in wheels.glob("loopkit*.whl")}
    make_other(wheels)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(PARALLEL) as threads:
        made = Path(temporary).resolve()
        share(site, made / "shared")
        tried = [
            threads.submit(try_alone, name, with_requirements(name, needs), wheels, made / "shared", made)
            for name in sorted(needs)
        ]
        wrong = [text for each in tried if (text := each.result())]
    print(*wrong, f"{len(needs) - len(wrong)} of {len(needs)} distributions install from their wheels", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
