"""Online runs: wandb's own client, and a stub of its server on this machine.

The stub answers the questions that the client asks: it shows which run, which rows and which end arrive. How the real
server shows them, quotas and access rights are not tested here.
"""

import importlib
import warnings

import pytest
from stub import Stub
from test_backend import KillAt, Killed, LogLoss, folders

from loopkit.errors import LogError, PluginError
from loopkit.plugins import Checkpoint, LogTo
from loopkit_wandb import Wandb, wandb

SECONDS = ("_runtime", "_timestamp")


def forget():
    """End wandb's process, which keeps the address and the key that it was started with."""
    importlib.import_module("wandb").teardown()


@pytest.fixture(scope="module")
def server():
    """One for all tests, and a process of wandb's own that knows it."""
    forget()
    made = Stub()
    yield made
    forget()
    made.close()


@pytest.fixture
def stub(server, monkeypatch, tmp_path):
    """The server, without questions; the user's variables have its address and a key."""
    made = server
    made.asked.clear()
    made.ended.clear()
    monkeypatch.setenv("WANDB_BASE_URL", made.address)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    return made


def rows(stub, run):
    return [{key: row[key] for key in row if key not in SECONDS} for row in stub.rows[run]]


def test_online_run_sends_its_rows_and_its_end(tmp_path, make_learner, batches, stub):
    backend = Wandb("digits", tmp_path, mode="online")
    make_learner(LogTo(backend), LogLoss()).fit(batches, epochs=2)
    found = rows(stub, backend.run_id)
    assert [row["loopkit/step"] for row in found] == list(range(1, 9))
    assert [row["_step"] for row in found] == list(range(8))
    assert stub.ended == {backend.run_id: 0}
    assert folders(tmp_path) == []
    assert backend.folder.name.startswith("run-")


def test_online_run_that_was_killed_twice_goes_on_in_the_same_run(tmp_path, make_learner, batches, stub):
    whole = Wandb("digits", tmp_path, mode="online")
    make_learner(LogTo(whole), LogLoss()).fit(batches, epochs=3)
    ids = set()
    for kill in (6, 10, None):
        backend = Wandb("digits", tmp_path, mode="online")
        stack = [LogTo(backend), LogLoss(), Checkpoint(tmp_path / "checkpoints", resume="auto")]
        learner = make_learner(*stack, *([KillAt(kill)] if kill else []))
        try:
            learner.fit(batches, epochs=3)
        except Killed:
            assert kill
        ids.add(backend.run_id)
    (run,) = ids
    assert rows(stub, run) == rows(stub, whole.run_id)
    assert [fresh for each, fresh in stub.inserted if each == run].count(True) == 1


@pytest.mark.parametrize(("sent", "said"), [(4, None), (3, "1 row"), (1, "3 rows"), (0, "4 rows")])
def test_resumed_online_run_warns_of_rows_that_were_not_sent(tmp_path, make_learner, batches, stub, sent, said):
    def learner(*more):
        backend = Wandb("digits", tmp_path, mode="online")
        stack = [LogTo(backend), LogLoss(), Checkpoint(tmp_path / "checkpoints", resume="auto"), *more]
        return backend, make_learner(*stack)

    first, killed = learner(KillAt(6))
    with pytest.raises(Killed):
        killed.fit(batches, epochs=3)
    del stub.rows[first.run_id][sent:]
    _, resumed = learner()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.fit(batches, epochs=3)
    found = [str(each.message) for each in caught if "reach the server" in str(each.message)]
    assert len(found) == bool(said)
    assert all(each.startswith(f"{said} of run {first.run_id}") for each in found)
    assert all(f"`wandb sync {first.folder}`" in each for each in found)


def test_offline_is_the_default_and_sends_nothing(tmp_path, make_learner, batches, stub):
    make_learner(LogTo(Wandb("digits", tmp_path)), LogLoss()).fit(batches, epochs=1)
    assert len(folders(tmp_path)) == 1
    assert stub.asked == []


def test_mode_that_is_none_names_the_nearest():
    with pytest.raises(ValueError, match=r"mode is 'on-line': it is 'offline' or 'online' \(did you mean 'online'\?\)"):
        Wandb(mode="on-line")


def test_mode_none_is_refused_in_the_form_of_options():
    with pytest.raises(PluginError, match=r"mode is None: it is 'offline' or 'online'"):
        Wandb(mode=None)


def test_mode_goes_by_name():
    assert wandb(mode="online").backends[0].mode == "online"


def test_online_without_a_key_is_an_error_before_the_first_step(tmp_path, make_learner, batches, stub, monkeypatch):
    forget()
    monkeypatch.setenv("WANDB_API_KEY", "short")
    learner = make_learner(LogTo(Wandb("digits", tmp_path, mode="online")))
    with pytest.raises(LogError, match=r"cannot begin online: .*; call `wandb login`, or give mode='offline'"):
        learner.fit(batches, epochs=1)
    assert learner.progress.steps == 0
