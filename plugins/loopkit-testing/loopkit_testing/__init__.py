"""Tools to test plugins with: a tiny problem, a log of events, and the whole plugin contract.

A suite for your own plugin, one test for each promise::

    from loopkit_testing import plugin_contract

    test_contract = plugin_contract(lambda: MyPlugin(0.5))

or all in one call, without pytest::

    from loopkit_testing import check_plugin

    check_plugin(lambda: MyPlugin(0.5))
"""

from loopkit_testing import _core as _core
from loopkit_testing.backends import BACKEND_CHECKS, backend_contract, check_backend
from loopkit_testing.case import Case
from loopkit_testing.checks import CHECKS
from loopkit_testing.contract import PROMISES, ContractError, check_plugin, plugin_contract
from loopkit_testing.event_log import EventLog
from loopkit_testing.overhead import overhead
from loopkit_testing.problems import Problem, tiny_problem

__version__ = "0.1.0"
__all__ = [
    "BACKEND_CHECKS",
    "CHECKS",
    "PROMISES",
    "Case",
    "ContractError",
    "EventLog",
    "Problem",
    "backend_contract",
    "check_backend",
    "check_plugin",
    "overhead",
    "plugin_contract",
    "tiny_problem",
]
