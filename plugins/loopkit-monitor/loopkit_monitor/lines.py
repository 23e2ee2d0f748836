"""The lines of a log, many at a time.

Nearly all lines of a long log are scalars in the one form that `loopkit.logs.JsonLines` writes. To read a million of
them with `json` takes seconds; here they are compared with a pattern and their digits are added up by numpy, in a
fraction of that. What has any other form is left to `json`. The values are the same to the last bit.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lines", "Points", "latest", "parse", "parse_line"]

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TAIL = 112
"""Bytes at the end of a line in which phase, epoch, step, update and time have to be."""
HEAD = 128
"""Bytes at its beginning in which the name has to be."""
VALUE = 24
"""Bytes in which its value has to be, and the space before it."""
ROOM = TAIL + VALUE + 4
"""Bytes before the end of a line that are looked at."""
DEEPEST = 50
"""Lists and objects in each other that a line may have."""
REGULAR_TAIL = re.compile(
    rb', "phase": ("(?:[^"\\\x00-\x1f\x80-\xff]|\\["\\/bfnrt])*"), '
    rb'"epoch": (0|[1-9]\d{0,14}), "step": (0|[1-9]\d{0,14}), "update": (0|[1-9]\d{0,14}), '
    rb'"time": ([1-9]\d{9})\.(\d{3})\}'
)
REGULAR_HEAD = re.compile(rb'\{"name": ("[^\x00-\x1f\x80-\xff]*"), "value": ')
NAME_BEGINS, NAME_ENDS = b'{"name": "', b'", "'
SHORTEST_HEAD = len(b'{"name": "", "value": ')
NUMBER = re.compile(rb"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
NAMED = {b'"nan"': float("nan"), b'"inf"': float("inf"), b'"-inf"': float("-inf")}
MOST_FORMS = 64
"""Forms of lines that are tried in one piece of a log."""
FACTORS = np.random.default_rng(0).integers(2**64, size=HEAD // 8, dtype=np.uint64) | np.uint64(1)
"""That make one word of the words of a name."""
SLOT_BITS, SLOT_TRIES = 12, 5
"""Names are told apart by so many bits of that word, and how often that is tried, each time with others."""


def _each_byte(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


def _kept(kept: NDArray[np.bool_]) -> Words:
    """Words by column, then row, that keep some bytes of each row."""
    return np.ascontiguousarray(np.where(kept, 0xFF, 0).astype(np.uint8).view(np.uint64).T)


FIRST = _kept(np.arange(HEAD) < np.arange(HEAD + 1)[:, None])
"""Words that keep so many bytes at the beginning."""
LAST = _kept(np.arange(VALUE) >= VALUE - np.arange(VALUE + 1)[:, None])
"""Words that keep so many bytes at the end."""
ZEROS, ABOVE_NINE, HIGH, LOW = map(_each_byte, (0x30, 0x76, 0x80, 0x7F))
TO_BITS = np.uint64(0x0002040810204081)
"""A factor that brings the highest bits of eight bytes together in the highest byte."""
EXPONENT = np.uint64(0x7FF << 52)
POWERS = np.array([float(10**k) for k in range(40)])
"""Of ten; what they lack is the next, and their bits in halves are the last two."""
POWERS_REST = np.array([float(10**k - int(float(10**k))) for k in range(40)])
SPLIT = 2.0**27 + 1
POWERS_UPPER = POWERS * SPLIT - (POWERS * SPLIT - POWERS)
POWERS_LOWER = POWERS - POWERS_UPPER
SPECIAL = ("nan", "inf", "-inf")
PHASES = {"train", "val", "test"}
"""A name that begins with one of these, or with the phase that logs it, says itself whose it is."""
SHARED = {"lr", "resources", "run"}
"""What begins so is of the whole run, whichever phase logs it."""


@dataclass(frozen=True)
class Points:
    """Scalars of one curve, in the order of the log."""

    phase: str
    step: Ints
    value: Floats
    time: Floats


@dataclass
class Lines:
    """What some lines say."""

    points: dict[str, Points] = field(default_factory=dict)
    """By the name of the curve."""
    others: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    """Objects that are no scalars: where the line begins, its length, and what it says."""
    foreign: int = 0
    """Lines that are none of a log."""
    step: int = 0
    """Where the last scalar was logged."""
    epoch: int = 0
    time: float = 0.0


def parse(data: bytes, most_names: int = 10_000, phases: Mapping[str, str] | None = None) -> Lines:
    """Read whole lines.

    Where several phases log the same name, the first of them has the curve of that name; those of the others are called
    ``phase/name``.

    Args:
        data: Lines, each with its end.
        most_names: Scalars of more names than that are left out, counted as foreign.
        phases: The phase of each curve in the lines before these.
    """
    made = Lines()
    ends = _line_ends(np.frombuffer(data, np.uint8))
    if not len(ends):
        return made
    starts = np.concatenate(([0], ends[:-1] + 1))
    groups, slow = _regular(data, starts, ends)
    for index in slow:
        start, end = int(starts[index]), int(ends[index])
        said = parse_line(data[start:end])
        group = None if said is None else _scalar(index, said)
        if group is not None:
            groups.append(group)
        elif said is not None and _is_other(said):
            made.others.append((start, end - start, said))
        else:
            made.foreign += end > start
    _collect(groups, made, dict(phases or {}))
    for name in list(made.points)[most_names:]:
        made.foreign += len(made.points.pop(name).step)
    return made


def latest(data: bytes) -> Lines:
    """Read of whole lines only the last of each name, and all with which a fit begins or ends.

    Args:
        data: Lines, each with its end.

    Returns:
        What `parse` says last of each name, in whichever phase; foreign lines are not counted.
    """
    made = Lines()
    groups: list[Group] = []
    seen: set[bytes] = set()
    lines = data.split(b"\n")[:-1]
    start = len(data)
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        start -= len(line) + 1
        key = line[: line.find(NAME_ENDS) + len(NAME_ENDS) + 1]
        if key in seen:
            continue
        said = parse_line(line)
        if said is None:
            continue
        if key.startswith(NAME_BEGINS) and b"\\" not in key:
            seen.add(key)
        if (group := _scalar(index, said)) is not None:
            groups.append(group)
        elif _is_other(said):
            made.others.append((start, len(line), said))
    made.others.reverse()
    _collect(groups, made)
    return made


def parse_line(line: bytes) -> dict[str, Any] | None:
    """What one line says, or None if it is none of a log."""
    try:
        said = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or (line.count(b"[") + line.count(b"{") > DEEPEST and _depth(said) > DEEPEST):
        return None
    return said


def _depth(said: Any) -> int:
    """How many lists and objects are in each other."""
    depth, level = 0, [said]
    while level:
        depth += 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
    return depth


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _scalar(index: int, said: dict[str, Any]) -> Group | None:
    """A group of one line, if it is a scalar."""
    name, value, phase = said.get("name"), said.get("value"), said.get("phase", "")
    epoch, step, time = (said.get(key, 0) for key in ("epoch", "step", "time"))
    if said.get("kind", "value") != "value" or not isinstance(name, str) or not isinstance(phase, str):
        return None
    if isinstance(value, str):
        value = float(value) if value in SPECIAL else None
    if not all(type(number) is int and 0 <= number < 2**53 for number in (epoch, step)):
        return None
    if type(value) not in (int, float) or type(time) not in (int, float):
        return None
    try:
        numbers = np.array([value], np.float64), np.array([time], np.float64)
    except OverflowError:  # an integer that is no float
        return None
    return Group(name, phase, epoch, np.array([index]), np.array([step]), *numbers)


def _is_other(said: dict[str, Any]) -> bool:
    kind = said.get("kind")
    return isinstance(kind, str) and kind != "value" and (kind in ("run", "end") or isinstance(said.get("name"), str))


# ------------------------------------------------------------------------------------------------------- regular lines


class Group(NamedTuple):
    """Lines of one name and one form."""

    name: str
    phase: str
    epoch: int
    """That of the last line."""
    at: Ints
    """Which lines."""
    step: Ints
    value: Floats
    time: Floats


def _line_ends(text: Bytes) -> Ints:
    """Where lines end."""
    found = text == 10
    eights = len(text) // 8
    words = found[: 8 * eights].view(np.uint64)
    at = np.flatnonzero(words != 0)
    bits = words[at]
    if (bits & (bits - np.uint64(1))).any():  # two ends within eight bytes
        return np.flatnonzero(found)
    return np.concatenate((at * 8 + (_highest_bit(bits) >> 3), 8 * eights + np.flatnonzero(found[8 * eights :])))


def _windows(data: bytes, width: int, begin: Ints) -> Words:
    """Bytes of the data, in rows of words."""
    every = np.ndarray(len(data) - width + 1, f"V{width}", data, 0, (1,))
    return every[begin].view(np.uint64).reshape(-1, width // 8)


def _column(rows: Words, begin: int) -> Words:
    """Eight bytes of each row."""
    return np.ndarray(len(rows), np.uint64, rows, begin, (rows.itemsize * rows.shape[1],)).copy()


def _regular(data: bytes, starts: Ints, ends: Ints) -> tuple[list[Group], list[int]]:
    """Read the lines that have the usual form; returns the indices of the others, too."""
    # What is looked at of a line must not reach beyond the data.
    low, high = int(np.searchsorted(ends, ROOM)), int(np.searchsorted(starts, len(data) - HEAD, "right"))
    groups: list[Group] = []
    if low >= high:
        return groups, list(range(len(ends)))
    slow = [*range(low), *range(high, len(ends))]
    left = np.arange(low, high)
    for _ in range(MOST_FORMS):
        if not len(left):
            break
        start, end = int(starts[left[0]]), int(ends[left[0]])
        place = data.rfind(b', "phase": "', start, end)
        match = REGULAR_TAIL.fullmatch(data, place, end) if place >= 0 and end - place <= TAIL else None
        if match is None:
            slow.append(int(left[0]))
            left = left[1:]
            continue
        width = -(-(VALUE + end - place) // 8) * 8
        rows = _windows(data, width, ends[left] - width)
        spans = [(width - end + low, width - end + high) for low, high in map(match.span, range(2, 7))]
        fits = _like(rows, data[place:end], spans)
        mine, like = (left, rows) if fits.all() else (left[fits], rows[fits])
        good = np.ones(len(mine), bool)
        for low, high in spans[:4]:
            if high - low > 1:
                good &= like.view(np.uint8)[:, low] != 48  # a number that begins with 0 is none
        step, whole, thousandths = (_number(like, *spans[field]) for field in (1, 3, 4))
        time = (whole * 1000 + thousandths) / 1000.0
        columns = [_column(like, width - (end - place) - VALUE + 8 * word) for word in range(VALUE // 8)]
        begin, value = _values(data, columns, starts[mine], ends[mine] - (end - place), good)
        names, order = _names(data, starts[mine], begin, good)
        slow += mine[~good].tolist()
        phase = json.loads(match[1])
        at, step, value, time = mine[order], step[order], value[order], time[order]
        for name, low, high in names:
            epoch = int(like.view(np.uint8)[order[high - 1], slice(*spans[0])].tobytes())
            groups.append(Group(name, phase, epoch, at[low:high], step[low:high], value[low:high], time[low:high]))
        left = left[~fits]
    return groups, sorted(slow + left.tolist())


def _collect(groups: list[Group], made: Lines, phases: dict[str, str] | None = None) -> None:
    """Put the groups of lines together by name, in the order of the lines; with phases, by curve."""
    by_name: dict[str, list[Group]] = {}
    for group in sorted(groups, key=lambda group: int(group.at[0])):
        name = group.name if phases is None else _curve(group, phases)
        by_name.setdefault(name, []).append(group)
    for name, mine in by_name.items():
        last = max(mine, key=lambda group: int(group.at[-1]))
        phase = last.phase or (phases or {}).get(name, "")
        if len(mine) == 1:
            made.points[name] = Points(phase, last.step, last.value, last.time)
            continue
        at, *columns = (np.concatenate(column) for column in zip(*(group[3:] for group in mine), strict=True))
        order = np.argsort(at, kind="stable")
        made.points[name] = Points(phase, *(column[order] for column in columns))
    if groups:
        latest = max(groups, key=lambda group: int(group.at[-1]))
        made.step, made.epoch, made.time = int(latest.step[-1]), latest.epoch, float(latest.time[-1])


def _curve(group: Group, phases: dict[str, str]) -> str:
    """The name of the curve that a group belongs to; notes the first phase of each name."""
    name, phase = group.name, group.phase
    first = phases[name] = phases.get(name) or phase
    if phase in ("", first):
        return name
    begin, slash, _ = name.partition("/")
    own = begin in SHARED or (slash and (begin in PHASES or begin in (phase, first)))
    return name if own else f"{phase}/{name}"


def _like(rows: Words, tail: bytes, spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which rows end as a given one does, with other digits in the spans."""
    width = 8 * rows.shape[1]
    pattern = np.frombuffer(tail.rjust(width, b"\0"), np.uint8).copy()
    same = np.where(np.arange(width) >= width - len(tail), 0xFF, 0).astype(np.uint8)
    six, digits, zero = np.zeros((3, width), np.uint8)
    for low, high in spans:
        pattern[low:high], same[low:high] = 0x30, 0xF0
        six[low:high], digits[low:high], zero[low:high] = 6, 0xF0, 0x30
    patterns, sames, sixes, highs, zeros = (each.view(np.uint64) for each in (pattern, same, six, digits, zero))
    differs = np.zeros(len(rows), np.uint64)
    for word in range((width - len(tail)) // 8, width // 8):
        column = rows[:, word].copy()
        if highs[word]:  # 0x30 to 0x39, and not up to 0x3f
            more = column + sixes[word]
            more &= highs[word]
            more ^= zeros[word]
            differs |= more
        column ^= patterns[word]
        column &= sames[word]
        differs |= column
    same_rows: NDArray[np.bool_] = differs == 0
    return same_rows


def _number(rows: Words, low: int, high: int) -> Ints:
    """Integers from their digits, at most 16, which are between two columns of bytes."""
    count = high - low
    words = _eight_digits(_column(rows, high - 8) & np.uint64(2**64 - 2 ** (64 - 8 * min(count, 8))))
    if count > 8:
        more = _column(rows, high - 16) & np.uint64(2**64 - 2 ** (128 - 8 * count))
        words += _eight_digits(more) * np.uint64(10**8)
    return words.view(np.int64)


def _eight_digits(words: Words) -> Words:
    """The number that eight characters say, of each word."""
    words = words & np.uint64(0x0F0F0F0F0F0F0F0F)
    for factor, shift, mask in (
        (2561, 8, 0x00FF00FF00FF00FF),
        (6553601, 16, 0x0000FFFF0000FFFF),
        (42949672960001, 32, 2**64 - 1),
    ):
        words *= np.uint64(factor)
        words >>= np.uint64(shift)
        words &= np.uint64(mask)
    return words


def _highest_bit(bits: Words) -> Ints:
    """The number of the highest bit, of words that floats round down; below 0 if there is none."""
    return (bits.astype(np.float64).view(np.int64) >> 52) - 1023


def _last_place(columns: list[Words], byte: int) -> Ints:
    """In which column of bytes a byte is for the last time in each row; below 0 if it is in none."""
    found = np.zeros(len(columns[0]), np.uint64)
    for place, column in enumerate(columns):
        other = column ^ _each_byte(byte)
        same = other & LOW
        same += LOW
        same |= other
        same &= HIGH
        same ^= HIGH  # the highest bit of each byte that is the same
        same *= TO_BITS
        same >>= np.uint64(56)
        same <<= np.uint64(8 * place)
        found |= same
    return _highest_bit(found)


def _values(
    data: bytes, columns: list[Words], starts: Ints, ends: Ints, good: NDArray[np.bool_]
) -> tuple[Ints, Floats]:
    """How many bytes of lines are before their values, and the values.

    Args:
        columns: The bytes before the values end.
        ends: Where the values end.
        good: Which lines are regular, as far as is known; those that are not are taken out of it.
    """
    length = VALUE - 1 - _last_place(columns, 32)
    begin = ends - length - starts
    good &= (length > 0) & (length < VALUE) & (begin >= SHORTEST_HEAD) & (begin <= HEAD)
    length[~good], begin[~good] = 1, SHORTEST_HEAD
    value, clear = _decimals(data, columns, ends, length)
    if clear.all():
        return begin, value
    odd = ~clear & good
    last = columns[-1] >> np.uint64(32)
    small = np.flatnonzero(odd & (last & np.uint64(0xF0F0FFFF) == np.uint64(0x30302D65)) & (length > 4))
    if len(small):  # e-05 and the like
        digits = last[small].astype(np.uint32).view(np.uint8).reshape(-1, 4)[:, 2:] & 15
        power = digits.astype(np.int64) @ np.array([10, 1])
        before = [column.copy() for column in _windows(data, VALUE, ends[small] - (VALUE + 4)).T]
        value[small], clear[small] = _decimals(data, before, ends[small] - 4, length[small] - 4, power)
    for index in np.flatnonzero(odd & ~clear).tolist():
        text = data[int(ends[index] - length[index]) : int(ends[index])]
        if text in NAMED:
            value[index] = NAMED[text]
        elif NUMBER.fullmatch(text):
            value[index] = float(text)
        else:
            good[index] = False
    return begin, value


def _decimals(
    data: bytes, columns: list[Words], ends: Ints, length: Ints, power: Ints | None = None
) -> tuple[Floats, NDArray[np.bool_]]:
    """The values of decimal fractions such as ``-0.25``, and which are such.

    Args:
        columns: The bytes before their ends.
        length: Of each, with its sign.
        power: Of ten, by which each is divided; by default, 0.
    """
    text = np.frombuffer(data, np.uint8)
    leading = text[ends - length]
    minus = leading == 45
    signed = bool(minus.any())
    count = length - minus if signed else length
    if signed:
        leading = text[ends - np.maximum(count, 1)]
    dot = _last_place(columns, 46)
    has_dot = dot >= VALUE - count
    after = np.where(has_dot, VALUE - 1 - dot, 0)
    whole = count - after - has_dot
    clear = (whole > 0) & ((whole == 1) | (leading != 48)) & (~has_dot | (after > 0))
    # A byte for each character, 0 to 9 if it is a digit; what is not of the number is 0. Those before the dot then
    # move over it. Words are little-endian: the next column is the next higher byte.
    rest = np.where(has_dot, after, VALUE)
    digits: list[Words] = []
    wrong = carried = np.zeros(len(length), np.uint64)
    for place, column in enumerate(columns):
        words = column ^ ZEROS
        words &= LAST[place][count]
        moved = words << np.uint64(8)
        moved |= carried
        carried = words >> np.uint64(56)
        kept = LAST[place][rest]
        words = ((words ^ moved) & kept) ^ moved
        wrong = wrong | (words + ABOVE_NINE) | words
        digits.append(_eight_digits(words))
    clear &= wrong & HIGH == 0
    divided = after if power is None else after + power
    clear &= (digits[0] < 100) & (divided < len(POWERS))
    number = (digits[0] * np.uint64(10**8) + digits[1]) * np.uint64(10**8) + digits[2]
    if not clear.all():
        number[~clear], divided = 0, np.where(clear, divided, 0)
    value, near = _quotient(number.view(np.int64), divided)
    clear &= ~near
    return np.where(minus, -value, value) if signed else value, clear


def _quotient(number: Ints, power: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """Integers below 2**62 by powers of ten, and which are too near the middle of two floats to be sure of."""
    high = number.astype(np.float64)
    low = (number - high.astype(np.int64)).astype(np.float64)
    divisor = POWERS[power]
    value = high / divisor
    # What is left, in twice as many bits: the product is exact in halves of 26 bits (Dekker 1971).
    scaled = value * SPLIT
    upper = scaled - (scaled - value)
    lower = value - upper
    product = value * divisor
    first, second = POWERS_UPPER[power], POWERS_LOWER[power]
    error = ((upper * first - product) + upper * second + lower * first) + lower * second
    rest = ((high - product) - error + low - value * POWERS_REST[power]) / divisor
    made = value + rest
    off = np.abs((value - made) + rest)
    middle = (made.view(np.uint64) & EXPONENT).view(np.float64) * 2.0**-53  # half of the way to the next float
    # Below a power of two, floats are twice as near.
    near: NDArray[np.bool_] = (off > 0.9999 * middle) | (np.abs(off - 0.5 * middle) < 0.0001 * middle)
    return made, near


def _names(data: bytes, starts: Ints, begin: Ints, good: NDArray[np.bool_]) -> tuple[list[tuple[str, int, int]], Ints]:
    """The lines of each name; those in which none can be read are taken out of ``good``.

    Args:
        begin: How many bytes are before the value.

    Returns:
        Names, each with the first and the end of its part of the indices that come with them.
    """
    names: list[tuple[str, int, int]] = []
    left = np.flatnonzero(good)
    if not len(left):
        return names, left
    indices: list[Ints] = []
    length = begin[left]
    words = -(-int(length.max()) // 8)
    rows, heads = _windows(data, 8 * words, starts[left]), np.empty((words, len(left)), np.uint64)
    key = np.zeros(len(left), np.uint64)
    for word, head in enumerate(heads):
        np.bitwise_and(rows[:, word], FIRST[word][length], out=head)
        key += head * FACTORS[word]
    key ^= key >> np.uint64(32)
    key *= FACTORS[0]
    done = 0
    for attempt in range(SLOT_TRIES):
        if not len(left):
            break
        slot = (key >> np.uint64(64 - SLOT_BITS * (attempt + 1))).astype(np.uint16) & np.uint16(2**SLOT_BITS - 1)
        order = np.argsort(slot, kind="stable")
        sizes = np.bincount(slot)
        sizes = sizes[sizes > 0]
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        first = order[bounds[:-1]]
        group = np.empty(len(left), np.int64)
        group[order] = np.repeat(np.arange(len(first)), sizes)
        differs = np.zeros(len(left), np.uint64)
        for head in heads:
            differs |= head ^ head[first][group]
        same = differs[order] == 0
        members = left[order]
        if not same.all():
            bounds = np.concatenate(([0], np.cumsum(same)))[bounds]
            members = members[same]
        for low, high in itertools.pairwise(bounds.tolist()):
            start = int(starts[members[low]])
            match = REGULAR_HEAD.fullmatch(data, start, start + int(begin[members[low]]))
            try:
                name = json.loads(match[1]) if match else None
            except ValueError:
                name = None
            if isinstance(name, str):
                names.append((name, done + low, done + high))
            else:
                good[members[low:high]] = False
        indices.append(members)
        done += len(members)
        rest = np.sort(order[~same])
        left, heads, key = left[rest], heads[:, rest], key[rest]
    good[left] = False
    return names, np.concatenate(indices)
