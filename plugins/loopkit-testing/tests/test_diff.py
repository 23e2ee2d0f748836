"""Comparison of saved states: what counts as a difference, and how it is said."""

from __future__ import annotations

from collections import OrderedDict

import numpy
import pytest
import torch
from torch import nn

from loopkit.checkpoint.tensors import DTYPES, PACKED, PAIRS
from loopkit.errors import StateError
from loopkit_testing.diff import count, differences, part, written

NAN = float("nan")


def said(one, other, **options):
    return [str(difference) for difference in differences(one, other, **options)]


def float_from_bits(bits, dtype=torch.float32):
    return torch.tensor(bits, dtype=torch.int32).view(dtype)


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (12, 14, "12 / 14"),
        (1, True, "int 1 / bool True"),
        (1, 1.0, "int 1 / float 1.0"),
        (0.0, -0.0, "0.0 / -0.0"),
        (0.1, 0.1 + 1e-17 + 2e-17, "0.1 / 0.10000000000000003"),
        ("a\n", "b", "'a\\n' / 'b'"),
        (b"a", "a", "bytes b'a' / str 'a'"),
        (None, 0, "None / int 0"),
        ([1], (1,), "list of 1 items / tuple of 1 items"),
        (torch.float32, torch.float64, "torch.float32 / torch.float64"),
        (torch.ones(2), [1.0, 1.0], "float32 [2] / list of 2 items"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float32 [2] / float64 [2]"),
        (torch.ones(2), torch.ones(1, 2), "float32 [2] / float32 [1, 2]"),
        (torch.ones(0, 2), torch.ones(2, 0), "float32 [0, 2] / float32 [2, 0]"),
        (torch.tensor(0.0), torch.tensor(-0.0), "1 of 1 values differ: 0 / -0"),
        (torch.tensor([True, True]), torch.tensor([True, False]), "1 of 2 values differ, first at [1]: True / False"),
        (torch.tensor([1, NAN]), torch.tensor([1, 2.0]), "1 of 2 values differ, first at [1]: nan / 2"),
        (torch.tensor([1 + 0j]), torch.tensor([1 + 0j]).conj(), "1 of 1 values differ, first at [0]: (1+0j) / (1-0j)"),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), "1 of 1 values differ, first at [0]: (1+2j) / (1-2j)"),
        (torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0)), "1 of 1 values differ: 1 / 1.00000012"),
    ],
)
def test_a_value_differs(one, other, what):
    assert said({"x": one}, {"x": other}) == [f"x: {what}"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NAN, float("-nan")),
        (torch.tensor([NAN]), float_from_bits([0x7FC00001])),
        (torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3).t().contiguous().t()),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        (torch.ones(0, 3), torch.ones(0, 3)),
        (torch.Size([1, 2]), (1, 2)),
        (OrderedDict(a=1, b=2), {"b": 2, "a": 1}),
        (numpy.float64(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
    ],
)
def test_a_value_is_the_same(one, other):
    assert said({"x": [one]}, {"x": [other]}) == []


@pytest.mark.parametrize("dtype", [*DTYPES.values(), *PAIRS], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_one_bit_is_found_in_every_dtype(dtype):
    data = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8)
    one, other = data.view(dtype), data.clone().view(dtype)
    assert said(one, one.clone()) == []
    other.view(torch.uint8)[2 * dtype.itemsize] = 1
    (text,) = said(one, other)
    assert text.startswith("the state: 1 of 4 values differ, first at [2]: ")
    if dtype == PACKED:
        assert text.endswith("0x0 / 0x1")


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES.values() if d.is_floating_point and d.itemsize > 1] + [torch.float8_e5m2], ids=str
)
def test_every_nan_is_the_same(dtype):
    one = torch.tensor([NAN, 1.0]).to(dtype)
    other = one.clone()
    other.view(torch.uint8)[dtype.itemsize - 1] ^= 128  # its sign
    assert not torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert said(one, other) == []


def test_paths_lead_to_what_differs_in_the_order_of_the_first_state():
    one = {"plugins": {"ema": {"tensors": {"0.weight": torch.arange(6.0).reshape(2, 3)}}}, "progress": {"steps": 12}}
    other = {"progress": {"steps": 14}, "plugins": {"ema": {"tensors": {"0.weight": torch.zeros(2, 3)}}}}
    assert said(one, other) == [
        "plugins.ema.tensors.0.weight: 5 of 6 values differ, first at [0, 1]: 1 / 0",
        "progress.steps: 12 / 14",
    ]
    assert said({"a": [0, {"b c": 1, 2: 3, "": 4}]}, {"a": [0, {"b c": 2, 2: 4, "": 5}]}) == [
        "a[1]['b c']: 1 / 2",
        "a[1][2]: 3 / 4",
        "a[1]['']: 4 / 5",
    ]


def test_what_is_on_one_side_alone_is_a_difference():
    assert said({"a": 1, "b": [2]}, {"b": [2, 3], "c": torch.ones(2)}) == [
        "a: int 1 / not there",
        "b: 1 items / 2 items",
        "c: not there / float32 [2]",
    ]
    assert said({1: "a"}, {"1": "a"}) == ["[1]: str 'a' / not there", "1: not there / str 'a'"]
    assert said({1: "a"}, {True: "a"}) == ["[1]: str 'a' / not there", "[True]: not there / str 'a'"]


def test_ignored_keys_are_left_out_at_any_depth():
    one = {"seconds": 1.0, "rows": [{"seconds": 2.0, "loss": 1.0}]}
    other = {"rows": [{"seconds": 3.0, "loss": 2.0}]}
    assert said(one, other, ignore=("seconds",)) == ["rows[0].loss: 1.0 / 2.0"]
    assert len(said(one, other)) == 3


def test_parts_are_counted():
    one = {"models": {"model": {"a.b": 1, "c": 2}}, "plugins": {"ema": {"x": 1}, "x.y": 3}, "progress": {"steps": 1}}
    other = {"models": {"model": {"a.b": 2, "c": 3}}, "plugins": {"ema": {"x": 2}, "x.y": 4}, "progress": {"steps": 2}}
    assert count(differences(one, other)) == {"models.model": 2, "plugins.ema": 1, "plugins.x.y": 1, "progress": 1}
    assert [part(("fit", "epochs")), part(("generators", "torch")), part(())] == [
        "fit",
        "generators.torch",
        "the state",
    ]


def test_what_a_path_says_stays_on_one_line():
    assert written(("a\nb", "x" * 300)) == f"['a\\nb'].{'x' * 48}...{'x' * 48}"


def test_a_long_value_is_cut():
    (text,) = said("a" * 10_000, "b" * 10_000)
    assert len(text) < 250


def test_a_tensor_that_no_state_can_hold_is_refused():
    with pytest.raises(StateError, match=r"plugins\.ema\.mask is a sparse tensor"):
        differences(
            {"plugins": {"ema": {"mask": torch.ones(2).to_sparse()}}}, {"plugins": {"ema": {"mask": torch.ones(2)}}}
        )
