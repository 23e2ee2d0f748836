"""What each plugin promises."""

import os

import pytest
from loopkit_testing import plugin_contract

from loopkit_wandb import wandb


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """Where the plugin logs to; in the environment, so that other processes know it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNS", str(tmp_path_factory.mktemp("runs")))
        yield


test_wandb_keeps_the_contract = plugin_contract(lambda: wandb(directory=os.environ["RUNS"]), name="wandb")
