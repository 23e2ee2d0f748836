"""The tutorials: their scripts and notebooks are their pages, and run. The pictures of docs/pictures.md."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `docs` has it")

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("tutorial*.md"))


def imported(name: str) -> ModuleType:
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """docs/make_tutorials.py."""
    return imported("make_tutorials")


def written(page: Path, suffix: str) -> Path:
    return ROOT / "examples" / f"{page.stem.replace('-', '_')}{suffix}"


def test_pictures_are_those_of_the_page_and_small() -> None:
    made = imported("make_pictures")
    assert made.PAGE.read_text() == made.page()
    pictures = {*ROOT.glob("docs/images/*.svg"), *ROOT.glob("docs/images/monitor-*.png")}
    recorded = {"resume.svg"}  # by make_recording.py, for the README
    assert {path.name for path in pictures} == recorded.union(re.findall(r"\(images/(.*?)\)", made.page()))
    assert max(path.stat().st_size for path in pictures) < 100_000


def test_there_are_three_tutorials() -> None:
    assert len(PAGES) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_script_is_the_code_of_its_page(page: Path, maker: ModuleType) -> None:
    assert written(page, ".py").read_text() == maker.script(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_notebook_has_the_cells_of_its_page_and_what_they_print(page: Path, maker: ModuleType) -> None:
    shown = nbformat.read(written(page, ".ipynb"), as_version=4)
    assert [cell.source for cell in shown.cells] == [cell.source for cell in maker.notebook(page).cells]
    assert all(cell.execution_count for cell in shown.cells if cell.cell_type == "code")
    assert any(cell.outputs for cell in shown.cells if cell.cell_type == "code")


@pytest.mark.slow  # a kernel each
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_notebook_runs(page: Path, maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix, "share", "jupyter")))
    made = maker.notebook(page)
    maker.execute(made, tmp_path)
    assert any(cell.outputs for cell in made.cells if cell.cell_type == "code")
