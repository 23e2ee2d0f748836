from __future__ import annotations

import gzip
import json

import pytest
import torch
from distributed.processes import run
from helpers import on, raising
from loopkit_testing import tiny_problem

from loopkit import CancelStep
from loopkit.errors import PluginError
from loopkit.plugins import DDP
from loopkit_insight import Profile


@pytest.fixture(autouse=True)
def _no_profiler_is_left():
    yield
    assert not torch._C._autograd._profiler_enabled()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "trace.json"


def fit(*plugins, epochs=2, **options):
    problem = tiny_problem()  # 4 training and 2 validation steps an epoch
    learner = problem.learner(plugins=plugins, standard=False, **options)
    learner.fit(problem.train, problem.val, epochs=epochs)
    return learner


def ranges(path):
    """How often each range is in the trace."""
    counts: dict[str, int] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts


def running(**given):
    return torch._C._autograd._profiler_enabled()


def test_trace_holds_the_chosen_steps(path):
    fit(Profile(range(1, 3), path, show=False))
    assert ranges(path)["train step"] == 2


def test_profiler_runs_in_the_chosen_steps_alone(path):
    seen = []
    fit(Profile(range(2, 5), path, show=False), on("backward_begin", lambda **given: seen.append(running())))
    assert seen == [False, False, True, True, True, False, False, False]


def test_steps_over_two_epochs_take_in_the_validation_between(path):
    fit(Profile(range(3, 6), path, show=False))
    found = ranges(path)
    assert (found["train step"], found["val epoch"], found["val step"]) == (3, 1, 2)


def test_table_is_printed_and_kept(path, capsys):
    plugin = Profile(range(1, 3), path)
    fit(plugin)
    assert "aten::addmm" in plugin.table
    assert plugin.table in capsys.readouterr().out


def test_table_is_not_printed_with_show_false(path, capsys):
    fit(Profile(range(1, 3), path, show=False))
    assert capsys.readouterr().out == ""


def test_rows_limit_the_table():
    plugin = Profile([1], None, show=False, rows=1)
    fit(plugin)
    assert sum("aten::" in line for line in plugin.table.splitlines()) <= 1


def test_without_a_path_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(Profile([1], None, show=False))
    assert list(tmp_path.iterdir()) == []


def test_path_with_gz_is_compressed(tmp_path):
    fit(Profile([1], tmp_path / "trace.json.gz", show=False))
    with gzip.open(tmp_path / "trace.json.gz") as file:
        assert "traceEvents" in json.load(file)


def test_options_go_to_the_profiler(path):
    fit(Profile([1], path, show=False, record_shapes=True))
    events = json.loads(path.read_text())["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events)


@pytest.mark.parametrize("hooks", [True, False])
def test_hooks_of_other_plugins_are_named_on_demand(path, hooks):
    logging = on("loss_begin", lambda **given: None, name="logging")
    fit(Profile(range(1, 3), path, show=False, hooks=hooks), logging)
    assert ranges(path).get("logging.loss_begin", 0) == (2 if hooks else 0)


def test_named_hooks_return_what_they_do_without():
    doubled = on("move_batch", lambda batch, **given: tuple(torch.cat([part, part]) for part in batch))
    assert fit(doubled, Profile([1], None, show=False, hooks=True), epochs=1).progress.samples == 2 * 20


@pytest.mark.parametrize("hook", ["step_begin", "forward_begin", "loss_begin", "update_end", "step_end"])
def test_profiler_is_stopped_after_an_error(path, hook):
    with pytest.raises(RuntimeError, match="deliberate"):
        fit(Profile(range(1, 100), path, show=False), raising(hook, RuntimeError("deliberate"), at=2))
    assert not running()
    assert not path.exists()


def test_profiler_is_stopped_after_an_error_in_a_pass_of_its_own(path):
    problem = tiny_problem()
    plugin = Profile(range(1, 100), path, show=False)
    learner = problem.learner(plugins=[plugin, raising("loss_begin", RuntimeError("deliberate"), at=2)], standard=False)
    with pytest.raises(RuntimeError, match="deliberate"):
        learner.run("train", problem.train)
    assert not running()


def test_fit_that_ends_early_writes_what_there_is(path):
    fit(Profile(range(6, 100), path, show=False))
    assert ranges(path)["train step"] == 2


def test_pass_of_its_own_writes_at_its_end(path):
    problem = tiny_problem()
    learner = problem.learner(plugins=[Profile(range(1, 100), path, show=False)], standard=False)
    learner.run("train", problem.train)
    assert ranges(path)["train step"] == 3


def test_cancelled_last_step_ends_the_profile(path):
    cancel = raising("loss_begin", CancelStep("no"), at=2)
    seen = []
    fit(
        Profile(range(1, 3), path, show=False),
        cancel,
        on("step_begin", lambda **given: seen.append(running()), name="zz"),
        epochs=1,
    )
    assert seen == [False, True, True, False, False, False]


def test_each_fit_is_profiled(path):
    problem = tiny_problem()
    learner = problem.learner(plugins=[Profile([1], path, show=False)], standard=False)
    for _ in range(2):
        path.unlink(missing_ok=True)
        learner.fit(problem.train, epochs=1)
        assert ranges(path)["train step"] == 1


def test_fit_that_never_reaches_the_steps_warns(path):
    with pytest.warns(UserWarning, match=r"had 8 training steps .* step 10, so no step was profiled"):
        fit(Profile(path=path))


def test_other_profiler_is_left_alone(path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        with pytest.warns(UserWarning, match="another profiler is running"):
            fit(Profile([1], path, show=False))
        assert running()
    assert not path.exists()
    assert any(event.key == "aten::addmm" for event in other.key_averages())


def test_training_is_bitwise_as_without(path):
    states = []
    for plugins in ((Profile(range(1, 5), path, show=False),), ()):
        torch.manual_seed(0)
        states.append(fit(*plugins).model.state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.two_processes
def test_first_of_several_processes_is_profiled_alone(tmp_path):
    def each(rank):
        fit(DDP(shard=False), Profile(range(2), tmp_path / str(rank) / "trace.json", show=False), epochs=1)

    run(each, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("steps", [[], [3, 5], [-1, 0], range(0, 10, 2), [2, 1]])
def test_steps_that_do_not_follow_one_another_are_refused(steps):
    with pytest.raises(PluginError, match="steps"):
        Profile(steps)


def test_directory_as_path_is_refused(tmp_path):
    with pytest.raises(PluginError, match="directory"):
        Profile(path=tmp_path)


@pytest.mark.parametrize("steps", [[], "ab", [0.0], [True], [-1], [1, 3]])
def test_profile_refuses_steps_that_do_not_follow_one_another(steps):
    with pytest.raises(PluginError, match=r"Profile: steps is .*: they follow one another"):
        Profile(steps)
