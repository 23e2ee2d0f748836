"""Root: something that the witness looks at."""

from __future__ import annotations

from typing import Any, NamedTuple

from loopkit.engine.kept.witness.looks import ATTRIBUTES, Leave, Scope


class Root(NamedTuple):
    """Something that a run consists of."""

    name: str
    """A description, such as ``"phase 'train'"``."""
    object: Any
    cure: str
    """How to save its attributes; ``{0}`` stands for their names, as a class writes them."""
    leave: Leave
    """Whether a value that it holds is saved, or is a root itself: then it is not looked at here."""
    written: frozenset[str] = frozenset()
    """Attributes of modules that a plugin owns, which writes them anew after a resume."""
    scope: Scope = ATTRIBUTES
    """How far to look."""
    state: tuple[str, str] | None = None
    """The part of a state, and the name in it, where its own ``state_dict`` stands, which may leave something out."""
