"""Directories: who may write where; and what a failure does."""

import atexit
import os
import resource
import shutil
import tempfile

import pytest
import torch
from conftest import LogLoss, LogOnce
from loopkit_testing import plugin_contract
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

import loopkit_tensorboard.backend
from loopkit import hookimpl
from loopkit.errors import LogError, PluginError
from loopkit.logs import Run, Text
from loopkit.plugins import LogTo
from loopkit_tensorboard import TensorBoard, tensorboard

DIRECTORY = tempfile.mkdtemp()
atexit.register(shutil.rmtree, DIRECTORY)


def fit(make_learner, batches, directory, **options):
    return make_learner(LogLoss(), LogTo(TensorBoard(directory)), **options).fit(batches, epochs=1)


def steps(read, directory):
    return [event.step for event in read(directory).Scalars("train/loss")]


def make_plugin():
    """A plugin with a directory of its own."""
    return tensorboard(tempfile.mkdtemp(dir=DIRECTORY))


test_contract = plugin_contract(make_plugin, name="tensorboard")


def test_the_plugin_can_be_given_by_name(make_learner, batches, tmp_path, read):
    make_learner(LogLoss(), {"tensorboard": {"directory": str(tmp_path / "a"), "every": 2}}).fit(batches, epochs=1)
    assert steps(read, tmp_path / "a") == [1, 2, 3, 4, 5]


def test_the_plugin_is_called_tensorboard(tmp_path):
    plugin = tensorboard(tmp_path)
    assert (plugin.name, plugin.provides) == ("tensorboard", "log")


def test_the_backend_alone_is_no_plugin(make_learner, tmp_path):
    with pytest.raises(PluginError, match=r"LogTo\("):
        make_learner(TensorBoard(tmp_path))


def test_the_bits_are_those_of_a_run_without(make_learner, batches, tmp_path):
    plain, logged = make_learner(LogLoss()), make_learner(LogLoss(), LogTo(TensorBoard(tmp_path), every=1))
    for learner in (plain, logged):
        learner.fit(batches, epochs=2)
    assert torch.equal(plain.model.weight, logged.model.weight)


def test_directories_are_made(make_learner, batches, tmp_path, read):
    fit(make_learner, batches, tmp_path / "runs" / "a")
    assert steps(read, tmp_path / "runs" / "a") == [1, 2, 3, 4, 5]


def test_a_relative_directory_stays_where_it_was(make_learner, batches, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = TensorBoard("a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    make_learner(LogLoss(), LogTo(backend)).fit(batches, epochs=1)
    assert (tmp_path / "a").is_dir()


def test_an_earlier_run_is_set_aside(make_learner, batches, tmp_path, read):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes").write_text("mine")
    for _ in range(3):
        fit(make_learner, batches, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a-1", "a-2"]
    assert [steps(read, path) for path in tmp_path.iterdir()] == [[1, 2, 3, 4, 5]] * 3
    assert (tmp_path / "a" / "notes").read_text() == "mine"


def test_event_files_of_others_are_left_alone(make_learner, batches, tmp_path):
    other = tmp_path / "events.out.tfevents.1.host"
    other.write_bytes(b"theirs")
    fit(make_learner, batches, tmp_path)
    assert other.read_bytes() == b"theirs"


def test_two_runs_in_one_directory_are_refused(make_learner, batches, tmp_path, read):
    class Nested:
        @hookimpl
        def phase_end(self):
            with pytest.raises(LogError, match="is being written by another run"):
                fit(make_learner, batches, tmp_path)

    make_learner(LogLoss(), Nested(), LogTo(TensorBoard(tmp_path))).fit(batches, epochs=1)
    assert steps(read, tmp_path) == [1, 2, 3, 4, 5]


def test_two_backends_in_one_directory_are_refused(make_learner, batches, tmp_path):
    learner = make_learner(LogLoss(), LogTo(TensorBoard(tmp_path), TensorBoard(tmp_path)))
    with pytest.raises(LogError, match="is being written by another run"):
        learner.fit(batches, epochs=1)
    fit(make_learner, batches, tmp_path)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of a fork
def test_a_forked_child_does_not_keep_the_directory(make_learner, batches, tmp_path):
    child = []

    class Fork:
        @hookimpl
        def phase_end(self):
            read, self.write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(self.write)
                os.read(read, 1)  # until the parent closes its end
                os._exit(0)
            os.close(read)
            child.append(pid)

    fork = Fork()
    make_learner(LogLoss(), fork, LogTo(TensorBoard(tmp_path / "a"))).fit(batches, epochs=1)
    try:
        fit(make_learner, batches, tmp_path / "a")
    finally:
        os.close(fork.write)
        os.waitpid(child[0], 0)


@pytest.mark.parametrize(("path", "why"), [("file", "a part of the path is a file"), ("file/a", "part of the path")])
def test_a_directory_that_cannot_be_made_is_refused_before_the_first_step(make_learner, batches, tmp_path, path, why):
    (tmp_path / "file").write_text("")
    loss = LogLoss()
    learner = make_learner(loss, LogTo(TensorBoard(tmp_path / path)))
    with pytest.raises(LogError, match=f"{tmp_path / path} cannot be written: .*{why}"):
        learner.fit(batches, epochs=1)
    assert learner.progress.steps == 0


def test_a_full_disk_disables_the_log_with_one_warning(make_learner, batches, tmp_path):
    plain, logged = make_learner(LogLoss()), make_learner(LogLoss(), LogTo(TensorBoard(tmp_path), every=1))
    plain.fit(batches, epochs=5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.warns(UserWarning, match="'tensorboard' is disabled .* write failed, .*File too large") as caught:
            logged.fit(batches, epochs=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caught) == 1
    assert torch.equal(plain.model.weight, logged.model.weight)
    (path,) = tmp_path.iterdir()
    found = [event.step for event in LegacyEventFileLoader(str(path)).Load() if event.summary.value and event.step]
    assert 0 < len(found) < 25
    assert found == [*range(1, len(found) + 1)]


def test_scalars_of_a_step_are_one_event(make_learner, batches, tmp_path):
    make_learner(LogOnce(1, a=1.0, b=2.0, c=3.0), LogTo(TensorBoard(tmp_path))).fit(batches, epochs=1)
    (path,) = tmp_path.iterdir()
    events = [event for event in LegacyEventFileLoader(str(path)).Load() if event.step == 1 and event.summary.value]
    assert [[value.tag for value in event.summary.value] for event in events] == [["train/a", "train/b", "train/c"]]


def test_all_kinds_of_a_step_are_one_event(make_learner, batches, tmp_path):
    values = {"a": 1.0, "text": Text("t"), "b": 2.0, **{f"v{i}": float(i) for i in range(1000)}}
    make_learner(LogOnce(1, **values), LogTo(TensorBoard(tmp_path))).fit(batches, epochs=1)
    (path,) = tmp_path.iterdir()
    events = [event for event in LegacyEventFileLoader(str(path)).Load() if event.step == 1 and event.summary.value]
    assert [sorted(value.tag for value in event.summary.value) for event in events] == [
        sorted(f"train/{name}" for name in values)
    ]


def test_tags_of_files_that_are_gone_are_forgotten(make_learner, batches, tmp_path, read):
    plugin = LogOnce(1, x=Text("t"))
    backend = TensorBoard(tmp_path / "a")
    learner = make_learner(plugin, LogTo(backend))
    learner.fit(batches, epochs=1)
    shutil.rmtree(tmp_path / "a")
    plugin.step, plugin.values = 6, {"x": 1.0, "y": 2.0}
    with pytest.warns(UserWarning, match="has no file"):
        learner.fit(batches, epochs=1)
    assert read(tmp_path / "a").Tags()["scalars"] == ["train/x", "train/y"]
    assert backend.state_dict()["shown"]["train/x"] == ["value", "x"]


def test_files_are_read_in_the_order_in_which_they_were_made(make_learner, batches, tmp_path, monkeypatch):
    learner = make_learner(LogLoss(), LogTo(TensorBoard(tmp_path)))
    learner.fit(batches, epochs=1)
    monkeypatch.setattr(loopkit_tensorboard.backend.socket, "gethostname", lambda: "0.earlier.name")
    learner.fit(batches, epochs=2)
    assert [path.name.endswith("0.earlier.name.loopkit") for path in sorted(tmp_path.iterdir())] == [False, True]


def test_the_configuration_is_shown(make_learner, batches, tmp_path, read):
    backend = TensorBoard(tmp_path)
    backend.open(Run(make_learner(), False, {"rate": 0.5}, "seed = 0\n"))
    backend.close(None)
    backend.open(Run(make_learner(), True, {"rate": 0.5}, "seed = 0\n"))
    backend.write([])
    backend.close(None)
    (text,) = read(tmp_path).Tensors("config")
    assert text.tensor_proto.string_val == [b"```toml\nseed = 0\n```"]
