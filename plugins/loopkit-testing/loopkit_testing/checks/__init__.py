"""The checks of the contract: each takes a `Case` and returns a message for each promise that is broken.

They may import everything but the commands.
"""

from loopkit_testing.case import Check
from loopkit_testing.checks.data import loader_kept, metrics_reset
from loopkit_testing.checks.files import files_within
from loopkit_testing.checks.loaders import data_wrapped
from loopkit_testing.checks.memory import bounded_memory, learner_freed, no_graph_kept
from loopkit_testing.checks.order import any_list_order, declared_access, no_undeclared_effect, options_kept
from loopkit_testing.checks.phases import unknown_phases
from loopkit_testing.checks.runs import (
    evaluated_between,
    measured_weights,
    nested_names,
    paused_in_process,
    under_autocast,
    validated_within,
)
from loopkit_testing.checks.state import exact_resume, state_round_trip
from loopkit_testing.checks.syncs import no_device_sync
from loopkit_testing.checks.teardown import cancelled_step, error_elsewhere, fit_twice

CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        declared_access,
        options_kept,
        loader_kept,
        metrics_reset,
        learner_freed,
        no_graph_kept,
        no_undeclared_effect,
        any_list_order,
        state_round_trip,
        fit_twice,
        nested_names,
        files_within,
        data_wrapped,
        under_autocast,
        validated_within,
        paused_in_process,
        evaluated_between,
        measured_weights,
        no_device_sync,
        unknown_phases,
        cancelled_step,
        error_elsewhere,
        exact_resume,
        bounded_memory,
    )
}
"""Every check by name, the cheap ones first."""
