"""Words: the nearest spelling of a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a close spelling among ``known``, else an empty string."""
    close = get_close_matches(word, sorted(set(known)), n=1, cutoff=0.75)
    return f" (did you mean {close[0]!r}?)" if close else ""
