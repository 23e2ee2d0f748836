"""Frozen weights that checkpoints leave out: every loader knows them by their fingerprints."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import Learner, checkpoint, hookimpl
from loopkit.base.fingerprint import fingerprint
from loopkit.checkpoint import load_best, load_weights
from loopkit.engine.kept import left_out
from loopkit.errors import StateError
from loopkit.plugins import Checkpoint, Freeze, Metrics, WeightAverage

DATA = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


class KeepsBase:
    """A plugin of another kind, which says so by an attribute: it keeps the first layer frozen."""

    name = "keeps_base"
    leaves_out = ("encoder.0",)

    @hookimpl
    def fit_begin(self):
        pass


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make(*plugins, seed=0, freeze=True):
    given = [Freeze("encoder", saved=False)] if freeze else []
    model = Model(seed)
    return Learner(model, mse_loss, sgd, plugins=[*given, Metrics(), *plugins], standard=False)


FROZEN = {"encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias", "encoder.2.weight"} | {
    "encoder.2.bias"
}


def test_file_of_weights_holds_what_is_trained_and_buffers(tmp_path):
    learner = make()
    learner.fit(DATA, epochs=1)
    saved = checkpoint.save(learner, tmp_path / "run")
    assert load_file(saved.path / "model.safetensors").keys() == learner.model.state_dict().keys() - FROZEN
    assert saved.about["left_out"]["model"].keys() == FROZEN


def test_all_are_saved_where_nobody_says_so(tmp_path):
    learner = Learner(Model(), mse_loss, sgd, plugins=[Freeze("encoder")], standard=False)
    learner.fit(DATA, epochs=1)
    saved = checkpoint.save(learner, tmp_path / "run")
    assert load_file(saved.path / "model.safetensors").keys() == learner.model.state_dict().keys()
    assert "left_out" not in saved.about
    assert "left_out" not in learner.state_dict()


def test_run_resumes_bit_for_bit(tmp_path):
    whole = make()
    whole.fit(DATA, epochs=3)
    first = make()
    first.fit(DATA, epochs=2)
    checkpoint.save(first, tmp_path / "run")
    second = make()
    checkpoint.load(second, tmp_path / "run")
    second.fit(DATA, epochs=1)
    assert all(map(torch.equal, whole.model.state_dict().values(), second.model.state_dict().values()))


def test_what_is_thawed_is_saved(tmp_path):
    learner = make(Freeze({"encoder": 1}, saved=False), freeze=False)
    learner.fit(DATA, epochs=1)
    before = checkpoint.save(learner, tmp_path / "run")
    learner.fit(DATA, epochs=1)
    after = checkpoint.save(learner, tmp_path / "run")
    assert not FROZEN & load_file(before.path / "model.safetensors").keys()
    assert load_file(after.path / "model.safetensors").keys() >= FROZEN
    resumed = make(Freeze({"encoder": 1}, saved=False), freeze=False)
    checkpoint.load(resumed, after.path)
    assert all(map(torch.equal, learner.model.parameters(), resumed.model.parameters()))


LOADERS = {
    "load": lambda other, learner, run: checkpoint.load(other, run),
    "load_weights": lambda other, learner, run: load_weights(other.model, run),
    "load_best": lambda other, learner, run: load_best(other, run),
    "load_state_dict": lambda other, learner, run: other.load_state_dict(learner.state_dict()),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_refuses_other_frozen_weights_and_changes_nothing(loader, tmp_path):
    learner = make(Checkpoint(tmp_path / "run", best="val/loss"))
    learner.fit(DATA, DATA[:1], epochs=1)
    other = make(Checkpoint(tmp_path / "other"), seed=1)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(StateError, match=r"the frozen weights of '?encoder\.0\.weight.*pretrained"):
        LOADERS[loader](other, learner, tmp_path / "run")
    assert all(map(torch.equal, before.values(), other.model.state_dict().values()))


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("plugins", [(), (lambda: WeightAverage(decay=0.5),)])
def test_best_is_loaded_into_the_pretrained_model(weights_only, plugins, tmp_path):
    run = tmp_path / "run"
    saves = Checkpoint(run, best="val/loss", weights_only=weights_only)
    learner = make(saves, *(plugin() for plugin in plugins))
    learner.fit(DATA, DATA[:1], epochs=3)
    best = checkpoint.best(run)
    files = list(best.path.glob("model*.safetensors"))
    assert len(files) == 1 + len(plugins)
    for file in files:
        assert not FROZEN & load_file(file).keys()
    for made in ([plugin() for plugin in plugins], []):
        fresh = make(*made)
        load_best(fresh, run)
        assert fresh.evaluate(DATA[:1])["val/loss"] == best.metrics["val/loss"]
    model = Model()
    report = load_weights(model, run)
    assert not report.missing
    assert (
        torch.equal(model.head.weight, learner.model.head.weight) or plugins or best.path.name != files[0].parent.name
    )


def test_load_weights_without_strict_lists_what_is_missing(tmp_path):
    learner = make()
    learner.fit(DATA, epochs=1)
    checkpoint.save(learner, tmp_path / "run")
    model = Model(seed=1)
    report = load_weights(model, tmp_path / "run", strict=False)
    assert {*report.missing} >= {"encoder.0.weight", "encoder.2.weight"}
    assert torch.equal(model.head.weight, learner.model.head.weight)


def test_plugin_says_so_by_an_attribute(tmp_path):
    learner = make(KeepsBase(), Freeze("encoder"), freeze=False)
    learner.fit(DATA, epochs=1)
    saved = checkpoint.save(learner, tmp_path / "run")
    assert saved.about["left_out"]["model"].keys() == {"encoder.0.weight", "encoder.0.bias"}


def test_what_is_trained_is_saved_whatever_a_plugin_says(tmp_path):
    learner = make(KeepsBase(), freeze=False)
    learner.fit(DATA, epochs=1)
    assert "left_out" not in checkpoint.save(learner, tmp_path / "run").about


def test_fingerprints_are_made_once_and_again_where_a_version_moved(monkeypatch):
    made = []
    monkeypatch.setattr(left_out, "fingerprint", lambda tensor: made.append(tensor.shape) or fingerprint(tensor))
    learner = make()
    learner.state_dict()
    assert len(made) == len(FROZEN)
    learner.fit(DATA, epochs=1)
    first = learner.state_dict()["left_out"]["model"]
    assert len(made) == len(FROZEN)
    with torch.no_grad():
        learner.model.encoder[0].bias.add_(1)
    second = learner.state_dict()["left_out"]["model"]
    assert len(made) == len(FROZEN) + 1
    assert {name for name in FROZEN if first[name] != second[name]} == {"encoder.0.bias"}


def test_models_of_a_mapping_leave_out_by_their_paths(tmp_path):
    def mapped():
        models = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
        torch.manual_seed(3)
        for model in models.values():
            nn.init.normal_(model.weight)
            nn.init.zeros_(model.bias)
        return Learner(models, plugins=[Freeze("a.weight", "b", saved=False)], standard=False)

    saved = checkpoint.save(mapped(), tmp_path / "run")
    assert saved.about["left_out"] == {
        "a": {"weight": fingerprint(mapped().models["a"].weight)},
        "b": {name: fingerprint(p) for name, p in mapped().models["b"].named_parameters()},
    }
    checkpoint.load(mapped(), saved.path)


def test_malformed_part_is_refused():
    learner = make()
    for wrong in ({"model": {"encoder.0.bias": 3}}, {"model": 3}, []):
        with pytest.raises(StateError, match="malformed"):
            learner.load_state_dict({**learner.state_dict(), "left_out": wrong})


def test_damaged_fingerprint_of_a_name_that_is_no_parameter_is_named():
    learner = make()
    state = learner.state_dict()
    state["left_out"] = {"model": {**state["left_out"]["model"], "nothing": "0"}}
    del state["left_out"]["model"]["encoder.0.bias"]
    with pytest.raises(StateError, match=r"encoder\.0\.bias"):
        learner.load_state_dict(state)


def test_load_leaves_the_frozen_weights_alone(tmp_path):
    learner = make()
    learner.fit(DATA, epochs=1)
    saved = checkpoint.save(learner, tmp_path)
    again = make()
    versions = [p._version for p in again.model.encoder.parameters()]
    checkpoint.load(again, saved.path)
    assert [p._version for p in again.model.encoder.parameters()] == versions
