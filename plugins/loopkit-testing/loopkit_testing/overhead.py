"""The cost of a plugin."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loopkit.author import Target, plugin_name
from loopkit.hooks import hookimpl
from loopkit_testing.case import Case, alone
from loopkit_testing.problems import Problem, tiny_problem

TIMES = 16
"""How often an epoch goes over the data."""


def overhead(factory: Callable[[], Any], *, problem: Callable[[], Problem] = tiny_problem) -> dict[str, float]:
    """The time of a call of each hook on the host: the median in microseconds, by hook.

    A context counts from its making to its entering, and with its leaving. For a replacement, the
    default's work is included. On an accelerator this is the time to launch the work, not to do it.

    Args:
        factory: As for `check_plugin`.
        problem: Makes what is fitted.

    Example::

        print(overhead(lambda: ClipGradNorm(1.0)))  # {'update_begin': 61.2}
    """
    return measured(Case(factory, problem=problem))


def measured(case: Case) -> dict[str, float]:
    """`overhead` of a case."""
    with alone():
        plugins = case.plugins()
        clock = _Clock(plugin_name(plugins[0]))
        learner = case.bench([*plugins, clock])
        learner.train()  # what is made at the first call is made
        clock.spent.clear()
        learner.train(times=TIMES)
    empty = _empty()
    return {hook: max(statistics.median(times) - empty, 0.0) / 1000 for hook, times in sorted(clock.spent.items())}


def _empty() -> float:
    """Nanoseconds that reading the clock twice takes by itself."""
    return statistics.median(-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(100))


class _Clock:
    """Measures the calls of one plugin."""

    name = "~clock"
    volatile = ("*",)

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.spent: dict[str, list[int]] = {}
        """Nanoseconds of each call."""

    @hookimpl
    def instrument_call(self, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        if target.plugin != self.plugin:
            return call
        hook = target.hook

        def timed(*values: Any) -> Any:
            begun = time.perf_counter_ns()
            result = call(*values)
            spent = time.perf_counter_ns() - begun
            if result is not None and hook in ("step_context", "epoch_context"):
                return self._context(hook, spent, result)
            self.spent.setdefault(hook, []).append(spent)
            return result

        return timed

    @contextmanager
    def _context(self, hook: str, spent: int, context: Any) -> Iterator[None]:
        begun = time.perf_counter_ns()
        with context:
            spent += time.perf_counter_ns() - begun
            try:
                yield
            finally:
                begun = time.perf_counter_ns()
        self.spent.setdefault(hook, []).append(spent + time.perf_counter_ns() - begun)
