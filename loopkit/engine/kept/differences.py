"""Differences between a state and a learner, in words."""

from __future__ import annotations

from collections.abc import Collection

from loopkit.base.words import nearest, some


def first(what: str, items: list[str], most: int = 5) -> list[str]:
    """One line that counts items and lists the first of them; nothing if there are none."""
    if not items:
        return []
    return [f"{len(items)} {what}: {some(items, most)}"]


def names(what: str, saved: Collection[str], own: Collection[str]) -> list[str]:
    """Lines that list the names in the state only, with the nearest here, and the names in the learner only."""
    missing = [f"{name!r}{nearest(name, own)}" for name in saved if name not in own]
    extra = [repr(name) for name in own if name not in saved]
    return first(f"{what} in the state that are not here", missing) + first(
        f"{what} here that are not in the state", extra
    )
