"""Logged values as the messages that TensorBoard's plugins read."""

from __future__ import annotations

import html
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboardX.proto.plugin_text_pb2 import TextPluginData
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

from loopkit.logs import Audio, Figure, Histogram, Hyperparameters, Image, Table, Text

__all__ = ["END", "START", "Scalars", "add", "joined", "session_end", "session_start"]

START = "_hparams_/session_start_info"
END = "_hparams_/session_end_info"
WAV = bytes([2 << 3, 11])
"""The metadata of the audio plugin: field 2, the encoding, is 11. tensorboardX has no message for it."""
SUMMARY = bytes([5 << 3 | 2])
"""The bytes before the length of a summary in the message of an event: its field is 5."""
SUCCESS, FAILURE = 1, 2
"""TensorBoard's names for the status of a finished run."""


class Scalars:
    """Makes summaries of scalars, as messages, of which only the numbers change.

    Args:
        tags: The scalars' tags.
    """

    def __init__(self, tags: Sequence[str]) -> None:
        begins = [Summary(value=[Summary.Value(tag=tag, simple_value=1.0)]).SerializeToString()[:-4] for tag in tags]
        self._pack = struct.Struct("<" + "".join(f"{len(begin)}sf" for begin in begins)).pack
        self._parts: list[Any] = [part for begin in begins for part in (begin, 0.0)]

    def __call__(self, values: Collection[float]) -> bytes:
        """The messages; a number that is too large for 32 bits is infinite."""
        parts = self._parts[:]
        parts[1::2] = values
        try:
            return self._pack(*parts)
        except OverflowError:
            parts[1::2] = map(_single, values)
            return self._pack(*parts)


def _single(value: float) -> float:
    """The number as 32 bits can hold it."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return math.copysign(math.inf, value)
    return value


def joined(parts: Sequence[bytes]) -> bytes:
    """Summaries as messages, as a part of the message of an event."""
    if not parts:
        return b""
    content = b"".join(parts)
    size, length = bytearray(), len(content)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    size.append(length)
    return b"".join((SUMMARY, size, content))


@singledispatch
def add(value: Any, summary: Summary.Value) -> None:
    """Put what was logged into a summary."""
    raise TypeError(f"TensorBoard shows no {type(value).__name__}")


@add.register
def _(value: Text, summary: Summary.Value) -> None:
    _add_text(value.text, summary)


@add.register
def _(value: Table, summary: Summary.Value) -> None:
    lines = [value.columns, ["---"] * len(value.columns), *value.rows]
    _add_text("\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines), summary)


@add.register
def _(value: Hyperparameters, summary: Summary.Value) -> None:
    add(Table(("name", "value"), [*value.values.items()]), summary)


@add.register
def _(value: Image, summary: Summary.Value) -> None:
    height, width, channels = value.array().shape
    png = value.png()
    summary.image.CopyFrom(Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png))
    if value.caption:
        summary.metadata.summary_description = value.caption


@add.register
def _(value: Figure, summary: Summary.Value) -> None:
    png = value.png()
    width, height = struct.unpack_from(">II", png, 16)  # a PNG begins with its signature and its size
    summary.image.CopyFrom(Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png))


@add.register
def _(value: Audio, summary: Summary.Value) -> None:
    # A tensor of sound and label, since TensorBoard's fast loader forgets the type of an audio message.
    _add_strings("audio", WAV, [value.wav(), b""], [1, 2], summary)


@add.register
def _(value: Histogram, summary: Summary.Value) -> None:
    counts, edges = (np.asarray(part, dtype=np.float64) for part in (value.counts, value.edges))
    middles = (edges[:-1] + edges[1:]) / 2
    summary.histo.CopyFrom(
        HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=counts.sum(),
            sum=counts @ middles,
            sum_squares=counts @ middles**2,
            bucket_limit=edges[1:],
            bucket=counts,
        )
    )


def session_start(values: Mapping[str, Any], time: float) -> Summary.Value:
    """The hyperparameters of a run; None is left out, and shown as empty."""
    info = SessionStartInfo(start_time_secs=time)
    for name, value in values.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, (int, float)):
            info.hparams[name].number_value = value
        elif value is not None:
            info.hparams[name].string_value = str(value)
    return _hparams(START, HParamsPluginData(session_start_info=info))


def session_end(failed: bool, time: float) -> Summary.Value:
    """The end of a run."""
    info = SessionEndInfo(status=FAILURE if failed else SUCCESS, end_time_secs=time)
    return _hparams(END, HParamsPluginData(session_end_info=info))


def _hparams(tag: str, content: HParamsPluginData) -> Summary.Value:
    data = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data))


def _add_text(text: str, summary: Summary.Value) -> None:
    content = TextPluginData(version=0).SerializeToString()
    _add_strings("text", content, [text.encode("utf-8", "replace")], [], summary)


def _add_strings(
    plugin: str, content: bytes, strings: Sequence[bytes], shape: Sequence[int], summary: Summary.Value
) -> None:
    """A tensor of strings, for a plugin of TensorBoard."""
    summary.metadata.plugin_data.plugin_name = plugin
    summary.metadata.plugin_data.content = content
    sizes = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])
    summary.tensor.CopyFrom(TensorProto(dtype="DT_STRING", string_val=strings, tensor_shape=sizes))


def _cell(value: Any) -> str:
    """A cell of a table in Markdown."""
    return " ".join(html.escape(str(value), quote=False).replace("|", "\\|").split())
