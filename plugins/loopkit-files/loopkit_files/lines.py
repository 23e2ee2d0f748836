"""The line of each key of a TOML text, which `tomllib` does not give."""

from __future__ import annotations

import tomllib
from bisect import bisect_right

__all__ = ["Place", "line_numbers"]

Place = tuple[str | int, ...]
"""The keys, and indices of arrays, that lead to a value: ``("data", "train", "call")``."""

BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def line_numbers(text: str) -> dict[Place, int]:
    """The line, from 1, where each table, key and item of an array first stands.

    Args:
        text: A valid document: one that ``tomllib.loads`` accepts.

    >>> line_numbers("[model]\\ncall = 'a:b'\\nsizes = [\\n  1,\\n  2,\\n]")[("model", "sizes", 1)]
    5
    """
    scan = _Scan(text)
    scan.document()
    return scan.found


class _Scan:
    """Walks over a valid document once; the parser has checked it before."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.found: dict[Place, int] = {}
        self._newlines = [i for i, character in enumerate(text) if character == "\n"]
        self._tables: dict[Place, int] = {}
        """How many tables each array of tables has so far."""

    def document(self) -> None:
        table: Place = ()
        while self._skip(" \t\r\n"):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Place:
        """``[a.b]`` or ``[[a.b]]``; names below an array of tables belong to its last table."""
        start = self.at
        double = self.text.startswith("[[", self.at)
        self.at += 2 if double else 1
        *above, last = self._key("]")
        self.at += 2 if double else 1
        place: Place = ()
        for name in above:
            place = self._note((*place, name), start)
            if place in self._tables:
                place = (*place, self._tables[place] - 1)
        place = self._note((*place, last), start)
        if double:
            self._tables[place] = self._tables.get(place, 0) + 1
            place = self._note((*place, self._tables[place] - 1), start)
        return place

    def _pair(self, table: Place) -> None:
        start = self.at
        place = table
        for name in self._key("="):
            place = self._note((*place, name), start)
        self.at += 1
        self._skip(" \t")
        self._value(place)

    def _key(self, end: str) -> list[str]:
        """The parts of a dotted key, up to the character that ends it."""
        parts: list[str] = []
        while True:
            self._skip(" \t.")
            start = self.at
            character = self.text[start]
            if character == end:
                return parts
            if character in "\"'":
                self._string()
                parts.append(tomllib.loads(f"key = {self.text[start : self.at]}")["key"])
            else:
                while self.text[self.at] in BARE:
                    self.at += 1
                parts.append(self.text[start : self.at])

    def _value(self, place: Place) -> None:
        character = self.text[self.at]
        if character in "\"'":
            self._string()
        elif character == "[":
            self.at += 1
            index = 0
            while self._skip(" \t\r\n,") and self.text[self.at] != "]":
                self._note((*place, index), self.at)
                self._value((*place, index))
                index += 1
            self.at += 1
        elif character == "{":
            self.at += 1
            while self._skip(" \t\r\n,") and self.text[self.at] != "}":
                self._pair(place)
            self.at += 1
        else:
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def _string(self) -> None:
        quote = self.text[self.at]
        end = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.at += len(end)
        while not self.text.startswith(end, self.at):
            self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
        self.at += len(end)
        if len(end) == 3:  # the last three of up to five quotes end it
            while self.text.startswith(quote, self.at):
                self.at += 1

    def _skip(self, characters: str) -> bool:
        """Skip these characters and, where lines may end, comments; returns False at the end."""
        while self.at < len(self.text):
            if self.text[self.at] == "#" and "\n" in characters:
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text[self.at] in characters:
                self.at += 1
            else:
                return True
        return False

    def _note(self, place: Place, at: int) -> Place:
        self.found.setdefault(place, 1 + bisect_right(self._newlines, at - 1))
        return place
