"""What each plugin promises, with a real server."""

import os

import pytest
from loopkit_testing import plugin_contract

from loopkit_mlflow import mlflow


@pytest.fixture(scope="module", autouse=True)
def place(server, tmp_path_factory):
    """Where the plugin logs to; in the environment, so that other processes know it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", server)
        patch.setenv("SPOOLS", str(tmp_path_factory.mktemp("spools")))
        yield


test_mlflow_keeps_the_contract = pytest.mark.slow(  # some three minutes: each fit waits for the server
    plugin_contract(lambda: mlflow(experiment="contract", spool=os.environ["SPOOLS"]), name="mlflow")
)
