"""The check under phases that the plugin's author never saw."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

from loopkit.errors import StepStateError
from loopkit.phases import Phase, PredictionPhase
from loopkit_testing.case import Case, described, refuses_model
from loopkit_testing.problems import Problem, adversarial_problem, tiny_problem
from loopkit_testing.troubles import Adversarial, Bare, NoBackward, Strange, TwoBackwards


class _Stream:
    """Data that do not know how many they are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _problem_for(case: Case, phase: Phase) -> Problem | None:
    """Return a fresh problem for a phase: the case's own, if the phase runs on it without plugins; None if not."""
    if case.problem is tiny_problem:
        problem = tiny_problem()
        return adversarial_problem(problem.train) if isinstance(phase, Adversarial) else problem
    if isinstance(phase, Adversarial):
        return None  # it has models of its own
    problem = case.problem()
    try:
        learner = problem.learner(phases=[copy.deepcopy(phase)], standard=False)
        learner.run(phase.name, problem.train)
    except Exception:
        return None
    return case.problem()


def unknown_phases(case: Case) -> list[str]:
    """The plugin works in unknown phases, with accumulation, and with data without a length.

    They are: a phase without backward, one with two models, two optimizers and two backwards, one with two backwards
    for one update, one whose step sets no attribute, and prediction; and validation and prediction outside of a
    fit. A plugin that is for some phases only limits its hooks to them with ``@hookimpl(phase=...)``. A
    `PluginError` in ``setup_model`` is a plain refusal of a model that does not suit the plugin.
    With ``problem=``, the phases that run on that problem without plugins run on it, and the others are left out.
    """
    broken = []
    for phase in (NoBackward(), Adversarial(), TwoBackwards(), Bare(), PredictionPhase()):
        problem = _problem_for(case, phase)
        if problem is None:
            continue
        try:
            others = [each for each in case.fresh_phases() if each.name != phase.name]
            learner = problem.learner(plugins=case.plugins(), phases=[*others, phase], standard=False)
            with warnings.catch_warnings(), learner.rounds():
                warnings.filterwarnings("ignore", message="plugin .* is never called")
                for _ in range(2):
                    learner.run(phase, problem.train)
        except Exception as error:
            if refuses_model(error):
                continue
            unset = next((e for e in (error, error.__cause__) if isinstance(e, StepStateError)), None)
            hint = "; ask with getattr(step, ..., None), or limit the hook with @hookimpl(phase=...)" if unset else ""
            what = phase.what if isinstance(phase, Strange) else "prediction (only outputs)"
            broken.append(f"under {what}, the fit {described(unset or error)}{hint}")
    try:
        case.bench(case.plugins(), accumulate=3).train()
    except Exception as error:
        if case.accumulates():
            broken.append(f"with accumulate=3, the fit {described(error)}")
    learner = case.bench(case.plugins())
    try:
        learner.train(load=_Stream)
    except Exception as error:
        broken.append(f"with data without a length, where epoch.length is None, the fit {described(error)}")
    learner = case.bench(case.plugins())
    try:
        if learner.problem.val is not None:
            learner.evaluate(learner.problem.val, case.val_phase)
    except Exception as error:
        broken.append(
            f"outside of a fit, where fit_begin does not come, a validation {described(error)}; make its resources "
            f"in __init__ or setup_model"
        )
    return broken
