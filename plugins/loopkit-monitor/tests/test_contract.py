"""Both plugins keep the contract of plugins."""

import tempfile

from loopkit_testing import plugin_contract

from loopkit.plugins import ClipGradNorm, LogMetrics, LogTo, Metrics
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
