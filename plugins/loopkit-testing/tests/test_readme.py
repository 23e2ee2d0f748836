"""The README's programs run, and print what it shows."""

from pathlib import Path

import torch
from pages import run_page


def test_readme_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")
