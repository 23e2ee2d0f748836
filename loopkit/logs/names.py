"""names: a name beside names below it, for logs that take a name for a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from loopkit.logs.record import Record


class Names:
    """The names in a log, and the other names under which it takes some of them.

    A log that keeps ``train/loss`` in a file cannot have a folder of that name for ``train/loss/step``. Such a name is
    written by itself when it is new; if that fails, it gets another name, such as ``train/loss.step``.

    Args:
        shown: The other names that a saved log has.
    """

    def __init__(self, shown: Mapping[str, str] | None = None) -> None:
        self.shown = dict(shown or {})
        self._seen: set[str] = set()
        self._above: set[str] = set()

    def parts(self, records: Sequence[Record]) -> Iterator[tuple[str, Sequence[Record]]]:
        """Yield the records in parts; a part that holds only the first record of a name in question has that name."""
        asked = self._meet(dict.fromkeys(record.name for record in records))
        if not asked:
            yield "", self._renamed(records)
            return
        part: list[Record] = []
        for record in records:
            if record.name not in asked:
                part.append(record)
                continue
            asked.discard(record.name)
            if part:
                yield "", self._renamed(part)
            part = []
            yield record.name, [record]
        if part:
            yield "", self._renamed(part)

    def rename(self, record: Record) -> Record:
        """Give a name that the log cannot take another one; return the record with it."""
        name = record.name
        above = next((each for each in _above(name) if each in self._seen), "")
        below = name[len(above) + 1 :].replace("/", ".")
        other = f"{above}.{below}" if above else f"{name}.value"
        self.shown[name] = other
        return Record(other, *record[1:])

    def _meet(self, names: Iterable[str]) -> set[str]:
        """Note names; return the new ones that lie above or below others."""
        asked = set()
        for name in names:
            if name in self._seen or name in self.shown:
                continue
            above = _above(name)
            if name in self._above or not self._seen.isdisjoint(above):
                asked.add(name)
            self._seen.add(name)
            self._above.update(above)
        return asked

    def _renamed(self, records: Sequence[Record]) -> Sequence[Record]:
        if not self.shown:
            return records
        return [Record(self.shown.get(name, name), *rest) for name, *rest in records]


def _above(name: str) -> list[str]:
    """List the names above a name: ``a`` and ``a/b`` of ``a/b/c``."""
    return [name[:index] for index, letter in enumerate(name) if letter == "/"]
