"""What keeps tests from going by how busy the machine is, and what makes all of them faster."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that go by the real clock a second try."""
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the garbage collector overlook torch and all tests, of which a full collection takes half a second."""
    gc.collect()
    gc.freeze()
