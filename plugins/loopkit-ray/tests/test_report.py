"""What is reported, and when: in Ray's local mode, where a training function runs in this process."""

import tomllib
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from loopkit_testing import check_plugin
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import Checkpoint, SaveOptions

pytest.importorskip("ray", reason="Ray is not installed")

import pyarrow.fs
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils

from loopkit_ray import RayReport, resume_from

COUNTS = ["epochs", "steps", "updates", "samples"]


class Count:
    """Makes the metric ``<phase>/passes``."""

    name = "count"

    def __init__(self):
        self.passes = {}

    @hookimpl(writes=("metrics.*/passes",))
    def epoch_end(self, learner, phase):
        self.passes[phase.name] = self.passes.get(phase.name, 0) + 1
        learner.metrics[f"{phase.name}/passes"] = torch.tensor(float(self.passes[phase.name]))

    def state_dict(self):
        return dict(self.passes)

    def load_state_dict(self, state):
        self.passes = dict(state)


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]


@pytest.fixture
def reports(monkeypatch):
    """Every report: its metrics without the counts, and the name of its checkpoint."""
    made = []
    report = ray.train.report

    def note(metrics, checkpoint=None):
        assert list(metrics)[:4] == COUNTS
        name = None if checkpoint is None else Path(checkpoint.path).name
        made.append(({key: value for key, value in metrics.items() if key not in COUNTS}, name))
        report(metrics, checkpoint=checkpoint)

    monkeypatch.setattr(ray.train, "report", note)
    yield made
    set_train_fn_utils(None)


def make_learner(*plugins):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Learner(model, nn.MSELoss(), optimizer, plugins=[Count(), *plugins], standard=False)


def in_ray(function):
    return TorchTrainer(function, scaling_config=ScalingConfig(num_workers=0)).fit()


def in_ray_fit(learner, *data, **options):
    return in_ray(lambda: learner.fit(*data, **options) and None)


def test_ray_report_keeps_the_contract():
    check_plugin(RayReport)


def test_ray_report_outside_ray_does_nothing(batches, tmp_path, monkeypatch):
    monkeypatch.setattr(ray.train, "report", lambda *args, **options: pytest.fail("it reported"))
    make_learner(RayReport(), Checkpoint(tmp_path)).fit(batches, batches, epochs=1)


def test_resume_from_outside_ray_is_none():
    with resume_from() as latest:
        assert latest is None


def test_each_epoch_is_reported_after_its_validation(batches, reports):
    result = in_ray_fit(make_learner(RayReport()), batches, batches[:1], epochs=2)
    assert reports == [
        ({"train/passes": 1.0, "val/passes": 1.0}, None),
        ({"train/passes": 2.0, "val/passes": 2.0}, None),
    ]
    assert {name: result.metrics[name] for name in COUNTS} == {"epochs": 2, "steps": 8, "updates": 8, "samples": 32}


def test_each_epoch_is_reported_without_validation(batches, reports):
    in_ray_fit(make_learner(RayReport()), batches, epochs=2)
    assert reports == [({"train/passes": 1.0}, None), ({"train/passes": 2.0}, None)]


def test_values_are_plain_numbers(batches, reports):
    in_ray_fit(make_learner(RayReport()), batches, epochs=1)
    assert [type(value) for metrics, _ in reports for value in metrics.values()] == [float]


def test_an_old_validation_is_not_reported_again(batches, reports):
    in_ray_fit(make_learner(RayReport()), batches, batches[:1], epochs=4, validate=every(epochs=2))
    assert [sorted(metrics) for metrics, _ in reports] == [
        ["train/passes"],
        ["train/passes", "val/passes"],
        ["train/passes"],
        ["train/passes", "val/passes"],
    ]


def test_a_phase_that_is_given_is_reported_after_each_of_its_passes(batches, reports):
    learner = make_learner(RayReport("val"))
    in_ray_fit(learner, batches, batches[:1], epochs=1, validate=every(updates=2))
    assert [metrics for metrics, _ in reports] == [{"val/passes": 1.0}, {"val/passes": 2.0}, {"train/passes": 1.0}]


def test_a_phase_that_does_not_exist_is_refused(batches, reports):
    with pytest.raises(PluginError, match="no phase is called 'vla'"):
        in_ray_fit(make_learner(RayReport("vla")), batches, epochs=1)


def test_report_is_made_after_each_round(batches, reports):
    def train():
        learner = make_learner(RayReport())
        for _ in learner.rounds(epochs=2):
            learner.run("train", batches)
            learner.run("val", batches[:1])

    in_ray(train)
    assert [metrics["val/passes"] for metrics, _ in reports] == [1.0, 2.0]


def test_loop_without_rounds_needs_a_phase(batches, reports):
    def train(plugin):
        learner = make_learner(plugin)
        with learner.rounds():
            for _ in range(2):
                learner.run("train", batches)
                learner.run("val", batches[:1])

    with pytest.raises(PluginError, match=r"'ray_report': your own loop .* RayReport\('train'\)"):
        in_ray(lambda: train(RayReport()))
    assert reports == []
    in_ray(lambda: train(RayReport("val")))
    assert [metrics["val/passes"] for metrics, _ in reports] == [1.0, 2.0]


def test_the_checkpoint_of_the_epoch_goes_along(batches, reports, tmp_path):
    in_ray_fit(make_learner(RayReport(), Checkpoint(tmp_path)), batches, batches[:1], epochs=2)
    assert [(metrics["val/passes"], name) for metrics, name in reports] == [
        (1.0, "000001-step-4"),
        (2.0, "000002-step-8"),
    ]


def test_a_checkpoint_goes_along_once(batches, reports, tmp_path):
    in_ray_fit(make_learner(RayReport(), Checkpoint(tmp_path, save=every(epochs=2))), batches, epochs=4)
    assert [name for _, name in reports] == [None, "000001-step-8", None, "000002-step-16"]


def test_the_checkpoint_of_the_end_is_reported_with_all_metrics(batches, reports, tmp_path):
    in_ray_fit(make_learner(RayReport(), Checkpoint(tmp_path, save=every(epochs=2))), batches, batches[:1], epochs=3)
    end = {"train/passes": 3.0, "val/passes": 3.0}
    assert reports[2:] == [(end, None), (end, "000002-step-12")]


@pytest.mark.parametrize("background", [False, True])
def test_the_last_checkpoint_is_reported_also_if_it_is_written_in_the_background(
    batches, reports, tmp_path, background
):
    in_ray_fit(
        make_learner(RayReport(), Checkpoint(tmp_path, options=SaveOptions(background=background))), batches, epochs=3
    )
    assert [name for _, name in reports if name][-1] == "000003-step-12"


def test_an_epoch_that_was_cut_is_reported_at_the_end(batches, reports, tmp_path):
    class Stop:
        @hookimpl
        def step_end(self, learner, phase):
            if learner.progress.steps == 5:
                learner.stop("enough")

    in_ray_fit(make_learner(RayReport(), Checkpoint(tmp_path), Stop()), batches, batches[:1], epochs=3)
    assert reports[1:] == [({"train/passes": 2.0, "val/passes": 2.0}, "000002-step-5")]


def test_nothing_is_reported_after_an_error(batches, reports, tmp_path):
    class Fail:
        @hookimpl
        def step_end(self, learner, phase):
            if learner.progress.steps == 5:
                raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        in_ray_fit(make_learner(RayReport(), Checkpoint(tmp_path), Fail()), batches, epochs=3)
    assert [name for _, name in reports] == ["000001-step-4"]


def test_passes_outside_a_fit_are_not_reported(batches, reports):
    in_ray(lambda: make_learner(RayReport()).evaluate(batches) and None)
    assert reports == []


def test_several_checkpoint_plugins_need_a_name(batches, reports, tmp_path):
    def several(report):
        path = Path(mkdtemp(dir=tmp_path))
        return make_learner(report, Checkpoint(path / "a"), Checkpoint(path / "b", save=every(epochs=2), name="other"))

    with pytest.raises(PluginError, match=r"several Checkpoint plugins \(checkpoint, other\)"):
        in_ray_fit(several(RayReport()), batches, epochs=1)
    with pytest.raises(PluginError, match=r"no Checkpoint is called 'othr' \(did you mean 'other'\?\)"):
        in_ray_fit(several(RayReport(checkpoint="othr")), batches, epochs=1)
    in_ray_fit(several(RayReport(checkpoint="other")), batches, epochs=2)
    assert [name for _, name in reports] == [None, "000001-step-8"]


class Sync:
    """Says that it syncs."""

    provides = "sync"

    @hookimpl
    def fit_end(self):
        pass


def be_worker(rank):
    """Make this process one of two workers, as far as Ray's functions say."""
    set_train_fn_utils(LocalTrainFnUtils("digits", world_size=2, world_rank=rank))


def test_workers_that_nothing_syncs_are_warned_of(batches, reports):
    be_worker(0)
    with pytest.warns(UserWarning, match="Ray runs 2 workers, and no plugin syncs them"):
        make_learner(RayReport()).fit(batches, epochs=1)
    make_learner(RayReport(), Sync()).fit(batches, epochs=1)  # a warning would be an error


@pytest.mark.parametrize("rank", [0, 1])
def test_the_checkpoint_is_that_of_rank_0(batches, reports, tmp_path, rank):
    be_worker(rank)
    make_learner(RayReport(), Sync(), Checkpoint(tmp_path)).fit(batches, epochs=1)
    assert [name for _, name in reports] == [None if rank else "000001-step-4"]


def test_a_run_goes_on_from_a_checkpoint_that_is_elsewhere(batches, reports, tmp_path, monkeypatch):
    straight = make_learner()
    straight.fit(batches, epochs=3)
    be_worker(0)
    make_learner(Sync(), Checkpoint(tmp_path / "far")).fit(batches, epochs=2)
    far = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "far"), pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: ray.train.Checkpoint("000002-step-8", far))
    with resume_from() as latest:
        assert latest is not None
        assert not latest.is_relative_to(tmp_path)
        learner = make_learner(RayReport(), Sync(), Checkpoint(tmp_path / "near", resume=latest))
        learner.fit(batches, epochs=3)
    assert not latest.exists()
    assert reports == [({"train/passes": 3.0}, "000001-step-12")]
    assert torch.equal(learner.model.weight, straight.model.weight)


def test_entry_point_names_the_plugin():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["loopkit.plugins"] == {"ray_report": "loopkit_ray:RayReport"}
