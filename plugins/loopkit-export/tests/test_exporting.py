"""What was exported gives what the learner predicts; saved weights are those of the best epoch."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import batches, make_learner
from loopkit_testing import check_plugin
from pages import run_page
from torch import nn

from loopkit import Learner, sharded
from loopkit.checkpoint import load_weights
from loopkit.errors import PhaseError, PluginError
from loopkit.plugins import Metrics, WeightAverage
from loopkit_export import SaveWeights, export, load

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


@pytest.mark.parametrize(("best", "epoch"), [(None, 2), ("val/loss", 0)])
def test_weights_are_those_of_the_last_or_best_epoch(best, epoch, tmp_path):
    learner = make_learner(Metrics(), SaveWeights(tmp_path / "weights", best=best), lr=0.0)
    kept = []
    for add in range(3):
        with torch.no_grad():
            learner.model.weight.add_(100.0 * add)
        learner.fit(batches(2), batches(2), epochs=1)
        kept.append(learner.model.weight.clone())
    fresh = nn.Linear(3, 1)
    load_weights(fresh, tmp_path / "weights" / "model.safetensors")
    assert torch.equal(fresh.weight, kept[epoch])
    assert [file.name for file in (tmp_path / "weights").iterdir()] == ["model.safetensors"]


def test_best_of_a_metric_that_does_not_say_when_it_is_better_is_refused(tmp_path):
    learner = make_learner(Metrics(own=lambda outputs, targets: outputs.mean()), SaveWeights(tmp_path, best="val/own"))
    with pytest.raises(PluginError, match=r"plugin 'save_weights': nothing says whether 'val/own' is better"):
        learner.fit(batches(1), batches(1), epochs=1)


def test_best_value_goes_on_from_a_state(tmp_path):
    plugin = SaveWeights(tmp_path, best="val/loss")
    plugin.load_state_dict({"value": 0.0})
    make_learner(Metrics(), plugin).fit(batches(2), batches(2), epochs=1)
    assert list(tmp_path.iterdir()) == []


def saved(directory):
    fresh = nn.Linear(3, 1)
    load_weights(fresh, directory / "model.safetensors")
    return fresh


def test_evaluation_after_the_fit_leaves_the_best_weights(tmp_path):
    learner = make_learner(Metrics(), SaveWeights(tmp_path, best="val/loss"))
    learner.fit(batches(2), batches(2), epochs=1)
    kept = saved(tmp_path)
    with torch.no_grad():
        learner.model.weight.zero_()
    learner.evaluate([(torch.zeros(2, 3), torch.zeros(2, 1) + learner.model.bias.detach())])  # a loss of 0
    assert torch.equal(saved(tmp_path).weight, kept.weight)


@pytest.mark.parametrize(("phases", "average"), [(None, True), ((), False)])
def test_best_weights_are_those_that_were_measured(phases, average, tmp_path):
    learner = make_learner(Metrics(), WeightAverage(phases=phases), SaveWeights(tmp_path, best="val/loss"))
    learner.fit(batches(4), batches(2), epochs=1)
    own = learner.model.weight.clone()
    with learner.plugins["weight_average"].averaged(learner):
        averaged = learner.model.weight.clone()
    assert not torch.equal(own, averaged)
    assert torch.equal(saved(tmp_path).weight, averaged if average else own)


def test_of_several_processes_rank_0_alone_writes_the_weights(tmp_path, monkeypatch):
    learner = make_learner(SaveWeights(tmp_path))
    monkeypatch.setitem(vars(learner.world), "rank", 1)
    learner.fit(batches(2), epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_run_that_goes_on_keeps_the_best_weights_of_its_first_part(tmp_path):
    def made():
        return make_learner(Metrics(), SaveWeights(tmp_path, best="val/loss"), lr=10.0)  # it gets worse

    first = made()
    first.fit(batches(4), batches(2), max_updates=4)
    best = saved(tmp_path).weight
    again = made()
    again.load_state_dict(first.state_dict())
    again.fit(batches(4), batches(2), epochs=2)
    assert torch.equal(saved(tmp_path).weight, best)
    assert not torch.equal(again.model.weight, best)


def test_sharded_weights_are_refused_when_the_fit_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "is_sharded", lambda value: True)
    learner = make_learner(SaveWeights(tmp_path))
    before = learner.model.weight.clone()
    with pytest.raises(PluginError, match="the parameters of model 'model' are sharded"):
        learner.fit(batches(2), epochs=1)
    assert torch.equal(learner.model.weight, before)


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


@pytest.mark.parametrize("options", [{"mode": "low"}, {"best": "loss"}])
def test_save_weights_refuses(options, tmp_path):
    with pytest.raises(PluginError, match=f"SaveWeights: {next(iter(options))} is"):
        SaveWeights(tmp_path, **options)


def test_plugin_keeps_the_contract(tmp_path):
    check_plugin(lambda: SaveWeights(tmp_path))


def test_readme_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")
