"""A plugin of pytest: run installed plugins through the contract, by name.

``pytest -p loopkit_testing.installed --plugin-check NAME``, or ``NAME={"option": 1}`` with options as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SUITE = Path(__file__).parent / "installed_suite.py"


def pytest_addoption(parser: Any) -> None:
    """Take names of plugins."""
    parser.addoption(
        "--plugin-check",
        action="append",
        default=[],
        metavar="NAME[={...}]",
        help="check this installed loopkit plugin, made with these options, and run no other tests; repeatable",
    )


def pytest_configure(config: Any) -> None:
    """Run only the contract suite, if plugins are named."""
    if config.getoption("plugin_check"):
        config.args[:] = [str(SUITE)]


def pytest_generate_tests(metafunc: Any) -> None:
    """One test for each plugin and check."""
    from loopkit_testing.checks import CHECKS

    if Path(str(metafunc.definition.path)) == SUITE:
        names = metafunc.config.getoption("plugin_check")
        promises = ("declaration", *CHECKS)
        cases = [(name, promise) for name in names for promise in promises]
        metafunc.parametrize(
            ("given", "promise"), cases, ids=["-".join((name.partition("=")[0], promise)) for name, promise in cases]
        )
