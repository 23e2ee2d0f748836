"""undo: put back what a load has changed, if it fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loopkit.base.notes import add_note

Undo = Callable[[], None]
Undos = list[tuple[str, Undo]]
"""Each with a word for the thing that it puts back."""


@contextmanager
def undone_by(undos: Undos) -> Iterator[None]:
    """If the block fails, put back what it has changed, the last change first; the block adds to the list."""
    try:
        yield
    except BaseException as error:
        for what, put_back in reversed(undos):
            try:
                put_back()
            except Exception as second:
                add_note(error, f"{what} could not be put back as it was before the load: {second!r}")
        raise


def all_of(undos: Undos) -> Undo:
    """Return one undo of several; all are tried, and the first error is raised."""

    def undo() -> None:
        first: Exception | None = None
        for _, put_back in reversed(undos):
            try:
                put_back()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    return undo


def undo_of(owner: Any) -> Undo:
    """Return a function that puts a plugin or phase back into its state of now."""
    attributes = _undo_attributes(owner)
    try:
        before = copy.deepcopy(owner.state_dict())
    except Exception:  # it has none before the first fit
        return attributes

    def undo() -> None:
        try:
            owner.load_state_dict(before)  # what its parts hold
        finally:
            attributes()

    return undo


def _undo_attributes(owner: Any) -> Undo:
    """Return a function that gives an object its attributes of now."""
    attributes = getattr(owner, "__dict__", {})
    before = dict(attributes)

    def undo() -> None:
        attributes.clear()
        attributes.update(before)

    return undo
