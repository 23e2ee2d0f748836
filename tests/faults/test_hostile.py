"""Checkpoints made to do harm, with manifests that verify: they are refused soon, and nothing is run or changed."""

from __future__ import annotations

import copy
import difflib  # noqa: F401 - for the nearest spelling in messages, so that no load imports it
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import differences, on
from torch import nn

from faults.forked import call_forked
from loopkit import Learner, LoopkitError, checkpoint, every, hookimpl, schedules
from loopkit.checkpoint import storage, strict_json
from loopkit.checkpoint.encoding import dumps, loads
from loopkit.checkpoint.manifest import MANIFEST
from loopkit.checkpoint.tensors import OURS, BytesSource, pack, unpack
from loopkit.data import TensorLoader
from loopkit.plugins import EarlyStopping, GradNoise, History, Metrics, SaveOptions, Schedule, WeightAverage
from loopkit.plugins.checkpoint import Checkpoint

STATE, TENSORS, MODEL, STRUCTURE = "state.json", "state.safetensors", "model.safetensors", "structure.json"


def make(*plugins):
    """A learner with every kind of state, and its data."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
    learner = Learner(
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=0.01),
        plugins=[
            WeightAverage(0.9),
            Schedule(schedules.cosine()),
            GradNoise(0.01),
            History(steps=True),
            Metrics(),
            EarlyStopping("train/loss", patience=5),
            *plugins,
        ],
        accumulate=2,
        standard=False,
    )
    return learner, TensorLoader(inputs, targets, batch_size=4, shuffle=True, seed=3)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A checkpoint in the middle of the second epoch and of a window."""
    directory = tmp_path_factory.mktemp("hostile")
    saved = []

    def save(learner, **given):
        if learner.progress.steps == 9:
            saved.append(checkpoint.save(learner, directory).path)

    learner, data = make(on("step_end", save, "saver", reads=("*",)))
    learner.fit(data, epochs=2)
    fresh, _ = make()
    checkpoint.load(fresh, saved[0])  # and whatever is imported late is imported now
    checkpoint.load_weights(fresh.model, saved[0])
    str(checkpoint.inspect(saved[0]))
    return saved[0]


# ------------------------------------------------------------------------------------------------- forging


def rewrite(path: Path, files: dict[str, bytes]) -> None:
    """Replace files of a checkpoint, with a manifest that agrees with them; None removes one."""
    about = storage.read_manifest(path).about
    content = {name: (path / name).read_bytes() for name in storage.read_manifest(path).files}
    content.update(files)
    shutil.rmtree(path)
    at = storage.write(path.parent, {name: [data] for name, data in content.items() if data is not None}, about)
    at.path.rename(path)


def forge_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the manifest says, with a right digest."""
    said = json.loads((path / MANIFEST).read_bytes())
    del said["sha256"]
    change(said)
    rest = strict_json.render(said, sort=True)[1:]
    digest = hashlib.sha256(rest).hexdigest().encode()
    (path / MANIFEST).write_bytes(b'{"sha256":"' + digest + b'",' + rest)


def in_state(*keys: Any, to: Any) -> Callable[[Path], None]:
    """Put a value, or what a function makes of the old one, at a place in state.json."""

    def act(path: Path) -> None:
        state = loads((path / STATE).read_bytes())
        at = state
        for key in keys[:-1]:
            at = _inside(at)[key]
        at = _inside(at)
        at[keys[-1]] = to(at[keys[-1]]) if callable(to) else to
        rewrite(path, {STATE: dumps(state)})

    return act


def _inside(value: Any) -> Any:
    """What is in a tuple or a dict with integer keys, as something with items."""
    if isinstance(value, dict) and set(value) == {"$tuple"}:
        return value["$tuple"]
    if isinstance(value, dict) and set(value) == {"$dict"}:
        return _Pairs(value["$dict"])
    return value


class _Pairs:
    def __init__(self, pairs):
        self.pairs = pairs

    def __getitem__(self, key):
        return next(value for name, value in self.pairs if name == key)

    def __setitem__(self, key, value):
        next(pair for pair in self.pairs if pair[0] == key)[1] = value


def without(key):
    def change(value):
        return {name: part for name, part in value.items() if name != key}

    return change


def raw(name: str, data: bytes | Callable[[], bytes]) -> Callable[[Path], None]:
    """Put other bytes in the place of a file."""
    return lambda path: rewrite(path, {name: data() if callable(data) else data})


def tensors_of(path: Path, name: str) -> dict[str, torch.Tensor]:
    return dict(unpack(BytesSource((path / name).read_bytes()))[0])


def in_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Change the tensors of a file."""

    def act(path: Path) -> None:
        tensors = tensors_of(path, name)
        change(tensors)
        rewrite(path, {name: b"".join(bytes(chunk) for chunk in pack(tensors))})

    return act


def in_header(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the header of a safetensors file, and nothing of what follows."""

    def act(path: Path) -> None:
        data = (path / name).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        rewrite(path, {name: struct.pack("<Q", len(text)) + text + data[8 + size :]})

    return act


class Bomb:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return os.system, ("touch /tmp/loopkit-was-here",)


def pickled() -> bytes:
    return pickle.dumps(Bomb())


def zipped() -> bytes:
    stream = io.BytesIO()
    torch.save({"model": Bomb()}, stream)
    return stream.getvalue()


def in_place_of(name: str, kind: str) -> Callable[[Path], None]:
    """Put something that is no file, or not here, in the place of a file."""

    def act(path: Path) -> None:
        at = path / name
        at.rename(path.parent / "moved")
        if kind == "directory":
            at.mkdir()
        elif kind == "pipe":
            os.mkfifo(at)
        else:
            at.symlink_to({"zero": "/dev/zero", "link": str(path.parent / "moved")}[kind])

    return act


def entry(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(values)


def ours(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.setdefault("__metadata__", {}).update({OURS: json.dumps(entries)})


def about(key, value):
    return lambda path: forge_manifest(path, lambda said: said["about"].update({key: value}))


def named(name: str) -> Callable[[Path], None]:
    def change(said: dict[str, Any]) -> None:
        said["files"][name] = said["files"].pop(MODEL)

    return lambda path: forge_manifest(path, change)


HUGE = {"$int": "0x1" + "0" * 50_000}
NAN = {"$float": "nan"}
REDUCE = {"__reduce__": ["os.system", ["touch /tmp/loopkit-was-here"]], "py/object": "os.system"}
ADAM = ("optimizers", "optimizer")
FIRST = "optimizers.optimizer.state.0.exp_avg"

FILES = {
    # what runs when it is unpickled
    "pickle as state": (raw(STATE, pickled), "state.json"),
    "pickle as tensors": (raw(TENSORS, pickled), "state.safetensors"),
    "pickle as weights": (raw(MODEL, pickled), "model.safetensors"),
    "torch.save as weights": (raw(MODEL, zipped), "model.safetensors"),
    "pickle as manifest": (lambda path: (path / "manifest.json").write_bytes(pickled()), "manifest.json"),
    # JSON
    "unknown tag": (in_state("plugins", "history", "rows", to={"$object": "os.system"}), r"unknown tag '\$object'"),
    "tag with more keys": (in_state("plugins", "history", "rows", to={"$int": "0x1", "a": 1}), "more keys"),
    "list as state": (raw(STATE, b"[]"), "state"),
    "spaces": (raw(STATE, b'{"models": {}}'), "state.json|dumps"),
    "duplicate keys": (raw(STATE, b'{"models":{},"models":{}}'), "'models' is given twice"),
    "deep": (raw(STATE, lambda: b"[" * 100_000_000), "nested"),
    "deep and closed": (raw(STATE, lambda: b"[" * 50_000_000 + b"]" * 50_000_000), "nested"),
    "deep mappings": (raw(STATE, lambda: b'{"a":' * 1_000_000), "nested"),
    "digits": (raw(STATE, lambda: b'{"models":' + b"9" * 10_000_000 + b"}"), "digits"),
    "token": (raw(STATE, b'{"models":NaN}'), "NaN"),
    "bad bytes": (raw(STATE, b"\xff\xfe\x00"), "state.json|dumps"),
    "state is missing": (lambda path: rewrite(path, {STATE: None}), "state.json"),
    "tensors are missing": (lambda path: rewrite(path, {TENSORS: None}), "state.safetensors"),
    "weights are missing": (lambda path: rewrite(path, {MODEL: None}), "model.safetensors"),
    # names and things that are no files
    "name above": (named("../secret"), "'../secret'"),
    "name absolute": (named("/etc/passwd"), "'/etc/passwd'"),
    "model above": (in_state("models", to={"../../etc/passwd": {}}), "models|model"),
    "link": (in_place_of(MODEL, "link"), "model.safetensors"),
    "link to zeros": (in_place_of(MODEL, "zero"), "model.safetensors"),
    "link in place of the manifest": (in_place_of("manifest.json", "zero"), "manifest.json"),
    "pipe": (in_place_of(STATE, "pipe"), "state.json"),
    "directory": (in_place_of(TENSORS, "directory"), "state.safetensors"),
    "size of a file": (
        lambda path: forge_manifest(path, lambda said: said["files"][MODEL].update(size=2**60)),
        "model.safetensors has",
    ),
    # headers of tensors
    "header of 2**63 bytes": (raw(MODEL, struct.pack("<Q", 2**63) + b"{}"), "model.safetensors"),
    "shape of 2**60": (
        in_header(MODEL, entry("0.weight", shape=[2**60])),
        "'0.weight' takes 4611686018427387904 bytes",
    ),
    "shape that overflows": (in_header(MODEL, entry("0.weight", shape=[2**32, 2**32])), "0.weight"),
    "negative shape": (in_header(MODEL, entry("0.weight", shape=[-4, -5])), "0.weight"),
    "zero and huge": (in_header(MODEL, entry("0.weight", shape=[0, 2**62])), "0.weight"),
    "overlap": (in_header(MODEL, entry("0.weight", data_offsets=[0, 80])), "0.weight|begins"),
    "beyond the end": (in_header(MODEL, entry("0.weight", data_offsets=[2**40, 2**40 + 80])), "a hole before"),
    "dtype": (in_header(MODEL, entry("0.weight", dtype="os.system")), "dtype 'os.system'"),
    "alias of nothing": (in_header(MODEL, ours(aliases={"a": "b"})), "alias"),
    "alias of itself": (in_header(MODEL, ours(aliases={"a": "a"})), "alias"),
    "strides": (in_header(MODEL, ours(strides={"0.weight": [1, 1]})), "strides"),
    "strides of 2**60": (in_header(MODEL, ours(strides={"0.weight": [2**60, 1]})), "strides"),
    "tensor is missing": (in_tensors(TENSORS, lambda t: t.pop(FIRST)), FIRST),
    "weight is missing": (in_tensors(MODEL, lambda t: t.pop("0.weight")), "'0.weight'"),
    "weight too many": (in_tensors(MODEL, lambda t: t.update(evil=torch.ones(1))), "'evil'"),
    "weight of another shape": (in_tensors(MODEL, lambda t: t.update({"0.weight": torch.ones(5, 5)})), "0.weight"),
    "weight of another dtype": (
        in_tensors(MODEL, lambda t: t.update({"0.weight": t["0.weight"].double()})),
        "0.weight: torch.float64",
    ),
    # parts of the state
    "part is missing": (raw(STATE, b'{"models":{"model":{}}}'), "is missing"),
    "progress is a list": (in_state("progress", to=[1, 2, 3, 4]), "progress is a list"),
    "counter is negative": (in_state("progress", "steps", to=-1), "progress.steps is -1"),
    "counter is not finite": (in_state("progress", "steps", to=NAN), "progress.steps is nan"),
    "counter is huge": (in_state("progress", "steps", to=HUGE), "progress.steps is an integer of"),
    "counter is unknown": (in_state("progress", to=lambda v: {**v, "__class__": 1}), "progress.__class__"),
    "metrics are code": (in_state("metrics", to={"train/loss": "__import__('os')"}), "metrics"),
    "models are a list": (in_state("models", to=[]), "state"),
    "buffers of another model": (in_state("buffers", to={"other": {}}), "buffers"),
    "weight among the buffers": (in_state("buffers", "model", to={"0.weight": 1}), "0.weight"),
    "optimizers are text": (in_state("optimizers", to="Adam"), "optimizers is 'Adam'"),
    "optimizer of another class": (in_state(*ADAM, "class", to="os.system"), "'optimizer': os.system"),
    "groups are a mapping": (in_state(*ADAM, "param_groups", to={}), "param_groups"),
    "group without lr": (in_state(*ADAM, "param_groups", 0, to=without("lr")), "lacks 'lr'"),
    "lr is text": (in_state(*ADAM, "param_groups", 0, "lr", to="0.1"), "'lr'"),
    "parameters of 2**60": (in_state(*ADAM, "param_groups", 0, "params", to=[2**60]), "param_groups"),
    "parameters twice": (in_state(*ADAM, "param_groups", 0, "params", to=[0] * 6), "param_groups"),
    "state of no parameter": (in_state(*ADAM, "state", to={"$dict": [[99, {}]]}), r"state\[99\]"),
    "state of a parameter is a list": (in_state(*ADAM, "state", 0, to=[]), r"state\[0\] is a list"),
    "state of another shape": (in_tensors(TENSORS, lambda t: t.update({FIRST: torch.ones(7)})), r"exp_avg.*\(7,\)"),
    "state of another dtype": (in_tensors(TENSORS, lambda t: t.update({FIRST: t[FIRST].long()})), "exp_avg.*int64"),
    "state that is none": (in_state(*ADAM, "state", 0, "exp_avg", to=None), r"state\[0\]\['exp_avg'\] is None"),
    "state that is a mapping": (in_state(*ADAM, "state", 0, "step", to=REDUCE), r"state\[0\]\['step'\] is a dict"),
    "flag that is a mapping": (in_state(*ADAM, "param_groups", 0, "fused", to=REDUCE), "'fused'.* is a dict"),
    "flag that is a number": (in_state(*ADAM, "param_groups", 0, "amsgrad", to=7), "'amsgrad'.* is 7"),
    "betas are one": (in_state(*ADAM, "param_groups", 0, "betas", to={"$tuple": [0.9]}), "'betas'"),
    "betas are text": (in_state(*ADAM, "param_groups", 0, "betas", to={"$tuple": [0.9, "x"]}), "'betas'"),
    "plugins are a list": (in_state("plugins", to=[]), "plugins is a list"),
    "plugin that is not here": (in_state("plugins", to=lambda v: {**v, "os.system": REDUCE}), "'os.system'"),
    "generators are text": (in_state("generators", to="mt19937"), "generators is 'mt19937'"),
    "generator is missing": (in_state("generators", to=without("torch")), "generators lacks torch"),
    "generator of Python": (in_state("generators", "python", to="random"), "'python'"),
    "generator of another kind": (in_state("generators", "numpy", "bit_generator", to="PCG64"), "'numpy'"),
    "generator of NumPy": (in_state("generators", "numpy", "state", to=REDUCE), "'numpy'"),
    "generator of torch": (in_tensors(TENSORS, lambda t: t.update({"generators.torch": torch.ones(3)})), "'torch'"),
    "fit is a list": (in_state("fit", to=[]), "fit is a list"),
    "fit without a start": (in_state("fit", to=without("start")), "fit.start is missing"),
    "fit with a start of text": (in_state("fit", "start", to="0"), "fit.start is '0'"),
    "fit with negative epochs": (in_state("fit", "epochs", to=-5), "fit.epochs is -5"),
    "fit that ends never": (in_state("fit", "seconds", to=NAN), "fit.seconds is nan"),
    "fit that is stopped by code": (in_state("fit", "stop", to=REDUCE), "fit.stop"),
    "passes are a mapping": (in_state("epochs", to={}), "epochs"),
    "pass of a number": (in_state("epochs", 0, "phase", to=7), r"epochs\[0\].phase is 7"),
    "pass of negative steps": (in_state("epochs", 0, "steps", to=-3), r"epochs\[0\].steps is -3"),
    "pass of huge steps": (in_state("epochs", 0, "steps", to=HUGE), r"epochs\[0\].steps"),
    "window of no optimizer": (
        in_state("epochs", 0, "windows", to=lambda v: {"evil": v["optimizer"]}),
        "windows.*'evil'",
    ),
    "window of 2**70 steps": (in_state("epochs", 0, "windows", "optimizer", "size", to=HUGE), "windows.optimizer.size"),
    "window with count -1": (in_state("epochs", 0, "windows", "optimizer", "count", to=-1), "count is -1"),
    "window with weight nan": (in_state("epochs", 0, "windows", "optimizer", "weight", to=NAN), "weight is nan"),
    "window without gradients": (in_state("epochs", 0, "windows", "optimizer", "grads", to=[]), "0 gradients"),
    "gradients of other shapes": (
        in_state("epochs", 0, "windows", "optimizer", "grads", to=lambda v: v[::-1]),
        "gradients of other shapes",
    ),
    "position is a list": (in_state("epochs", 0, "data", to=[1]), r"epochs\[0\].data is a list"),
    "position of unknown kind": (in_state("epochs", 0, "data", "kind", to="os.system"), "data.kind is 'os.system'"),
    "position with negative steps": (in_state("epochs", 0, "data", "steps", to=-2), "data.steps is -2"),
    "position without its place": (in_state("epochs", 0, "data", "state", to=7), "data.state is 7"),
    "place that is huge": (in_state("epochs", 0, "data", "state", "position", to=HUGE), "data.state"),
    "facts of code": (in_state("epochs", 0, "data", "facts", "class", to=REDUCE), "data.facts"),
    "position's generators": (in_state("epochs", 0, "data", "own", to={"generator": "x"}), "data.own"),
    "positions are a list": (in_state("data", to=[]), "data is a list"),
    # what only the plugin can tell
    "state of a schedule": (in_state("plugins", "schedule", to=[1]), "plugin 'schedule'"),
    "state of a history": (in_state("plugins", "history", "rows", to=5), "plugin 'history'"),
    "state of an average": (in_state("plugins", "weight_average", to="x"), "plugin 'weight_average'"),
    "state of a stopper": (in_state("plugins", "early_stopping", "criterion", to=None), "plugin 'early_stopping'"),
    "state of noise": (in_state("plugins", "grad_noise", "generators", to=3), "plugin 'grad_noise'"),
}


@pytest.fixture
def hostile(valid, tmp_path):
    """Make a hostile checkpoint of the valid one; returns its path."""

    def make_hostile(kind: str) -> Path:
        path = tmp_path / kind.replace("/", " ") / "000001-step-9"
        shutil.copytree(valid, path)
        FILES[kind][0](path)
        return path

    return make_hostile


class Watch:
    """Writes down what a process that only reads has no reason to do."""

    HARM = ("exec", "compile", "import", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename")
    KINDS = ("subprocess.", "socket.", "pickle.", "ctypes.", "shutil.", "os.mkdir", "os.symlink", "os.link")

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in self.HARM or event.startswith(self.KINDS):
            self.seen.append(f"{event} {str(arguments[:1])[:200]}")
        elif event == "open":
            _, mode, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or (isinstance(mode, str) and set(mode) & set("wax+")):
                self.seen.append(f"open {arguments!r:.200}")


def attempt(path: Path, load: Callable[[Learner], Any], learner: Learner) -> tuple[str, str, list[str]]:
    """Load under watch; the kind of the error and its message, and what harm was seen."""
    watch = Watch()
    sys.addaudithook(watch)
    watch.on = True
    try:
        load(learner)
        kind, text = "", ""
    except LoopkitError as error:
        kind, text = type(error).__name__, str(error)
    watch.on = False
    return kind, text, watch.seen


def refuse(path: Path, load: Callable[[Learner], Any]) -> tuple[str, str]:
    return refuse_each((path, load))[0]


def refuse_each(*hostile: tuple[Path, Callable[[Learner], Any]]) -> list[tuple[str, str]]:
    """Load each in one child, which takes a fraction of the time of one for each; what the errors are and say."""

    def child():
        answers = []
        for path, load in hostile:
            learner, _ = make()
            before = copy.deepcopy(learner.state_dict())
            found = attempt(path, load, learner)
            answers.append((path.parent.name, *found, list(differences(before, learner.state_dict()))))
        return answers

    answers = call_forked(child)  # which may take a minute
    for name, kind, text, harm, changed in answers:
        assert kind, f"{name} was loaded"
        assert (name, harm) == (name, [])
        assert (name, changed) == (name, [])
        assert len(text) < 3_000
    return [(kind, text) for _, kind, text, *_ in answers]


@pytest.mark.parametrize("part", range(8))
def test_hostile_checkpoint_is_refused_and_changes_nothing(hostile, part):
    kinds = list(FILES)[part::8]
    paths = [hostile(kind) for kind in kinds]
    answers = refuse_each(*((path, lambda learner, path=path: checkpoint.load(learner, path)) for path in paths))
    for kind, (name, text) in zip(kinds, answers, strict=True):
        assert name in ("StateError", "CheckpointError", "CorruptCheckpointError", "FormatVersionError"), kind
        assert re.search(FILES[kind][1], text, re.DOTALL), (kind, text)


@pytest.mark.parametrize("kind", ["pickle as weights", "weight of another shape", "overlap", "pipe", "name above"])
def test_hostile_checkpoint_gives_no_weights(hostile, kind):
    path = hostile(kind)
    refuse(path, lambda learner: checkpoint.load_weights(learner.model, path))


@pytest.mark.parametrize("kind", ["pickle as state", "progress is a list", "state of a history", "name absolute"])
def test_hostile_checkpoint_is_not_resumed(hostile, kind):
    path = hostile(kind)

    def resume(learner):
        _, data = make()
        learner.fit(data, epochs=2)

    def child():
        learner, _ = make(Checkpoint(path.parent / "new", resume=path))
        before = copy.deepcopy({**learner.state_dict(), "fit": None})
        kind, text, _ = attempt(path, resume, learner)
        changed = list(differences(before, {**learner.state_dict(), "fit": None}))
        return kind, text, changed, list(learner._engine.running.epochs), os.listdir(path.parent / "new")

    name, text, changed, passes, left = call_forked(child)
    assert name in ("StateError", "CorruptCheckpointError")
    assert re.search(FILES[kind][1], text)
    assert (changed, passes, left) == ([], [], [])


@pytest.mark.parametrize(
    "kind", ["shape of 2**60", "overlap", "strides", "pickle as weights", "pipe", "header of 2**63 bytes"]
)
def test_hostile_checkpoint_is_not_described(hostile, kind):
    path = hostile(kind)
    name, _ = refuse(path, lambda learner: checkpoint.inspect(path))
    assert name == "CorruptCheckpointError"


STRUCTURES = {
    "pickle": pickled,
    "list": lambda: b"[]",
    "model of text": lambda: b'{"model":"os.system"}',
    "deep": lambda: b"[" * 10_000_000,
    "huge shape": lambda: b'{"model":{"entries":[["0.weight","parameter",[1152921504606846976],"float32"]]}}',
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_hostile_structure_is_refused_by_who_reads_it(hostile, valid, tmp_path, kind):
    path = tmp_path / "000001-step-9"
    shutil.copytree(valid, path)
    rewrite(path, {STRUCTURE: STRUCTURES[kind]()})
    name, text = refuse(path, lambda learner: checkpoint.inspect(path))
    assert name == "CorruptCheckpointError"
    assert STRUCTURE in text


def test_structure_of_another_model_is_refused(hostile, valid, tmp_path):
    path = tmp_path / "000001-step-9"
    shutil.copytree(valid, path)
    said = loads((path / STRUCTURE).read_bytes())
    said["model"]["entries"][0][1] = [1, 4]
    rewrite(path, {STRUCTURE: dumps(said)})
    for load in (lambda learner: checkpoint.load(learner, path), lambda learner: checkpoint.inspect(path)):
        name, text = refuse(path, load)
        assert name == "CorruptCheckpointError"
        assert f"{STRUCTURE} is not of the models that were saved" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [("versions", 3), ("versions", {"torch": ["x"]}), ("threads", {}), ("monitored", "x"), ("structure", [])],
)
def test_hostile_words_of_a_manifest_hinder_nothing(hostile, valid, tmp_path, key, value, capsys):
    directory = tmp_path / "run"
    directory.mkdir()
    path = directory / "000001-step-9"
    shutil.copytree(valid, path)
    about(key, value)(path)
    learner, data = make(
        Checkpoint(
            directory,
            save=every(epochs=1),
            best="train/loss",
            resume="auto",
            options=SaveOptions(allow=["history", "metrics"]),
        )
    )
    assert learner.fit(data, epochs=2).epochs == 2
    assert "resumed" in capsys.readouterr().err


def test_watch_sees_harm(valid, tmp_path):
    """What the tests above would report."""

    def child():
        def harm(learner):
            pickle.loads(pickle.dumps(Bomb.__mro__))
            eval("1")
            (tmp_path / "file").write_text("x")
            sys.modules.pop("colorsys", None)
            __import__("colorsys")

        learner, _ = make()
        return attempt(valid, harm, learner)[2]

    seen = call_forked(child)
    assert {"compile", "exec", "import"} <= {each.split()[0] for each in seen}
    assert any(each.startswith("pickle.") for each in seen)
    assert any(each.startswith("open") and "file" in each for each in seen)


class Late:
    """A plugin that changes itself before it finds that its state is bad."""

    def __init__(self, name, bad=False):
        self.name, self.bad = name, bad
        self.values, self.loads = [1], 0

    def state_dict(self):
        return {"values": list(self.values)}

    def load_state_dict(self, state):
        self.loads += 1
        self.values[:] = state["values"]
        if self.bad and state["values"] != [1]:
            raise RuntimeError("too late")

    @hookimpl
    def fit_end(self):
        pass


def test_load_that_fails_late_puts_back_what_was_loaded():
    first, data = make(Late("late"), Late("zealous", bad=True))
    first.fit(data, epochs=1)
    for name in ("late", "zealous"):
        first.plugins[name].values = [2, 3]
    second, _ = make(Late("late"), Late("zealous", bad=True))
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(RuntimeError, match="too late") as caught:
        second.load_state_dict(first.state_dict())
    assert "in load_state_dict of plugin 'zealous'" in caught.value.__notes__[0]
    assert not list(differences(before, second.state_dict()))
    assert second.plugins["late"].loads == 0


class Extra(nn.Linear):
    """A module with a state of its own, which it may refuse."""

    refuses = False

    def get_extra_state(self):
        return {"count": 1}

    def set_extra_state(self, state):
        if self.refuses and state["count"] != 1:
            raise ValueError("no such count")


def test_model_that_refuses_its_extra_state_is_put_back():
    def learner():
        return Learner(Extra(2, 2), nn.MSELoss(), lambda p: torch.optim.Adam(p), standard=False)

    first, second = learner(), learner()
    state = copy.deepcopy(first.state_dict())
    state["models"]["model"]["_extra_state"] = {"count": 2}
    second.model.refuses = True
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(ValueError, match="no such count") as caught:
        second.load_state_dict(state)
    assert "in load_state_dict of model 'model'" in caught.value.__notes__[0]
    assert not list(differences(before, second.state_dict()))
