"""Checks of a plugin's changes to the data, and of its results from them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from loopkit.author import Target, plugin_name
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit_testing.bits import difference, plain, tensors_in
from loopkit_testing.case import Case, seed_all
from loopkit_testing.ends import watched_ends
from loopkit_testing.troubles import Disturbance


def loader_kept(case: Case) -> list[str]:
    """Tensors of the loader are not changed in place: they may be the dataset itself.

    Observed by the versions of the tensors, before and after each call of a hook, and of both ends of a context. That
    a plugin declares ``updates=("batch",)`` does not help: it changes a copy, or puts another batch in its place.
    """
    plugins = case.plugins()
    watch = _LoaderWatch(plugin_name(plugins[0]))
    learner = case.bench([*plugins, Disturbance(), watch])
    load = learner.problem.load or list
    learner.train(epochs=1, load=lambda batches: load(watch.given(batches)))
    return [
        f"{hook} changes one of the loader's tensors in place (of shape {shape}): it may be the data set itself, which "
        f"would change with every epoch. Make another one (x * 2, not x.mul_(2)), or change x.clone(), and put that in "
        f"its place"
        for hook, shape in watch.found.items()
    ]


class _LoaderWatch:
    """Looks at the versions of the loader's tensors around the calls of one plugin."""

    name = "~loader_watch"
    volatile = ("*",)

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.found: dict[str, tuple[int, ...]] = {}
        self._tensors: list[Tensor] = []

    def given(self, batches: list[Any]) -> list[Any]:
        """Return the data for the fit."""
        self._tensors += tensors_in(batches)
        return batches

    @hookimpl
    def instrument_call(self, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        hook = target.hook
        if target.plugin != self.plugin:
            return call

        def watched(*values: Any) -> Any:
            with self._during(hook):
                result = call(*values)
            return (
                watched_ends(result, lambda: self._during(hook))
                if hook.endswith("_context") and result is not None
                else result
            )

        return watched

    @contextmanager
    def _during(self, hook: str) -> Iterator[None]:
        before = [tensor._version for tensor in self._tensors]
        try:
            yield
        finally:
            for tensor, version in zip(self._tensors, before, strict=False):
                if tensor._version != version:
                    self.found.setdefault(hook, tuple(tensor.shape))


def metrics_reset(case: Case) -> list[str]:
    """Metrics of an epoch do not depend on earlier epochs: they are reset.

    An epoch of other data comes first, in which no update is made; then one that is compared with the same of a fresh
    plugin. List a metric that continues over epochs in ``volatile``. A plugin may raise `PluginError` or
    ``ValueError`` in a user's own loop, or in its second epoch.
    """
    plugins = case.plugins()
    problem = case.problem()
    found = []
    for phase, data in ((case.val_phase, problem.val), (case.train_phase, problem.train)):
        if not data or len(data) < 2:
            continue
        try:
            alone = _metrics(case, phase, data, first=False)
            after = _metrics(case, phase, data, first=True)
        except (PluginError, ValueError):
            continue
        found += [
            f"metrics[{name!r}] is {after[name]!r} where another epoch came before, and {alone[name]!r} without: start "
            f"empty in each epoch, with epoch.store(self); or, if it is meant to continue over epochs, set "
            f'volatile = ("{name.partition("/")[2]}",) in the class'
            for name in alone.keys() & after.keys()
            if case.repeats(name, plugins) and difference(alone[name], after[name], name, ())
        ]
    return found


class _NoUpdates:
    name = "~no_updates"
    volatile = ("*",)

    @hookimpl
    def update_begin(self, step: Any) -> None:
        step.skip_update("a vote of a test")


def _metrics(case: Case, phase: str, data: list[Any], first: bool) -> dict[str, Any]:
    """Return the metrics that only the plugin adds in an epoch over the last batch."""
    batches = copy.deepcopy(data)

    def run(plugins: list[Any]) -> dict[str, Any]:
        seed_all()
        learner: Learner = case.bench([*plugins, _NoUpdates()])
        state = copy.deepcopy({name: model.state_dict() for name, model in learner.models.items()})
        with warnings.catch_warnings(), learner.rounds():
            warnings.simplefilter("ignore")
            for part in ([batches[:-1]] if first else []) + [batches[-1:]]:
                for name, model in learner.models.items():
                    model.load_state_dict(state[name])
                seed_all()
                fresh = {each.name: each for each in case.fresh_phases()}  # what a phase keeps is not the plugin's
                learner.run(fresh.get(phase, phase), part)
        return {name: plain(value) for name, value in learner.metrics.items()}

    plugins = case.plugins()
    others = run(case.plugins()[1:]) if len(plugins) > 1 else {}
    return {name: value for name, value in run(plugins).items() if name not in others}
