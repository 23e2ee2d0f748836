"""The README's program runs, and prints what it shows."""

from pathlib import Path

import torch
from pages import run_page


def test_readme_prints_what_it_shows():
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")
