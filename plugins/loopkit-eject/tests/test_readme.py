"""The README's code runs, and prints what it shows."""

from pathlib import Path

from project.test_docs import run_page

README = Path(__file__).parent.parent / "README.md"


def test_code_runs_and_prints_what_the_page_shows(isolated):
    run_page(README)
