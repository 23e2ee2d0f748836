"""Where streams, events and types of devices may be named, and which device a process takes."""

import ast
import re
from pathlib import Path

import pytest
import torch
from fake_accelerator import Fake
from torch import nn

import loopkit
from loopkit import Learner
from loopkit.base import devices, generators
from loopkit.plugins import ToDevice

HOME = Path(loopkit.__file__).parent
REASONS = {
    "loopkit/engine/kept/witness/looks.py": ("a module of torch whose objects are not looked into", {"cuda"}),
    "loopkit/engine/life/surroundings.py": ("kinds whose autocast an interrupt may leave on", {"cuda"}),
    "plugins/loopkit-whole-step/loopkit_whole_step/cuda_graph.py": ("graphs of CUDA", {"cuda"}),
    "plugins/loopkit-insight/loopkit_insight/find_syncs.py": ("CUDA's own mode that tells of syncs", {"cuda"}),
    "plugins/loopkit-insight/loopkit_insight/log_resources.py": ("what NVML tells of GPUs", {"cuda"}),
    "plugins/loopkit-callbacks/loopkit_callbacks/trainer.py": (
        "Lightning's names of its accelerators",
        {"cuda", "mps"},
    ),
}
"""Files that name what only `loopkit.base.devices` may: what for, and which words."""
TYPES = ("cuda", "mps", "xpu")
TYPE = re.compile(rf"\b({'|'.join(TYPES)})\b")
OF_TORCH = {*TYPES, "accelerator", "Event", "Stream"}
OF_TENSORS = {*TYPES, "is_cuda", "is_mps", "is_xpu", "is_pinned", "pin_memory", "record_stream"}
WAITS = {"synchronize", "wait_event", "wait_stream"}
KEYWORDS = {"pin_memory", "non_blocking"}
WORDS = re.compile("|".join({*OF_TORCH, *OF_TENSORS, *WAITS, *KEYWORDS}))


def named(text):
    """The words by which a file names a type of device, or takes from torch what belongs to one, and their lines."""
    tree = ast.parse(text if WORDS.search(text) else "")
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        found = set()
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found = {node.attr} & (OF_TENSORS | (OF_TORCH if owner == "torch" else set()))
            found |= {node.attr} & WAITS if owner != "devices" else set()
        elif isinstance(node, ast.Import):
            found = {part for each in node.names if each.name.startswith("torch.") for part in each.name.split(".")}
            found &= OF_TORCH
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found = {*node.module.split("."), *(each.name for each in node.names)} & OF_TORCH
        elif isinstance(node, ast.keyword):
            found = {node.arg} & KEYWORDS
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            found = set(TYPE.findall(node.value))
        for word in sorted(found):
            yield word, node.lineno


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from torch import cuda, Event", ["Event", "cuda"]),
        ("from torch.cuda import Stream", ["Stream", "cuda"]),
        ("import torch.cuda", ["cuda"]),
        ("cuda.synchronize()", ["synchronize"]),
        ("Event().synchronize()", ["synchronize"]),
        ("stream.wait_event(event)", ["wait_event"]),
        ("torch.accelerator.current_stream()", ["accelerator"]),
        ("name = f'cuda:{number}'", ["cuda"]),
        ("pattern = 'cpu|cuda|mps'", ["cuda", "mps"]),
        ("tensor.cuda()", ["cuda"]),
        ("tensor.to(device, non_blocking=True)", ["non_blocking"]),
        ("torch.empty(1, pin_memory=True)", ["pin_memory"]),
        ("devices.synchronize([device])", []),
        ("from threading import Event", []),
        ('def run():\n    """On cuda."""', []),
    ],
)
def test_line_that_names_a_device_is_found(line, words):
    assert [word for word, _ in named(line)] == words


def test_devices_are_named_in_one_file():
    root = HOME.parent
    sources = [*HOME.rglob("*.py"), *root.glob("plugins/*/loopkit_*/**/*.py")]
    assert len(sources) > 150
    found = {
        str(path.relative_to(root)): list(named(path.read_text()))
        for path in sources
        if path != HOME / "base/devices.py"
    }
    allowed = {path: words for path, (_, words) in REASONS.items()}
    lines = [
        f"{path}:{line}: {word}"
        for path, all in found.items()
        for word, line in all
        if word not in allowed.get(path, ())
    ]
    assert lines == []
    assert {path: {word for word, _ in all} for path, all in found.items() if all} == allowed


@pytest.mark.parametrize(
    ("rank", "count", "expected"),
    [(None, 2, "cuda"), ("0", 2, "cuda:0"), ("1", 2, "cuda:1"), ("3", 1, "cuda:0"), ("3", 2, "cuda:1")],
)
def test_each_process_has_a_device_of_its_own(monkeypatch, rank, count, expected):
    Fake(monkeypatch, count=count)
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert devices.local_device() == ToDevice().device == torch.device(expected)


def test_local_device_without_an_accelerator_is_the_host(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.local_device() == torch.device("cpu") or devices.accelerator() is not None


@pytest.mark.parametrize(("given", "expected"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0")])
def test_to_device_moves_models_to_the_process_s_own_device(monkeypatch, given, expected):
    moved = []
    plugin = ToDevice(given)  # before a launcher says which process it is
    Fake(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(nn.Module, "to", lambda self, device: moved.append(str(device)))
    if given == "auto":
        plugin = ToDevice(given)
    Learner(nn.Linear(1, 1), plugins=[plugin], standard=False)
    assert moved == [str(plugin.device)] == [expected]


@pytest.mark.parametrize(("local", "expected"), [("1", "cpu:gloo,cuda:nccl"), ("2", "gloo")])
def test_backend_of_the_device_needs_one_for_each_process(monkeypatch, local, expected):
    Fake(monkeypatch, count=1)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert devices.backends() == expected


def test_arrival_marks_each_device_on_its_own_stream(monkeypatch):
    fake = Fake(monkeypatch)
    first, second, host = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    arrival = devices.Arrival([second, host, first, second])
    assert fake.calls == [f"event of {device} on stream of {device}" for device in (second, first)]
    assert arrival.here
    fake.calls.clear()
    arrival.wait()
    assert fake.calls == [f"wait for {device}" for device in (second, first)]


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators_are_waited_for(monkeypatch, kind):
    fake = Fake(monkeypatch, kind)
    assert devices.Arrival([torch.device(kind, 0)]).here
    assert fake.calls == []


def test_exact_is_float64_where_there_is_one():
    assert devices.exact(torch.device("mps")) == torch.float32
    assert devices.exact(torch.device("cuda")) == devices.exact(torch.device("cpu")) == torch.float64


def generator(number):
    return torch.full((8,), number, dtype=torch.uint8)


def test_generator_of_mps_is_saved_and_restored(monkeypatch):
    Fake(monkeypatch, "mps", count=1)
    put = []
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device="mps": generator(3))
    monkeypatch.setattr(
        torch.mps, "set_rng_state", lambda state, device="mps": put.append((state.tolist(), str(device)))
    )
    state = generators.save()
    generators.restore(state)
    assert [each.tolist() for each in state["mps"]] == [[3] * 8]
    assert put == [([3] * 8, "mps:0")]


def test_generators_of_two_xpus_are_saved_and_each_is_restored(monkeypatch):
    Fake(monkeypatch, "xpu", count=2)
    put = []
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_rng_state_all", lambda: [generator(3), generator(4)])
    monkeypatch.setattr(
        torch.xpu, "set_rng_state", lambda state, device="xpu": put.append((state.tolist(), str(device)))
    )
    state = generators.save()
    generators.restore(state)
    assert [each.tolist() for each in state["xpu"]] == [[3] * 8, [4] * 8]
    assert put == [([3] * 8, "xpu:0"), ([4] * 8, "xpu:1")]


def test_generators_of_an_accelerator_that_is_not_in_use_are_left_alone(monkeypatch):
    Fake(monkeypatch, "xpu")
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: False)
    assert devices.generator_states() == {}
