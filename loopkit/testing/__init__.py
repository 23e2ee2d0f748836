"""What plugin authors test with: a tiny problem, a log of events, and the whole plugin contract.

A suite for a plugin of your own, one test for each promise::

    from loopkit.testing import plugin_contract

    test_contract = plugin_contract(lambda: MyPlugin(0.5))

or all in one call, without pytest::

    from loopkit.testing import check_plugin

    check_plugin(lambda: MyPlugin(0.5))

It may import everything but the commands.
"""

from loopkit.testing.backends import BACKEND_CHECKS, backend_contract, check_backend
from loopkit.testing.case import Case
from loopkit.testing.checks import CHECKS
from loopkit.testing.contract import PROMISES, ContractError, check_plugin, plugin_contract
from loopkit.testing.event_log import EventLog
from loopkit.testing.overhead import overhead
from loopkit.testing.problems import Problem, tiny_problem

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


def __dir__() -> list[str]:
    return __all__
