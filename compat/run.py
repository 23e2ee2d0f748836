"""Run the files of this folder, each in an environment of its own: ``.ci/compat [NAME ...]``.

Environments are kept under ``LOOPKIT_COMPAT``, by default ``~/.cache/loopkit-compat``: one with torch and loopkit, and
one on top of it for each file, with the packages that the file needs. The results go to ``compat/results.json``, from
which ``docs/make_works_with.py`` makes the page.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results.json"
NAMES = ("control", "data", "huggingface", "metrics", "mlflow", "optuna", "sam", "wandb")
"""The distributions that the files use."""
LOOPKIT = [".", *(f"plugins/loopkit-{name}" for name in NAMES)]
"""What is installed of this repository."""
MEMORY = Path("/dev/shm")
MINUTES = 20
"""The limit of one file."""


def needs_of(file: Path) -> list[str]:
    """The packages of a file, with their versions: its constant ``NEEDS``."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "NEEDS":
            return list(ast.literal_eval(statement.value))
    raise SystemExit(f"{file} has no NEEDS")


def install(python: Path, *arguments: str) -> None:
    """Install with the base's pip."""
    pip = [str(python), "-m", "pip", "install", "--no-compile", "-q"]
    subprocess.run([*pip, *arguments], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)


def base(cache: Path) -> Path:
    """The environment with torch and loopkit; made if it is not there."""
    folder = cache / "base"
    python = folder / "bin" / "python"
    made = folder / "made"
    words = (ROOT / "constraints.txt").read_text() + str(ROOT) + " ".join(LOOPKIT)
    key = hashlib.sha256(words.encode()).hexdigest()
    if made.exists() and made.read_text() == key:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install(python, "-c", "constraints.txt", "setuptools", "wheel", "torch", "numpy")
    editable = [word for each in LOOPKIT for word in ("-e", each)]
    install(python, "--no-build-isolation", "--no-deps", *editable)
    install(python, "-c", "constraints.txt", "msgspec", "pluggy", "safetensors", "tomli-w", "tqdm")
    made.write_text(key)
    return python


def environment(cache: Path, file: Path) -> Path:
    """The environment of a file, on top of the base; made if it is not there, or has other packages."""
    python = base(cache)
    needs = needs_of(file)
    folder = cache / file.stem
    made = folder / "made"
    own = folder / "bin" / "python"
    if made.exists() and made.read_text() == " ".join(needs):
        return own
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    ask = [str(python), "-c", "import sysconfig, torch; print(sysconfig.get_path('purelib'), torch.__version__)"]
    site, torch = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.split()
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "base.pth").write_text(f"import site; site.addsitedir({site!r})\n")
    limit = folder / "constraints.txt"
    limit.write_text(f"torch=={torch.split('+')[0]}\n")  # another one would bring the libraries of CUDA
    install(own, "-c", str(limit), *needs)
    made.write_text(" ".join(needs))
    return own


def run(cache: Path, file: Path, words: list[str]) -> dict[str, Any] | None:
    """Run a file; its results, or None if it did not get to its end."""
    out = cache / f"{file.stem}.json"
    out.unlink(missing_ok=True)
    more = {"LOOPKIT_COMPAT_RESULTS": str(out), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if MEMORY.is_dir():
        more["TMPDIR"] = str(MEMORY)  # thousands of checkpoints need no disk
    try:
        command = [str(environment(cache, file)), str(file), *words]
        subprocess.run(command, check=False, cwd=cache, env={**os.environ, **more}, timeout=60 * MINUTES)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{file.stem}: {error}")
    return json.loads(out.read_text()) if out.exists() else None


def short(found: dict[str, Any]) -> dict[str, Any]:
    """The results as they are kept: of each check, how many programs are bitwise, and what the others are."""
    checks: dict[str, Any] = {}
    for program, outcomes in found["programs"].items():
        for check, result in outcomes.items():
            kept = checks.setdefault(check, {"bitwise": 0, "other": {}})
            if result["result"] == "bitwise":
                kept["bitwise"] += 1
            else:
                kept["other"][program] = result
    return {**found, "programs": len(found["programs"]), "checks": checks}


def good(found: dict[str, Any]) -> bool:
    """Whether all checks of a file ended as it expects."""
    return not any(check.get("unexpected") for program in found["programs"].values() for check in program.values())


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files without with_ and .py, such as schedulefree; default: all")
    parser.add_argument("--only", nargs="*", default=[], help="programs of a file, by a part of their names")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("LOOPKIT_COMPAT", Path.home() / ".cache" / "loopkit-compat"))
    cache.mkdir(parents=True, exist_ok=True)
    names = arguments.names or sorted(file.stem.removeprefix("with_") for file in HERE.glob("with_*.py"))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for name in names:
        begun = time.perf_counter()
        print(f"== {name}", flush=True)
        found = run(cache, HERE / f"with_{name}.py", arguments.only)
        if found is None or not good(found):
            failed.append(name)
        if found is not None and not arguments.only:
            results[name] = short(found)
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        print(f"== {name}: {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"not as expected: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
