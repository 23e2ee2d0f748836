"""The fork server, which the tests of kills, signals and workers share."""

from __future__ import annotations

import pytest

from faults.campaign import WARM, Trials, scratch
from faults.forkserver import ForkServer


@pytest.fixture(scope="session")
def session_trials():
    with scratch() as directory, ForkServer(WARM) as server:
        yield Trials(server, directory)


@pytest.fixture
def trials(session_trials):
    session_trials.counts.clear()
    yield session_trials
    session_trials.server.sweep()
