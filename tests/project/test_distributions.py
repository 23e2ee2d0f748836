"""Each distribution alone: it installs into a fresh environment with the core, and passes its tests there."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from loopkit.base.version import DISTRIBUTION
from loopkit.found.discovery import ELSEWHERE, SUBCOMMANDS
from loopkit.found.installed import COMMANDS, PLUGINS

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
PACKAGES = {path.name.replace("-", "_") for path in DISTRIBUTIONS}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    return found


def test_there_are_distributions() -> None:
    assert {"loopkit_mlflow", "loopkit_optuna", "loopkit_tensorboard"} <= PACKAGES


def project(folder: Path) -> dict[str, Any]:
    """The metadata of a distribution under ``plugins/``."""
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])


def test_requirements_of_all_name_loopkit_and_every_distribution() -> None:
    lines = (ROOT / "requirements-all.txt").read_text().splitlines()
    named = [f"-e plugins/{each.name}" for each in DISTRIBUTIONS]
    assert [line for line in lines if line[0] != "#"] == ["-e .", *named]


def test_the_distribution_has_another_name_than_the_package() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert (config["metadata"]["name"], DISTRIBUTION) == ("loopkit-engine", "loopkit-engine")
    assert config["options.packages.find"]["include"].split() == ["loopkit", "loopkit.*"]


OPEN = ("fsspec", "s3fs")
"""Required packages whose versions are dates: no number of theirs announces a break."""


def core_requirements() -> list[str]:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options"]["install_requires"].split()


def requirements(folder: Path) -> list[str]:
    """The requirements of a distribution and its extras, without its own extras."""
    about = project(folder)
    extras = about.get("optional-dependencies", {}).values()
    found = [*about["dependencies"], *(each for extra in extras for each in extra)]
    return [each for each in found if not each.startswith(f"{about['name']}[")]


@pytest.mark.parametrize("folder", [None, *DISTRIBUTIONS], ids=lambda path: path.name if path else "loopkit-engine")
def test_requirements_have_a_lower_and_an_upper_bound_that_the_tested_versions_keep(folder: Path | None) -> None:
    required = core_requirements() if folder is None else requirements(folder)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {re.sub("[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    for requirement in map(Requirement, required):
        operators = {each.operator for each in requirement.specifier}
        assert operators == ({">="} if requirement.name in OPEN else {">=", "<"}), requirement
        if version := pinned.get(requirement.name.lower()):
            assert requirement.specifier.contains(version), requirement


def test_no_fact_stands_in_both_files_of_metadata() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(tools) == ["build-system", "tool"]  # names, versions and requirements are those of setup.cfg
    assert {name.partition(".")[0] for name in config.sections()} == {"metadata", "options"}
    lowest = config["options"]["python_requires"].removeprefix(">=")
    assert tools["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"  # ruff reads no setup.cfg


def test_oldest_torch_is_read_from_the_requirements() -> None:
    line = next(line for line in (ROOT / ".ci/versions").read_text().splitlines() if line.startswith("oldest="))
    found = subprocess.check_output(["bash", "-c", f"{line}; echo $oldest"], cwd=ROOT, text=True).strip()
    assert any(each.startswith(f"torch>={found},") for each in core_requirements())


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda path: path.name)
def test_requirements_of_the_project_s_distributions_are_bounded(folder: Path) -> None:
    about = project(folder)
    own = [each for each in requirements(folder) if each.startswith("loopkit")]
    assert "loopkit-engine>=0.1,<0.2" in about["dependencies"]
    assert [each for each in own if not re.fullmatch(r"loopkit-[a-z-]+>=0\.1,<0\.2", each)] == []


@pytest.mark.parametrize(("group", "table"), [(PLUGINS, ELSEWHERE), (COMMANDS, SUBCOMMANDS)])
def test_errors_know_which_distribution_has_what(group: str, table: dict[str, str]) -> None:
    made = {}
    for folder in DISTRIBUTIONS:
        about = project(folder)
        made |= dict.fromkeys(about.get("entry-points", {}).get(group, {}), about["name"])
    assert table == made


def test_nothing_of_the_core_imports_a_distribution() -> None:
    guilty = {str(path): imports(path) & PACKAGES for path in (ROOT / "loopkit").rglob("*.py")}
    assert {path: found for path, found in guilty.items() if found} == {}


def neighbours(folder: Path, *extras: str) -> list[Path]:
    """The other distributions that one requires, with extras, and all that these require."""
    about = project(folder)
    required = [*about["dependencies"], *(each for extra in extras for each in about["optional-dependencies"][extra])]
    names = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in required} - {folder.name}
    found = {each for each in DISTRIBUTIONS if each.name in names}
    for other in list(found):
        found |= set(neighbours(other))
    return sorted(found)


# Install lines


CODE = re.compile(r"^```sh\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md")]
LINES = sorted(
    {
        line
        for page in PAGES
        for found in CODE.findall(page.read_text())
        for line in re.findall(r"pip install ([^#&|;\n]+)", "".join(found))
    }
)
"""What stands behind ``pip install`` in the code of README, pages and READMEs; `.ci/install_lines.py` resolves them."""


def test_there_are_install_lines_for_every_distribution() -> None:
    named = {Path(word.partition("[")[0]).name for line in LINES for word in shlex.split(line)}
    assert {folder.name for folder in DISTRIBUTIONS} <= named


@pytest.mark.parametrize("line", LINES)
def test_install_line_names_what_is_in_the_clone_and_all_that_it_requires(line: str) -> None:
    words = shlex.split(line)
    assert [word for word in words if word.startswith("loopkit")] == []
    folders = {
        Path(word.partition("[")[0]): re.findall(r"\w+", word.partition("[")[2]) for word in words if word[0] in ".p"
    }
    named = {ROOT / folder for folder in folders if folder.parts[:1] == ("plugins",)}
    required = {other for folder in named for other in neighbours(folder, *folders[folder.relative_to(ROOT)])}
    plain = {ROOT / word for word in words if word.startswith("plugins/") and "[" not in word}
    assert required <= named
    assert {other for folder in named for other in neighbours(folder)} <= plain  # pip takes x[test] for another than x
    assert not named or Path() in folders


def needed(name: str, found: set[str]) -> set[str]:
    """A distribution that is installed here, and all that it requires; without what is not installed."""
    try:
        here = distribution(name)
    except PackageNotFoundError:
        return found
    if name not in found:
        found.add(name)
        for requirement in here.requires or ():
            if "extra ==" not in requirement:
                needed(re.split(r"[^\w.-]", requirement, maxsplit=1)[0], found)
    return found


def share_torch(python: Path, folder: Path) -> None:
    """Let an environment have torch, and nothing beyond what torch requires, from this one."""
    folder.mkdir()
    for name in needed("torch", set()):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            target = Path(str(distribution(name).locate_file(top)))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    Path(site, "shared.pth").write_text(f"{folder}\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda path: path.name)
def test_distribution_installs_alone_and_passes_its_tests(folder: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    share_torch(python, tmp_path / "shared")
    install = ["-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", "-e", ROOT]
    beside = neighbours(folder, "test")
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    packages = [word for each in beside for word in ("-e", each)]
    for command in ([*install, *packages, "-e", f"{folder}[test]"], ["-m", "pytest", "-q", "-p", "no:cacheprovider"]):
        done = subprocess.run(
            [python, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    listed = subprocess.run(
        [python, "-m", "pip", "list"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert {each.name for each in DISTRIBUTIONS if each.name in listed} == {path.name for path in (folder, *beside)}
    assert sys.prefix not in listed


def shown_of(folder: Path) -> dict[str, list[str]]:
    """The bases of each class of a distribution, and ``__repr__`` if it has one."""
    found = {}
    for path in folder.glob("loopkit_*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                own = ["__repr__" for each in node.body if getattr(each, "name", "") == "__repr__"]
                found[node.name] = [*own, *(ast.unparse(base).partition("[")[0] for base in node.bases)]
    return found


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_each_plugin_and_metric_is_shown_in_a_line(folder: Path) -> None:
    """By the source: importing all of them takes long. What derives from a class of the core is tested there."""
    classes = shown_of(folder)
    names = {value.partition(":")[2] for value in project(folder).get("entry-points", {}).get(PLUGINS, {}).values()}
    names |= {name for name, bases in classes.items() if "Metric" in bases}

    def is_shown(name: str) -> bool:
        if name not in classes:
            return name in ("__repr__", "Shown", "Metric", "Backend", "Member", "Checkpoint")
        return any(map(is_shown, classes[name]))

    assert sorted(name for name in names & classes.keys() if not is_shown(name)) == []
