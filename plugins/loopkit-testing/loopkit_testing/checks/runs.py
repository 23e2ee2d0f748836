"""Checks of runs that are no plain fit: validations within an epoch, a pause, an evaluation in between, autocast."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from loopkit import checkpoint
from loopkit.author import declared, plugin_name, provided
from loopkit.every import every
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.phases import Phase
from loopkit.plugins import Checkpoint, Metrics, MixedPrecision
from loopkit_testing.bits import difference, plain, weights
from loopkit_testing.case import Bench, Case, changed_by, described, entries, seed_all
from loopkit_testing.diff import differences
from loopkit_testing.leftovers import Calls, environment, left_behind

WITHIN = every(updates=2)
"""When it is validated within an epoch."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings, and without the lines of loopkit's own."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def validated_within(case: Case) -> list[str]:
    """A validation in the middle of a training epoch leaves that epoch as it is.

    Everything is put back as in ``fit_twice``. If no hook of the plugin reads metrics or changes training, its metrics
    of training epochs, and the weights, are the same as in a fit that is validated between the epochs.
    """
    if case.problem().val is None:
        return []
    plugins = case.plugins()
    calls = Calls(plugins[0])
    learner = case.bench([*plugins, calls])
    before = environment(learner)
    try:
        learner.train(validate=WITHIN)
    except Exception as error:
        return [f"with validate={WITHIN!r}, within epochs, the fit {described(error)}"]
    if broken := [*left_behind(before, learner), *calls.unbalanced()]:
        return [f"with validate={WITHIN!r}, within epochs, after the fit {message}" for message in broken]
    if _acts_on_validation(learner, plugins[0]):
        return []
    others = _trained(case, case.plugins()[1:], WITHIN), _trained(case, case.plugins()[1:], every(epochs=1))
    if difference(*others, "", ()):  # then it is not the plugin's
        return []
    within, between = _trained(case, case.plugins(), WITHIN), _trained(case, case.plugins(), every(epochs=1))
    for name in between:
        if name.startswith("metrics ") and not case.repeats(name.removeprefix("metrics "), plugins):
            continue
        if path := difference(between[name], within.get(name), name, ()):
            return [
                f"a validation within a training epoch changes what the plugin does in that epoch: {path} differs from "
                f"a fit that is validated between the epochs. Epochs nest: keep what belongs to one in "
                f"epoch.store(self) or epoch.keep(self), not on the plugin, and limit hooks with @hookimpl(phase=...)"
            ]
    return []


def _acts_on_validation(learner: Learner, plugin: Any) -> bool:
    """Whether what the plugin does may rightly depend on when it is validated."""
    name = plugin_name(plugin)
    reads = [state for _, entry in entries(learner, name) for state in entry.reads]
    changes = changed_by(learner, name)
    owned = declared(plugin, "owns", getattr(plugin, "owns", ()))
    metrics = any(state.split(".")[0] in ("metrics", "*") for state in reads)
    stands_in = any(state.split(".")[0] in ("weights", "rng") for state in (*owned, *changes))
    return metrics or stands_in


class _Trained:
    """Writes down what the training epochs come to."""

    name = "~~trained"
    volatile = ("*",)

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    @hookimpl(reads=("*",))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        if phase.training:
            own = {name: plain(v) for name, v in learner.metrics.items() if name.startswith(f"{phase.name}/")}
            for name, value in own.items():
                self.found.setdefault(f"metrics {name}", []).append(value)


def _trained(case: Case, plugins: list[Any], validate: Any) -> dict[str, Any]:
    """The metrics of the training epochs of a fit, and the weights at its end."""
    seen = _Trained()
    seed_all()
    learner = case.bench([*plugins, seen])
    seed_all()
    with _quietly():
        learner.train(validate=validate)
    return {**seen.found, "weights": copy.deepcopy(weights(learner))}


class _Pauses:
    """Pauses once, in the second epoch after the first step."""

    name = "~~pauses"
    volatile = ("*",)

    def __init__(self, at: int | None) -> None:
        self.at = at

    @hookimpl(reads=("*",))
    def step_end(self, learner: Learner, phase: Phase) -> None:
        if phase.training and self.at == learner.progress.steps:
            self.at = None
            learner.pause("a test")


def paused_in_process(case: Case) -> list[str]:
    """A run that is paused, within a window of accumulation, resumes in the same process, bit for bit.

    The second ``fit`` of the same learner takes up the epoch; ``fit_end`` and ``fit_begin`` fire in between, and the
    plugin keeps what it has. Compared is the whole of ``learner.state_dict()``.
    """
    accumulate = 2 if case.accumulates() else 1
    steps = len(case.problem().train)
    whole, again = (_paused(case, at, accumulate) for at in (None, steps + 1))
    if isinstance(again, str) or isinstance(whole, str):
        return [f"paused in an epoch, the second fit of the same learner {again}"] if isinstance(again, str) else []
    found = differences(whole[0], again[0], ignore=whole[1])
    own = [each for each in found if each.part.startswith("plugins.")]
    if not found:
        return []
    return [
        f"paused in an open window, then taken up by a second fit of the same learner, the run ends with other bits "
        f"than one that went through: {(own or found)[0]}. fit_end and fit_begin come in between: a value that "
        f"fit_end drops must be in epoch.store(self) or state_dict; epoch.resumed is True where an epoch resumes"
    ]


def _paused(case: Case, at: int | None, accumulate: int) -> tuple[dict[str, Any], tuple[str, ...]] | str:
    """The state at the end of a run that is paused once, or the error that it ends with."""
    seed_all()
    plugins = case.plugins()
    learner = case.bench([*plugins, _Pauses(at)], accumulate=accumulate)
    try:
        with _quietly():
            learner.train(on_interrupt="return")
            if at is not None and learner.result is not None and learner.result.reason == "pause":
                learner.train(on_interrupt="return")
    except Exception as error:
        return described(error)
    return copy.deepcopy(learner.state_dict()), case.ignored(plugins)


def evaluated_between(case: Case) -> list[str]:
    """``evaluate`` and ``predict`` between two fits do not change the training of the second.

    Compared are the states of models and optimizers after two fits, with both calls between them and without.
    """
    if case.problem().val is None:
        return []
    undisturbed, between = (_second(case, looks) for looks in (False, True))
    if isinstance(between, str):
        return [between]
    assert not isinstance(undisturbed, str)
    found = differences(undisturbed, between)
    found = [each for each in found if each.part.split(".")[0] in ("models", "buffers", "optimizers")]
    if not found:
        return []
    return [
        f"evaluate and predict between two fits change what the second one comes to: {found[0]}. Hooks come outside of "
        f"a fit, too: where a hook acts on training, return if learner.current is None"
    ]


def _second(case: Case, looks: bool) -> dict[str, Any] | str:
    seed_all()
    learner = case.bench(case.plugins())
    with _quietly():
        learner.train(epochs=1)
        seed_all()
        try:
            if looks:
                _look(case, learner)
        except Exception as error:
            return f"between two fits, an evaluation or a prediction {described(error)}"
        seed_all()
        learner.train(epochs=1)
    return copy.deepcopy(learner.state_dict())


def _look(case: Case, learner: Bench) -> None:
    """Evaluate on data that make another loss, and predict if the phases are the standard ones."""
    data = copy.deepcopy(learner.problem.val)
    assert data is not None
    learner.evaluate(data[-1:], case.val_phase)
    learner.evaluate(data, case.val_phase)
    if not case.phases and case.predicts():
        learner.predict(copy.deepcopy(data))


def measured_weights(case: Case) -> list[str]:
    """The best weights of a plugin that replaces the models' weights are the measured ones.

    It is for a plugin that owns ``weights.<phase>``. The best checkpoint, and one of weights only, are loaded by
    ``load_best``, into a learner with the plugin and into one without: ``evaluate`` then returns the metric that was
    saved.
    """
    plugin = case.plugins()[0]
    owned = declared(plugin, "owns", getattr(plugin, "owns", ()))
    if f"weights.{case.val_phase}" not in owned or case.problem().val is None:
        return []
    for weights_only in (False, True):
        with tempfile.TemporaryDirectory(prefix="loopkit-testing-") as directory, _quietly():
            kind = "of weights only" if weights_only else "with all of the run"
            try:
                broken = _loaded_best(case, directory, weights_only)
            except Exception as error:
                return [f"saving a best checkpoint {kind}, and loading it by load_best, {described(error)}"]
            if broken:
                return [f"{broken}, from a best checkpoint {kind}"]
    return []


def _loaded_best(case: Case, directory: str, weights_only: bool) -> str:
    """A message if what is loaded is not what was measured."""
    monitor = f"{case.val_phase}/loss"
    saves = Checkpoint(directory, best=monitor, weights_only=weights_only)
    seed_all()
    learner = case.bench(_with_metrics([*case.plugins(), saves]))
    learner.train(epochs=3)
    measured = checkpoint.best(directory).metrics[monitor]
    for made, where in ((case.plugins(), "with the plugin"), (case.plugins()[1:], "without it")):
        fresh = case.bench(_with_metrics(made))
        checkpoint.load_best(fresh, directory)
        value = fresh.evaluate(copy.deepcopy(fresh.problem.val), case.val_phase)[monitor]
        if value != measured:
            return (
                f"{monitor} was {measured!r} when it was saved, and is {value!r} after load_best into a learner "
                f"{where}: the weights that learner.models.weights.replaced puts in place for the validation must be "
                f"those that averaged(learner) and state_dict return"
            )
    return ""


def _with_metrics(plugins: list[Any]) -> list[Any]:
    there = any("metrics" in (plugin_name(plugin), provided(plugin)) for plugin in plugins)
    return plugins if there else [*plugins, Metrics()]


def under_autocast(case: Case) -> list[str]:
    """The plugin works beside ``MixedPrecision("bfloat16")``, where outputs have another dtype than the weights.

    Everything is put back as in ``fit_twice``. It is not for a plugin that raises for the other when it is added, nor
    for a problem that cannot be trained so.
    """
    fit = partial(Bench.train, epochs=1, short=True)
    try:
        fit(case.bench([*case.plugins()[1:], MixedPrecision("bfloat16")]))
        learner = case.bench([*case.plugins(), MixedPrecision("bfloat16")])
    except Exception:
        return []
    before = environment(learner)
    try:
        fit(learner)
    except Exception as error:
        return [f"under autocast, beside MixedPrecision('bfloat16'), the fit {described(error)}"]
    return [f"beside MixedPrecision('bfloat16'), after the fit {message}" for message in left_behind(before, learner)]


class _Nested:
    """Logs a name that is also the folder of another one, as ``LogMetrics(every=...)`` does."""

    name = "nested_names"
    volatile = ("*",)

    @hookimpl(phase="training")
    def step_end(self, learner: Learner, phase: Phase) -> None:
        learner.log(f"{phase.name}/nested/step", 1.0)

    @hookimpl(phase="training")
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        learner.log(f"{phase.name}/nested", 2.0)


def nested_names(case: Case) -> list[str]:
    """A plugin with ``log_value`` takes a name beside names below it: ``train/loss`` and ``train/loss/step``."""
    plugins = case.plugins()
    if not hasattr(plugins[0], "log_value"):
        return []
    learner = case.bench([*plugins, _Nested()])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            learner.train()
        except Exception as error:
            told = described(error)
        else:
            told = next((str(each.message) for each in seen if "is disabled" in str(each.message)), "")
    if not told:
        return []
    return [
        f"where 'train/loss/step' is logged beside 'train/loss', as LogMetrics(every=...) does, the fit {told}. A name "
        f"is no folder: give one of the two another form, such as 'train/loss/step' as 'train/loss_step'"
    ]
