"""Both plugins keep the contract of plugins."""

import tempfile

import torch
from torch import nn

from loopkit import Learner
from loopkit.eject import eject
from loopkit.plugins import ClipGradNorm, LogMetrics, LogTo, Metrics
from loopkit.testing import plugin_contract
from loopkit_monitor import Monitor, Report

PLACE = tempfile.TemporaryDirectory()


def fresh():
    """A directory that no other run has: a new run in the place of another would set its log aside."""
    return tempfile.mkdtemp(dir=PLACE.name)


test_monitor_keeps_the_contract = plugin_contract(lambda: Monitor(fresh(), every=2), name="monitor")
test_monitor_beside_others_keeps_the_contract = plugin_contract(
    lambda: (Monitor(every=1), LogTo(fresh()), LogMetrics(every=1), Metrics(), ClipGradNorm(1.0)),
    skip={"two_processes": "the one above is in two processes", "overhead": "likewise"},
)
test_report_keeps_the_contract = plugin_contract(
    lambda: (Report(f"{fresh()}/report.html"), LogTo(fresh())), name="report"
)


def test_an_ejected_script_leaves_both_out():
    model = nn.Linear(2, 1)
    stack = [Monitor(fresh()), Report(f"{fresh()}/report.html")]
    learner = Learner(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), plugins=stack)
    source = eject(learner, {"epochs": 1})
    left_out = source.partition("Left out, since they change nothing of what is trained: ")[2].partition(".")[0]
    assert {"monitor", "report"} <= set(left_out.replace(",", " ").split())
