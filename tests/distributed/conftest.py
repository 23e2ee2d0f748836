"""What every started process would otherwise import anew."""

import multiprocessing

import pytest
import torch._dynamo  # noqa: F401

multiprocessing.set_forkserver_preload(["pytest", "torch._dynamo", "loopkit.plugins"])


@pytest.fixture(autouse=True)
def recorded_elsewhere(tmp_path_factory, monkeypatch):
    """What torch recorded of collectives is written below the tests' own directory."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path_factory.getbasetemp()}/rank_")
