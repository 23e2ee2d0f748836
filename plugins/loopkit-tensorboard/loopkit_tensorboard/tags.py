"""Tags: the names that TensorBoard shows."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Collection

__all__ = ["LONGEST", "tag_of"]

LONGEST = 200
"""Characters of a name that are kept."""
RESERVED = "_hparams_/"
"""Tags that begin so are the hyperparameters'."""
UNSHOWN = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode's categories of control characters, halves of characters and line ends."""


def tag_of(phase: str, name: str, phases: Collection[str] = ()) -> str:
    """The tag of a name in a phase; TensorBoard groups tags by the part before the first "/".

    The phase comes first, unless the name begins with a phase already. Characters that cannot be shown give way to "_",
    and a name is cut after 200 characters; a digest of the name then keeps different names apart.

    Args:
        phase: Empty outside of an epoch.
        name: Any text.
        phases: The names of the other phases.

    >>> tag_of("train", "loss"), tag_of("val", "val/loss"), tag_of("", "lr")
    ('train/loss', 'val/loss', 'lr')
    >>> tag_of("train", "two\\nlines")
    'train/two_lines~9ce3c20c'
    """
    begin, slash, _ = name.partition("/")
    full = name if not phase or (slash and (begin == phase or begin in phases)) else f"{phase}/{name}"
    shown = "".join(["_" if unicodedata.category(character) in UNSHOWN else character for character in full])
    if shown == full and len(full) <= LONGEST and not full.startswith(RESERVED):
        return full
    digest = hashlib.sha256(full.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{shown[:LONGEST].lstrip('_')}~{digest}"
