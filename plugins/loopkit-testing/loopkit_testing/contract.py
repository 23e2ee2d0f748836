"""The contract of plugins, as one call and as a pytest suite."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from loopkit.author import nearest, plugin_name
from loopkit.errors import LoopkitError, PluginError
from loopkit.phases import Phase
from loopkit_testing import leftovers
from loopkit_testing.case import Case, alone, described
from loopkit_testing.checks import CHECKS
from loopkit_testing.declaration import declaration
from loopkit_testing.guard import MOVED
from loopkit_testing.leftovers import Calls, impatient, patience
from loopkit_testing.overhead import measured
from loopkit_testing.problems import Problem, tiny_problem
from loopkit_testing.processes import case_of, two_processes

PROMISES = (*CHECKS, "declaration", "overhead", "two_processes")
"""The tests of a suite made by `plugin_contract`."""


class ContractError(LoopkitError, AssertionError):
    """A plugin, or a backend, breaks promises; ``broken`` holds one message for each."""

    def __init__(self, plugin: str, broken: Sequence[str], what: str = "plugin") -> None:
        self.broken = tuple(broken)
        count = "a promise" if len(broken) == 1 else f"{len(broken)} promises"
        listed = "".join(f"\n  {number}. {message}" for number, message in enumerate(broken, 1))
        super().__init__(f"{what} {plugin!r} breaks {count}:{listed}")


def check_plugin(
    factory: Callable[[], Any],
    *,
    phases: Iterable[Phase] = (),
    problem: Callable[[], Problem] = tiny_problem,
    checks: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    volatile: Iterable[str] = (),
) -> None:
    """Run a plugin through the contract, and report every promise that it breaks.

    Each check is documented by its function in `CHECKS`. The generators of random numbers and the settings of the
    process are left as they were.

    Args:
        factory: Makes a fresh plugin at each call; or a tuple of it and the companions that it needs (such as a plugin
            that makes the metric which it reads).
        phases: Your own phases that the plugin is for, besides the standard ones. Its fits use the first of them
            that trains; each fit gets a copy.
        problem: Makes what is fitted, if the plugin or the phases need something else than `tiny_problem`.
        checks: Names of `CHECKS` to run; all by default.
        skip: Names of `CHECKS` not to run, for promises that a plugin cannot keep.
        volatile: Keys of the plugin's state, and names that it logs, whose values need not be repeatable, such as
            measured seconds; besides the class's own ``volatile``.

    Raises:
        ContractError: The plugin breaks promises; there is one message for each.
        PluginError: A check has another name, or the factory returns the same plugin again.

    Example::

        check_plugin(lambda: (EarlyStopping("val/loss"), Metrics()))
    """
    names = list(CHECKS) if checks is None else list(checks)
    left_out = list(skip)
    _known((*names, *left_out), CHECKS)
    case = Case(factory, tuple(phases), problem, tuple(volatile))
    _raise(case, *_outcome(case, [name for name in names if name not in left_out]))


def plugin_contract(
    factory: Callable[[], Any],
    *,
    name: str | None = None,
    phases: Iterable[Phase] = (),
    problem: Callable[[], Problem] = tiny_problem,
    skip: Mapping[str, str] | None = None,
    volatile: Iterable[str] = (),
) -> Callable[..., None]:
    """A pytest suite of the contract: one test for each promise, whose failure names the problem and a fix.

    Besides `CHECKS` there are ``declaration`` (the distribution's description of the plugin is true; only with a
    ``name``), ``overhead``, which cannot fail and reports the microseconds of each hook (``pytest -rP`` shows them),
    and ``two_processes``, which takes some seconds. That one has the marker ``two_processes`` if the project registers
    it; ``-k "not two_processes"`` leaves it out in any case.

    Args:
        factory: As for `check_plugin`.
        name: The name of the plugin's entry point.
        phases: As for `check_plugin`.
        problem: Likewise.
        skip: Promises that the plugin cannot keep, and for each the reason.
        volatile: As for `check_plugin`.

    Returns:
        The test. Give it a name that begins with ``test``, in a module of tests.

    Raises:
        PluginError: A promise to skip has another name, or no reason.

    Example::

        from loopkit_testing import plugin_contract

        test_contract = plugin_contract(lambda: ClipGradNorm(1.0), name="clip_grad_norm")
    """
    import pytest

    left_out = dict(skip or {})
    _known(left_out, PROMISES)
    if silent := [promise for promise, reason in left_out.items() if not reason]:
        raise PluginError(f"plugin_contract(skip=...): {silent[0]!r} has no reason; give one")
    case = Case(factory, tuple(phases), problem, tuple(volatile), name)
    params = []
    for promise in PROMISES:
        marks = [pytest.mark.skip(reason=left_out[promise])] if promise in left_out else []
        if promise == "two_processes":
            marks += _registered_marker(promise)
        if promise != "declaration" or name is not None:
            params.append(pytest.param(promise, id=promise, marks=marks))

    @pytest.mark.parametrize("promise", params)
    def test_contract(promise: str, request: Any) -> None:
        __tracebackhide__ = True
        if promise == "overhead":
            spent = measured(case)
            request.node.user_properties.append(("microseconds", spent))
            lines = [f"{hook:20} {microseconds:8.1f} us" for hook, microseconds in spent.items()]
            request.node.add_report_section("call", "overhead", "\n".join(lines))
        elif promise == "two_processes":
            make = partial(case_of, str(request.path), request.module.__name__, request.node.originalname)
            _raise(case, [f"{promise}: {message}" for message in two_processes(make)], None)
        else:
            _raise(case, *_outcome(case, [promise]))

    suite: Any = test_contract
    suite.case = case
    return cast("Callable[..., None]", suite)


def _known(names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise PluginError(f"no check is called {name!r}{nearest(name, known)}; there are: {', '.join(known)}")


def _registered_marker(name: str) -> list[Any]:
    """The marker, if pytest takes it without an error or a warning."""
    import pytest

    with warnings.catch_warnings():
        warnings.simplefilter("error", pytest.PytestUnknownMarkWarning)
        try:
            return [getattr(pytest.mark, name)]
        except (pytest.PytestUnknownMarkWarning, pytest.fail.Exception):
            return []


SAYS_MORE = {
    "exact_resume": ("state_round_trip", "loader_kept", "data_wrapped"),
    "data_wrapped": ("declared_access",),
    "no_undeclared_effect": ("declared_access",),
    "under_autocast": ("fit_twice",),
    "validated_within": ("fit_twice", "metrics_reset", "state_round_trip", "declared_access"),
    "paused_in_process": ("fit_twice",),
    "evaluated_between": ("fit_twice",),
}
"""Checks that would only repeat a failure of another check."""
SAYS_AGAIN = {"cancelled_step": "fit_twice", "error_elsewhere": "fit_twice"}
"""Checks that compare what another one compares, and the weights besides."""


def _outcome(case: Case, names: Sequence[str]) -> tuple[list[str], BaseException | None]:
    """The messages of these checks, and the first error that one ended with."""
    plugin = case.plugins()[0]
    if plugin is case.plugins()[0]:
        raise PluginError(f"the factory returned {plugin!r} twice: it must make a fresh plugin at each call")
    broken: list[str] = []
    cause: BaseException | None = None
    refused, blocking = _first_fit(case)  # it imports what it needs: that is not taken for what the plugin does
    if refused and len(names) > 1:
        return [f"{names[0]}, and all others: the fit {described(refused)}"], refused
    if blocking and {"fit_twice"} < set(names):
        return [f"fit_twice: {blocking}. The other checks, which fit a hundred times, were not run"], None
    failed: set[str] = set()
    with _only_new_objects(), patience(leftovers.SECONDS + 1.0):
        for name in names:
            if failed.intersection(SAYS_MORE.get(name, ())):
                continue
            count = len(broken)
            check = declaration if name == "declaration" else CHECKS[name]
            again = SAYS_AGAIN.get(name) in failed
            with alone(), impatient() if again else nullcontext():
                try:
                    found = check(case)
                    if again:
                        found = [message for message in found if MOVED in message]
                    broken += [f"{name}: {message}" for message in found]
                except Exception as error:
                    broken.append(f"{name}: {described(error)}")
                    cause = cause or error
            if len(broken) > count:
                failed.add(name)
    return broken, cause


@contextmanager
def _only_new_objects() -> Iterator[None]:
    """Let the garbage collector overlook what is there already: to go over all of torch takes 80 ms."""
    mine = len(gc.get_objects()) > 100_000 and gc.get_freeze_count() == 0  # to count a million frozen ones takes 50 ms
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def _first_fit(case: Case) -> tuple[Exception | None, str]:
    """The error of a learner that is made with the plugin, and fits once; or what its ``fit_end`` made wait."""
    plugins = case.plugins()
    calls = Calls(plugins[0])
    with alone():
        try:
            case.bench([*plugins, calls]).train(epochs=1)
        except Exception as error:
            return error, ""
    return None, "".join(calls.blocking())


def _raise(case: Case, broken: Sequence[str], cause: BaseException | None) -> None:
    __tracebackhide__ = True
    if broken:
        raise ContractError(plugin_name(case.plugins()[0]), broken) from cause
