import signal

import pytest
from hypothesis import HealthCheck, settings
from support import Server, Writer

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items):
    """Give tests that go by the real clock a second try."""
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A shell's background jobs ignore interrupts, and what they start does, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A server may take its time to start."""
    monkeypatch.setattr("loopkit_monitor.background.PATIENCE", 120.0)


@pytest.fixture
def writer(tmp_path):
    """A log in ``tmp_path/runs/a``."""
    return Writer(tmp_path / "runs" / "a" / "log.jsonl")


@pytest.fixture
def serve(tmp_path):
    """Start servers; they are ended after the test."""
    started = []

    def start(root, *words, **options):
        started.append(Server(root, *words, **options))
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """One server for all tests that do nothing to it, with a run ``a`` that has a picture."""
    root = tmp_path_factory.mktemp("shared") / "runs"
    made = Writer(root / "a" / "log.jsonl")
    made.begin(hyperparameters={"lr": 0.1})
    made.values(50)
    made.media(b"\x89PNG picture", ".png")
    made.media(b"<script>alert(1)</script>", ".html")
    (root / "secret.txt").write_text("secret")
    (root.parent / "secret.txt").write_text("secret")
    server = Server(root)
    yield server
    server.end()
