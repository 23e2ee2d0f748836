"""Another distribution called ``loopkit`` is found, and people are told what to type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import install

import loopkit
from loopkit.commands import cli
from loopkit.found.namesake import check, cure, namesake

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("plugins/*/loopkit_*/__init__.py"))
LATER = {"loopkit_monitor": ["plugin.py", "commands.py"]}
"""Files that look in the place of ``__init__.py``: the server of the monitor imports no loopkit, and so no torch."""
OWN = "[console_scripts]\nloopkit = loopkit.commands.cli:main\n"
OTHER = "[console_scripts]\nloopkit = loopkit.control:main\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path of imports, before what is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    check.cache_clear()
    yield tmp_path
    check.cache_clear()


@pytest.mark.parametrize("entry_points", [None, "", OTHER, "[loopkit.plugins]\na = b:c\n"])
def test_other_distribution_of_the_name_is_found(entry_points, site):
    install(site, "loopkit", entry_points, version="1.0.1")
    assert namesake() == "loopkit 1.0.1"
    with pytest.warns(
        UserWarning, match=r"loopkit 1\.0\.1, is installed .* pip uninstall loopkit, then .* --no-deps loopkit-engine"
    ):
        check()


@pytest.mark.parametrize(("name", "entry_points"), [("loopkit", OWN), ("loopkit-engine", OWN), ("loopkit-other", None)])
def test_distribution_that_is_no_other_loopkit_is_passed_over(name, entry_points, site):
    install(site, name, entry_points)
    assert (namesake(), cure()) == (None, None)
    check()


def test_version_names_the_other_distribution(site, capsys):
    install(site, "loopkit", OTHER, version="1.0.1")
    assert cli.main(["--version"]) == 0
    out, err = capsys.readouterr()
    assert out == f"loopkit {loopkit.__version__}\n"
    assert "another library, loopkit 1.0.1, is installed" in err
    assert "pip uninstall loopkit" in err


def test_version_alone_is_one_line(site, capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr() == (f"loopkit {loopkit.__version__}\n", "")


def test_core_does_not_look_when_it_is_imported():
    code = "import sys, loopkit; assert 'loopkit.found.namesake' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Of the distributions


def test_each_distribution_looks_first_and_by_the_same_code():
    sources = {package.name: (package / "_core.py").read_text() for package in PACKAGES}
    assert len(sources) == len(list(ROOT.glob("plugins/*/pyproject.toml"))) >= 20
    assert set(sources.values()) == {sources["loopkit_recipes"]}
    for package in PACKAGES:
        for file in LATER.get(package.name, ["__init__.py"]):
            lines = (package / file).read_text().splitlines()
            imports = [line for line in lines if line.startswith(("from loopkit", "import torch"))]
            assert imports[0].startswith(f"from {package.name} import _core as _core"), f"{package.name}/{file}"


def imported(package: Path, path: Path) -> str:
    """The last line of the error of importing a distribution where only these folders are on the path."""
    module = Path(LATER.get(package.name, [""])[0]).stem
    name = f"{package.name}.{module}".rstrip(".")
    code = f"import sys; sys.path[:0] = [{str(path)!r}, {str(package.parent)!r}]; import {name}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["loopkit_recipes", "loopkit_monitor", "loopkit_wandb", "loopkit_files"])
@pytest.mark.parametrize("there", ["nothing", "other library", "folder of a clone"])
def test_distribution_without_loopkit_engine_says_what_to_type(name, there, tmp_path):
    package = next(each for each in PACKAGES if each.name == name)
    if there == "other library":
        (tmp_path / "loopkit").mkdir()
        (tmp_path / "loopkit/__init__.py").write_text("class Controller: ...\n")
    elif there == "folder of a clone":
        (tmp_path / "loopkit/loopkit").mkdir(parents=True)
    line = imported(package, tmp_path)
    assert line.startswith(
        "ModuleNotFoundError: this needs loopkit-engine, and Python finds none, or another `loopkit`."
    )
    assert "pip uninstall loopkit, then pip install --force-reinstall --no-deps loopkit-engine" in line


def test_error_of_another_module_that_is_missing_stays(tmp_path):
    (tmp_path / "loopkit").mkdir()
    (tmp_path / "loopkit/__init__.py").write_text("import no_such_torch\n")
    package = next(each for each in PACKAGES if each.name == "loopkit_recipes")
    assert imported(package, tmp_path) == "ModuleNotFoundError: No module named 'no_such_torch'"
