"""The safetensors format: our writer and reader, against the library's and against hostile files."""

import json
import struct
import time
import weakref

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from loopkit.checkpoint.tensors import (
    DTYPES,
    BytesSource,
    TensorInfo,
    check,
    pack,
    peek,
    read_header,
    unpack,
)
from loopkit.errors import CheckpointError, CorruptCheckpointError, FormatVersionError, StateError

IN_LIBRARY_FILES_ONLY = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
"""Read by ``safe_open``, not by ``safetensors.torch.load``."""


def packed(tensors, metadata=None):
    return b"".join(pack(tensors, metadata))


def read(data):
    return unpack(BytesSource(data))[0]


def raw(tensor):
    """The values' bytes: equal also for NaNs, and for dtypes that cannot be compared."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found, expected):
    assert (found.dtype, found.shape, raw(found)) == (expected.dtype, expected.shape, raw(expected))


def some(dtype, *shape):
    """A tensor of random bits, but for booleans."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def in_file(tmp_path, data):
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    return path


def library_read(tmp_path, data):
    with safetensors.safe_open(in_file(tmp_path, data), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict


def header_of(data):
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def built(header, data=b""):
    """A file with this header, which may be a value or text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# --------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("shape", [(6, 4), (), (0,), (3, 0, 2), (1,), (7,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_of_every_dtype_are_read_by_the_library_and_by_us(tmp_path, dtype, shape):
    if dtype == torch.float4_e2m1fn_x2 and not shape:
        pytest.skip("refused, see below")
    tensor = some(dtype, *shape)
    data = packed({"x": tensor})
    assert_same(read(data)["x"], tensor)
    assert_same(library_read(tmp_path, data)["x"], tensor)
    if dtype not in IN_LIBRARY_FILES_ONLY:
        assert_same(safetensors.torch.load(data)["x"], tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_that_the_library_wrote_are_read(dtype):
    tensors = {"x": some(dtype, 3, 4), "empty": some(dtype, 0, 2), "ü": some(dtype, 5)}
    found, metadata = unpack(BytesSource(safetensors.torch.save(tensors, {"model": "tïny"})))
    assert metadata == {"model": "tïny"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(found[name], tensor)


def test_tensors_every_dtype_that_the_library_writes_is_known():
    assert set(safetensors.torch._SIZE) == set(DTYPES.values())


def test_tensors_bytes_are_the_same_as_the_librarys_for_one_tensor():
    tensors = {"x": torch.arange(6.0).reshape(2, 3)}
    assert packed(tensors, {"a": "b"}) == safetensors.torch.save(tensors, {"a": "b"})


def test_tensors_come_back_as_plain_tensors_in_memory_of_their_own():
    parameter = nn.Parameter(torch.ones(3))
    found = read(packed({"parameter": parameter, "computed": parameter * 2}))
    for tensor in found.values():
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == 12
        assert tensor.storage_offset() == 0
        tensor.add_(1)  # writable


def test_tensors_begin_where_their_elements_may():
    tensors = {f"{index}": some(dtype, 3) for index, dtype in enumerate(DTYPES.values())}
    tensors["complex"] = some(torch.complex128, 3)
    data = packed(tensors)
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    assert begin % 8 == 0
    for name, info in header_of(data).items():
        if name != "__metadata__":
            size = 8 if name == "complex" else tensors[name].dtype.itemsize
            assert (begin + info["data_offsets"][0]) % size == 0


def test_tensors_give_the_same_bytes_in_whatever_order_they_come():
    tied = torch.ones(3)
    tensors = {"b": tied, "a": torch.zeros(2), "c": tied, "d": torch.ones(2, 3).t()}
    assert packed(tensors, {"x": "1", "y": "2"}) == packed(dict(reversed(tensors.items())), {"y": "2", "x": "1"})


def test_tensors_none_at_all_is_a_file_too():
    assert unpack(BytesSource(packed({}, {"only": "text"}))) == ({}, {"only": "text"})
    assert safetensors.torch.load(packed({})) == {}


def test_tensors_metadata_is_returned_as_it_was_given():
    tied = torch.ones(3)
    metadata = {"b": "mine", "ü\n": '"', "": ""}
    assert unpack(BytesSource(packed({"a": tied, "b": tied}, metadata)))[1] == metadata


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(
            st.sampled_from([*DTYPES.values(), torch.complex128]),
            st.lists(st.integers(0, 4), min_size=1, max_size=4),
            st.permutations(range(4)),
        ),
        max_size=5,
    )
)
def test_tensors_of_any_name_dtype_shape_and_order_of_memory_come_back(drawn):
    tensors = {}
    for name, (dtype, shape, order) in drawn.items():
        dims = [dim for dim in order if dim < len(shape)]
        tensors[name] = some(dtype, *shape).permute(dims)
    data = packed(tensors)
    found = read(data)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(found[name], tensor)
        assert found[name].stride() == tensor.stride()


# ------------------------------------------------------------------------------------------- what the format lacks


def test_tensors_complex128_is_a_pair_of_doubles_for_others(tmp_path):
    tensor = some(torch.complex128, 2, 3)
    scalar = torch.tensor(1 - 2j, dtype=torch.complex128)
    data = packed({"x": tensor, "scalar": scalar, "transposed": tensor.t(), "empty": tensor[:0]})
    found = read(data)
    assert_same(found["x"], tensor)
    assert_same(found["scalar"], scalar)
    assert_same(found["transposed"], tensor.t())
    assert found["transposed"].stride() == (1, 3)
    assert_same(found["empty"], tensor[:0])
    other = library_read(tmp_path, data)
    assert_same(other["x"], torch.view_as_real(tensor))
    assert other["scalar"].tolist() == [1.0, -2.0]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_complex32_is_a_pair_of_halves_for_others():
    tensor = some(torch.complex32, 5)
    data = packed({"x": tensor})
    assert_same(read(data)["x"], tensor)
    assert raw(safetensors.torch.load(data)["x"]) == raw(tensor)
    assert safetensors.torch.load(data)["x"].shape == (5, 2)


def test_tensors_tied_are_written_once_and_come_back_as_one():
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    tensors = {"head": weight, "embedding": nn.Parameter(weight), "other": weight.clone(), "view": weight[:, :2]}
    data = packed(tensors)
    assert header_of(data)["__metadata__"]["head"] == "embedding"
    assert sorted(safetensors.torch.load(data)) == ["embedding", "other", "view"]
    found, metadata = unpack(BytesSource(data))
    assert metadata == {}
    assert found["head"] is found["embedding"]
    assert found["other"] is not found["embedding"]
    for name, tensor in tensors.items():
        assert_same(found[name], tensor)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[1:],
        lambda x: x[:3],
        lambda x: x.reshape(2, 2),
        lambda x: x.view(torch.int32),
        lambda x: torch._neg_view(x),
        lambda x: x.clone(),
    ],
)
def test_tensors_that_only_overlap_are_not_tied(other):
    x = torch.arange(1.0, 5)
    found = read(packed({"x": x, "y": other(x)}))
    assert_same(found["x"], x)
    assert_same(found["y"], other(x))
    assert found["x"].data_ptr() != found["y"].data_ptr()


def test_tensors_without_elements_are_not_tied():
    found = read(packed({"x": torch.empty(0), "y": torch.empty(0)}))
    assert found["x"] is not found["y"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.zed = nn.Linear(3, 3, bias=False)
        self.alpha = nn.Linear(3, 3, bias=False)
        self.alpha.weight = self.zed.weight
        self.more = nn.ModuleList([self.alpha, nn.BatchNorm1d(3)])


def test_tensors_of_a_tied_model_are_loaded_by_the_library(tmp_path):
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    path = in_file(tmp_path, packed(model.state_dict()))
    assert safetensors.torch.load_model(other, path) == (set(), [])
    assert torch.equal(other.zed.weight, model.zed.weight)
    assert other.load_state_dict(read(path.read_bytes()))


def test_tensors_tied_in_the_librarys_own_file_keep_its_metadata(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(Tied(), path)
    with path.open("rb") as file:
        found, metadata = unpack(BytesSource(file.read()))
    assert metadata == {"more.0.weight": "alpha.weight", "zed.weight": "alpha.weight"}
    assert "zed.weight" not in found


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda x: x.contiguous(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (lambda x: x.transpose(0, 2), (5, 20, 60, 1)),
        (lambda x: x[:1].contiguous(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (lambda x: x[:, :1].contiguous(memory_format=torch.channels_last), (20, 1, 5, 1)),
        (lambda x: x[:0].contiguous(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (lambda x: x[::2][:1], (120, 20, 5, 1)),
        (lambda x: x[:, ::2], (40, 20, 5, 1)),  # has holes: contiguous
        (lambda x: x[:, :1].expand(2, 3, 4, 5), (60, 20, 5, 1)),  # lies over itself: contiguous
        (lambda x: x.reshape(-1).unfold(0, 5, 1), (5, 1)),  # overlaps: contiguous
        (lambda x: x.flip(0), (60, 20, 5, 1)),
        (lambda x: x[1, 1:], (20, 5, 1)),
    ],
)
def test_tensors_are_row_by_row_for_others_and_keep_dense_strides_for_us(view, strides):
    tensor = view(torch.arange(120, dtype=torch.float16).reshape(2, 3, 4, 5))
    data = packed({"x": tensor})
    other = safetensors.torch.load(data)["x"]
    assert_same(other, tensor)
    assert other.is_contiguous()
    found = read(data)["x"]
    assert_same(found, tensor)
    assert found.stride() == strides
    assert found.untyped_storage().nbytes() == tensor.numel() * 2


def test_tensors_conjugate_and_negative_views_are_written_as_they_read():
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    tensors = {
        "conj": x.conj(),
        "adjoint": x.reshape(1, 2).mH,
        "neg": x.conj().imag,
        "double": x.to(torch.complex128).conj(),
        "original": x,
    }
    assert tensors["neg"].is_neg()
    assert tensors["conj"].is_conj()
    data = packed(tensors)
    found = read(data)
    for name, tensor in tensors.items():
        assert_same(found[name], tensor)
    assert found["conj"].tolist() == [1 - 2j, 3 + 1j]
    assert safetensors.torch.load(data)["conj"].tolist() == [1 - 2j, 3 + 1j]
    assert safetensors.torch.load(data)["neg"].tolist() == [-2.0, 1.0]


def test_tensors_conjugate_views_are_written_wrongly_by_the_library():
    # Why the writer is ours: should this fail one day, the library has learnt it.
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    assert safetensors.torch.load(safetensors.torch.save({"x": x.conj()}))["x"].tolist() == x.tolist()
    negative = torch._neg_view(torch.tensor([1.0, 2.0]))
    assert safetensors.torch.load(safetensors.torch.save({"x": negative}))["x"].tolist() == [1.0, 2.0]


def test_tensors_zeros_without_memory_are_written_as_zeros():
    tensor = torch._efficientzerotensor((2, 3))
    assert read(packed({"x": tensor, "y": tensor}))["x"].tolist() == [[0.0] * 3] * 2


@pytest.mark.gpu
def test_tensors_on_cuda_come_back_on_the_cpu():
    x = torch.arange(24.0, device="cuda").reshape(1, 2, 3, 4)
    tensors = {"x": x, "last": x.contiguous(memory_format=torch.channels_last), "half": x.bfloat16(), "tied": x}
    tensors["conj"] = (x * 1j).conj()
    found = read(packed(tensors))
    for name, tensor in tensors.items():
        assert found[name].device.type == "cpu"
        assert_same(found[name], tensor)
        assert found[name].stride() == tensor.stride()
    assert found["tied"] is found["x"]


# ------------------------------------------------------------------------------------------------------------- laziness


def test_tensors_contiguous_on_the_cpu_are_not_copied():
    for dtype in DTYPES.values():
        tensor = some(dtype, 2, 3)
        _, buffer = pack({"x": tensor})
        before = bytes(buffer)
        tensor.view(torch.uint8).bitwise_not_() if dtype != torch.bool else tensor.logical_not_()
        assert bytes(buffer) != before
        assert buffer.readonly


class Copies(TorchFunctionMode):
    """Counts the tensors that are copied to be contiguous."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += func is torch.Tensor.contiguous and result is not args[0]
        return result


def test_tensors_are_copied_only_when_their_turn_comes():
    tensors = {name: torch.ones(3, 2).t() for name in "abc"}
    with Copies() as copies:
        stream = pack(tensors)
        next(stream)
        assert copies.count == 0
        for count in (1, 2, 3):
            next(stream)
            assert copies.count == count


def test_tensors_are_let_go_before_the_next_is_copied():
    stream = pack({name: torch.ones(3, 2).t() for name in "ab"})
    next(stream)
    copy = weakref.ref(next(stream).obj)
    assert copy() is None  # the generator, waiting, holds no copy


def test_tensors_are_read_straight_into_their_memory():
    class Recorder(BytesSource):
        def __init__(self, data):
            super().__init__(data)
            self.buffers = []

        def readinto(self, buffer):
            self.buffers.append(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() if len(buffer) else 0)
            super().readinto(buffer)

    source = Recorder(packed({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}))
    found = unpack(source)[0]
    assert source.buffers[2:] == [found["a"].data_ptr(), found["b"].data_ptr()]


def test_tensors_peek_reads_the_header_alone():
    tied = torch.ones(2, 3, dtype=torch.bfloat16).t()
    data = packed({"x": tied, "y": tied, "z": torch.ones(2, dtype=torch.complex128), "e": torch.ones(0)}, {"k": "v"})

    class HeaderOnly(BytesSource):
        read = 0

        def readinto(self, buffer):
            self.read += len(buffer)
            super().readinto(buffer)

    source = HeaderOnly(data)
    assert peek(source) == {
        "z": TensorInfo((2,), torch.complex128, 32),
        "e": TensorInfo((0,), torch.float32, 0),
        "x": TensorInfo((3, 2), torch.bfloat16, 12, (1, 3)),
        "y": TensorInfo((3, 2), torch.bfloat16, 12, (1, 3), "x"),
    }
    assert source.read == len(data) - 32 - 12
    assert read_header(BytesSource(data)).metadata == {"k": "v"}


# ------------------------------------------------------------------------------------------------------------- refusals


class Hiding(torch.Tensor):
    """A subclass that may keep its data elsewhere."""


class Wrapper(torch.Tensor):
    """A subclass without memory."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    def __repr__(self, **kwargs):
        return "Wrapper()"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"its data were touched: {func}")


def sparse(layout):
    dense = torch.ones(4, 4)
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return dense.to_sparse(layout=layout, **blocks)


def freed():
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut():
    tensor = torch.ones(6)[2:].reshape(2, 2)
    tensor.untyped_storage().resize_(20)
    return tensor


REFUSED = {
    "sparse_coo": (lambda: sparse(torch.sparse_coo), "sparse tensor .layout torch.sparse_coo.*to_dense"),
    "sparse_csr": (lambda: sparse(torch.sparse_csr), "sparse tensor .layout torch.sparse_csr"),
    "sparse_csc": (lambda: sparse(torch.sparse_csc), "sparse tensor .layout torch.sparse_csc"),
    "sparse_bsr": (lambda: sparse(torch.sparse_bsr), "sparse tensor .layout torch.sparse_bsr"),
    "sparse_bsc": (lambda: sparse(torch.sparse_bsc), "sparse tensor .layout torch.sparse_bsc"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised tensor.*int_repr"),
    "channelwise": (
        lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "quantised",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "meta device.*to_empty"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided), "nested tensor.*unbind"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "MKLDNN.*to_dense"),
    "subclass": (lambda: torch.ones(2).as_subclass(Hiding), "Hiding, whose data its class may keep elsewhere"),
    "subclass parameter": (lambda: nn.Parameter(torch.ones(2).as_subclass(Hiding)), "Hiding"),
    "wrapper": (Wrapper, "Wrapper"),
    "uninitialised": (nn.UninitializedParameter, "without a shape yet.*run the model once"),
    "uninitialised buffer": (nn.UninitializedBuffer, "without a shape yet"),
    "freed": (freed, "has been freed"),
    "cut": (cut, "has been freed"),
    "bits": (lambda: torch.empty(2, dtype=torch.bits8), "dtype torch.bits8"),
    "float4": (lambda: torch.empty((), dtype=torch.float4_e2m1fn_x2), "without dimensions.*reshape"),
    "dimensions": (lambda: torch.ones([1] * 65), "65 dimensions"),
    "no tensor": (lambda: 1.0, "float, not a tensor.*as_tensor"),
}


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor",
    "ignore:Sparse",
    "ignore:The PyTorch API of nested tensors",
    "ignore:.*prototype",
)
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_tensors_that_cannot_be_saved_are_refused_by_name(make, message):
    tensors = {"fine": torch.ones(2), "net.weight": make()}
    with pytest.raises(StateError, match=f"model: 'net.weight' is .*{message}"):
        check(tensors, "model")
    with pytest.raises(StateError, match=r"'net\.weight'"):
        pack(tensors)  # at the call, before the first byte


def test_tensors_inside_a_transform_are_refused():
    def function(x):
        check({"x": x}, "model")
        return x

    with pytest.raises(StateError, match=r"'x' is .*inside a torch.func transform"):
        torch.func.vmap(function)(torch.ones(2, 2))
    with pytest.raises(StateError, match=r"'x' is .*inside a torch.func transform"):
        torch.func.grad(lambda x: function(x).sum())(torch.ones(2))


@pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="this torch has no named tensors")
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_tensors_with_named_dimensions_are_refused():
    with pytest.raises(StateError, match="named dimensions"):
        check({"x": torch.ones(2, names=("batch",))}, "model")


def test_tensors_parameters_and_buffers_are_plain():
    check({"p": nn.Parameter(torch.ones(2)), "b": nn.Buffer(torch.ones(2)), "s": torch.tensor(1)}, "model")


@pytest.mark.parametrize("name", [1, "__metadata__", "\ud800", None])
def test_tensors_names_that_the_format_lacks_are_refused(name):
    with pytest.raises(StateError, match="cannot name a tensor"):
        pack({name: torch.ones(2)})


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, {"a": "\ud800"}, {"loopkit.tensors": "x"}])
def test_tensors_metadata_that_is_no_text_is_refused(metadata):
    with pytest.raises(StateError, match="metadata"):
        pack({}, metadata)


# -------------------------------------------------------------------------------------------------------- hostile files

EIGHT = bytes(8)
GOOD = {"x": entry()}


def ours(**entries):
    return {"loopkit.tensors": json.dumps(entries)}


HOSTILE = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "no header": struct.pack("<Q", 0),
    "header longer than the file": struct.pack("<Q", 100) + b"{}",
    "header of 2**64 bytes": b"\xff" * 8 + b"{}",
    "header above the limit": struct.pack("<Q", 2**62) + b"{}",
    "no JSON": built(b"hello"),
    "a list": built(b"[]"),
    "a number": built(b"1"),
    "leading space": built(b" {}"),
    "two values": built(b"{}{}"),
    "invalid UTF-8": built(b'{"\xff":1}'),
    "deep": built(b"[" * 1_000_000),
    "deep object": built(b'{"a":' * 300_000),
    "quotes": built(b'{"' + b'\\"' * 1_000_000),
    "long number": built(b'{"x":' + b"1" * 1_000_000 + b"}"),
    "NaN": built(b'{"x":NaN}'),
    "metadata twice": built(b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"b"}}'),
    "text twice": built(b'{"__metadata__":{"a":"b","a":"b"}}'),
    "name twice": built(b'{"x":%b,"x":%b}' % ((json.dumps(entry()).encode(),) * 2), EIGHT),
    "key twice": built(b'{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
    "lone surrogate": built(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), EIGHT),
    "tensor is a list": built({"x": []}),
    "tensor is null": built({"x": None}),
    "no dtype": built({"x": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "a key more": built({"x": entry() | {"strides": [1]}}, EIGHT),
    "unknown dtype": built({"x": entry("F33")}, EIGHT),
    "dtype is a list": built({"x": entry() | {"dtype": ["F32"]}}, EIGHT),
    "negative size": built({"x": entry(shape=(-2, -1))}, EIGHT),
    "shape is a number": built({"x": entry() | {"shape": 2}}, EIGHT),
    "size is a float": built({"x": entry(shape=(2.0,))}, EIGHT),
    "size is a bool": built({"x": entry(shape=(True, 2))}, EIGHT),
    "size is text": built({"x": entry(shape=("2",))}, EIGHT),
    "shape overflows to what fits": built({"x": entry(shape=(2**32, 2**32, 2**32, 0), offsets=(0, 0))}),
    "shape of 2**64 + 2": built({"x": entry(shape=(2**64 + 2,))}, EIGHT),
    "product of 2**64": built({"x": entry(shape=(2**32, 2**32))}, EIGHT),
    "100000 dimensions": built({"x": entry(shape=(1,) * 100_000, offsets=(0, 4))}, bytes(4)),
    "65 dimensions": built({"x": entry(shape=(1,) * 65, offsets=(0, 4))}, bytes(4)),
    "more than the file": built({"x": entry(shape=(2**40,), offsets=(0, 2**42))}, EIGHT),
    "offsets and shape differ": built({"x": entry(shape=(3,))}, EIGHT),
    "offsets backwards": built({"x": entry(offsets=(8, 0))}, EIGHT),
    "offsets negative": built({"x": entry(offsets=(-8, 0))}, EIGHT),
    "offsets are three": built({"x": entry(offsets=(0, 8, 8))}, EIGHT),
    "offsets are floats": built({"x": entry(offsets=(0.0, 8.0))}, EIGHT),
    "offsets are text": built({"x": entry() | {"data_offsets": "08"}}, EIGHT),
    "hole at the start": built({"x": entry(offsets=(4, 12))}, bytes(12)),
    "hole between": built({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20)),
    "overlap": built({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12)),
    "same place": built({"x": entry(), "y": entry()}, EIGHT),
    "same place, and none for the rest": built({"x": entry(), "y": entry()}, bytes(16)),
    "hole as large as the overlap": built(
        {"x": entry(), "y": entry(offsets=(4, 12)), "z": entry(offsets=(16, 24))}, bytes(24)
    ),
    "data cut": built(GOOD, bytes(7)),
    "data too long": built(GOOD, bytes(9)),
    "data without tensors": built({}, b"x"),
    "half an F4": built({"x": entry("F4", (1,), (0, 0))}),
    "F4 without dimensions": built({"x": entry("F4", (), (0, 0))}),
    "metadata is a list": built({"__metadata__": []}),
    "metadata is null": built({"__metadata__": None}),
    "metadata of numbers": built({"__metadata__": {"a": 1}}),
    "metadata of objects": built({"__metadata__": {"a": {}}}),
    "ours is no JSON": built({"__metadata__": {"loopkit.tensors": "x"}}),
    "ours is a list": built({"__metadata__": {"loopkit.tensors": "[]"}}),
    "ours is deep": built({"__metadata__": {"loopkit.tensors": "[" * 100_000}}),
    "ours twice": built({"__metadata__": {"loopkit.tensors": '{"aliases":{},"aliases":{}}'}}),
    "ours of lists": built({"__metadata__": ours(aliases=[])}),
    "alias of nothing": built(GOOD | {"__metadata__": ours(aliases={"y": "z"})}, EIGHT),
    "alias of itself": built(GOOD | {"__metadata__": ours(aliases={"y": "y"})}, EIGHT),
    "alias of an alias": built(GOOD | {"__metadata__": ours(aliases={"y": "x", "z": "y"})}, EIGHT),
    "alias hides a tensor": built(GOOD | {"__metadata__": ours(aliases={"x": "x"})}, EIGHT),
    "alias of a number": built(GOOD | {"__metadata__": ours(aliases={"y": 1})}, EIGHT),
    "alias named as metadata": built(GOOD | {"__metadata__": ours(aliases={"__metadata__": "x"})}, EIGHT),
    "strides of nothing": built(GOOD | {"__metadata__": ours(strides={"y": [1]})}, EIGHT),
    "strides too many": built(GOOD | {"__metadata__": ours(strides={"x": [1, 1]})}, EIGHT),
    "strides with holes": built(GOOD | {"__metadata__": ours(strides={"x": [2**40]})}, EIGHT),
    "strides of zero": built(GOOD | {"__metadata__": ours(strides={"x": [0]})}, EIGHT),
    "strides negative": built(GOOD | {"__metadata__": ours(strides={"x": [-1]})}, EIGHT),
    "strides of text": built(GOOD | {"__metadata__": ours(strides={"x": ["1"]})}, EIGHT),
    "strides is a number": built(GOOD | {"__metadata__": ours(strides={"x": 1})}, EIGHT),
    "strides of one element": built(
        {"x": entry(shape=(1,), offsets=(0, 4)), "__metadata__": ours(strides={"x": [2**59]})}, bytes(4)
    ),
    "strides that overlap": built(
        {"x": entry(shape=(2, 2), offsets=(0, 16)), "__metadata__": ours(strides={"x": [1, 1]})}, bytes(16)
    ),
    "complex of nothing": built(GOOD | {"__metadata__": ours(complex={"y": "complex128"})}, EIGHT),
    "complex of floats": built(GOOD | {"__metadata__": ours(complex={"x": "complex128"})}, EIGHT),
    "complex of one": built(
        {"x": entry("F64", (1,)), "__metadata__": ours(complex={"x": "complex128"})},
        EIGHT,
    ),
    "complex64": built(GOOD | {"__metadata__": ours(complex={"x": "complex64"})}, EIGHT),
    "complex is a list": built(GOOD | {"__metadata__": ours(complex={"x": []})}, EIGHT),
}


@pytest.mark.timeout(60)  # it takes 0.1 s at most, for a header of a megabyte
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_tensors_hostile_files_are_refused_at_once(data):
    with pytest.raises(CorruptCheckpointError, match="not a valid file of tensors") as raised:
        unpack(BytesSource(data))
    with pytest.raises(CorruptCheckpointError):
        peek(BytesSource(data))
    assert len(str(raised.value)) < 600


@pytest.mark.clock
@pytest.mark.parametrize("kind", ["data", pytest.param("strides", marks=pytest.mark.slow), "last strides"])
def test_tensors_many_entries_are_refused_in_linear_time(kind):
    count = 30_000
    entries = {f"a{i}": entry("U8", (1, 1), (i, i + 1)) for i in range(count)}
    if kind == "strides":
        entries["__metadata__"] = ours(strides={name: [1, 1] for name in entries} | {"a": [1, 1]})
    if kind == "last strides":
        entries["__metadata__"] = ours(strides={name: [1, 1] for name in entries} | {f"a{count - 1}": [2**50, 1]})
    data = built(entries, bytes(count - (kind == "data")))
    begun = time.process_time()  # other processes do not count
    with pytest.raises(CorruptCheckpointError):
        peek(BytesSource(data))
    assert time.process_time() - begun < 1.5  # it takes a tenth of it; quadratic, ten seconds and more


def test_tensors_hostile_files_begin_from_one_that_is_read():
    # Else the cases above could fail for another reason than theirs.
    names = ours(aliases={"y": "x"}, strides={"x": [1]})
    found = read(built(GOOD | {"__metadata__": names}, EIGHT))
    assert found["x"] is found["y"]
    assert found["x"].tolist() == [0.0, 0.0]
    assert read(built({"x": entry("F64", (2,), (0, 16)), "__metadata__": ours(complex={"x": "complex128"})}, bytes(16)))
    assert read(built({"x": entry("F4", (2,), (0, 1))}, b"x"))["x"].shape == (1,)
    assert read(built({"x": entry(shape=(1,) * 64, offsets=(0, 4))}, bytes(4)))["x"].ndim == 64


def test_tensors_from_a_newer_loopkit_are_refused_as_such():
    with pytest.raises(FormatVersionError, match=r"'layouts'.*newer loopkit"):
        read(built({"__metadata__": ours(layouts=[])}))


def test_tensors_allocate_nothing_that_the_file_cannot_hold():
    class Allocations(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Allocations() as allocations:
        read(built(GOOD, EIGHT))
    assert allocations.count > 0
    with Allocations() as allocations:
        for data in HOSTILE.values():
            with pytest.raises(CorruptCheckpointError):
                unpack(BytesSource(data))
    assert allocations.count == 0


def test_tensors_a_source_that_ends_early_is_an_error():
    source = BytesSource(packed({"x": torch.ones(4)})[:-1])
    source.size += 1  # as a file that is cut while it is read
    with pytest.raises(CorruptCheckpointError, match="end 1 bytes early"):
        unpack(source)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_tensors_a_damaged_header_gives_a_checkpoint_error_or_valid_tensors(data):
    tied = torch.ones(2, 3).t()
    good = bytearray(packed({"x": tied, "y": tied, "z": torch.ones(2, dtype=torch.complex128)}, {"k": "v"}))
    end = 8 + struct.unpack("<Q", good[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from(b'0123456789,:"{}[]ax\\ \x00\xff'))
    try:
        found, _ = unpack(BytesSource(bytes(good)))
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= 2 * len(good)


ONE_ELEMENT = {
    "a clone of a column": lambda: torch.arange(21.0).reshape(7, 3)[2:3, 1].clone(),
    "a row of a transpose": lambda: torch.arange(30.0).reshape(1, 30).t()[:1],
    "two dimensions": lambda: torch.arange(30.0).reshape(5, 6)[1:2, ::6],
    "complex": lambda: torch.arange(6.0).to(torch.complex128).reshape(2, 3)[:1, 1],
    "empty": lambda: torch.arange(21.0).reshape(7, 3)[2:2, 1],
}


@pytest.mark.parametrize("make", ONE_ELEMENT.values(), ids=ONE_ELEMENT.keys())
def test_tensor_of_one_element_is_saved_whatever_its_stride(make):
    tensor = make()
    found, _ = unpack(BytesSource(b"".join(pack({"a": tensor}))))
    assert torch.equal(found["a"], tensor)
    assert found["a"].shape == tensor.shape
