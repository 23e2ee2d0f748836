"""Checks of the plan and of a plugin's declarations."""

from __future__ import annotations

import inspect
import random
import reprlib
from itertools import zip_longest

from torch import Tensor, nn

from loopkit.author import STATES, declared, plugin_name, provided
from loopkit.errors import StepStateError
from loopkit.learner import Learner
from loopkit_testing.access import AccessWatch
from loopkit_testing.bits import difference, plain, weights
from loopkit_testing.case import Case, changed_by, entries, seed_all
from loopkit_testing.event_log import EventLog
from loopkit_testing.troubles import Disturbance


def any_list_order(case: Case) -> list[str]:
    """The order of the plugin list does not matter: with the standard plugins around, each gives the same plan.

    And a short fit comes to the same weights, wherever in the list the plugin stands.
    """
    plans: list[str] = []
    for trial in range(4):
        given = case.plugins()
        words = {word for plugin in given for word in (plugin_name(plugin), provided(plugin))}
        standard = Learner(nn.Identity()).plugins.items()
        given += [p for name, p in standard if name not in words and provided(p) not in words]
        if trial == 1:
            given.reverse()
        elif trial > 1:
            random.Random(trial).shuffle(given)
        plans.append(str(case.bench(given).explain(full=True)))
        if plans[-1] != plans[0]:
            lines = zip_longest(plans[0].splitlines(), plans[-1].splitlines(), fillvalue="nothing")
            one, other = next((a.strip(), b.strip()) for a, b in lines if a != b)
            return [
                f"lists of the same plugins in another order give another plan ({one!r} became {other!r}): names and "
                f"declarations must follow only from the plugin's arguments"
            ]
    if path := difference(_result(case, False), _result(case, True), "weights", ()):
        return [f"where it stands in the list of plugins changes what a fit comes to: {path} differs"]
    return []


def _result(case: Case, last: bool) -> dict[str, Tensor]:
    """The weights after a short fit, with a bystander behind the plugins or before them."""
    seed_all()
    bystander, plugins = EventLog("~bystander"), case.plugins()
    learner = case.bench([bystander, *reversed(plugins)] if last else [*plugins, bystander])
    seed_all()
    learner.train(epochs=1, short=True)
    return weights(learner)


def declared_access(case: Case) -> list[str]:
    """Each hook declares what it reads and changes.

    Reads that are observed: attributes of the step; entries of ``learner.metrics``; parameters, buffers and gradients
    that a function of torch is given; hyperparameters. Free to read: a step's ``index``, ``samples``, ``weight``,
    ``seed``, ``last``, ``optimizer_name``, and ``params`` and ``optimizer``, which are the way to the gradients;
    shapes, dtypes and devices; ``learner.progress``; reads of a model's forward; all tensors in ``setup_model``, in
    ``optimizer_step`` and at the two ends of a context. Reads of optimizers' states, and of other plugins, cannot be
    observed.

    Changes that are observed: attributes set on the step or on the learner, tensors on the step changed in place,
    entries of ``learner.metrics``; and, by comparing before and after each call: parameters and buffers, gradients,
    hyperparameters (``optimizer.<key>``) and state of optimizers (``optimizer.state``), modes of modules,
    ``learner.progress`` and the generators of random numbers (``rng``). Free: ``step.seed``, votes and stop requests;
    ``learner.world`` for what provides ``"sync"``.
    In ``optimizer_step``, parameters and ``optimizer.state`` are free, in ``take_step`` all that a step changes; in
    ``setup_model``, ``"model"`` covers them too.
    """
    plugins = case.plugins()
    watch = AccessWatch(plugin_name(plugins[0]))
    learner = case.bench([*plugins, Disturbance(), watch])
    watch.watch_groups()
    try:
        learner.train()
        if isinstance(learner.model, nn.Module) and not case.phases:
            learner.predict(learner.problem.train)
    except StepStateError:
        pass  # another check reports it
    hooks_changing = {(hook, state) for hook, access, state in watch.broken if access == "changes"}
    return [
        message
        for (hook, access, state), message in watch.broken.items()
        if access == "changes" or (hook, state) not in hooks_changing  # what may change it may read it
    ]


EFFECTS = STATES.keys() - {"metrics", "progress"}
"""The states whose declared change means that the parameters may come out differently."""


def no_undeclared_effect(case: Case) -> list[str]:
    """A plugin that declares no change leaves the parameters bitwise unchanged.

    Changes are the states that its hooks update or write, except metrics and its own, the ones it ``owns``, and
    replacements. A plugin may end the fit earlier; one that cancels a step or votes to skip an update is not
    compared.
    """
    plugins = case.plugins()
    name, log = plugin_name(plugins[0]), EventLog("~log")
    learner = case.bench([*plugins, log])
    changed = [*changed_by(learner, name), *declared(plugins[0], "owns", getattr(plugins[0], "owns", ()))]
    replaced = any(hook in ("optimizer_step", "take_step") for hook, _ in entries(learner, name))
    if replaced or any(state.split(".")[0] in EFFECTS for state in changed):
        return []
    seed_all()
    learner.train()
    if any(line.endswith(("step_cancelled", "update_skipped")) for line in log.lines) or not learner.progress.steps:
        return []
    plain = case.bench(case.plugins()[1:])
    seed_all()
    plain.train(max_steps=learner.progress.steps)
    if path := difference(weights(plain), weights(learner), "weights", ()):
        return [
            f"it declares no change, yet a fit with it gives other parameters than one without it: {path} differs. "
            f'Declare what it changes (updates=("grads",), updates=("rng",), ...)'
        ]
    return []


def options_kept(case: Case) -> list[str]:
    """Attributes named like arguments of the constructor have the same values after a fit as before.

    Such an attribute is an option: it is shown, written to files, and used by the next fit. A value that
    changes during training needs another name.
    """
    plugins = case.plugins()
    plugin = plugins[0]
    names = [name for name in inspect.signature(type(plugin)).parameters if hasattr(plugin, name)]
    before = {name: plain(getattr(plugin, name)) for name in names}
    case.bench(plugins).train()
    after = {name: plain(getattr(plugin, name, None)) for name in names}
    return [
        f"the option {name!r} was {reprlib.repr(before[name])} before a fit and is {reprlib.repr(after[name])} after "
        f"it: keep what changes under another name"
        for name in names
        if difference(before[name], after[name], name, ())
    ]
