"""The states of phases: collected, put back, and missed where a phase changes without one."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from loopkit.errors import PhaseError
from loopkit.notes import locate, warn
from loopkit.phases import Phase
from loopkit.words import STATE, half_a_state

OF_TORCH = ("defaults", "state", "param_groups", "found_inf", "grad_scale")
"""Attributes that torch gives an optimizer, beside those that begin with an underscore."""
OF_A_PHASE = "Give the class saved = ({0},), or state_dict and load_state_dict; for a cache, volatile = ({0},)"
OF_AN_OPTIMIZER = "Keep it in its param_groups, or in its state"
NOTHING = (object(), 0)


class PhaseStates:
    """The states of a learner's phases, and of others that it has run.

    Args:
        phases: The learner's, by name.
    """

    def __init__(self, phases: Mapping[str, Phase]) -> None:
        for phase in phases.values():
            _check(phase)
        self._phases = dict(phases)
        self._waiting: dict[str, Any] = {}
        """Loaded, of phases that were not run yet."""
        self._begun: dict[str, tuple[Any, dict[str, Any], str]] = {}
        """The phases and optimizers that have no place for their attributes in a checkpoint, how these were when each
        was first used in this fit, and what to do."""
        self._warned: set[str] = set()
        """Those of which this fit has warned."""

    def use(self, phase: Phase, optimizers: Mapping[str, Optimizer]) -> None:
        """A phase is run.

        Raises:
            PhaseError: Another phase of its name was run, and one of them has a state.
        """
        known = self._phases.get(phase.name)
        if known is not phase:
            _check(phase)
            self._add(known, phase)
        own = {name: each for name, each in optimizers.items() if not type(each).__module__.startswith("torch.")}
        for name, optimizer in own.items():
            if (of := f"optimizer {name!r}") not in self._begun and type(optimizer).state_dict is Optimizer.state_dict:
                self._begun[of] = optimizer, _looks(optimizer), OF_AN_OPTIMIZER
        if (of := f"phase {phase.name!r}") not in self._begun and not phase.has_state:
            self._begun[of] = phase, _looks(phase), OF_A_PHASE

    def _add(self, known: Phase | None, phase: Phase) -> None:
        if known is not None and (known.has_state or phase.has_state):
            raise PhaseError(
                f"{phase!r} and {known!r} are two phases of one name, and at least one has a state, which is saved "
                f"under the name: give one of them another, {type(phase).__name__}(name=...)"
            )
        self._phases[phase.name] = phase
        if phase.name in self._waiting:
            self._load(phase, self._waiting.pop(phase.name))

    def begin(self) -> None:
        """A fit begins: from here on changes of phases without a state count."""
        self._begun.clear()
        self._warned.clear()

    def collect(self) -> dict[str, Any]:
        """The states by name; warns, once, of phases that have changed and have none."""
        self._warn()
        states = dict(self._waiting)
        for name, phase in self._phases.items():
            if phase.has_state:
                try:
                    states[name] = phase.state_dict()
                except Exception as error:
                    locate(error, f"in state_dict of phase {name!r}")
                    raise
        return states

    def load(self, states: Mapping[str, Any]) -> None:
        """Put states back; those of phases that are not known wait until these are run."""
        self._waiting = {name: state for name, state in states.items() if name not in self._phases}
        for name, state in states.items():
            if name in self._phases and self._phases[name].has_state:
                self._load(self._phases[name], state)
        self.begin()

    @staticmethod
    def _load(phase: Phase, state: Any) -> None:
        try:
            phase.load_state_dict(state)
        except Exception as error:
            locate(error, f"in load_state_dict of phase {phase.name!r}, whose saved state may be of another version")
            raise

    def _warn(self) -> None:
        for name, message in self.missing().items():
            if name not in self._warned:
                self._warned.add(name)
                warn(message)

    def missing(self) -> dict[str, str]:
        """Of phases without a state, and of optimizers: which attributes have changed since the fit began, in words."""
        messages = {}
        for of, (owner, before, cure) in self._begun.items():
            now = _looks(owner).items()
            if listed := ", ".join(repr(key) for key, each in now if not _alike(before.get(key, NOTHING), each)):
                messages[of] = (
                    f"{of} ({type(owner).__name__}) has changed its {listed} since the fit began, and no checkpoint "
                    f"holds that: a run that is resumed goes on without. {cure.format(listed)}"
                )
        return messages


def _check(phase: Phase) -> None:
    """Refuse a phase whose state could be saved and not loaded, or the reverse; ``saved`` brings both."""
    own = [name for name in STATE if getattr(type(phase), name) is not getattr(Phase, name)]
    if not phase.saved and (half := half_a_state(own)):
        raise PhaseError(f"phase {phase.name!r} ({type(phase).__name__}) {half}")


def _looks(owner: Any) -> dict[str, tuple[Any, int]]:
    """Its own attributes: each with its version if it is a tensor, with its length if it is a container."""
    return {
        name: (value, value._version if isinstance(value, Tensor) else len(value) if isinstance(value, Sized) else 0)
        for name, value in vars(owner).items()
        if name not in getattr(owner, "volatile", OF_TORCH)
        and not (isinstance(owner, Optimizer) and name.startswith("_"))
        and not isinstance(value, (nn.Module, Optimizer))
        and not callable(value)
    }


def _alike(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    return before[0] is now[0] and before[1] == now[1]
