"""Checks that all ends well, whatever others do."""

from __future__ import annotations

import copy
import gc
from contextlib import suppress

from loopkit.errors import CancelEpoch, CancelFit, CancelStep
from loopkit_testing.bits import difference, weights
from loopkit_testing.case import Case, described
from loopkit_testing.guard import guarded
from loopkit_testing.leftovers import Calls, Running, environment, left_behind, open_files
from loopkit_testing.troubles import Deliberate, DeliberateExit, Trouble


def fit_twice(case: Case) -> list[str]:
    """A second ``fit`` works like the first: ``fit_end`` fires once, and changes outside are undone."""
    plugins = case.plugins()
    calls = Calls(plugins[0])
    learner = case.bench([*plugins, calls])
    before = environment(learner)
    gc.collect()  # else a file of an earlier fit could be closed in this one, and another have its number
    running, files = Running(), open_files().items()
    between = files
    for count, which in enumerate(("first", "second"), 1):
        try:
            learner.train()
        except Exception as error:
            return [f"the {which} fit {described(error)}"]
        if broken := [*left_behind(before, learner), *calls.unbalanced(), *calls.blocking()]:
            return [f"after the {which} fit {message}" for message in broken]
        if count == 1:
            # what serves all fits of the process may stay
            running, between = Running(), open_files().items()
    broken = running.more()
    if open_files().items() - files:
        gc.collect()
        opened = open_files().items() - files
        del plugins, calls, learner
        gc.collect()
        serving = between & open_files().items()
        left = sorted({path for _, path in opened - serving})
        broken += [f"a file is left open: {path!r}; close it in fit_end" for path in left]
    return [f"after the second fit {message}" for message in broken]


def cancelled_step(case: Case) -> list[str]:
    """After another plugin cancelled a step, an epoch or the fit, training continues.

    If no update was made in that step, the parameters are bitwise those before it; and so are the buffers, if the model
    has not run, unless the plugin declares that it changes them. A plugin that changes them in whole steps without an
    update, too, is not compared.
    """
    trouble, plugins = Trouble(last=False), case.plugins()
    guard = guarded(case, plugins, trouble)
    learner = case.bench([*plugins, trouble, *guard.plugins], order=guard.order)
    before, running = environment(learner), Running()
    cancels: list[tuple[str, type[Exception]]] = [
        (e.hook, CancelStep) for e in learner.events() if "step" in e.arguments
    ]
    cancels += [("step_begin", CancelEpoch), ("step_begin", CancelFit)]
    broken: list[str] = []
    for hook, cancel in cancels:
        where = f"{cancel.__name__} raised in {hook} by another plugin"
        trouble.arm(hook, cancel)
        guard.arm(hook)
        try:
            learner.train(short=True)
        except Exception as error:
            instead = "; step_cancelled comes in the place of step_end" if cancel is CancelStep else ""
            return broken or [f"with {where}, the fit {described(error)}{instead}"]
        broken = broken or [f"after {where}, {message}" for message in left_behind(before, learner, running)]
        if moved := guard.told():
            return [*broken, f"after {where}, {moved}"]
    return broken


def error_elsewhere(case: Case) -> list[str]:
    """After an error in a hook of another plugin ``fit_end`` fires once, changes are undone, and a new ``fit`` works.

    Put back are: grad mode, autocast, global settings of torch, modes and hooks of modules, ``requires_grad``, signal
    handlers, standard output and error, exception hooks, handlers of the root logger, the working directory,
    environment variables, ``sys.path``, filters of warnings, the locale, threads, child processes; functions of torch
    and Python's own ones; and the parameters and buffers, after an error in a validation; and in training, as after a
    cancelled step.
    """
    broken: list[str] = []
    for last in (False, True):
        trouble, plugins = Trouble(last), case.plugins()
        calls, guard = Calls(plugins[0]), guarded(case, plugins, trouble)
        learner = case.bench([*plugins, trouble, calls, *guard.plugins], order=guard.order)
        before, running = environment(learner), Running()
        hooks = ("fit_begin", *(event.hook for event in learner.events()), *trouble.others)
        for hook, error in (*((hook, Deliberate) for hook in hooks), ("step_end", DeliberateExit)):
            where = f"an error in {hook} of another plugin" if error is Deliberate else f"an exit in {hook}"
            trouble.arm(hook, error)
            guard.arm(hook)
            try:
                learner.train(epochs=1, short=True)
            except (Deliberate, DeliberateExit):
                guard.compare(learner)
            except Exception as error:
                return broken or [f"after {where}, the fit {described(error)}"]
            if not broken:
                left = [*left_behind(before, learner, running), *calls.unbalanced()]
                broken = [f"after {where}, {message}" for message in left]
            if moved := guard.told():
                return [*broken, f"after {where}, {moved}"]
            trouble.disarm()
            try:
                learner.train(epochs=1, short=True)
            except Exception as error:
                return broken or [f"after {where}, the next fit {described(error)}"]
            broken = broken or [f"in the next fit after {where}, {message}" for message in calls.unbalanced()]
        if broken:
            return broken
    return _failed_validation(case)


def _failed_validation(case: Case) -> list[str]:
    """A message if the weights are not as before after a validation in which another plugin has failed."""
    trouble = Trouble(last=True)
    learner = case.bench([*case.plugins(), trouble])
    data = learner.problem.val
    if data is None:
        return []
    learner.train(epochs=1)
    before = copy.deepcopy(weights(learner))
    trouble.arm("step_end", Deliberate, quiet=0)
    with suppress(Deliberate):
        learner.evaluate(copy.deepcopy(data), phase=case.val_phase)
    path = difference(before, weights(learner), "weights", ())
    if not path:
        return []
    return [
        f"after an error in a step_end of a validation the weights are not those before it: {path} differs. Put them "
        f"back in the context that changed them, with try and finally"
    ]
