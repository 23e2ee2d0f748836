"""From declared access to an order, or to an error that names the conflict.

Per event: writers before updaters before readers of overlapping state; readers of ``"*"`` last, and of these a
plugin that saves (``provides = "checkpoint"``) at the very end. Two writers
or two updaters of the same state need an explicit order between them. An explicit order replaces the derived
one for its pair, and a chain that the user gives replaces the plugins' declarations. The rest is ordered
by name, so that the order in which plugins are listed never matters.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise, product

from loopkit.errors import OrderError
from loopkit.hooks import STATES

EVERYTHING = "*"
SAVER = "checkpoint"
"""The role of a plugin that saves the state: changes by plugins after it would be lost."""
BY_USER = "the order given to the learner"
WILDCARD = re.compile(r"[*?[\]]")


@dataclass(frozen=True)
class Entry:
    """The declarations of one plugin for one event."""

    plugin: str
    provides: str = ""
    reads: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    package: str = ""
    """The top package of the plugin's class: nobody else edits the declarations of loopkit's own."""

    def is_called(self, word: str) -> bool:
        """Whether ``word`` is the plugin's name or what it provides."""
        return word in (self.plugin, self.provides)


@dataclass(frozen=True)
class Placed:
    """An entry in its place, and why it stands there."""

    entry: Entry
    reasons: tuple[str, ...]
    """Each once, whatever number of other entries it comes from."""


def overlaps(one: str, other: str) -> bool:
    """Whether two state names meet: equal, or one is above the other. A part may be a pattern.

    >>> overlaps("optimizer", "optimizer.lr"), overlaps("loss", "outputs")
    (True, False)
    >>> overlaps("metrics.*/loss", "metrics.val/loss")
    True
    """
    pairs = zip(_parts(one), _parts(other), strict=False)
    return all(a == b or _match(a, b) for a, b in pairs)


def _parts(state: str) -> list[str]:
    """The parts of a name; ``metrics.<phase>/<metric>`` has three, so that the pattern of a phase ends with it."""
    parts = state.split(".")
    if parts[0] != "metrics" or len(parts) == 1:
        return parts
    root, metric, *rest = parts
    return [root, *metric.split("/", 1), *rest]


def _match(one: str, other: str) -> bool:
    """Whether one part is a pattern that the other matches, or both are, and can match the same text."""
    if not (WILDCARD.search(one) or WILDCARD.search(other)):
        return False
    return fnmatchcase(one, other) or fnmatchcase(other, one) or _both_match(one, other)


def _both_match(one: str, other: str) -> bool:
    """Whether two patterns, both with a wildcard, can match the same text: the text around the wildcards agrees."""
    a = WILDCARD.split(one)
    b = WILDCARD.split(other)
    if len(a) == 1 or len(b) == 1:
        return False
    starts = a[0].startswith(b[0]) or b[0].startswith(a[0])
    ends = a[-1].endswith(b[-1]) or b[-1].endswith(a[-1])
    return starts and ends


def arrange(entries: Sequence[Entry], chains: Sequence[Sequence[str]] = (), event: str = "event") -> list[Placed]:
    """Put the entries of one event in order.

    Args:
        entries: One per plugin, in any order.
        chains: Orders given by the user, each a sequence of plugin names or provided words.
        event: The hook's name, for messages.

    Raises:
        OrderError: Two plugins change the same state without an order between them, or there is a cycle.
    """
    if len(entries) < 2:
        return [Placed(entry, ()) for entry in entries]
    entries = sorted(entries, key=lambda entry: entry.plugin)
    links = _explicit(entries, chains)
    settled = _closure(len(entries), links)
    for i, one in enumerate(entries):
        for j in range(i + 1, len(entries)):
            if (i, j) in settled or (j, i) in settled:
                continue
            other = entries[j]
            clash = _clash(one, other)
            if clash:
                raise OrderError(_ambiguous(one, other, clash, event))
            reason = _reason_before(one, other)
            if reason:
                links[i, j] = reason
            reason = _reason_before(other, one)
            if reason:
                links[j, i] = reason
    return _sort(entries, links, event)


Links = dict[tuple[int, int], str]
"""Reasons by pair: ``links[i, j]`` is why entry i comes before entry j."""


def _explicit(entries: Sequence[Entry], chains: Sequence[Sequence[str]]) -> Links:
    """The links that the user's chains and the plugins' ``before`` and ``after`` give."""
    links = _chained(entries, chains)
    chained = _closure(len(entries), links)
    for i, entry in enumerate(entries):
        for j, other in enumerate(entries):
            if i == j or (i, j) in chained or (j, i) in chained:
                continue
            if any(other.is_called(word) for word in entry.before):
                links[i, j] = f"{entry.plugin!r} says before {other.plugin!r}"
            if any(other.is_called(word) for word in entry.after):
                links[j, i] = f"{entry.plugin!r} says after {other.plugin!r}"
    return links


def _chained(entries: Sequence[Entry], chains: Sequence[Sequence[str]]) -> Links:
    """The links that the user's chains give."""
    links: Links = {}
    for chain in chains:
        before: list[int] = []
        for word in chain:
            called = [i for i, entry in enumerate(entries) if entry.is_called(word)]
            for i in before:
                for j in called:
                    if i != j:
                        links[i, j] = BY_USER
            before += called
    return links


def _closure(size: int, links: Links) -> set[tuple[int, int]]:
    """Every pair that is connected by a path of links."""
    reach: list[set[int]] = [set() for _ in range(size)]
    for i, j in links:
        reach[i].add(j)
    for middle in range(size):
        for start in range(size):
            if middle in reach[start]:
                reach[start] |= reach[middle]
    return {(i, j) for i in range(size) for j in reach[i]}


def _clash(one: Entry, other: Entry) -> str:
    """``"update 'grads'"`` if both change the same state in the same way, else an empty string."""
    ways = (("write", one.writes, other.writes), ("update", one.updates, other.updates))
    for how, mine, theirs in ways:
        for a, b in product(mine, theirs):
            if overlaps(a, b) and EVERYTHING not in (a, b):
                longer = max(a, b, key=len)
                return f"{how} {longer!r}"
    return ""


def _reason_by_everything(first: Entry, second: Entry) -> str:
    """Why ``first`` runs before ``second``, where one of them reads or writes everything, or an empty string."""
    if EVERYTHING in second.reads and EVERYTHING not in first.reads:
        return f"{second.plugin!r} reads everything"
    if EVERYTHING in second.reads and second.provides == SAVER and first.provides != SAVER:
        return f"{second.plugin!r} saves what was done by then"
    if EVERYTHING in first.writes and EVERYTHING not in second.writes:
        return f"{first.plugin!r} writes everything"
    return ""


def _reason_before(first: Entry, second: Entry) -> str:
    """Why ``first`` runs before ``second`` by access, or an empty string."""
    reason = _reason_by_everything(first, second)
    if reason:
        return reason
    # Others can declare a plugin's name or role as a state, unless that word is a state already, as "metrics" is.
    own_states = tuple(word for word in (first.plugin, first.provides) if word and word not in STATES)
    changed = second.updates + second.writes
    # A read of a state that the plugin also changes does not count: two such plugins would each come after the other.
    reads = [("reads", name) for name in second.reads if not any(_covers(state, name) for state in changed)]
    updates = [("updates", name) for name in second.updates]
    found = _first_overlap(first.writes + own_states, [*updates, *reads])
    how = "writes"
    if found is None:
        found = _first_overlap(first.updates, reads)
        how = "updates"
    if found is None:
        return ""
    state, word, name = found
    return f"{first.plugin!r} {how} {state!r}, {second.plugin!r} {word} {name!r}"


def _first_overlap(states: Iterable[str], uses: list[tuple[str, str]]) -> tuple[str, str, str] | None:
    """The first of the states that a use overlaps, with the word and the name of that use."""
    for state in states:
        for word, name in uses:
            if name != EVERYTHING and overlaps(state, name):
                return state, word, name
    return None


def _covers(above: str, below: str) -> bool:
    return below == above or below.startswith(above + ".")


def _ambiguous(one: Entry, other: Entry, clash: str, event: str) -> str:
    return (
        f"{event}: plugins {one.plugin!r} and {other.plugin!r} both {clash}, and nothing says which comes first. "
        f'Give the learner order=["{one.plugin}", "{other.plugin}"] (or the reverse){_declaration(one, other)}'
    )


def _declaration(one: Entry, other: Entry) -> str:
    """The declaration for a plugin that is the reader's to change; empty if loopkit ships both."""
    from loopkit.found.discovery import HOMES

    shipped = {"loopkit", *(home.replace("-", "_") for home in HOMES)}
    if one.package in shipped and other.package in shipped:
        return ""
    own = one
    shown = other
    if one.package in shipped:
        own = other
        shown = one
    word = shown.plugin
    return f', or declare before=("{word}",) or after=("{word}",) in {own.plugin!r}'


def _sort(entries: Sequence[Entry], links: Links, event: str) -> list[Placed]:
    """Sort topologically, by name where the order is free."""
    waits = {i: {a for a, b in links if b == i} for i in range(len(entries))}
    ready = [(entries[i].plugin, i) for i, earlier in waits.items() if not earlier]
    heapq.heapify(ready)
    placed: list[Placed] = []
    while ready:
        _, i = heapq.heappop(ready)
        del waits[i]
        reasons = dict.fromkeys(links[a, i] for a in range(len(entries)) if (a, i) in links)
        placed.append(Placed(entries[i], tuple(reasons)))
        for j, earlier in waits.items():
            if i not in earlier:
                continue
            earlier.remove(i)
            if not earlier:
                heapq.heappush(ready, (entries[j].plugin, j))
    if waits:
        raise OrderError(_cycle(entries, links, waits, event))
    return placed


def _cycle(entries: Sequence[Entry], links: Links, waits: dict[int, set[int]], event: str) -> str:
    """Walk backwards from any waiting entry until one repeats; that stretch is a cycle."""
    path = [min(waits)]
    while True:
        previous = min(waits[path[-1]])
        if previous in path:
            cycle = [previous, *reversed(path[path.index(previous) :])]
            break
        path.append(previous)
    steps = "; ".join(links[a, b] for a, b in pairwise(cycle))
    names = " -> ".join(repr(entries[i].plugin) for i in cycle)
    fix = "Remove one of them from order=[...]"
    for a, b in pairwise(cycle):
        if links[a, b] != BY_USER:
            turned = f'["{entries[b].plugin}", "{entries[a].plugin}"]'
            fix = f"Remove one of these declarations, or give the learner order={turned} to turn one round"
            break
    return f"{event}: the order of the plugins is a cycle, {names}: {steps}. {fix}"
