"""Weights by themselves: saving, loading into models of other shapes and names, and looking without loading."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from loopkit import Learner
from loopkit.checkpoint import disk, storage
from loopkit.checkpoint.bundle import Contents, describe
from loopkit.checkpoint.inspection import inspect
from loopkit.checkpoint.manifest import FORMAT
from loopkit.checkpoint.weights import LoadReport, load_weights, save_weights
from loopkit.errors import CheckpointError, CorruptCheckpointError, StateError

EVENTS: list[str] | None = None
"""The audit events that could run code, while a test listens."""


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if EVENTS is not None and event in ("pickle.find_class", "exec", "os.system", "os.exec", "subprocess.Popen"):
        EVENTS.append(event)


sys.addaudithook(listen)


class Net(nn.Module):
    def __init__(self, width: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(nn.Linear(4, width, dtype=dtype), nn.BatchNorm1d(width, dtype=dtype))
            self.head = nn.Linear(width, 2, dtype=dtype)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
        assert tensor.dtype == other[name].dtype, name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    save_weights(Net(seed=1), path)
    return path


def checkpoint(directory: Path, *models: nn.Module, label: str = "") -> Path:
    """Write a checkpoint of a learner with these models."""
    named = {f"net{i}": model for i, model in enumerate(models)}
    learner = Learner(
        named if len(models) > 1 else models[0],
        nn.functional.mse_loss,
        {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in named.items()}
        if len(models) > 1
        else torch.optim.SGD(models[0].parameters(), lr=0.1),
        standard=False,
    )
    contents = Contents.of(learner, learner.state_dict())
    return storage.write(directory, contents.files(), describe(learner, contents, "test"), label=label).path


# saving


def test_save_weights_writes_plain_names_that_safetensors_reads(file: Path) -> None:
    assert_equal(safetensors.torch.load_file(file), values(Net(seed=1)))
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_save_weights_stream_holds_the_bytes_of_the_file_and_metadata(file: Path) -> None:
    stream = io.BytesIO()
    save_weights(Net(seed=1), stream)
    assert stream.getvalue() == file.read_bytes()
    stream = io.BytesIO()
    save_weights(Net(), stream, metadata={"run": "first"})
    assert safetensors.torch.load(stream.getvalue()).keys() == values(Net()).keys()
    assert b'"run":"first"' in stream.getvalue()


class Slow(io.RawIOBase):
    """Takes at most 7 bytes at a time, as sockets may."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data[:7])
        return len(data[:7])


def test_save_weights_stream_that_takes_a_part_gets_the_rest(file: Path) -> None:
    stream = Slow()
    save_weights(Net(seed=1), stream)
    assert stream.data == file.read_bytes()


def test_save_weights_follows_the_umask_and_leaves_nothing_else(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save_weights(Net(), tmp_path / "new" / "a.safetensors")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new" / "a.safetensors").stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "new") == ["a.safetensors"]


def test_save_weights_failed_write_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(disk.System):
        def write(self, file: int, data: memoryview) -> int:
            raise OSError(28, "No space left on device")

    before = file.read_bytes()
    monkeypatch.setattr(disk, "system", Full())
    with pytest.raises(CheckpointError, match="ENOSPC"):
        save_weights(Net(seed=2), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_save_weights_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recording(disk.System):
        def fsync(self, file: int) -> None:
            calls.append("fsync")
            super().fsync(file)

        def rename(self, source: Path, target: Path) -> None:
            calls.append(f"rename to {target.name}")
            super().rename(source, target)

    monkeypatch.setattr(disk, "system", Recording())
    save_weights(Net(), tmp_path / "a.safetensors")
    assert calls == ["fsync", "rename to a.safetensors", "fsync"]


def test_save_weights_writes_through_a_link(file: Path) -> None:
    link = file.with_name("link.safetensors")
    link.symlink_to(file)
    save_weights(Net(seed=5), link)
    assert link.is_symlink()
    assert_equal(safetensors.torch.load_file(file), values(Net(seed=5)))


def test_save_weights_does_not_replace_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe"):
        save_weights(Net(), tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_save_weights_refuses_extra_state_lazy_parameters_and_wrong_suffixes(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    path = tmp_path / "a.safetensors"
    with pytest.raises(StateError, match="1 keeps its own state"):
        save_weights(nn.Sequential(nn.Linear(1, 1), Counting(1, 1)), path)
    with pytest.raises(StateError, match="weight"):
        save_weights(nn.LazyLinear(1), path)
    with pytest.raises(CheckpointError, match=r"suffix"):
        save_weights(Net(), tmp_path / "a.pt")
    with pytest.raises(StateError, match="wb"):
        save_weights(Net(), io.StringIO())
    assert os.listdir(tmp_path) == []


# loading by name


def test_load_weights_loads_parameters_and_buffers_exactly(file: Path) -> None:
    model = Net()
    report = load_weights(model, file)
    assert_equal(values(model), values(Net(seed=1)))
    assert report == LoadReport(str(file), loaded=sorted(report.loaded, key=report.loaded.index))
    assert {*report.loaded} == {*values(model)}
    assert str(report) == f"9 loaded from {file}"


def test_load_weights_keeps_bits_of_nan_and_negative_zero(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000], dtype=torch.int32)
    one, other = nn.ParameterDict({"a": bits.view(torch.float32)}), nn.ParameterDict({"a": torch.zeros(3)})
    save_weights(one, tmp_path / "a.safetensors")
    report = load_weights(other, tmp_path / "a.safetensors")
    assert other["a"].detach().view(torch.int32).tolist() == bits.tolist()
    assert report.non_finite == ["a"]
    assert "warning: not finite in the file: a" in str(report)


def test_load_weights_reads_a_stream_from_where_it_stands(file: Path) -> None:
    stream = io.BytesIO(b"before" + file.read_bytes())
    stream.seek(6)
    model = Net()
    load_weights(model, stream)
    assert_equal(values(model), values(Net(seed=1)))


def test_load_weights_reads_a_stream_that_cannot_be_sought(file: Path) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.rest = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return self.rest.readinto(memoryview(buffer)[:100])

    model = Net()
    load_weights(model, Pipe(file.read_bytes()))
    assert_equal(values(model), values(Net(seed=1)))


def test_load_weights_reads_files_of_other_tools(tmp_path: Path) -> None:
    safetensors.torch.save_file(values(Net(seed=3)), tmp_path / "a.safetensors")
    safetensors.torch.save_model(Tied(seed=3), str(tmp_path / "tied.safetensors"))
    model, tied = Net(), Tied()
    load_weights(model, tmp_path / "a.safetensors")
    assert_equal(values(model), values(Net(seed=3)))
    report = load_weights(tied, tmp_path / "tied.safetensors")
    assert_equal(values(tied), values(Tied(seed=3)))
    assert sorted(report.loaded) == ["embedding.weight", "output.weight"]
    assert tied.output.weight is tied.embedding.weight


def test_load_weights_missing_unexpected_and_mismatched_are_summed_up_and_nothing_changes(tmp_path: Path) -> None:
    given = values(Net(seed=1))
    given["heads.weight"] = given.pop("head.weight")
    given["encoder.0.weight"] = torch.zeros(5, 4)
    model = Net()
    before = values(model)
    with pytest.raises(StateError) as caught:
        load_weights(model, given)
    assert_equal(values(model), before)
    text = str(caught.value)
    assert "1 missing: head.weight (did you mean 'heads.weight'?)" in text
    assert "1 unexpected: heads.weight (did you mean 'head.weight'?)" in text
    assert "1 that does not fit: encoder.0.weight: shape (5, 4) in the file, (3, 4) here" in text


def test_load_weights_error_shows_the_first_five_of_each() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    with pytest.raises(StateError, match=r"40 missing: .* and 35 more") as caught:
        load_weights(model, {f"other{i}": torch.zeros(7) for i in range(30)})
    assert "30 unexpected: other0, other1, other2, other3, other4 and 25 more" in str(caught.value)
    assert len(str(caught.value)) < 700


def test_load_weights_not_strict_loads_what_fits_and_reports_the_rest() -> None:
    given = values(Net(seed=1))
    given["heads.weight"] = given.pop("head.weight")
    given["encoder.0.weight"] = torch.zeros(5, 4)
    model = Net()
    before = values(model)
    report = load_weights(model, given, strict=False)
    assert report.missing == ["head.weight"]
    assert report.unexpected == ["heads.weight"]
    assert report.mismatched == {"encoder.0.weight": "shape (5, 4) in the file, (3, 4) here"}
    after, wanted = values(model), values(Net(seed=1))
    for name in after:
        kept = name in ("head.weight", "encoder.0.weight")
        assert torch.equal(after[name], (before if kept else wanted)[name])
        assert (name in report.loaded) != kept
    assert "1 missing in the file: head.weight" in str(report)


def test_load_weights_not_strict_refuses_when_nothing_fits() -> None:
    model = Net()
    with pytest.raises(StateError, match="no tensor of"):
        load_weights(model, {"other": torch.zeros(1)}, strict=False)


@pytest.mark.parametrize(
    ("there", "here", "fits"),
    [
        (torch.float32, torch.float16, True),
        (torch.bfloat16, torch.float64, True),
        (torch.complex64, torch.complex128, True),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.float32, torch.complex64, False),
        (torch.complex64, torch.float32, False),
        (torch.int32, torch.int64, False),
        (torch.bool, torch.uint8, False),
    ],
)
def test_load_weights_casts_between_floats_only(there: torch.dtype, here: torch.dtype, fits: bool) -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(3, dtype=here))
    given = {"a": torch.tensor([1, 0, 1]).to(there)}
    if fits:
        report = load_weights(model, given)
        assert report.casts == {"a": f"{there} -> {here}".replace("torch.", "")}
        assert torch.equal(model.a, given["a"].to(here))
        assert "cast: a" in str(report)
    else:
        with pytest.raises(StateError, match="dtype"):
            load_weights(model, given)
        assert torch.equal(model.a, torch.zeros(3, dtype=here))


def test_load_weights_reports_values_that_overflow_in_a_smaller_dtype() -> None:
    model = nn.ParameterDict({"a": torch.zeros(1, dtype=torch.float16), "b": torch.zeros(1, dtype=torch.float16)})
    report = load_weights(model, {"a": torch.tensor([1e6]), "b": torch.tensor([1.0])})
    assert report.overflowed == ["a"]
    assert report.non_finite == []


def test_load_weights_one_name_of_tied_parameters_is_enough_and_two_must_agree() -> None:
    weight = torch.randn(5, 3)
    for name in ("embedding.weight", "output.weight"):
        model = Tied()
        report = load_weights(model, {name: weight})
        assert torch.equal(model.embedding.weight, weight)
        assert sorted(report.loaded) == ["embedding.weight", "output.weight"]
    model = Tied()
    before = values(model)
    with pytest.raises(StateError, match=r"tied to embedding\.weight here, but the file has other values"):
        load_weights(model, {"embedding.weight": weight, "output.weight": weight + 1})
    assert_equal(values(model), before)
    load_weights(model, {"embedding.weight": weight, "output.weight": weight.clone()})
    assert torch.equal(model.output.weight, weight)


def test_load_weights_refuses_lazy_and_meta_parameters() -> None:
    with pytest.raises(StateError, match="lazy parameters have no values yet: weight"):
        load_weights(nn.LazyLinear(2), {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    with pytest.raises(StateError, match="meta parameters have no values yet: weight"):
        load_weights(nn.Linear(2, 2, device="meta"), {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})


def test_load_weights_into_and_prefix_take_a_part_of_each() -> None:
    source = {f"backbone.{name}": tensor for name, tensor in values(Net(seed=1).encoder).items()}
    source["head.weight"] = torch.zeros(9)
    model = Net()
    head = values(model.head)
    report = load_weights(model, source, into="encoder", prefix="backbone")
    assert_equal(values(model.encoder), values(Net(seed=1).encoder))
    assert_equal(values(model.head), head)
    assert report.skipped == ["head.weight"]
    assert report.renamed["encoder.0.weight"] == "backbone.0.weight"
    assert load_weights(model, source, into="encoder", prefix="backbone.").loaded == report.loaded


def test_load_weights_wrong_into_and_prefix_get_the_nearest_spelling(file: Path) -> None:
    with pytest.raises(StateError, match="did you mean 'encoder'"):
        load_weights(Net(), file, into="encodr")
    with pytest.raises(StateError, match="did you mean 'encoder'"):
        load_weights(Net(), file, prefix="encodr")
    with pytest.raises(StateError, match=r"into='head.weight' is no module"):
        load_weights(Net(), file, into="head.weight")


@pytest.mark.parametrize("rename", [{}, {"encoder": "encoder"}])
def test_load_weights_failure_while_copying_puts_everything_back(rename: dict[str, str]) -> None:
    class Unwritable(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1).expand(3))  # copying into it fails: one number, three places

    model = Unwritable()
    before = values(model)
    given = {**values(Net(seed=1)), "mean": torch.ones(3)}
    with pytest.raises(RuntimeError) as caught:
        load_weights(model, given, rename=rename, freeze=True)
    assert_equal(values(model), before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "no tensor was loaded" in "".join(caught.value.__notes__)


def test_load_weights_two_layers_can_change_places() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    before = values(model)
    load_weights(model, model.state_dict(), rename={"a": "b", "b": "a"})
    after = values(model)
    assert torch.equal(after["a.weight"], before["b.weight"])
    assert torch.equal(after["b.weight"], before["a.weight"])


def test_load_weights_freeze_excludes_what_was_loaded() -> None:
    model = Net()
    model.encoder[0].weight.grad = torch.ones_like(model.encoder[0].weight)
    report = load_weights(model, values(Net(seed=1).encoder), into="encoder", freeze=True)
    assert report.frozen == ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias"]
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == report.frozen
    assert model.encoder[0].weight.grad is None


def test_load_weights_extra_state_of_a_checkpoint_is_skipped() -> None:
    model = nn.Linear(1, 1)
    report = load_weights(model, {**values(model), "_extra_state": torch.zeros(1)})
    assert report.skipped == ["_extra_state"]


# renaming


def lists(*names: str) -> nn.ParameterDict:
    """A module with one number under each name (which has no dot)."""
    return nn.ParameterDict({name: torch.zeros(()) for name in names})


@pytest.mark.parametrize(
    ("rename", "old", "new"),
    [
        ({"fc.weight": "head.weight"}, "fc.weight", "head.weight"),
        ({"fc": "head"}, "fc.weight", "head.weight"),
        ({"layers.*.attn": "blocks.*.attention"}, "layers.10.attn.q.weight", "blocks.10.attention.q.weight"),
        ({"*.gamma": "*.weight"}, "a.b.gamma", "a.b.weight"),
        ({"*.gamma": "*.weight"}, "gamma", "weight"),
        ({"model": ""}, "model.a.b", "a.b"),
        ({"a_*_*": "*.*"}, "a_x_y", "x.y"),
        ({"a": "b", "b": "c"}, "a.w", "b.w"),
        ({"a.w": "x", "a": "b"}, "a.w", "x"),
    ],
)
def test_load_weights_rename_patterns(rename: dict[str, str], old: str, new: str) -> None:
    model = nn.Module()
    path, _, name = new.rpartition(".")
    at = model
    for part in path.split(".") if path else ():
        at.add_module(part, nn.Module())
        at = at.get_submodule(part)
    at.register_parameter(name, nn.Parameter(torch.zeros(1)))
    others = {key.replace("*", "q"): torch.zeros(2) for key in rename}  # so that every entry fits something
    report = load_weights(model, {old: torch.ones(1), **{k: t for k, t in others.items() if k != old}}, rename=rename,
                          strict=False)  # fmt: skip
    assert report.renamed == {new: old}
    assert at.get_parameter(name).item() == 1.0


def test_load_weights_rename_to_one_name_is_refused() -> None:
    model = lists("a")
    given = {"x": torch.ones(()), "y": torch.ones(())}
    with pytest.raises(StateError, match=r"'x' and 'y' .* would both be 'a'"):
        load_weights(model, given, rename={"x": "a", "y": "a"}, strict=False)
    with pytest.raises(StateError, match="would both be 'a'"):
        load_weights(model, {"a": torch.ones(()), "y": torch.ones(())}, rename={"y": "a"}, strict=False)
    assert model["a"].item() == 0.0


def test_load_weights_rename_that_fits_nothing_is_refused() -> None:
    model, given = Net(), values(Net(seed=1))
    with pytest.raises(StateError, match=r"fits no name \(did you mean 'encoder'\?\)"):
        load_weights(model, given, rename={"encodr": "x"}, strict=False)
    with pytest.raises(StateError, match="entry before it"):
        load_weights(model, given, rename={"encoder": "encoder", "encoder.0": "x"}, strict=False)
    with pytest.raises(StateError, match="as many"):
        load_weights(model, given, rename={"encoder.*": "x"}, strict=False)


# by shape


def test_load_weights_positional_assigns_what_is_unique() -> None:
    given = {f"other.{i}": tensor for i, tensor in enumerate(values(nn.Linear(4, 3)).values())}
    model = nn.Linear(4, 3)
    report = load_weights(model, given, positional=True)
    assert report.positional == {"weight": "other.0", "bias": "other.1"}
    assert torch.equal(model.weight, given["other.0"])
    assert "2 only by shape: other.0 -> weight, other.1 -> bias" in str(report)


@pytest.mark.parametrize("strict", [True, False])
def test_load_weights_positional_ambiguity_is_listed_and_nothing_is_loaded(strict: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    before = values(model)
    given = {"a": torch.ones(3, 3), "b": torch.ones(3, 3), "c": torch.ones(3)}
    with pytest.raises(StateError, match=r"ambiguous.*\[3, 3\] float32: a, b -> 0.weight, 1.weight"):
        load_weights(model, given, positional=True, strict=strict)
    assert_equal(values(model), before)
    with pytest.raises(StateError, match=r"ambiguous.*\[3, 3\] float32: a -> 0.weight, 1.weight"):
        load_weights(model, {"a": torch.ones(3, 3), "c": torch.ones(3)}, positional=True, strict=strict)
    assert_equal(values(model), before)


def test_load_weights_positional_takes_tied_names_as_one_and_leaves_other_dtypes() -> None:
    model = Tied()
    report = load_weights(model, {"x": torch.ones(5, 3)}, positional=True)
    assert report.positional == {"embedding.weight": "x"}
    assert sorted(report.loaded) == ["embedding.weight", "output.weight"]
    shared = torch.full((5, 3), 2.0)
    report = load_weights(model, {"x": shared, "y": shared}, positional=True)
    assert (report.positional, report.unexpected) == ({"embedding.weight": "x"}, [])
    with pytest.raises(StateError, match="2 missing"):
        load_weights(Tied(), {"x": torch.ones(5, 3, dtype=torch.float64)}, positional=True)


# hints


@pytest.mark.parametrize(
    ("wrap", "hint"),
    [
        (lambda name: f"_orig_mod.{name}", "prefix='_orig_mod' would fit 9 of the 9 names"),
        (lambda name: f"module.{name}", "prefix='module' would fit 9 of the 9 names"),
        (lambda name: f"module._orig_mod.{name}", "prefix='module._orig_mod' would fit 9"),
        (lambda name: name.replace("encoder.", "encoder._orig_mod."), "rename={'encoder._orig_mod': 'encoder'}"),
    ],
)
def test_load_weights_wrapped_names_get_a_hint_that_works(wrap: Callable[[str], str], hint: str) -> None:
    given = {wrap(name): tensor for name, tensor in values(Net(seed=1)).items()}
    model = Net()
    with pytest.raises(StateError) as caught:
        load_weights(model, given)
    assert hint in str(caught.value)
    argument = str(caught.value).split("no tensor was loaded: ")[1]
    options = eval(f"dict({argument[argument.index(hint.split('=')[0] + '=') :].split(' would')[0]})")
    load_weights(model, given, **options)
    assert_equal(values(model), values(Net(seed=1)))


def test_load_weights_names_of_a_part_get_the_hint_into() -> None:
    given = values(Net(seed=1).encoder)
    with pytest.raises(StateError, match="into='encoder' would fit 7 of the 7 names"):
        load_weights(Net(), given)


def test_load_weights_takes_the_names_of_a_wrapped_model() -> None:
    given = nn.DataParallel(Net(seed=1)).state_dict()
    assert all(name.startswith("module.") for name in given)
    model = Net()
    load_weights(model, given, prefix="module")
    assert_equal(values(model), values(Net(seed=1)))


@pytest.mark.slow
def test_load_weights_takes_the_names_of_a_compiled_model() -> None:
    given = torch.compile(Net(seed=1), backend="eager").state_dict()
    assert all(name.startswith("_orig_mod.") for name in given)
    model = Net()
    load_weights(model, given, prefix="_orig_mod")
    assert_equal(values(model), values(Net(seed=1)))


# checkpoints


def test_load_weights_reads_a_checkpoint_and_verifies_it(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, Net(seed=1))
    model = Net()
    report = load_weights(model, path)
    assert_equal(values(model), values(Net(seed=1)))
    assert report.source == str(path / "model.safetensors")
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    before = values(model)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        load_weights(model, path)
    assert_equal(values(model), before)


def test_load_weights_takes_the_newest_checkpoint_of_a_run_that_is_whole(tmp_path: Path) -> None:
    for seed in (1, 2, 3, 4):
        path = checkpoint(tmp_path, Net(seed=seed))
        if seed == 3:
            data = bytearray((path / "model.safetensors").read_bytes())
            data[-1] ^= 1
            (path / "model.safetensors").write_bytes(data)
        if seed == 4:
            (path / "manifest.json").write_bytes(b"{}")
    model = Net()
    report = load_weights(model, str(tmp_path))
    assert_equal(values(model), values(Net(seed=2)))
    assert [text[:6] for text in report.warnings] == ["000003", "000004"]
    assert "warning: 000003 was passed over" in str(report)


def test_load_weights_run_without_a_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="without checkpoints"):
        load_weights(Net(), tmp_path)
    save_weights(Net(), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"It has a\.safetensors"):
        load_weights(Net(), tmp_path)
    path = checkpoint(tmp_path, Net())
    (path / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="none of the 1 checkpoints"):
        load_weights(Net(), tmp_path)


def test_load_weights_of_several_models_needs_which(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, Net(seed=1), Net(seed=2))
    model = Net()
    load_weights(model, path, which="net1")
    assert_equal(values(model), values(Net(seed=2)))
    with pytest.raises(StateError, match=r"holds 2 models: net0, net1"):
        load_weights(model, path)
    with pytest.raises(StateError, match="which='net' is no model"):
        load_weights(model, path, which="net")
    with pytest.raises(StateError, match="several models"):
        load_weights(model, {"a": torch.zeros(1)}, which="net1")


def test_load_weights_of_a_checkpoint_says_which_classes_changed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)))
    with pytest.raises(StateError, match="class Linear became Conv2d: 0"):
        load_weights(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Linear(2, 1)), path)


# torch.save


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_load_weights_refuses_torch_files_and_names_load_torch(tmp_path: Path) -> None:
    for name in ("a.pt", "a.safetensors"):
        torch.save(Net().state_dict(), tmp_path / name)
        with pytest.raises(CheckpointError, match="load_torch"):
            load_weights(Net(), tmp_path / name)
        with pytest.raises(CheckpointError, match="load_torch"):
            inspect(tmp_path / name)


# hostile files


def header(entries: Any, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": b"",
    "short": b"\x08\0\0",
    "long header": struct.pack("<Q", 2**63) + b"{}",
    "no json": header(b"{{{{"),
    "deep": header(b"[" * 100_000),
    "list": header([]),
    "overlap": header({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "outside": header({"a": entry(0, 400, shape=(100,))}, bytes(4)),
    "huge": header({"a": entry(0, 2**62, shape=(2**60,))}, bytes(4)),
    "dtype": header({"a": entry(0, 4, dtype="os.system")}, bytes(4)),
    "negative": header({"a": entry(0, 4, shape=(-1,))}, bytes(4)),
    "pickle": pickle.dumps(Payload()),
    "protocol 0": pickle.dumps(Payload(), protocol=0),
    "many digits": header(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "zeros": bytes(100_000),
}


@pytest.fixture
def events() -> Iterator[list[str]]:
    global EVENTS
    EVENTS = []
    yield EVENTS
    EVENTS = None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [*HOSTILE])
def test_load_weights_hostile_file_is_refused_quickly_and_runs_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.safetensors"
    path.write_bytes(HOSTILE[kind])
    model = Net()
    before = values(model)
    for attempt in (lambda: load_weights(model, path), lambda: load_weights(model, io.BytesIO(HOSTILE[kind])),
                    lambda: inspect(path)):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"safetensors|stream"):
            attempt()
    assert_equal(values(model), before)
    assert events == []
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_audit_hook_of_these_tests_hears_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Payload()))
    assert events == ["pickle.find_class"]


@pytest.mark.timeout(60)
def test_load_weights_things_that_are_no_files_are_refused_quickly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "to_pipe.safetensors").symlink_to(tmp_path / "pipe.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.safetensors"))
        names = [*os.listdir(tmp_path), "missing.safetensors"]
        assert len(names) == 7
        for name in names:
            for read in (lambda path: load_weights(Net(), path), inspect):
                with pytest.raises(CheckpointError, match=name.partition(".")[0]):
                    read(tmp_path / name)
    for path in ("/dev/zero", "/dev/null"):
        with pytest.raises(CheckpointError, match="device"):
            load_weights(Net(), path)


def test_load_weights_hostile_names_are_shown_on_one_short_line() -> None:
    given = {f"\x1b[2J\n{i}" + "x" * 100_000: torch.zeros(1) for i in range(3)}
    with pytest.raises(StateError) as caught:
        load_weights(Net(), given)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


def test_load_weights_follows_a_link_to_a_file(file: Path) -> None:
    link = file.with_name("link.safetensors")
    link.symlink_to(file)
    model = Net()
    load_weights(model, link)
    assert_equal(values(model), values(Net(seed=1)))


def test_load_weights_what_is_no_source_is_refused() -> None:
    for source, text in ((3, "no source"), (io.StringIO("a"), "rb"), ({"a": 3}, "not a tensor"), ({1: 2}, "name")):
        with pytest.raises(StateError, match=text):
            load_weights(Net(), source)
    with pytest.raises(StateError, match="no module"):
        load_weights({"a": Net()}, {})


# inspection


class Counting(disk.System):
    read_bytes = 0

    def read(self, file: int, buffer: memoryview) -> int:
        count = super().read(file, buffer)
        self.read_bytes += count
        return count


def test_inspect_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2**34  # elements: 64 GiB, in a file that is all hole
    opening = header({"a.weight": entry(0, 4 * count, shape=(count,))})
    with open(tmp_path / "big.safetensors", "wb") as stream:
        stream.write(opening)
        stream.truncate(len(opening) + 4 * count)
    system = Counting()
    monkeypatch.setattr(disk, "system", system)
    found = inspect(tmp_path / "big.safetensors")
    assert system.read_bytes == len(opening)
    assert found.parameters == count
    assert found.files["big.safetensors"].tensors["a.weight"].shape == (count,)
    assert "64.0 GiB" in str(found)


def test_inspect_checkpoint_tells_manifest_and_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path, nn.Linear(300, 300), label="last")
    system = Counting()
    monkeypatch.setattr(disk, "system", system)
    found = inspect(path)
    assert system.read_bytes < 20_000 < found.files["model.safetensors"].size
    assert (found.number, found.format, found.path) == (1, FORMAT, path)
    assert found.parameters == 300 * 300 + 300
    assert found.about["reason"] == "test"
    assert found.files["model.safetensors"].tensors["weight"].dtype == torch.float32
    assert "state.json" in found.files
    lines = str(found).splitlines()
    assert lines[:3] == [str(path), "checkpoint 1, format 1", "90,300 parameters"]
    assert any(line.split() == ["weight", "[300,", "300]", "float32", "351.6", "KiB"] for line in lines)
    assert lines[lines.index("structure:") + 1].startswith("  model: ")


def test_inspect_run_takes_the_newest(tmp_path: Path) -> None:
    checkpoint(tmp_path, Net())
    newest = checkpoint(tmp_path, Net())
    assert inspect(tmp_path).path == newest
    (newest / "manifest.json").write_bytes(b"")
    assert inspect(tmp_path).number == 1
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        inspect(newest)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="without checkpoints"):
        inspect(tmp_path / "empty")


def test_inspect_counts_parameters_of_all_models_and_tied_ones_once(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, Tied(), Net())
    assert inspect(path).parameters == 15 + sum(p.numel() for p in Net().parameters())
    save_weights(Tied(), tmp_path / "a.safetensors")
    assert inspect(tmp_path / "a.safetensors").parameters == 15


def test_inspect_prints_hostile_names_short_and_plain(tmp_path: Path) -> None:
    model = nn.ParameterDict({f"{i}\x1b[2J\n" + "x" * 1000: torch.zeros(1) for i in range(300)})
    save_weights(model, tmp_path / "a.safetensors")
    lines = str(inspect(tmp_path / "a.safetensors")).splitlines()
    assert all(line.isprintable() and len(line) < 250 for line in lines)
    assert lines[-1] == "  and 100 more tensors"
    assert len(lines) < 210
