"""Against a server of S3 on this machine: a run that loses its store goes on, and another goes on from it."""

import warnings

import pytest
from engine.life.runs import Killed, at, end, kill, make, same, train, val, whole

from loopkit import every
from loopkit.checkpoint import listing, verify
from loopkit.plugins import Checkpoint, LogTo
from loopkit_remote import RemoteError, Upload, download, upload

moto, s3fs = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
pytestmark = [
    pytest.mark.slow,
    # of the server and of the client
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
URL = "s3://bucket/runs/a"


@pytest.fixture
def options(monkeypatch):
    """Options for the store; a server that can be stopped and started."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    retries = {"connect_timeout": 2, "read_timeout": 5, "retries": {"max_attempts": 1}}
    given = {"endpoint_url": f"http://{host}:{port}", "config_kwargs": retries}
    store = s3fs.S3FileSystem(**given)
    store.mkdir("bucket")

    class Server:
        def stop(self):
            server.stop()

        def start(self):
            nonlocal server
            server = moto.ThreadedMotoServer(ip_address=host, port=port)
            server.start()

    yield given, Server()
    store.rm("bucket", recursive=True)
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def script(directory, given, *plugins, again=False, wait=60):
    saving = Checkpoint(directory, save=every(updates=3), resume="auto"), LogTo(directory)
    return make(*saving, Upload(URL, wait=wait, verify="digest", storage_options=given), *plugins, seed=99 * again + 1)


def test_killed_run_goes_on_from_s3_with_the_same_bits(options, tmp_path):
    given, _ = options
    with pytest.raises(Killed):
        script(tmp_path / "one", given, at(kill, epochs=1, index=1)).fit(train(), val(), epochs=2)
    upload(tmp_path / "one", URL, storage_options=given)
    learner = script(tmp_path / "two", given, again=True)
    learner.fit(train(), val(), epochs=2)
    same(end(learner), whole())
    assert download(URL, tmp_path / "three", storage_options=given).name == listing(tmp_path / "two")[0].path.name
    assert [verify(each.path).path.name for each in listing(tmp_path / "three")]


def test_server_that_is_away_for_a_while_ends_no_run(options, tmp_path):
    given, server = options
    away = at(lambda learner: server.stop(), epochs=0, index=2)
    back = at(lambda learner: server.start(), epochs=1, index=2, name="back")
    learner = script(tmp_path / "one", given, away, back)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        learner.fit(train(), val(), epochs=2)
    assert all("It is tried again, and training continues" in str(each.message) for each in said)
    same(end(learner), whole())
    assert download(URL, tmp_path / "two", storage_options=given) is not None
    assert listing(tmp_path / "two")[0].path.name == listing(tmp_path / "one")[0].path.name


def test_server_that_stays_away_is_said_and_what_is_left_is_brought_later(options, tmp_path):
    given, server = options
    learner = script(tmp_path / "one", given, at(lambda learner: server.stop(), epochs=0, index=1), wait=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        learner.fit(train(), val(), epochs=1)
    assert "was not uploaded within 1 s" in str(said[-1].message)  # before it, perhaps, that the store fails
    with pytest.raises(RemoteError, match="cannot list"):
        download(URL, tmp_path / "two", tries=1, storage_options=given)
    server.start()
    upload(tmp_path / "one", URL, storage_options=given)
    assert download(URL, tmp_path / "two", storage_options=given).name == listing(tmp_path / "one")[0].path.name
