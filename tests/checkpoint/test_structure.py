"""The structure of a module: its hash, and what is said of differences."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from loopkit.checkpoint.structure import CANDIDATES, LONGEST, Structure, differences, near, plain, structure
from loopkit.errors import StateError


class Branched(nn.Module):
    def __init__(self, width: int = 3, persistent: bool = True, tied: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, width)
        self.decoder = nn.Linear(4, width)
        if tied:
            self.decoder.weight = self.encoder.weight
        self.register_buffer("mean", torch.zeros(2), persistent=persistent)


def test_structure_describes_names_shapes_dtypes_kinds_ties_and_classes() -> None:
    found = structure(Branched(persistent=False))
    assert found.as_json() == {
        "entries": [
            ["encoder.weight", [3, 4], "float32", "parameter", True],
            ["encoder.bias", [3], "float32", "parameter", True],
            ["decoder.weight", [3, 4], "float32", "parameter", True],
            ["decoder.bias", [3], "float32", "parameter", True],
            ["mean", [2], "float32", "buffer", False],
        ],
        "ties": [["decoder.weight", "encoder.weight"]],
        "modules": {"": "Branched", "encoder": "Linear", "decoder": "Linear"},
    }


def test_structure_hash_ignores_values_gradients_and_modes() -> None:
    model = Branched()
    before = structure(model).hash
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.requires_grad_(False).eval()
    assert structure(model).hash == before
    assert len(before) == 64


def other_modules() -> dict[str, nn.Module]:
    reordered = Branched()
    reordered.decoder, encoder = reordered.encoder, reordered.decoder
    del reordered.encoder
    reordered.encoder = encoder
    replaced = Branched()
    replaced.extra = nn.Identity()
    halved = Branched()
    halved.encoder.bias.data = halved.encoder.bias.data.half()
    fixed = Branched()
    del fixed.decoder.bias
    fixed.decoder.register_buffer("bias", torch.zeros(3))
    return {
        "shape": Branched(5),
        "persistent": Branched(persistent=False),
        "ties": Branched(tied=False),
        "order": reordered,
        "module": replaced,
        "dtype": halved,
        "kind": fixed,
    }


@pytest.mark.parametrize(
    ("kind", "line"),
    {
        "shape": "encoder.weight: shape (3, 4) in the checkpoint, (5, 4) here",
        "persistent": "mean: persistent True in the checkpoint, False here",
        "ties": "decoder.weight, encoder.weight: tied in the checkpoint, not here",
        "order": "the parameters come in another order: where the checkpoint has encoder.weight, here is "
        "decoder.weight",
        "module": "modules not in the checkpoint: extra (1 Identity)",
        "dtype": "encoder.bias: dtype float32 in the checkpoint, float16 here",
        "kind": "decoder.bias: kind parameter in the checkpoint, buffer here",
    }.items(),
)
def test_structure_hash_and_differences_see_each_kind_of_change(kind: str, line: str) -> None:
    one, other = structure(Branched()), structure(other_modules()[kind])
    assert one.hash != other.hash
    assert differences(one, other)[0] == line
    assert len(differences(one, other)) == (4 if kind == "shape" else 1)
    assert differences(one, one) == []


class Several(nn.Module):
    """Tensors that share memory, or look as if they did."""

    def __init__(self) -> None:
        super().__init__()
        square = torch.zeros(3, 3)
        found: dict[str, list[torch.Tensor]] = {
            "z": [square, square],
            "b": [torch.zeros(2)] * 2,
            "transposed": [square.T],
            "row": [square[:1]],
            "bits": [square.view(torch.int32)],
            "empty": [torch.zeros(0), torch.zeros(0)],
            "meta": [torch.zeros(3, device="meta"), torch.zeros(3, device="meta")],
            "sparse": [torch.eye(2).to_sparse(), torch.eye(2).to_sparse()],
        }
        for name, tensors in found.items():
            for number, tensor in enumerate(tensors):
                self.register_buffer(f"{name}{number}", tensor)


def test_structure_ties_are_tensors_that_are_the_same_memory_seen_in_the_same_way() -> None:
    assert structure(Several()).ties == (("b0", "b1"), ("z0", "z1"))


def test_structure_ties_are_in_one_order_whatever_that_of_the_modules_is() -> None:
    one, other = nn.Module(), nn.Module()
    one.a, one.b = nn.PReLU(), nn.PReLU()
    one.b.weight = one.a.weight
    other.b, other.a = nn.PReLU(), nn.PReLU()
    other.b.weight = other.a.weight
    assert structure(one).ties == structure(other).ties == (("a.weight", "b.weight"),)


def test_structure_has_a_module_and_its_tensors_under_each_of_its_names() -> None:
    norm = nn.BatchNorm1d(2)
    found = structure(nn.ModuleDict({"one": norm, "other": norm}))
    assert found.modules == {"": "ModuleDict", "one": "BatchNorm1d", "other": "BatchNorm1d"}
    assert [entry.name.partition(".")[2] for entry in found.entries] == [
        *("weight", "bias") * 2,
        *("running_mean", "running_var", "num_batches_tracked") * 2,
    ]


def test_differences_of_what_comes_in_another_order_and_of_ties_with_what_is_gone() -> None:
    def module(*names: str) -> Structure:
        made, shared = nn.Module(), torch.zeros(1)
        for name in names:
            made.register_buffer(name, shared)
        return structure(made)

    one, other = module("a", "b"), module("b", "a")
    reordered = structure(nn.ModuleDict({"a": nn.PReLU(), "c": nn.PReLU(), "b": nn.PReLU()}))
    assert differences(structure(nn.ModuleDict({"a": nn.PReLU(), "b": nn.PReLU(), "c": nn.PReLU()})), reordered) == [
        "the parameters come in another order: where the checkpoint has b.weight, here is c.weight"
    ]
    assert differences(one, other) == ["the buffers come in another order, or the modules are nested otherwise"]
    assert differences(module("a", "b"), module("a", "c")) == [
        "1 buffer missing here: b",
        "1 buffer not in the checkpoint: c",
    ]


def test_structure_hash_is_the_same_in_another_process() -> None:
    code = (
        "import torch\nfrom torch import nn\nfrom loopkit.checkpoint.structure import structure\n"
        "print(structure(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).hash)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == structure(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).hash


def test_structure_hash_ignores_the_order_of_modules_without_parameters() -> None:
    one = nn.ModuleDict({"a": nn.Identity(), "b": nn.ReLU()})
    other = nn.ModuleDict({"b": nn.ReLU(), "a": nn.Identity()})
    assert structure(one).hash == structure(other).hash


def test_structure_survives_json() -> None:
    found = structure(Branched())
    again = Structure.from_json(json.loads(json.dumps(found.as_json())))
    assert again == found
    assert again.hash == found.hash


@pytest.mark.parametrize(
    "change",
    [
        lambda value: [],
        lambda value: {**value, "entries": 3},
        lambda value: {**value, "entries": [["a", [1], "float32", "parameter"]]},
        lambda value: {**value, "entries": [["a", ["1"], "float32", "parameter", True]]},
        lambda value: {**value, "entries": [["a", [1], "float32", "else", True]]},
        lambda value: {**value, "entries": [[3, [1], "float32", "parameter", True]]},
        lambda value: {**value, "entries": [["a", [True], "float32", "parameter", True]]},
        lambda value: {**value, "entries": [["a", [1], None, "parameter", True]]},
        lambda value: {**value, "entries": [["a", [1], "float32", "parameter", 1]]},
        lambda value: {**value, "modules": {"": 3}},
        lambda value: {**value, "modules": {3: "Linear"}},
        lambda value: {**value, "modules": ["Linear"]},
        lambda value: {**value, "ties": [[3]]},
        lambda value: {"entries": []},
    ],
)
def test_structure_malformed_json_is_refused(change: object) -> None:
    with pytest.raises(StateError, match="malformed"):
        Structure.from_json(change(structure(Branched()).as_json()))


def test_structure_lazy_parameters_are_described() -> None:
    lazy = nn.LazyLinear(3)
    assert structure(lazy).as_json()["entries"][0] == ["weight", None, "float32", "parameter", True]
    assert "weight: shape not made yet in the checkpoint, (3, 4) here" in differences(
        structure(lazy), structure(nn.Linear(4, 3))
    )


def test_differences_say_what_changed_in_words() -> None:
    one = nn.Sequential(nn.Linear(4, 3), nn.Conv2d(1, 1, 1))
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(1, 1))
    assert differences(structure(one), structure(other)) == [
        "0.weight: shape (3, 4) in the checkpoint, (5, 4) here",
        "0.bias: shape (3,) in the checkpoint, (5,) here",
        "1.weight: shape (1, 1, 1, 1) in the checkpoint, (1, 1) here",
        "class Conv2d became Linear: 1",
    ]


def test_differences_offer_the_nearest_spelling_of_a_renamed_name() -> None:
    one = nn.ModuleDict({"encoder": nn.Linear(4, 3)})
    other = nn.ModuleDict({"encoders": nn.Linear(4, 3)})
    lines = differences(structure(one), structure(other))
    assert lines[0] == (
        "2 parameters missing here: encoder.weight (did you mean 'encoders.weight'?), "
        "encoder.bias (did you mean 'encoders.bias'?)"
    )
    assert lines[1].startswith("2 parameters not in the checkpoint: encoders.weight (did you mean 'encoder.weight'?)")


def test_differences_count_what_they_do_not_show() -> None:
    one = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(12))
    other = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(12))
    lines = differences(structure(one), structure(other))
    assert len(lines) == 6
    assert lines[-1] == "and 7 more such differences"
    lines = differences(structure(one), structure(nn.ModuleList()))
    assert lines[0] == "12 parameters missing here: 0.weight, 1.weight, 2.weight, 3.weight, 4.weight and 7 more"


def test_differences_name_ties_and_order() -> None:
    tied, loose = structure(Branched()), structure(Branched(tied=False))
    assert differences(tied, loose) == ["decoder.weight, encoder.weight: tied in the checkpoint, not here"]
    assert differences(loose, tied) == ["decoder.weight, encoder.weight: tied here, not in the checkpoint"]
    assert differences(tied, structure(other_modules()["order"])) == [
        "the parameters come in another order: where the checkpoint has encoder.weight, here is decoder.weight"
    ]


def test_plain_caps_and_escapes() -> None:
    assert plain("a\x1b[2J\n") == "a\\x1b[2J\\n"
    assert len(plain("x" * 10_000)) <= 100
    assert plain("\ud800") == "\\ud800"
    assert plain("x" * 100) == "x" * 100


def test_near_looks_among_so_many_names_of_sane_length() -> None:
    assert near("weigt", ["weight"]) == " (did you mean 'weight'?)"
    assert near("x" * LONGEST, ["x" * (LONGEST - 1)]) != ""
    assert near("x" * (LONGEST + 1), ["x" * LONGEST]) == ""
    assert near("x" * LONGEST, ["x" * (LONGEST + 1)]) == ""
    others = [f"{i}" for i in range(CANDIDATES)]
    assert near("weigt", [*others[1:], "weight"]) != ""
    assert near("weigt", [*others, "weight"]) == ""


def test_differences_of_modules_are_sorted_counted_and_capped() -> None:
    def module(kind: type, **parts: nn.Module) -> Structure:
        made = kind()
        for name, part in parts.items():
            made.add_module(name, part)
        return structure(made)

    five = {name: nn.Identity() for name in "edcba"}
    own = type("Own", (nn.Module,), {})
    assert differences(module(nn.Module, **five), module(own)) == [
        "class Module became Own: the model",
        "modules missing here: a, b, c, d, e (5 Identity)",
    ]
    others = {"x": nn.Tanh(), "y": nn.ReLU(), "z": nn.SiLU(), "w": nn.ELU(), "v": nn.GELU(), "u": nn.CELU()}
    assert differences(module(nn.Module), module(nn.Module, **others)) == [
        "modules not in the checkpoint: u, v, w, x, y and 1 more (1 CELU, 1 ELU, 1 GELU, 1 ReLU, 1 SiLU)"
    ]
    relus = {name: nn.ReLU() for name in five}
    assert differences(module(nn.Module, **five), module(nn.Module, **relus)) == [
        "class Identity became ReLU: a, b, c, d, e"
    ]


def test_differences_of_five_are_all_shown_and_names_of_other_shapes_or_dtypes_are_no_spelling() -> None:
    one = structure(nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(5)))
    other = structure(nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(5)))
    assert len(differences(one, other)) == 5
    for renamed in (nn.Linear(4, 5), nn.Linear(4, 3, dtype=torch.float64)):
        here = structure(nn.ModuleDict({"encoders": renamed}))
        lines = differences(structure(nn.ModuleDict({"encoder": nn.Linear(4, 3)})), here)
        assert lines[0] == "2 parameters missing here: encoder.weight, encoder.bias"
