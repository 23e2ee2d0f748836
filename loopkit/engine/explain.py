"""The plan, for people to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loopkit.engine.order import Entry, Placed, arrange
from loopkit.hooks import hooks

if TYPE_CHECKING:
    from loopkit.engine.registry import Registry
    from loopkit.phases import Phase


@dataclass(frozen=True)
class Row:
    """One plugin's place in one hook."""

    phase: str
    """The phase's name; empty for hooks that belong to no phase."""
    hook: str
    position: int
    """From 1."""
    plugin: str
    access: str
    """What it reads and changes."""
    reasons: tuple[str, ...]
    """Why it stands where it does; empty if only its name decides."""
    note: str = ""
    """What the plugin's ``explain(phase, hook)`` says of it, and ``remark(phase, hook, plugin)`` of any plugin."""


@dataclass(frozen=True)
class Explanation:
    """The rows of a plan; ``print`` it."""

    rows: tuple[Row, ...]
    never_called: tuple[str, ...] = ()
    """The plugins of which no hook can fire in any phase, in words; empty for the plan of one phase."""

    @classmethod
    def of(cls, registry: Registry, phases: Sequence[Phase]) -> Explanation:
        """The plan that a registry has for these phases."""
        rows: list[Row] = []
        for name in ("instrument_call", "setup_model", "fit_begin", "fit_end"):
            entries = {impl.entry.plugin: impl.entry for impl in registry.implementations(name)}
            if name in ("instrument_call", "setup_model"):
                placed = arrange(list(entries.values()), registry.chains, name)
            else:
                placed = [place for place in registry.fit_order() if place.entry.plugin in entries]
            if name == "fit_end":
                placed = [Placed(entries[place.entry.plugin], ()) for place in reversed(placed)]
            rows += _rows("", name, placed)
        for phase in phases:
            fired = {event.hook for event in phase.events()}
            order = registry.plan(phase).order
            for name, hook in hooks().items():
                if name in order and (hook.kind != "event" or name in fired):
                    rows += [_noted(row, registry.plugins, phase) for row in _rows(phase.name, name, order[name])]
        return cls(tuple(rows), tuple(registry.idle(phases)) if len(phases) > 1 else ())

    def __str__(self) -> str:
        lines: list[str] = []
        phase: str | None = None
        hook = ""
        width = max((len(row.plugin) for row in self.rows), default=0)
        for row in self.rows:
            if row.phase != phase:
                phase, hook = row.phase, ""
                title = f"phase {phase!r}" if phase else "the learner"
                lines += ["", title, "=" * len(title)] if lines else [title, "=" * len(title)]
            if row.hook != hook:
                hook = row.hook
                lines.append(hook + (" (in reverse of fit_begin)" if hook == "fit_end" else ""))
            lines.append(f"  {row.position}. {row.plugin:{width}}  {row.access}".rstrip())
            lines += [f"     {'':{width}}    {row.note}"] if row.note else []
            lines += [f"     {'':{width}}    because {reason}" for reason in row.reasons]
        lines += ["", *self.never_called] if self.never_called else []
        return "\n".join(lines) or "no plugins"


def _rows(phase: str, hook: str, placed: Sequence[Placed]) -> list[Row]:
    return [
        Row(phase, hook, number, place.entry.plugin, _access(place.entry), place.reasons)
        for number, place in enumerate(placed, 1)
    ]


def _noted(row: Row, plugins: Mapping[str, Any], phase: Phase) -> Row:
    explain = getattr(plugins[row.plugin], "explain", None)
    notes = [] if explain is None else [explain(phase, row.hook)]
    remarks = (plugin.remark for plugin in plugins.values() if hasattr(plugin, "remark"))
    notes += [remark(phase, row.hook, row.plugin) for remark in remarks]
    return replace(row, note="; ".join(filter(None, notes)))


def _access(entry: Entry) -> str:
    parts = (("reads", entry.reads), ("updates", entry.updates), ("writes", entry.writes))
    return "; ".join(f"{verb} {', '.join(states)}" for verb, states in parts if states)
