"""All plugins keep the contract of plugins, alone and in two processes."""

import pytest
from distributed.processes import run
from loopkit_testing import Case, plugin_contract
from loopkit_testing.processes import compared, train_together

from loopkit_insight import (
    Cost,
    DetectAnomaly,
    FindSyncs,
    LogGradients,
    LogHistograms,
    LogPredictions,
    LogResources,
    ModuleProfile,
    PeakMemory,
    Profile,
    TryValidation,
    Watch,
)

PLUGINS = {
    "cost": lambda: Cost(show=False),
    "detect_anomaly": DetectAnomaly,
    "find_syncs": lambda: FindSyncs(show=False),
    "log_gradients": lambda: LogGradients(depth=1, ratio=True),
    "log_histograms": lambda: LogHistograms(every=2, gradients=True),
    "log_predictions": lambda: LogPredictions(count=3),
    "log_resources": lambda: LogResources(every=0.01),
    "peak_memory": PeakMemory,
    "module_profile": lambda: ModuleProfile(every=2, show=False),
    "profile": lambda: Profile(range(1, 3), None, show=False),
    "try_validation": TryValidation,
    "watch": lambda: Watch({"0": "norm", "1": "mean"}),
}
FORKED = {"two_processes": "it is test_plugin_keeps_in_two_processes, which starts them faster"}
MODELS = {"unknown_phases": "the models of this check have other paths; test_watch.py has a phase with one that fits"}

test_cost = plugin_contract(PLUGINS["cost"], name="cost", skip=FORKED)
test_find_syncs = plugin_contract(PLUGINS["find_syncs"], name="find_syncs", skip=FORKED)
test_module_profile = plugin_contract(PLUGINS["module_profile"], name="module_profile", skip=FORKED)
test_profile = plugin_contract(PLUGINS["profile"], name="profile", skip=FORKED)
test_watch = plugin_contract(PLUGINS["watch"], name="watch", skip={**FORKED, **MODELS})


@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_keeps_in_two_processes(name):
    assert compared(run(lambda rank: train_together(Case(PLUGINS[name])), 2, timeout=60)) == []
