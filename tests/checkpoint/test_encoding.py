"""Nested state as JSON and tensors: what goes in comes back, what cannot is named, what is hostile is refused."""

import collections
import decimal
import enum
import math
import pathlib
import types

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loopkit.checkpoint.encoding import decode, dumps, encode, loads
from loopkit.checkpoint.tensors import BytesSource, pack, unpack
from loopkit.errors import StateError


def through(state, where="state"):
    """``state`` after the whole way: encoded, written, read, decoded."""
    value, tensors = encode(state, where)
    text, data = dumps(value), b"".join(pack(tensors))
    return decode(loads(text), unpack(BytesSource(data))[0])


def assert_same(found, expected, path="state"):
    """Equal in types, values, order, dtypes, strides: bit for bit."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        assert [type(key) for key in found] == [type(key) for key in expected], path
        for key, item in expected.items():
            assert_same(found[key], item, f"{path}[{key!r}]")
    elif isinstance(expected, numpy.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert found.tobytes() == expected.tobytes(), path
    elif isinstance(expected, collections.deque):
        assert found.maxlen == expected.maxlen, path
        assert_same(list(found), list(expected), path)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, item in enumerate(expected):
            assert_same(found[index], item, f"{path}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert found.stride() == expected.stride(), path
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
        assert torch.equal(*bits), path
    elif isinstance(expected, float):
        assert repr(found) == repr(expected), path
    else:
        assert found == expected, path


# --------------------------------------------------------------------------------------------------------- round trips

SURROGATES = "\ud83d\ude00"
VALUES = {
    "scalars": [None, True, False, 0, -1, 1.5, "", "text", b"", b"\x00\xff"],
    "bool is no int": {"a": True, "b": 1, "c": 1.0},
    "sets": [set(), {3, 1, 2}, {"b", "a", None, True, 2.5, (1, "x")}, frozenset({math.inf, b"c"})],
    "deques": [collections.deque(), collections.deque([1, [2]], maxlen=5), collections.deque([torch.ones(2)])],
    "keys of any plain kind": {None: 1, True: 2, 1.5: 3, (1, ("a", None)): 4, b"b": 5, math.inf: 6, 2: 7, "2": 8},
    "arrays": [numpy.arange(6.0).reshape(2, 3).T, numpy.zeros(0, "int8"), numpy.array(3), numpy.array([True])],
    "large ints": [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**30, -(2**200), 2**50_000],
    "floats": [0.0, -0.0, 0.1, 1e16, 1e-300, 5e-324, 1.7976931348623157e308, 1 / 3, 123456789012345680.0],
    "non-finite": [math.inf, -math.inf, math.nan],
    "strings": ["é", "\x00", "\u2028", '"\\/', "😀", "\ud800", "\udc00\ud800", "a" + SURROGATES, SURROGATES * 2],
    "containers": {"list": [[], [[]], [1, [2]]], "tuple": ((), (1,), ((), [(2,)])), "dict": {"": {}, "a": {"b": {}}}},
    "order": {"b": 1, "a": 2, "c": {"z": 1, "y": 2}},
    "integer keys": {1: "a", 0: "b", -5: {2**70: "c"}},
    "mixed keys": {1: "int", "1": "str", "b": 1, "a": 2, -1: 3},
    "keys like tags": {"$tensor": "x", "$": 1, "$dict": [], "a": {"$tuple": [1]}, "b": [{"$int": "0x1"}]},
    "one key like a tag": {"$tensor": "x"},
    "surrogate keys": {SURROGATES: 1, "\ud83d": 2, "😀": 3},
    "deep": [[{"a": ({1: [()]},)}]],
    "torch names": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool],
    "devices": [torch.device("cpu"), torch.device("cuda"), torch.device("cuda:11"), torch.device("meta")],
    "memory formats": [
        torch.channels_last,
        torch.channels_last_3d,
        torch.contiguous_format,
        torch.preserve_format,
    ],
    "random state of python": __import__("random").Random(0).getstate(),
}


@pytest.mark.parametrize("state", VALUES.values(), ids=VALUES.keys())
def test_encoding_gives_back_what_it_was_given(state):
    assert_same(through(state), state)


def test_encoding_gives_back_tensors_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    state = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
        "bool": torch.tensor([True, False]),
        "generator": generator.get_state(),
        "channels_last": torch.randn(2, 3, 4, 5, generator=generator).contiguous(memory_format=torch.channels_last),
        0: [torch.randn(3, generator=generator).bfloat16(), (torch.tensor(1, dtype=torch.int64),)],
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    }
    assert_same(through(state), state)


def test_encoding_names_tensors_by_their_path():
    x = torch.ones(1)
    state = {"plugins": {"ema": {"tensors": {"weight": x}}}, "optimizer": {"state": {0: [x + 1]}}, "": (x + 2,)}
    assert list(encode(state, where="")[1]) == ["plugins.ema.tensors.weight", "optimizer.state.0.0", ".0"]
    assert list(encode(state, where="run")[1]) == [
        "run.plugins.ema.tensors.weight",
        "run.optimizer.state.0.0",
        "run..0",
    ]
    assert list(encode(x, where="")[1]) == ["tensor"]
    assert list(encode(x, where="x")[1]) == ["x"]


def test_encoding_names_of_tensors_are_unique_and_can_be_written():
    names = ["a.b", "__metadata__", "\ud800", "a.b~2", "😀"]
    state = {name: torch.tensor(float(index)) for index, name in enumerate(names)}
    state |= {"a": {"b": torch.tensor(8.0)}, 1: torch.tensor(9.0), "1": torch.tensor(10.0)}
    _, tensors = encode(state, where="")
    assert len(tensors) == 8
    assert_same(through(state, where=""), state)


def test_encoding_keeps_a_tensor_found_twice_as_one():
    x, parameter = torch.ones(2), nn.Parameter(torch.ones(3))
    state = {"a": x, "b": [x], "c": torch.ones(2), "p": parameter, "q": (parameter,)}
    value, tensors = encode(state)
    assert value["a"] == value["b"][0] != value["c"]
    assert len(tensors) == 3
    found = through(state)
    assert found["a"] is found["b"][0]
    assert found["p"] is found["q"][0]
    assert found["a"] is not found["c"]


def test_encoding_tensors_made_on_the_way_are_never_taken_for_one_another():
    class Fresh(dict):
        def items(self):
            return ((str(index), torch.tensor(float(index))) for index in range(50))

    assert [tensor.item() for tensor in through(Fresh(a=1)).values()] == list(range(50))


def test_encoding_gives_detached_tensors_that_share_memory():
    parameter = nn.Parameter(torch.ones(2))
    tensor = encode(parameter * 1)[1]["state"]
    assert not tensor.requires_grad
    tensor = encode(parameter)[1]["state"]
    assert type(tensor) is torch.Tensor
    assert not tensor.requires_grad
    assert tensor.data_ptr() == parameter.data_ptr()


class Level(enum.IntEnum):
    HIGH = 3


class Mode(str, enum.Enum):  # noqa: UP042 - the older way is found in saved states
    MIN = "min"


class Text(str):
    def __str__(self):
        return "changed"


PLAIN = {
    "numpy float64": (numpy.float64(0.1), 0.1),
    "numpy float32": (numpy.float32(0.1), float(numpy.float32(0.1))),
    "numpy float16": (numpy.float16("nan"), math.nan),
    "numpy int64": (numpy.int64(-3), -3),
    "numpy uint64": (numpy.uint64(2**64 - 1), 2**64 - 1),
    "numpy bool": (numpy.bool_(True), True),
    "numpy str": (numpy.str_("a"), "a"),
    "numpy bytes": (numpy.bytes_(b"a"), b"a"),
    "int enum": (Level.HIGH, 3),
    "str enum": (Mode.MIN, "min"),
    "str subclass": (Text("a"), "a"),
    "keys": ({numpy.int64(1): 1, Level.HIGH: 2, Mode.MIN: 3, Text("b"): 4}, {1: 1, 3: 2, "min": 3, "b": 4}),
    "OrderedDict": (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "defaultdict": (collections.defaultdict(list, a=[1]), {"a": [1]}),
    "Counter": (collections.Counter("aab"), {"a": 2, "b": 1}),
    "list subclass": (collections.UserList([1]).data, [1]),
    "Size": (torch.Size([2, 3]), (2, 3)),
    "parameter": (nn.Parameter(torch.ones(2)), torch.ones(2)),
}


@pytest.mark.parametrize(("state", "plain"), PLAIN.values(), ids=PLAIN.keys())
def test_encoding_makes_subclasses_plain(state, plain):
    assert_same(through(state), plain)
    assert_same(through([state]), [plain])


def values():
    """States of every kind that is encoded, but for tensors of every dtype (see the tests of tensors)."""
    text = st.text(st.characters() | st.sampled_from("$\ud83d\ude00"), max_size=6)
    plain_keys = text | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.binary(max_size=3)
    keys = plain_keys | st.tuples(plain_keys, plain_keys) | st.sampled_from(["$tensor", "$dict", "$tuple", "a"])
    tensors = st.builds(
        lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
    )
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(max_size=6) | tensors
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
            | st.lists(inner, max_size=3).map(collections.deque)
            | st.sets(keys, max_size=4)
        ),
        max_leaves=20,
    )


@settings(max_examples=200, deadline=None)
@given(values())
def test_encoding_gives_back_any_state(state):
    assert_same(through(state), state)


# ------------------------------------------------------------------------------------------------------------- refusals


def generator():
    yield 1


Point = collections.namedtuple("Point", "x y")

REFUSED = {
    "function": (lambda: 0, "function <lambda> cannot be saved: code is not state"),
    "named function": (generator, "function generator cannot be saved"),
    "class": (Level, r"EnumType Level cannot be saved|EnumMeta Level cannot be saved"),
    "builtin": (len, "builtin_function_or_method len cannot"),
    "module": (nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear cannot be saved"),
    "generator": (generator(), "generator cannot be saved"),
    "set of objects": ({len}, "has the member <built-in function len> of type builtin_function_or_method"),
    "set of tensors": ({torch.ones(1)}, "has the member tensor"),
    "object": (object(), "object cannot be saved: save the plain values"),
    "decimal": (decimal.Decimal(1), "decimal.Decimal cannot"),
    "complex": (1j, "complex cannot"),
    "numpy complex": (numpy.complex64(1), "complex cannot"),
    "numpy date": (numpy.datetime64("2020-01-01"), "numpy.datetime64 cannot"),
    "numpy long double": (numpy.longdouble(1), "numpy.* cannot"),
    "array of objects": (numpy.array([None]), "numpy.ndarray of object cannot be saved: save a list"),
    "array of texts": (numpy.array(["a"]), "numpy.ndarray of <U1 cannot be saved"),
    "path": (pathlib.PurePosixPath("a"), "PurePosixPath cannot"),
    "enum": (enum.Enum("Colour", "RED").RED, "Colour cannot"),
    "bytearray": (bytearray(b"a"), r"save bytes\(value\)"),
    "range": (range(3), "range cannot"),
    "slice": (slice(3), "slice cannot"),
    "mapping": (types.MappingProxyType({}), r"save dict\(value\)"),
    "namedtuple": (Point(1, 2), "Point cannot be saved: a named tuple would come back without its names"),
    "structseq": (torch.ones(2, 2).max(0), "named tuple"),
    "torch generator": (torch.Generator(), "torch._C.Generator cannot"),
    "dtype": (torch.qint8, "torch.dtype cannot"),
    "layout": (torch.strided, "torch.layout cannot"),
    "device": (torch.device("vulkan"), "torch.device cannot"),
    "sparse": (torch.ones(2).to_sparse(), r"is a sparse tensor .*to_dense\(\)"),
    "meta": (torch.ones(2, device="meta"), "is a tensor on the meta device"),
    "tuple of objects": ({(1, len): 1}, "has the key <built-in function len> of type builtin_function_or_method"),
    "tensor key": ({torch.tensor(1): 1}, r"has the key tensor\(1\) of type Tensor"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_encoding_refuses_what_has_no_plain_form_and_names_its_path(value, message):
    with pytest.raises(StateError, match=rf"^plugins\.ema\.state\['fn'\]: .*({message})"):
        encode({"state": {"a": 1, "fn": value}}, where="plugins.ema")
    with pytest.raises(StateError, match=rf"^the state: .*({message})"):
        encode(value, where="")


def test_encoding_writes_paths_as_one_would():
    def path(state, where):
        with pytest.raises(StateError) as raised:
            encode(state, where)
        return str(raised.value).split(": object")[0]

    bad = object()
    assert path({"plugins": {"ema": {"state": {"fn": bad}}}}, "") == "plugins.ema.state['fn']"
    assert path({"fn": bad}, "plugins.ema.state") == "plugins.ema.state['fn']"
    assert path([1, ({"a b": {0: [bad]}},)], "state") == "state[1][0]['a b'][0][0]"
    assert len(path({"k" * 10_000: bad}, "state")) < 250


def test_encoding_refuses_keys_that_become_equal():
    class Other(str):
        __hash__ = object.__hash__

        def __eq__(self, other):
            return self is other

    with pytest.raises(StateError, match="keys that are the same once they are plain"):
        encode({"a": 1, Other("a"): 2})


def test_encoding_refuses_cycles():
    own = []
    own.append(own)
    with pytest.raises(StateError, match=r"state\[0\]: is state again, around itself: a cycle"):
        encode(own)
    outer = {"a": {"b": ({},)}}
    outer["a"]["b"][0]["back"] = outer["a"]
    with pytest.raises(StateError, match=r"state\.a\.b\[0\]\['back'\]: is state\['a'\] again"):
        encode(outer)


def test_encoding_takes_a_list_found_twice_that_is_no_cycle():
    twice = [1]
    assert through({"a": twice, "b": (twice, twice)}) == {"a": [1], "b": ([1], [1])}


def nested(depth, wrap):
    state = 7
    for _ in range(depth):
        state = wrap(state)
    return state


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}, lambda x: {"$": x}]
)
def test_encoding_is_a_hundred_levels_deep_and_no_more(wrap):
    deepest = nested(99, wrap)
    assert_same(through(wrap(deepest)), wrap(deepest))
    assert_same(through(nested(100, wrap)), nested(100, wrap))
    with pytest.raises(StateError, match="nested more than 100 deep"):
        encode(nested(101, wrap))
    with pytest.raises(StateError, match="nested more than 100 deep"):
        encode(nested(100_000, wrap))


def test_encoding_gives_tagged_leaves_at_the_deepest_level():
    state = nested(99, lambda x: [x])
    leaf = state
    while isinstance(leaf[0], list):
        leaf = leaf[0]
    leaf[0] = {1: torch.ones(2), 2: b"x"}
    assert_same(through(state), state)


# ------------------------------------------------------------------------------------------------------- hostile values

MALFORMED = {
    "unknown tag": {"$bag": [1]},
    "set out of order": {"$set": [2, 1]},
    "set with a member twice": {"$set": [1, 1]},
    "set of lists": {"$set": [[1]]},
    "set of a number": {"$set": 1},
    "deque without a length": {"$deque": [[1]]},
    "deque that is too long": {"$deque": [[1, 2], 1]},
    "deque of a number": {"$deque": [1, None]},
    "array of a list": {"$array": [1]},
    "key that is a list": {"$dict": [[[1], 2]]},
    "key that is a tensor": {"$dict": [[{"$tensor": "a"}, 2]]},
    "empty tag": {"$": 1},
    "misspelt tag": {"$tupel": [1]},
    "tag with more": {"$tuple": [], "x": 1},
    "tag behind a key": {"x": 1, "$tuple": []},
    "two tags": {"$tuple": [], "$dict": []},
    "missing tensor": {"$tensor": "y"},
    "tensor of a number": {"$tensor": 1},
    "tensor of a list": {"$tensor": ["x"]},
    "tuple of a dict": {"$tuple": {"a": 1}},
    "tuple of text": {"$tuple": "ab"},
    "dict of a dict": {"$dict": {"a": 1}},
    "dict of a single": {"$dict": [["a"]]},
    "dict of a triple": {"$dict": [["a", 1, 2]]},
    "dict of text": {"$dict": ["ab"]},
    "dict with a key twice": {"$dict": [[1, 1], [1, 2]]},
    "dict with a large key twice": {"$dict": [[{"$int": hex(2**70)}, 1], [{"$int": hex(2**70)}, 2]]},
    "dict with a list as key": {"$dict": [[[1], 1]]},
    "dict with a tensor as key": {"$dict": [[{"$tensor": "x"}, 1]]},
    "int in decimal": {"$int": "123456789012345678901234567890"},
    "int that is small": {"$int": "0x1"},
    "int with a leading zero": {"$int": "0x010000000000000000"},
    "int in capitals": {"$int": "0x1AAAAAAAAAAAAAAAAA"},
    "int with underscores": {"$int": "0x1_0000_0000_0000_0000"},
    "int of an int": {"$int": 2**70},
    "float in other words": {"$float": "infinity"},
    "finite float": {"$float": "1.0"},
    "float of a float": {"$float": 1.0},
    "float of a list": {"$float": []},
    "str that needs no tag": {"$str": "61"},
    "str of no hex": {"$str": "zz"},
    "str in capitals": {"$str": "EDA0BDEDB880"},
    "str of invalid bytes": {"$str": "ff"},
    "str of a number": {"$str": 1},
    "bytes of no base64": {"$bytes": "a"},
    "bytes with a newline": {"$bytes": "YQ==\n"},
    "bytes not canonical": {"$bytes": "YR=="},
    "bytes of a number": {"$bytes": 1},
    "bytes of non-ASCII": {"$bytes": "é"},
    "dtype unknown": {"$dtype": "float33"},
    "dtype of another name": {"$dtype": "nn"},
    "dtype of a list": {"$dtype": []},
    "device unknown": {"$device": "gpu"},
    "device with a bad index": {"$device": "cuda:01"},
    "device with a huge index": {"$device": "cuda:999999999999"},
    "device of a number": {"$device": 0},
    "memory format unknown": {"$memory_format": "strided"},
    "memory format of a dict": {"$memory_format": {}},
    "a key that is no text": {1: 1},
    "a tuple": (1,),
    "a set": {1},
    "bytes": b"a",
    "NaN": math.nan,
    "infinity": math.inf,
    "a numpy float": numpy.float64(1.0),
    "too deep": nested(102, lambda x: [x]),
    "far too deep": 100_000,
}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED.keys())
def test_encoding_refuses_to_decode_what_it_has_not_written(value):
    if value == MALFORMED["far too deep"]:
        value = nested(value, lambda x: {"$tuple": [x]})
    with pytest.raises(StateError, match="state") as raised:
        decode(value, {"x": torch.ones(1)})
    assert len(str(raised.value)) < 400
    with pytest.raises(StateError, match=r"state\['a'\]\[1\]"):
        decode({"a": [1, value]}, {"x": torch.ones(1)})


def test_encoding_suggests_the_tag_that_was_meant():
    with pytest.raises(StateError, match=r"did you mean '\$tuple'"):
        decode({"$tupel": []}, {})


HOSTILE = {
    "nothing": b"",
    "cut": b'{"a":[1,2',
    "two values": b"1 2",
    "spaces": b'{"a": 1}',
    "newline at the end": b"1\n",
    "other order of escapes": b'"\\u0061"',
    "escape in capitals": b'"\\u00E9"',
    "slash escaped": b'"\\/"',
    "unescaped non-ASCII": '"é"'.encode(),
    "invalid UTF-8": b'"\xff"',
    "byte order mark": b"\xef\xbb\xbf1",
    "UTF-16": '"a"'.encode("utf-16"),
    "control character": b'"\x01"',
    "key twice": b'{"a":1,"a":1}',
    "key twice inside": b'[{"a":{"b":1,"c":2,"b":1}}]',
    "NaN": b"NaN",
    "Infinity": b"[Infinity]",
    "-Infinity": b"-Infinity",
    "float that overflows": b"1e999",
    "float in other digits": b"1.50",
    "float in capitals": b"1E+16",
    "minus zero as an int": b"-0",
    "leading zero": b"01",
    "plus": b"+1",
    "int of many digits": b"1" * 5_000,
    "int of a million digits": b"[" + b"9" * 1_000_000 + b"]",
    "float of a million digits": b"0." + b"9" * 1_000_000,
    "nested lists": b"[" * 1_000_000,
    "nested and closed": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"a":' * 200_000,
    "quotes": b'"' + b'\\"' * 1_000_000,
    "backslashes": b'"' + b"\\" * 999_999,
    "unclosed strings": b'"a\\' * 300_000,
    "single quotes": b"{'a':1}",
    "comment": b"1//",
    "trailing comma": b"[1,]",
    "python": b"__import__('os')",
    "pickle": b"\x80\x04N.",
}


@pytest.mark.timeout(60)  # it takes 0.1 s at most, for megabytes
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_encoding_refuses_to_load_what_it_has_not_dumped(data):
    with pytest.raises(StateError, match="not the JSON that dumps") as raised:
        loads(data)
    assert len(str(raised.value)) < 400


def test_encoding_names_the_key_that_is_given_twice():
    with pytest.raises(StateError, match="key 'b' is given twice"):
        loads(b'[{"a":{"b":1,"c":2,"b":1}}]')


def test_encoding_loads_only_so_many_bytes(monkeypatch):
    monkeypatch.setattr("loopkit.checkpoint.encoding.LARGEST_JSON", 10)
    assert loads(b'"01234567"') == "01234567"
    with pytest.raises(StateError, match="JSON of 11 bytes"):
        loads(b'"012345678"')


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=30) | st.text('[]{}",:01.eE-+ \\un$aNI', max_size=30).map(str.encode))
def test_encoding_loads_nothing_but_what_dumps_gives(data):
    try:
        value = loads(data)
    except StateError:
        return
    assert dumps(value) == data


@pytest.mark.parametrize("value", [math.nan, {"a": math.inf}, {1, 2}, b"a", object(), [torch.ones(1)], 1j])
def test_encoding_dumps_only_plain_values(value):
    with pytest.raises(StateError, match="not a plain value"):
        dumps(value)


def test_encoding_dumps_no_cycle():
    own = []
    own.append(own)
    with pytest.raises(StateError, match="not a plain value"):
        dumps(own)


# ----------------------------------------------------------------------------------------------------------- optimizers

VARIANTS = {
    "Adadelta": [{}, {"foreach": True}, {"differentiable": True}, {"maximize": True, "weight_decay": 0.1}],
    "Adafactor": [{}, {"foreach": True}, {"eps": (None, 1e-3)}, {"lr": torch.tensor(0.01)}],
    "Adagrad": [{}, {"foreach": True}, {"fused": True}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adam": [
        {},
        {"amsgrad": True},
        {"foreach": True},
        {"fused": True},
        {"fused": True, "amsgrad": True},
        {"differentiable": True},
        {"lr": torch.tensor(0.01), "foreach": False},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "lr": torch.tensor(0.01), "foreach": False},
    ],
    "AdamW": [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}, {"differentiable": True}],
    "Adamax": [{}, {"foreach": True}, {"maximize": True}],
    "ASGD": [{}, {"foreach": True}, {"t0": 1, "weight_decay": 0.1}],
    "LBFGS": [{}, {"line_search_fn": "strong_wolfe"}, {"history_size": 2, "max_iter": 7}],
    "Muon": [{}, {"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False}],
    "NAdam": [{}, {"decoupled_weight_decay": True}, {"foreach": True}],
    "RAdam": [{}, {"decoupled_weight_decay": True}, {"foreach": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}, {"foreach": True}],
    "Rprop": [{}, {"foreach": True}, {"etas": (0.4, 1.3)}],
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "foreach": True},
        {"momentum": 0.9, "fused": True},
    ],
    "SparseAdam": [{}, {"maximize": True}],
}


def test_encoding_knows_every_optimizer_of_torch():
    classes = [name for name, item in vars(torch.optim).items() if isinstance(item, type)]
    assert sorted(VARIANTS) == sorted(set(classes) - {"Optimizer"})


def parameters_for(name):
    if name == "SparseAdam":
        return [nn.Parameter(torch.randn(5, 3))]
    if name == "Muon":  # matrices only
        return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 4).t())]
    if name == "LBFGS":  # contiguous gradients of one dtype only
        return [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3))]
    channels_last = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    others = [torch.randn(3), torch.randn(()), torch.randn(3).double(), torch.randn(3).bfloat16()]
    return [nn.Parameter(tensor) for tensor in (channels_last, *others)]


def train(name, options):
    """An optimizer after three steps, with a second parameter group where it takes one."""
    torch.manual_seed(0)
    parameters = parameters_for(name)
    if options.get("differentiable"):  # updates are part of the graph, in which leaves cannot change
        parameters = [parameter.clone() for parameter in parameters]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
    simple = name in ("LBFGS", "SparseAdam")
    optimizer = getattr(torch.optim, name)(parameters if simple else groups, **options)
    inputs = torch.tensor([0, 3, 3])

    def closure():
        optimizer.zero_grad()
        if name == "SparseAdam":
            loss = nn.functional.embedding(inputs, parameters[0], sparse=True).square().sum()
        else:
            loss = sum(((parameter - 1) ** 2).sum().float() for parameter in parameters)
        loss.backward()
        return loss

    for _ in range(3):
        if options.get("differentiable"):
            for parameter in parameters:
                parameter.grad = (parameter * 2).clone()
            optimizer.step()
        else:
            optimizer.step(closure)
    return optimizer


CASES = [(name, options) for name, variants in VARIANTS.items() for options in variants]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{'-'.join(options)}" for name, options in CASES])
def test_encoding_gives_back_the_state_of_optimizers(name, options):
    state = train(name, options).state_dict()
    assert state["state"] or (name == "SGD" and not options)
    found = through(state, where="optimizer")
    assert_same(found, state)


SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2]),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_encoding_gives_back_the_state_of_schedulers(make):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(
            *([numpy.float64(1.0)] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
        )
    state = scheduler.state_dict()
    found = through(state)
    assert found == state
    scheduler.load_state_dict(found)
