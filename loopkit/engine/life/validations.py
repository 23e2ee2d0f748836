"""Validation: the data that a fit validates on, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopkit.base.words import nearest
from loopkit.engine.life.sources import Source
from loopkit.errors import ArgumentError
from loopkit.every import Every

if TYPE_CHECKING:
    from loopkit.engine.compile.phase_table import PhaseTable
    from loopkit.engine.compile.registry import Registry


@dataclass(frozen=True)
class Validation:
    """The data of a validation, and how often it runs."""

    source: Source
    every: Every

    @property
    def phase(self) -> str:
        """The name of its phase."""
        return self.source.phase.name

    @property
    def by_epochs(self) -> bool:
        """Whether it is due only at the end of training epochs."""
        return self.every.epochs is not None and not self.every.in_parts


def validations_of(
    registry: Registry, phases: PhaseTable, val: Any, validate: Every | Mapping[str, Every] | None
) -> list[Validation]:
    """The validations of a fit that was given these.

    Raises:
        ValueError: They do not go together.
        EmptyDataError: One has no batch.
    """
    if val is None and validate is None:
        return []
    if val is None:
        raise ArgumentError(f"validate is {validate!r}, but there is no data for it: give val=, or leave it out")
    sources = {phase.name: Source(registry, phase, data) for phase, data in phases.validating(val)}
    given = validate if isinstance(validate, Mapping) else dict.fromkeys(sources, validate)
    for name, each in given.items():
        if name not in sources:
            raise ArgumentError(f"validate names {name!r}{nearest(name, sources)}; val has {', '.join(sources)}")
        if each is not None and not isinstance(each, Every):
            raise ArgumentError(f"validate is {each!r}: write every(epochs=1), of `from loopkit import every`")
    return [Validation(source, given.get(name) or Every(epochs=1)) for name, source in sources.items()]
