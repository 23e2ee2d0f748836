"""The tests that ``--plugin-check`` runs."""

from __future__ import annotations

import functools
import json
from typing import Any

from loopkit.author import load_plugin
from loopkit.errors import PluginError
from loopkit_testing.case import Case
from loopkit_testing.contract import check_plugin
from loopkit_testing.declaration import declaration


def test_installed_plugin(given: str, promise: str) -> None:
    """Check that an installed plugin keeps a promise."""
    __tracebackhide__ = True
    name, _, options = given.partition("=")
    make = functools.partial(_made, name, json.loads(options or "{}"))
    if promise == "declaration":
        assert declaration(Case(make, name=name)) == []
    else:
        check_plugin(make, checks=[promise])


def _made(name: str, options: dict[str, Any]) -> Any:
    try:
        return load_plugin(name)(**options)
    except TypeError as error:
        raise PluginError(
            f"plugin {name!r} is not made with these options ({error}): give others, --plugin-check "
            f"'{name}={{\"option\": 1}}', or check it from a test, with plugin_contract(lambda: ..., name={name!r})"
        ) from error
