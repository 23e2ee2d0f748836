"""Steady and fast tests; hypothesis, too, does not go by how busy the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from steady import pytest_collection_modifyitems, pytest_runtest_setup  # noqa: F401
from torch.utils.data import DataLoader

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def workers_end_at_once() -> Iterator[None]:
    """End persistent workers after the test: a loader in a cycle would wait 5 s for each when it is collected."""
    loaders: list[DataLoader[Any]] = []
    own = DataLoader._get_iterator

    def noted(loader: DataLoader[Any]) -> Any:
        if loader.persistent_workers:
            loaders.append(loader)
        return own(loader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataLoader, "_get_iterator", noted)
        yield
    for loader in loaders:
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            loader._iterator = None
            iterator._shutdown_workers()
