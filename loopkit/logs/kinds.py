"""The kinds of values that can be logged. Each is checked when it is made, in the code that logs it.

Tensors are copied on their device and read when a backend asks, so that making a kind in a step never waits.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from loopkit.base import devices
from loopkit.base.batches import describe
from loopkit.errors import LogError
from loopkit.logs.masking import masked_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

Scalar = float | Tensor
CHANNELS = (1, 3, 4)
COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""The color types of PNG, by the number of channels."""
_modes_are_on = torch._C._len_torch_function_stack


class Kind:
    """Base of the kinds."""

    kind: ClassVar[str] = ""
    """The name of the kind in a log."""

    def _refuse(self, problem: str) -> LogError:
        return LogError(f"{type(self).__name__}: {problem}")


@dataclass(frozen=True, eq=False)
class Value(Kind):
    """One number. A plain number, or a scalar tensor, given to ``learner.log`` means this.

    Raises:
        LogError: It is not one real number.
    """

    kind = "value"
    value: Scalar

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _scalar("Value", self.value))


@dataclass(frozen=True)
class Text(Kind):
    """Text, of any length."""

    kind = "text"
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise self._refuse(f"text is {describe(self.text)}: give a string, str(...)")


@dataclass(frozen=True, eq=False)
class Image(Kind):
    """An image.

    Args:
        pixels: ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)``, where C is 1 (grey), 3 (RGB) or 4 (RGBA); uint8, or floats
            in [0, 1]. An ambiguous shape is ``(C, H, W)`` for a tensor, else ``(H, W, C)``.
        caption: A line of text.

    Raises:
        LogError: The shape or the dtype is another; floats on the host leave [0, 1].
    """

    kind = "image"
    pixels: Any = field(repr=False)
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixels", pixels := _copied(self.pixels))
        shape = tuple(pixels.shape)
        if len(shape) not in (2, 3) or (len(shape) == 3 and not self._channel_axes()) or 0 in shape:
            raise self._refuse(
                f"pixels have the shape {shape}: it is (H, W), (H, W, C) or (C, H, W), with 1, 3 or 4 channels; log "
                f"several images one by one, or as a grid"
            )
        if not (_is_floating(pixels) or pixels.dtype in (torch.uint8, np.uint8)):
            raise self._refuse(f"pixels are {pixels.dtype}: they are uint8, or floats in [0, 1]")
        if _is_floating(pixels) and _on_host(pixels):
            _check_range(self, "pixels", pixels, 0.0, 1.0, "divide by 255, or give uint8")
        if not isinstance(self.caption, str):
            raise self._refuse(f"caption is {describe(self.caption)}: give a string")

    def _channel_axes(self) -> list[int]:
        first, *_, last = self.pixels.shape
        order = (0, 2) if isinstance(self.pixels, Tensor) else (2, 0)
        return [axis for axis in order if (first, 0, last)[axis] in CHANNELS]

    def array(self) -> NDArray[np.uint8]:
        """The pixels on the host, uint8 ``(H, W, C)``; floats are rounded, those outside [0, 1] moved to its ends."""
        pixels = _to_numpy(self.pixels)
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        elif self._channel_axes()[0] == 0:
            pixels = np.moveaxis(pixels, 0, 2)
        if pixels.dtype != np.uint8:
            pixels = np.rint(np.clip(np.nan_to_num(pixels.astype(np.float64)), 0, 1) * 255).astype(np.uint8)
        return np.ascontiguousarray(pixels)

    def png(self) -> bytes:
        """The picture as a PNG file."""
        pixels = self.array()
        height, width, channels = pixels.shape
        header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
        lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter: none
        lines[:, 1:] = pixels.reshape(height, -1)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        )


@dataclass(frozen=True, eq=False)
class Figure(Kind):
    """A matplotlib figure. It is drawn at once, since it may be cleared and used again."""

    kind = "figure"
    figure: Any = field(repr=False)
    _png: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(getattr(self.figure, "savefig", None)):
            raise self._refuse(f"figure is {describe(self.figure)}: give a matplotlib figure, such as axes.figure")
        drawn = io.BytesIO()
        self.figure.savefig(drawn, format="png")
        object.__setattr__(self, "_png", drawn.getvalue())

    def png(self) -> bytes:
        """The figure as a PNG file."""
        return self._png


@dataclass(frozen=True, eq=False)
class Histogram(Kind):
    """How numbers are distributed: counts of equally wide bins between the least and the largest.

    Args:
        values: A tensor or array of any shape and real dtype. It is counted on its device when a backend reads it;
            infinite and undefined numbers are left out.
        bins: How many.

    Raises:
        LogError: The values are no real numbers, or ``bins`` is no number above 0.
    """

    kind = "histogram"
    values: Any = field(repr=False)
    bins: int = 64
    _counted: tuple[tuple[float, ...], tuple[float, ...]] | None = field(default=None, init=False, repr=False)
    _packed: Tensor | None = field(default=None, init=False, repr=False)
    """The least and the largest number and the counts, on their device."""

    def __post_init__(self) -> None:
        if isinstance(self.bins, bool) or not isinstance(self.bins, int) or self.bins < 1:
            raise self._refuse(f"bins is {self.bins!r}: it counts from 1")
        values = _copied(self.values)
        values = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        if values.is_complex():
            raise self._refuse(f"values are {values.dtype}: give real numbers, values.abs()")
        object.__setattr__(self, "values", values)

    @classmethod
    def of_counts(cls, counts: Sequence[float], edges: Sequence[float]) -> Histogram:
        """A histogram that was counted already.

        Args:
            counts: One for each bin, not negative.
            edges: The ends of the bins, rising; one more than counts.
        """
        counted = tuple(map(float, counts))
        ends = tuple(map(float, edges))
        if not counted or len(ends) != len(counted) + 1:
            raise LogError(f"Histogram.of_counts: {len(counted)} counts and {len(ends)} edges; there is one edge more")
        if any(not 0 <= count < math.inf for count in counted):
            raise LogError(f"Histogram.of_counts: a count is {min(counted)!r}; counts are finite and not negative")
        if any(not low < high for low, high in pairwise(ends)) or math.isinf(ends[0] - ends[-1]):
            raise LogError("Histogram.of_counts: the edges do not rise, or are not finite: sort them")
        made = cls(np.zeros(0), len(counted))
        object.__setattr__(made, "_counted", (counted, ends))
        return made

    @classmethod
    def counted(cls, values: Tensor, bins: int = 64) -> Histogram:
        """A histogram of a tensor that is counted now, on its device and without waiting for it: no copy is kept.

        A number between two bins can be in the other one than by ``Histogram(values)``, by rounding.

        Args:
            values: As for `Histogram`.
            bins: Likewise.
        """
        made = cls(values.detach().flatten()[:0], bins)
        object.__setattr__(made, "_packed", _count(values.detach().flatten(), bins))
        return made

    @property
    def counts(self) -> tuple[float, ...]:
        """How many values are in each bin."""
        return self._read()[0]

    @property
    def edges(self) -> tuple[float, ...]:
        """The ends of the bins, one more than there are bins. The last bin holds its upper end too."""
        return self._read()[1]

    def _read(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self._counted is None:
            if self._packed is not None:
                low, high, *counts = self._packed.tolist()  # host sync: a backend reads it
                low, high = _apart(low, high)
            else:
                values = _in_precision(self.values.flatten())
                values = values[values.isfinite()]
                ends = torch.stack(values.aminmax()).tolist() if values.numel() else (0.0, 1.0)  # host sync: likewise
                low, high = _apart(*ends)
                counts = torch.histc(values, self.bins, low, high).tolist() if values.numel() else [0.0] * self.bins
            width = (high - low) / self.bins
            edges = (*(low + width * i for i in range(self.bins)), high)
            object.__setattr__(self, "_counted", (tuple(counts), edges))
            object.__setattr__(self, "values", self.values.flatten()[:0])  # nobody needs them any more
            object.__setattr__(self, "_packed", None)
        assert self._counted is not None
        return self._counted


def _apart(low: float, high: float) -> tuple[float, float]:
    """The ends of a histogram, which must not be the same."""
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _in_precision(values: Tensor) -> Tensor:
    """Values in a floating type that their bins can be computed in."""
    enough = values.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return values.to(torch.float32 if enough else devices.exact(values.device))


PIECE = 1 << 22
"""Numbers that are counted at once, so that what that takes does not grow with the tensor."""


def _count(values: Tensor, bins: int) -> Tensor:
    """The least and the largest finite number of a flat tensor, and the counts of the bins between, on its device."""
    packed = devices.exact(values.device)
    pieces = values.split(PIECE) if values.numel() else ()  # type: ignore[no-untyped-call]
    lows = []
    highs = []
    for piece in map(_in_precision, pieces):
        finite = piece.isfinite()
        lows.append(torch.where(finite, piece, math.inf).amin())
        highs.append(torch.where(finite, piece, -math.inf).amax())
    if not lows:
        return torch.tensor([0.0, 1.0, *[0.0] * bins], dtype=packed, device=values.device)
    low = torch.stack(lows).amin()
    high = torch.stack(highs).amax()
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=values.device)  # the last one: what is not finite
    one = torch.ones((), dtype=torch.int64, device=values.device)
    scale = torch.where(low < high, bins / (high - low), 0.0)
    for piece in map(_in_precision, pieces):
        place = ((piece - low) * scale).clamp(0, bins - 1) if bins > 1 else torch.zeros_like(piece)
        place = torch.where(low < high, place, bins // 2)  # all are the same
        index = torch.where(piece.isfinite(), place, bins).long()
        counts.scatter_add_(0, index, one.expand_as(index))
    nothing = low > high
    ends = torch.stack([torch.where(nothing, 0.0, low), torch.where(nothing, 1.0, high)])
    return torch.cat([ends.to(packed), counts[:-1].to(packed)])


@dataclass(frozen=True)
class Table(Kind):
    """Rows of None, booleans, numbers and strings under named columns."""

    kind = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        for what, given in (("columns", self.columns), ("rows", self.rows)):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise self._refuse(f"{what} are {describe(given)}: give a list")
        if not all(isinstance(column, str) for column in self.columns):
            raise self._refuse(f"columns are {self.columns!r:.200}: give a list of strings")
        columns = tuple(self.columns)
        rows = tuple(self.rows)
        if others := [row for row in rows if isinstance(row, str) or not isinstance(row, Iterable)]:
            raise self._refuse(f"a row is {describe(others[0])}: rows are lists of cells, [[1, 'a'], [2, 'b']]")
        rows = tuple(map(tuple, rows))
        for number, row in enumerate(rows):
            if len(row) != len(columns):
                raise self._refuse(f"row {number} has {len(row)} cells, and there are {len(columns)} columns")
            for column, cell in zip(columns, row, strict=True):
                if cell is not None and type(cell) not in (bool, int, float, str):
                    raise self._refuse(
                        f"row {number} has {describe(cell)} under {column!r}: cells are None, booleans, numbers and "
                        f"strings; float(...) and str(...) make such"
                    )
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "rows", rows)


@dataclass(frozen=True, eq=False)
class Audio(Kind):
    """Sound.

    Args:
        samples: ``(T,)`` or ``(channels, T)``, floats in [-1, 1].
        rate: Samples a second.

    Raises:
        LogError: The shape, dtype or rate is another; samples on the host leave [-1, 1].
    """

    kind = "audio"
    samples: Any = field(repr=False)
    rate: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", samples := _copied(self.samples))
        shape = tuple(samples.shape)
        if len(shape) not in (1, 2) or 0 in shape or (len(shape) == 2 and shape[0] > 32):
            raise self._refuse(f"samples have the shape {shape}: it is (T,) or (channels, T)")
        if not _is_floating(samples):
            raise self._refuse(f"samples are {samples.dtype}: give floats in [-1, 1]")
        if _on_host(samples):
            _check_range(self, "samples", samples, -1.0, 1.0, "divide by the largest absolute value")
        if isinstance(self.rate, bool) or not isinstance(self.rate, int) or self.rate < 1:
            raise self._refuse(f"rate is {self.rate!r}: it is a whole number of samples a second, such as 16000")

    def wav(self) -> bytes:
        """The sound as a WAV file of 16 bits; samples outside [-1, 1] are moved to its ends."""
        import wave

        samples = np.atleast_2d(_to_numpy(self.samples).astype(np.float64))
        whole = np.rint(np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype("<i2")
        made = io.BytesIO()
        with wave.open(made, "wb") as file:
            file.setnchannels(len(whole))
            file.setsampwidth(2)
            file.setframerate(self.rate)
            file.writeframes(whole.T.tobytes())
        return made.getvalue()


@dataclass(frozen=True)
class File(Kind):
    """A file. It is read when it is written to the log: leave it until then."""

    kind = "file"
    path: Path | str

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise self._refuse(f"path is {describe(self.path)}: give a string or a Path")
        path = Path(self.path).absolute()
        if not path.is_file():
            raise self._refuse(f"{path} is no file: write it before it is logged")
        object.__setattr__(self, "path", path)


@dataclass(frozen=True)
class Hyperparameters(Kind):
    """The hyperparameters of a run, by name: None, booleans, numbers and strings.

    Values whose names look like a password, a token or a key, and passwords in URLs, become ``***``.
    """

    kind = "hyperparameters"
    values: Mapping[str, bool | int | float | str | None]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise self._refuse(f"values are {describe(self.values)}: give a dict")
        for name, value in self.values.items():
            if not isinstance(name, str):
                raise self._refuse(f"the name {name!r} is no string")
            if value is not None and type(value) not in (bool, int, float, str):
                raise self._refuse(
                    f"{name!r} is {describe(value)}: values are None, booleans, numbers and strings; str(...) makes one"
                )
        object.__setattr__(self, "values", masked_values(self.values))


@dataclass(frozen=True, eq=False)
class Graph(Kind):
    """The structure of a model.

    Args:
        model: The model.
        inputs: Its inputs, for backends that trace it.
    """

    kind = "graph"
    model: nn.Module = field(repr=False)
    inputs: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise self._refuse(f"model is {describe(self.model)}: give an instance of torch.nn.Module")

    def modules(self) -> list[dict[str, Any]]:
        """A row for each module, as ``{"name", "type", "parameters"}``; the parameters are its own, by name a shape."""
        return [
            {
                "name": name,
                "type": type(module).__name__,
                "parameters": {key: list(p.shape) for key, p in module.named_parameters(recurse=False)},
            }
            for name, module in self.model.named_modules()
        ]


def loggable(name: str, value: Any) -> Any:
    """A value as a record holds it: a number or a copied scalar tensor, or a kind.

    Raises:
        LogError: It cannot be logged; the message shows an alternative.
    """
    if not isinstance(name, str) or not name:
        raise LogError(f"learner.log: the name is {name!r:.100}: give a string, learner.log('loss', loss)")
    if value.__class__ is Tensor and value.is_cpu:  # there is nothing to wait for
        try:
            if (number := value.item()).__class__ is float:
                return number
        except RuntimeError:
            pass  # no scalar
    if isinstance(value, Kind):
        return value.value if isinstance(value, Value) else value
    return _scalar(f"learner.log({name!r:.100})", value)


def all_loggable(values: Mapping[str, Any]) -> dict[str, Any]:
    """`loggable` of each; of floats, and of scalar tensors on the host, without its call.

    Raises:
        LogError: They are no mapping, or one cannot be logged.
    """
    try:
        items = values.items()
    except AttributeError:
        raise LogError(f"learner.log: {describe(values)} is no name, and no mapping of names to values") from None
    made: dict[str, Any] = {}
    for name, value in items:
        number = value
        if value.__class__ is Tensor and value.is_cpu:  # there is nothing to wait for
            try:
                number = value.item()
            except RuntimeError:
                pass  # no scalar
        if number.__class__ is float and name.__class__ is str and name:
            made[name] = number
        else:
            made[name] = loggable(name, value)
    return made


def _elements(value: Any) -> int:
    """How many elements a tensor or array has; 1 for anything else."""
    if isinstance(value, Tensor):
        return value.numel()
    return value.size if isinstance(value, (np.generic, np.ndarray)) else 1


def _scalar(where: str, value: Any) -> Scalar:
    """A real number: a float, or, where it would have to be waited for, a private copy of the tensor."""
    array = isinstance(value, (np.generic, np.ndarray))
    if _elements(value) != 1:
        raise LogError(f"{where}: it is {describe(value)}: log a scalar, such as .mean(), or Histogram(...)")
    if isinstance(value, Tensor):
        if value.is_complex():
            raise LogError(f"{where}: it is {describe(value)}: log a real number, such as .abs()")
        if value.is_cpu:
            return float(value.item())
        if value.is_meta:
            raise LogError(f"{where}: it is {describe(value)}, which has no value: log a tensor of another device")
        return value.detach().clone()
    if isinstance(value, type) and issubclass(value, Kind):
        raise LogError(f"{where}: {value.__name__} is a class: give an instance, {value.__name__}(...)")
    if array:
        value = value.item()
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError as error:
            raise LogError(f"{where}: {error}: log its logarithm") from None
    raise LogError(f"{where}: it is {describe(value)}, which is no number: log {_instead_of(value)}")


def _instead_of(value: Any) -> str:
    """Suggest what to log in the place of a value that is no number."""
    if value is None:
        return "only where there is a value, or float('nan')"
    if isinstance(value, (str, bytes)):
        return "Text(...)"
    if isinstance(value, Mapping):
        return "its values one by one, or Hyperparameters(...)"
    return "a number, a scalar tensor or a kind of loopkit.logs"


def _copied(values: Any) -> Any:
    """A copy of a tensor or array."""
    if isinstance(values, Tensor):
        if values.is_meta or values.layout is not torch.strided or values.is_nested:
            raise LogError(f"{describe(values)} is no plain tensor with values: give such, as by .to_dense()")
        return values.detach().clone()
    try:
        made = np.array(values)
    except (TypeError, ValueError):
        made = np.array(None)
    if made.dtype.kind not in "biufc":
        raise LogError(f"{describe(values)} is no tensor or array of numbers: give one")
    return made


def _is_floating(values: Any) -> bool:
    return values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"


def _on_host(values: Any) -> bool:
    return not isinstance(values, Tensor) or (values.is_cpu and not _modes_are_on())


def _to_numpy(values: Any) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.float() if values.dtype is torch.bfloat16 else values
        return values.cpu().numpy()  # type: ignore[no-any-return]  # host sync: a backend reads it
    return values  # type: ignore[no-any-return]


def _check_range(kind: Kind, what: str, values: Any, low: float, high: float, fix: str) -> None:
    least = float(values.min())
    largest = float(values.max())
    if least < low or largest > high:
        worst = largest if largest > high else least
        raise kind._refuse(f"{what} reach {worst:g}: floats are in [{low:g}, {high:g}]; {fix}")
