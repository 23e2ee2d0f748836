"""Names and texts that an MLflow server takes, for any that a user can write."""

from __future__ import annotations

import hashlib
import posixpath
import re

__all__ = ["artifact_name", "clean", "name_for"]

LONGEST = 250
"""Characters of a metric's, parameter's or tag's name, as MLflow limits them."""
LONGEST_ARTIFACT = 120
DIGITS = 8


def name_for(name: str) -> str:
    """The name itself if MLflow takes it, else the nearest one that it takes; different names stay different.

    MLflow takes letters, digits, ``_ - . : /`` and spaces, 250 characters, and no path that could be written in another
    way. A name that is changed ends in 8 hexadecimal digits of its SHA-256.

    >>> name_for("val/loss")
    'val/loss'
    >>> name_for("recall@5")
    'recall_5-80191039'
    """
    if len(name) <= LONGEST and re.fullmatch(r"[\w.\- :/]+", name) and _is_plain(name):
        return name
    return _changed(name, r"[^\w.\- :/]", LONGEST)


def artifact_name(name: str) -> str:
    """The same for a part of an artifact's path: ASCII without spaces and colons, 120 characters."""
    if len(name) <= LONGEST_ARTIFACT and re.fullmatch(r"[\w.\-/]+", name, re.ASCII) and _is_plain(name):
        return name
    return _changed(name, r"[^A-Za-z0-9_.\-/]", LONGEST_ARTIFACT)


def clean(text: str) -> str:
    """The text without what a database cannot hold: NUL, and halves of surrogate pairs."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _is_plain(name: str) -> bool:
    return posixpath.normpath(name) == name and not name.startswith(("..", "/")) and name != "."


def _changed(name: str, refused: str, longest: int) -> str:
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    parts = [part for part in re.sub(refused, "_", name).split("/") if part.strip(".")]
    return f"{'/'.join(parts)[: longest - DIGITS - 1].rstrip('/') or 'unnamed'}-{digest}"
