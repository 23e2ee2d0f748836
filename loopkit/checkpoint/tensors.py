"""Named tensors as one stream of bytes in the safetensors format, which other tools read too.

The file holds 8 bytes with the length of the header, the header in JSON, then the bytes of the tensors without holes.
What the format lacks stands in one entry of the header's ``__metadata__``, ``loopkit.tensors``; a reader that does
not know it still gets right values under plain shapes:

- ``aliases``: names of tensors that are the same memory as another. It is written once; the name of the
  other also stands under the alias in ``__metadata__``, as ``safetensors.torch.save_model`` has it.
- ``strides``: of tensors whose memory is dense but permuted, such as channels-last. Values are written row by row.
- ``complex``: tensors of a complex dtype without a name in the format, written as real ones ``(..., 2)``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.base.raw import raw
from loopkit.checkpoint import strict_json
from loopkit.errors import CorruptCheckpointError, FormatVersionError, StateError

Buffer = bytes | memoryview | bytearray

METADATA = "__metadata__"
OURS = "loopkit.tensors"
LONGEST_HEADER = 100_000_000
"""Bytes; the limit that the safetensors library sets too."""
MOST_DIMS = 64
MOST_ELEMENTS = 2**60
LARGEST_STRIDE = 2**48
ALIGNMENT = 8
HEADER_DEPTH = 4
LARGE = 4 << 20
"""Bytes from which NumPy asks for huge pages."""
VECTOR = 64
"""Bytes; how torch aligns the memory of a tensor."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAIRS = {torch.complex32: "F16", torch.complex128: "F64"}
"""Complex dtypes that the format lacks, and what their two parts are written as."""
PAIR_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in PAIRS}
PACKED = torch.float4_e2m1fn_x2
"""Two numbers in an element: the format counts numbers, torch counts pairs of them."""


class Source(Protocol):
    """A source of bytes, from which tensors are read once and in order."""

    size: int
    """Bytes in all, counted from the beginning."""

    def readinto(self, buffer: memoryview, /) -> None:
        """Fill ``buffer`` with the bytes that come next.

        Raises:
            CorruptCheckpointError: They end before it is full.
        """


class BytesSource:
    """A :class:`Source` over bytes in memory.

    >>> tensors, metadata = unpack(BytesSource(b"".join(pack({"weight": torch.ones(2)}, {"model": "tiny"}))))
    >>> tensors, metadata
    ({'weight': tensor([1., 1.])}, {'model': 'tiny'})
    """

    def __init__(self, data: Buffer) -> None:
        self._rest = memoryview(data)
        self.size = len(self._rest)

    def readinto(self, buffer: memoryview, /) -> None:
        """Fill ``buffer`` with the bytes that come next."""
        count = len(buffer)
        if count > len(self._rest):
            raise CorruptCheckpointError(f"the data end {count - len(self._rest)} bytes early")
        buffer[:] = self._rest[:count]
        self._rest = self._rest[count:]


class TensorInfo(msgspec.Struct, frozen=True, gc=False):  # there can be hundreds of thousands
    """The entry of one tensor in a header, in torch's terms instead of the format's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    """Its bytes in the file; for an alias the size of the tensor that it is an alias of."""
    strides: tuple[int, ...] | None = None
    """If they do not fit a contiguous tensor."""
    alias_of: str | None = None


@dataclass(frozen=True)
class Header:
    """The header of a file, checked: tensors in the order of their bytes, then the aliases."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    """As given to :func:`pack`."""


Size = Annotated[int, msgspec.Meta(ge=0, le=MOST_ELEMENTS)]


class Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The entry of one tensor in a file's header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MOST_DIMS + 1)]
    data_offsets: tuple[Size, Size]


class Ours(msgspec.Struct, forbid_unknown_fields=True):
    """Loopkit's own entry in the metadata, by the names of tensors."""

    aliases: dict[str, str] = {}
    complex: dict[str, str] = {}
    strides: dict[str, tuple[Size, ...]] = {}


HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
ENTRY = msgspec.json.Decoder(Entry)
ENTRIES = msgspec.json.Decoder(list[Entry])
TEXTS = msgspec.json.Decoder(dict[str, str])
OURS_DECODER = msgspec.json.Decoder(Ours)


def refusal(tensor: Tensor) -> str:
    """Why ``tensor`` cannot be saved, and what to do; empty if it can.

    >>> refusal(torch.ones(2).to_sparse())
    'a sparse tensor (layout torch.sparse_coo), which the file format lacks; save tensor.to_dense()'
    """
    kind = type(tensor)
    if is_lazy(tensor):
        return "a parameter without a shape yet; run the model once before saving"
    if kind is not Tensor and kind is not nn.Parameter:
        return (
            f"a {kind.__module__}.{kind.__qualname__}, whose data its class may keep elsewhere; save the plain tensors "
            "it is made of, or full_tensor() of a distributed one"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside a torch.func transform, which has no memory; save the result of the transform"
    if tensor.is_nested:
        return "a nested tensor, which the file format lacks; save the list tensor.unbind()"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype}), whose scale would be lost; save tensor.int_repr() and its scale"
    if tensor.is_mkldnn:
        return "a tensor in the private layout of MKLDNN; save tensor.to_dense()"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor (layout {tensor.layout}), which the file format lacks; save tensor.to_dense()"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values; materialise it with to_empty() and initialise it"
    if tensor.ndim > MOST_DIMS:
        return f"a tensor of {tensor.ndim} dimensions, at most {MOST_DIMS} are read; reshape it"
    if any(names := getattr(tensor, "names", ())):  # torch 2.13 has none any more
        return f"a tensor with named dimensions {names}, which would be lost; save tensor.rename(None)"
    if _is_freed(tensor):
        return "a tensor whose memory has been freed (its storage is resized); save it before, or gather it again"
    return _refused_dtype(tensor)


def _refused_dtype(tensor: Tensor) -> str:
    if tensor.dtype not in NAMES and tensor.dtype not in PAIRS:
        return f"a tensor of dtype {tensor.dtype}, which the file format lacks; convert it to another"
    if tensor.dtype == PACKED and tensor.ndim == 0:
        return f"a tensor of dtype {PACKED} without dimensions, which the file format lacks; save tensor.reshape(1)"
    return ""


def _is_freed(tensor: Tensor) -> bool:
    if not tensor.numel() or tensor._is_zerotensor():
        return False
    return _last_byte(tensor) > tensor.untyped_storage().nbytes()


def check(tensors: Mapping[str, Tensor], where: str) -> None:
    """Check that all can be saved, before anything is written.

    Args:
        tensors: By name.
        where: Their owner, for the message: ``"model"``.

    Raises:
        StateError: A tensor is sparse, quantised, nested, on the meta device, of a subclass, ... or its name cannot be
            a name in the file.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == METADATA or not _is_text(name):
            raise StateError(
                f"{where}: {name!r} cannot name a tensor: a name is a string of valid Unicode other than {METADATA!r}. "
                "Rename it"
            )
        if not isinstance(tensor, Tensor):
            raise StateError(f"{where}: {name!r} is {type(tensor).__name__}, not a tensor. Convert it: torch.as_tensor")
        if why := refusal(tensor):
            raise StateError(f"{where}: {name!r} is {why}")


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[Buffer]:
    """The bytes of a safetensors file: the header, then each tensor that is not empty as one buffer.

    Lazy: a buffer is the memory of its tensor if that is contiguous and on the CPU, so write it before the tensor
    changes; other tensors are copied one at a time, when their turn comes.

    Args:
        tensors: By name. Equal tensors give equal bytes, in whatever order they come.
        metadata: Text to keep with them; :func:`unpack` returns it.

    Raises:
        StateError: At the call: a tensor cannot be saved, see :func:`check`, or ``metadata`` holds no text.

    Source: the description of the format at https://github.com/huggingface/safetensors
    """
    header, plan = _plan(tensors, metadata)
    return _stream(header, plan)


def peek(source: Source) -> dict[str, TensorInfo]:
    """The tensors in a file, by name; only its header is read.

    Raises:
        CorruptCheckpointError: The header is malformed, or does not fit the size of the file.
    """
    return read_header(source).tensors


def read_header(source: Source) -> Header:
    """The header of a file, checked; the bytes of the tensors come next in ``source``.

    Raises:
        CorruptCheckpointError: It is malformed, or does not fit the size of the file.
        FormatVersionError: It has entries that this loopkit does not know.
    """
    if source.size < 8:
        raise _corrupt(f"{source.size} bytes, too short for a header")
    length = struct.unpack("<Q", _read(source, 8))[0]
    if length > min(LONGEST_HEADER, source.size - 8):
        raise _corrupt(f"a header of {length} bytes in a file of {source.size}, at most {LONGEST_HEADER} are read")
    raw = bytes(_read(source, length))
    try:
        text = raw.decode("utf-8")
        bare = strict_json.without_strings(text, HEADER_DEPTH)
        header = HEADER.decode(raw)
    except ValueError as error:
        raise _corrupt(f"its header is not what a writer of safetensors writes: {_short(error)}") from error
    if not text.startswith("{"):
        raise _corrupt("its header does not begin with '{'")
    keys = len(header)
    try:
        metadata = TEXTS.decode(header.pop(METADATA, b"{}"))
    except ValueError as error:
        raise _corrupt(f"{METADATA} is not a mapping of text to text: {_short(error)}") from error
    infos = _infos(header, source.size - 8 - length)
    if bare.count(":") != keys + len(metadata) + len(Entry.__struct_fields__) * len(infos):
        raise _corrupt("a key is given twice in its header")
    return _extras(infos, metadata)


def unpack(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors, each straight into its own memory, on the CPU; aliases are the very same tensor.

    Returns:
        The tensors by name, none requiring gradients, and the metadata given to :func:`pack`.

    Raises:
        CorruptCheckpointError: The file is malformed. Allocations never exceed the file.
        FormatVersionError: It has entries that this loopkit does not know.
    """
    header = read_header(source)
    tensors: dict[str, Tensor] = {}
    for name, info in header.tensors.items():
        if info.alias_of is not None:
            tensors[name] = tensors[info.alias_of]
            continue
        tensor = _empty(info)
        if info.nbytes:
            source.readinto(_bytes_of(tensor))
        if info.strides is not None:
            tensor = torch.empty_strided(info.shape, info.strides, dtype=info.dtype).copy_(tensor)
        tensors[name] = tensor
    return tensors, header.metadata


def _empty(info: TensorInfo) -> Tensor:
    """New memory for a tensor; where it is large by NumPy, which asks for huge pages: filled 3 times faster."""
    if info.nbytes < LARGE:
        return torch.empty(info.shape, dtype=info.dtype)
    room = torch.from_numpy(np.empty(info.nbytes + VECTOR, np.uint8))
    start = -room.data_ptr() % VECTOR
    return room[start : start + info.nbytes].view(info.dtype).view(info.shape)


# ------------------------------------------------------------------------------------------------------------- writing


def _check_metadata(texts: Mapping[str, str]) -> None:
    """Raise for metadata that the file format cannot hold."""
    for key, value in texts.items():
        if not isinstance(key, str) or not isinstance(value, str) or not _is_text(key) or not _is_text(value):
            raise StateError(f"metadata: {key!r} is {value!r:.80}, but the file format holds only text. Use str()")
    if OURS in texts:
        raise StateError(f"metadata: the key {OURS!r} is kept for what the file format lacks. Choose another")


def _plan(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, list[Tensor]]:
    """The header with its length, and the tensors in the order of their bytes."""
    check(tensors, "tensors")
    texts = dict(metadata or {})
    _check_metadata(texts)

    # Detached first, so that nothing below records a graph.
    kept = {name: tensors[name].detach() for name in sorted(tensors)}
    aliases = _aliases(kept)
    for name, original in aliases.items():
        del kept[name]
        texts.setdefault(name, original)
    # Larger elements first: then each tensor begins where its elements may.
    names = sorted(kept, key=lambda name: (-_element_size(kept[name]), name))

    strides = {name: list(tensor.stride()) for name, tensor in kept.items() if _is_permuted(tensor)}
    pairs = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in kept.items() if tensor.dtype in PAIRS}
    ours = {"aliases": aliases, "complex": pairs, "strides": strides}
    if any(ours.values()):
        texts[OURS] = strict_json.render({key: value for key, value in ours.items() if value}).decode()

    header: dict[str, Any] = {METADATA: dict(sorted(texts.items()))} if texts else {}
    end = 0
    for name in names:
        begin = end
        end += kept[name].nbytes
        dtype, shape = _in_file(kept[name].dtype, tuple(kept[name].shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = strict_json.render(header)
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > LONGEST_HEADER:
        raise StateError(
            f"tensors: a header of {len(text)} bytes, at most {LONGEST_HEADER} are read. Save fewer tensors"
        )
    return struct.pack("<Q", len(text)) + text, [kept[name] for name in names]


def _stream(header: bytes, plan: list[Tensor]) -> Iterator[Buffer]:
    yield header
    for tensor in plan:
        if tensor.numel():
            # Never bound to a name: the copy of one tensor is gone before that of the next is made.
            yield _bytes_of(_plain(tensor)).toreadonly()


def _plain(tensor: Tensor) -> Tensor:
    """The same values on the CPU, row by row; the tensor itself if it is so."""
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    # A conjugate or negative view is a flag: its memory holds other values than the tensor.
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor that is not empty."""
    return raw(tensor).numpy().data


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names that share an earlier name's memory and shape, in order, each with that name."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor._is_zerotensor():
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        original = first.setdefault((*place, tensor.is_conj(), tensor.is_neg()), name)
        if original != name:
            aliases[name] = original
    return aliases


def _in_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The format's name and shape for a dtype and shape of torch."""
    if dtype in PAIRS:
        return PAIRS[dtype], (*shape, 2)
    if dtype == PACKED:
        return NAMES[dtype], (*shape[:-1], shape[-1] * 2)
    return NAMES[dtype], shape


def _element_size(tensor: Tensor) -> int:
    return tensor.dtype.itemsize // 2 if tensor.dtype in PAIRS else tensor.dtype.itemsize


def _last_byte(tensor: Tensor) -> int:
    """How many bytes of its storage a tensor that is not empty reaches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.dtype.itemsize


def _is_permuted(tensor: Tensor) -> bool:
    shape = tuple(tensor.shape)
    strides = tensor.stride()
    return strides != _row_by_row(shape) and _is_dense(shape, strides)


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch computes them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=1024)  # a file holds many tensors of few shapes
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether such a tensor fills its memory once; the stride of a dimension of size 1 is free."""
    if strides and not 0 <= min(strides) <= max(strides) <= LARGEST_STRIDE:
        return False
    step = 1
    for stride, size in sorted([pair for pair in zip(strides, shape, strict=True) if pair[1] != 1]):
        if stride != step and 0 not in shape:
            return False
        step *= size
    return True


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates, which other readers refuse
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- reading


def _read(source: Source, count: int) -> bytearray:
    buffer = bytearray(count)
    source.readinto(memoryview(buffer))
    return buffer


def _corrupt(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"not a valid file of tensors: {what}. It was cut, changed or not written as safetensors; take another copy"
    )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _infos(header: dict[str, msgspec.Raw], size: int) -> dict[str, TensorInfo]:
    """The tensors of a header whose data take ``size`` bytes, in the order of their bytes."""
    found = []
    for name, entry in zip(header, _entries(header), strict=True):
        begin, end = entry.data_offsets
        info = _info(name, entry.dtype, entry.shape)
        if end - begin != info.nbytes:
            raise _corrupt(f"{_short(repr(name))} takes {info.nbytes} bytes, but data_offsets are [{begin}, {end}]")
        found.append((begin, end, name, info))
    found.sort(key=itemgetter(0, 1))
    end = 0
    for begin, after, name, _ in found:
        if begin != end:
            kind = "a hole before" if begin > end else "an overlap at"
            raise _corrupt(f"{kind} {_short(repr(name))}, which begins at {begin} and not at {end}")
        end = after
    if end != size:
        raise _corrupt(f"the tensors take {end} bytes, but {size} come after the header")
    return {name: info for _, _, name, info in found}


def _entries(header: dict[str, msgspec.Raw]) -> list[Entry]:
    try:
        return ENTRIES.decode(b"[%b]" % b",".join(header.values()))  # at once: there can be hundreds of thousands
    except ValueError:
        for name, raw in header.items():
            try:
                ENTRY.decode(raw)
            except ValueError as error:
                raise _corrupt(
                    f"{_short(repr(name))} is not described by dtype, shape and data_offsets: {_short(error)}"
                ) from error
        raise


def _info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    if dtype not in DTYPES:
        raise _corrupt(f"{_short(repr(name))} has the dtype {_short(repr(dtype))}, which is not known")
    elements = math.prod(shape)
    if elements > MOST_ELEMENTS or (elements == 0 and math.prod(size or 1 for size in shape) > MOST_ELEMENTS):
        raise _corrupt(f"{_short(repr(name))} has the shape {_short(repr(shape))}, too large for any memory")
    kind = DTYPES[dtype]
    if kind == PACKED:
        if not shape or shape[-1] % 2:
            raise _corrupt(f"{_short(repr(name))} has the shape {_short(repr(shape))}, but {dtype} come in pairs")
        shape = (*shape[:-1], shape[-1] // 2)
        elements = math.prod(shape)
    return TensorInfo(shape, kind, elements * kind.itemsize)


def _extras(infos: dict[str, TensorInfo], metadata: dict[str, str]) -> Header:
    """The format's own entries, completed by loopkit's."""
    ours = _ours(metadata.pop(OURS, "{}"))
    infos = dict(infos)
    for name, dtype in ours.complex.items():
        infos[name] = _complex(name, dtype, infos.get(name))
    for name, strides in ours.strides.items():
        infos[name] = _strided(name, strides, infos.get(name))
    for name, info in infos.items():
        if len(info.shape) > MOST_DIMS:
            raise _corrupt(f"{_short(repr(name))} has {len(info.shape)} dimensions, at most {MOST_DIMS} are read")
    for name, original in ours.aliases.items():
        if original not in infos or infos[original].alias_of is not None:
            raise _corrupt(f"{_short(repr(name))} is an alias of {_short(repr(original))}, which is not in the file")
        if name in infos or name == METADATA or not _is_text(name):
            raise _corrupt(f"{_short(repr(name))} cannot be an alias: the name is taken or not valid")
        info = infos[original]
        infos[name] = TensorInfo(info.shape, info.dtype, info.nbytes, info.strides, original)
        if metadata.get(name) == original:
            del metadata[name]
    return Header(infos, metadata)


def _ours(text: str) -> Ours:
    try:
        bare = strict_json.without_strings(text, HEADER_DEPTH)
        keys = HEADER.decode(text).keys()
        if unknown := sorted(keys - set(Ours.__struct_fields__)):
            raise FormatVersionError(
                f"{OURS} in the header holds {_short(repr(unknown))}, unknown here: a newer loopkit wrote it. Upgrade"
            )
        ours = OURS_DECODER.decode(text)
    except ValueError as error:
        raise _corrupt(f"{OURS} is not valid: {_short(error)}") from error
    if bare.count(":") != len(keys) + len(ours.aliases) + len(ours.complex) + len(ours.strides):
        raise _corrupt(f"a key is given twice in {OURS}")
    return ours


def _complex(name: str, dtype: str, info: TensorInfo | None) -> TensorInfo:
    kind = PAIR_NAMES.get(dtype)
    if kind is None or info is None or info.dtype != DTYPES[PAIRS[kind]] or info.shape[-1:] != (2,):
        raise _corrupt(f"{_short(repr(name))} cannot be {_short(repr(dtype))}: it is no tensor of pairs")
    return TensorInfo(info.shape[:-1], kind, info.nbytes)


def _strided(name: str, strides: tuple[int, ...], info: TensorInfo | None) -> TensorInfo:
    if info is None or len(strides) != len(info.shape):
        raise _corrupt(
            f"the strides of {_short(repr(name))} are {_short(repr(strides))}, which fit no tensor of the file"
        )
    if not _is_dense(info.shape, strides):
        raise _corrupt(f"the strides of {_short(repr(name))} are {_short(repr(strides))}, which leave holes or overlap")
    return TensorInfo(info.shape, info.dtype, info.nbytes, strides)
