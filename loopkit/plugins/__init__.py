"""The standard plugins, one concern a module."""

from __future__ import annotations

from typing import Any


def standard_set(given: list[Any]) -> list[Any]:
    return []
