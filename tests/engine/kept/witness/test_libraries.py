"""The packages that count as loopkit's own."""

from __future__ import annotations

from pathlib import Path

from loopkit.engine.kept.witness.libraries import SHIPPED, is_library

PLUGINS = Path(__file__).parents[4] / "plugins"


def test_shipped_packages_are_the_distributions_of_the_repository():
    folders = {path.parent.name.replace("-", "_") for path in PLUGINS.glob("*/pyproject.toml")}
    assert folders
    assert {"loopkit", *folders} == SHIPPED


def test_package_of_others_with_a_name_like_loopkits_is_none():
    assert is_library("loopkit_wandb.backend")
    assert not is_library("loopkit_grad_peak")
