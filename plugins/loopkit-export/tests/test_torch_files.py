"""load_torch: tensors out of files of torch.save, and no code of them."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopkit.checkpoint import load_weights
from loopkit.errors import CheckpointError
from loopkit_export import load_torch


def net(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def same(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_load_torch_gives_tensors_for_load_weights(tmp_path: Path) -> None:
    torch.save(net(1).state_dict(), tmp_path / "a.pt")
    stream = io.BytesIO((tmp_path / "a.pt").read_bytes())
    for source in (tmp_path / "a.pt", str(tmp_path / "a.pt"), stream):
        model = net(0)
        report = load_weights(model, load_torch(source))
        assert same(model, net(1))
        assert report.source == "the tensors given"


def test_load_torch_unwraps_only_by_key(tmp_path: Path) -> None:
    torch.save({"state_dict": net(1).state_dict(), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="key='state_dict'"):
        load_torch(tmp_path / "a.pt")
    found = load_torch(tmp_path / "a.pt", key="state_dict")
    assert all(torch.equal(value, found[name]) for name, value in net(1).state_dict().items())
    with pytest.raises(CheckpointError, match=r"no key 'statedict' \(did you mean 'state_dict'"):
        load_torch(tmp_path / "a.pt", key="statedict")
    with pytest.raises(CheckpointError, match="is int, not tensors by name"):
        load_torch(tmp_path / "a.pt", key="epoch")


def test_load_torch_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.zeros(1), "bad": Payload()}, "a.pt")
    with pytest.raises(CheckpointError, match="runs no code"):
        load_torch("a.pt")
    assert not Path("executed").exists()


def test_load_torch_bad_paths_are_clear(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04cut")
    for name, text in {"none.pt": "cannot open", "pipe.pt": "no regular file", "cut.pt": "cannot be read"}.items():
        with pytest.raises(CheckpointError, match=text):
            load_torch(tmp_path / name)
