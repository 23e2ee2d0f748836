"""What was exported gives what the learner predicts."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import batches
from pages import run_page
from torch import nn

from loopkit import Learner
from loopkit.errors import PhaseError, PluginError
from loopkit.plugins import WeightAverage
from loopkit_export import export, load

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch.export
INPUTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def trained(*plugins):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
    learner = Learner(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), plugins=plugins)
    learner.remove("progress")
    learner.fit(batches(4), epochs=1)
    return learner


@pytest.mark.parametrize("average", [False, True])
def test_round_trip_equals_predict(average, tmp_path):
    learner = trained(*([WeightAverage()] if average else []))
    state = {name: value.clone() for name, value in learner.model.state_dict().items()}
    (file,) = export(learner, tmp_path / "model", INPUTS, onnx=False)
    assert file == tmp_path / "model.pt2"
    expected = learner.predict(INPUTS)
    with torch.no_grad():
        own = learner.model.eval()(INPUTS)
    learner.model.train()
    assert torch.equal(expected, own) is not average
    for count in (6, 1, 3):  # a batch of any size
        assert torch.allclose(load(file)(INPUTS[:count]), expected[:count], rtol=1e-6)  # another size, other kernels
    assert torch.equal(load(file)(INPUTS), expected)
    assert learner.model.training
    assert all(torch.equal(value, state[name]) for name, value in learner.model.state_dict().items())
    export(learner, tmp_path / "own", INPUTS, weights=None, onnx=False)
    assert torch.equal(load(tmp_path / "own.pt2")(INPUTS), own)


def test_onnx_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("loopkit_export.exporting.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnx and onnxscript: pip install 'loopkit-export\[onnx\]'"):
        export(trained(), tmp_path / "model", INPUTS, onnx=True)
    assert [file.name for file in export(trained(), tmp_path / "model", INPUTS)] == ["model.pt2"]


@pytest.mark.skipif(not all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))), reason="it needs them installed")
def test_onnx_round_trip_equals_predict(tmp_path):
    import onnxruntime

    learner = trained()
    file = export(learner, tmp_path / "model", INPUTS, onnx=True)[1]
    session = onnxruntime.InferenceSession(file)
    name = session.get_inputs()[0].name
    for inputs in (INPUTS, INPUTS[:1], torch.cat([INPUTS, INPUTS])):
        (found,) = session.run(None, {name: inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), learner.predict(inputs), rtol=1e-6, atol=1e-6)  # kernels


def test_export_refuses_models_and_weights_that_are_not_there(tmp_path):
    several = Learner({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}, standard=False)
    with pytest.raises(PhaseError, match="it is one of 'a', 'b'"):
        export(several, tmp_path / "model", INPUTS)
    for weights in ("avrage", "metrics"):
        with pytest.raises(PluginError, match=f"weights is '{weights}'"):
            export(trained(), tmp_path / "model", INPUTS, weights=weights)


@pytest.mark.parametrize("name", ["lr0.1", "model.pt2", "model"])
def test_name_of_the_file_keeps_its_dots(name, tmp_path):
    (file,) = export(trained(), tmp_path / name, INPUTS, onnx=False)
    assert file.name == name.removesuffix(".pt2") + ".pt2"
    assert list(tmp_path.iterdir()) == [file]


def test_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    def fail(program, path):
        Path(path).write_bytes(b"half")
        raise OSError("the disk is full")

    learner = trained()
    (file,) = export(learner, tmp_path / "model", INPUTS, onnx=False)
    before = file.read_bytes()
    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(OSError, match="the disk is full"):
        export(learner, tmp_path / "model", INPUTS, onnx=False)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_rank_0_alone_writes(tmp_path, monkeypatch):
    learner = trained()
    monkeypatch.setitem(vars(learner.world), "rank", 1)
    assert export(learner, tmp_path / "model", INPUTS, onnx=False) == [tmp_path / "model.pt2"]
    assert list(tmp_path.iterdir()) == []


def test_readme_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")
