"""The plan, for people to read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loopkit.base.tabular import html, paragraph
from loopkit.engine.compile.order import Entry, Placed, arrange
from loopkit.hooks import hooks

if TYPE_CHECKING:
    from loopkit.engine.compile.registry import Registry
    from loopkit.phases import Phase


SETUPS = ("setup_model", "setup_optimizer")
"""The hooks that come once, when a learner is built."""


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
    """The states that it reads and changes."""
    changes: tuple[str, ...]
    """The states that it updates or writes."""
    reasons: tuple[str, ...]
    """Why it stands where it does; empty if only its name decides."""
    note: str = ""
    """The texts of the plugin's ``explain(phase, hook)`` and of all plugins' ``remark(phase, hook, plugin)``."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that the hook may take."""
        return hooks()[self.hook].arguments

    @property
    def changes_training(self) -> bool:
        """Whether it may change the way of gradients and weights: its states do, or it stands around or in the step."""
        is_event = hooks()[self.hook].kind == "event"
        if "step" in self.arguments and not is_event:
            return True
        if self.note:
            return True
        return any(not state.startswith("metrics") for state in self.changes)

    @property
    def why(self) -> str:
        """Its note, and why it stands where it does."""
        return "; ".join(filter(None, (self.note, *self.reasons)))

    @property
    def text(self) -> str:
        """The plugin, with its changes and its note."""
        text = self.plugin
        if self.changes:
            text += f" ({', '.join(self.changes)})"
        if self.note:
            text += f": {self.note}"
        return text


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of a plan; ``print`` it."""

    rows: tuple[Row, ...]
    full: bool = True
    """Print every row, with its reasons; else what changes something, on one screen."""
    never_called: tuple[str, ...] = ()
    """The plugins of which no hook can fire in any phase, in words; empty for the plan of one phase."""

    modes: tuple[str, ...] = ()
    """The optimizers that have modes, and who switches them, in words."""

    unproved: tuple[str, ...] = ()
    """The data that the last state has no digest of, in words."""

    @classmethod
    def of(
        cls,
        registry: Registry,
        phases: Sequence[Phase],
        full: bool,
        modes: Iterable[str] = (),
        unproved: Iterable[str] = (),
    ) -> Explanation:
        """Explain the plan that a registry has for these phases."""
        rows = _rows_of_learner(registry)
        for phase in phases:
            rows += _rows_of_phase(registry, phase)
        idle = tuple(registry.idle(phases)) if len(phases) > 1 else ()
        return cls(tuple(rows), full, idle, tuple(modes), tuple(unproved))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = self._whole() if self.full else self._short()
        for more in (self.never_called, self.modes, self.unproved):
            if more:
                lines += ["", *more]
        return "\n".join(lines).lstrip("\n") or "no plugins"

    def _repr_html_(self) -> str:
        if not (self.rows or self.modes or self.unproved):
            return paragraph("no plugins")
        parts = [self._table()] if self.full else self._short_in_html()
        for line in (*self.never_called, *self.modes, *self.unproved):
            parts.append(paragraph(line))
        return "".join(parts)

    def _table(self) -> str:
        cells = []
        for row in self.rows:
            phase = row.phase or "the learner"
            cells.append((phase, row.hook, row.position, row.plugin, row.access, row.why))
        return html(("phase", "hook", "", "plugin", "access", "why"), cells)

    def _short_in_html(self) -> list[str]:
        parts = []
        for title, chains in self._groups():
            cells = [(hook, " > ".join(each)) for hook, each in chains.items()]
            parts.append(paragraph(title))
            parts.append(html(("hook", "plugins"), cells))
        parts += map(paragraph, self._onlookers())
        return parts

    def _groups(self) -> list[tuple[str, dict[str, list[str]]]]:
        """List the changes of gradients and weights by hook: steps first, phases with equal lists together."""
        groups: list[tuple[list[str], dict[str, list[str]]]] = []
        for phase in dict.fromkeys(row.phase for row in self.rows):
            told = [row for row in self.rows if row.phase == phase and row.changes_training]
            told.sort(key=lambda row: "step" not in row.arguments)
            chains: dict[str, list[str]] = {}
            for row in told:
                chains.setdefault(row.hook, []).append(row.text)
            title = _title(phase)
            for titles, others in groups:
                if list(others.items()) == list(chains.items()):
                    titles.append(title)
                    break
            else:
                groups.append(([title], chains))
        groups.sort(key=lambda item: item[0] == ["the learner"])
        return [(", ".join(titles), chains) for titles, chains in groups]

    def _onlookers(self) -> list[str]:
        changing = {row.plugin for row in self.rows if row.changes_training}
        # one whose name begins with "~" is a part of another
        shown = {row.plugin for row in self.rows if row.plugin[0] != "~"}
        names = sorted(shown - changing)
        return [f"look on: {', '.join(names)}"] if names else []

    def _short(self) -> list[str]:
        lines: list[str] = []
        for title, chains in self._groups():
            width = max(map(len, chains), default=0)
            told = [_chain(hook.ljust(width), parts) for hook, parts in chains.items()]
            lines += [title, *(told or ["  nothing is changed"]), ""]
        lines += self._onlookers()
        if lines:
            lines.append("explain(full=True) shows every hook, and why each plugin stands there")
        return lines

    def _whole(self) -> list[str]:
        lines: list[str] = []
        phase: str | None = None
        hook = ""
        width = max((len(row.plugin) for row in self.rows), default=0)
        for row in self.rows:
            if row.phase != phase:
                phase = row.phase
                hook = ""
                title = _title(phase)
                if lines:
                    lines.append("")
                lines += [title, "=" * len(title)]
            if row.hook != hook:
                hook = row.hook
                lines.append("fit_end (in reverse of fit_begin)" if hook == "fit_end" else hook)
            below = f"     {'':{width}}    "
            lines.append(f"  {row.position}. {row.plugin:{width}}  {row.access}".rstrip())
            if row.note:
                lines.append(below + row.note)
            lines += [f"{below}because {reason}" for reason in row.reasons]
        return lines


def _title(phase: str) -> str:
    return f"phase {phase!r}" if phase else "the learner"


def _rows_of_learner(registry: Registry) -> list[Row]:
    """The rows of the hooks that belong to no phase."""
    rows: list[Row] = []
    for name in ("instrument_call", *SETUPS):
        entries = [impl.entry for impl in registry.implementations(name)]
        rows += _rows("", name, arrange(entries, registry.chains, name))
    order = registry.fit_order()
    begins = {impl.entry.plugin for impl in registry.implementations("fit_begin")}
    rows += _rows("", "fit_begin", [place for place in order if place.entry.plugin in begins])
    ends = {impl.entry.plugin: impl.entry for impl in registry.implementations("fit_end")}
    reverse = [place.entry.plugin for place in reversed(order)]
    rows += _rows("", "fit_end", [Placed(ends[plugin], ()) for plugin in reverse if plugin in ends])
    return rows


def _rows_of_phase(registry: Registry, phase: Phase) -> list[Row]:
    """The rows of the hooks that can be called in a phase."""
    rows: list[Row] = []
    fired = {event.hook for event in phase.events()}
    order = registry.plan(phase).order
    for name, hook in hooks().items():
        never_fires = hook.kind == "event" and name not in fired
        if name in order and not never_fires:
            found = _rows(phase.name, name, order[name])
            rows += [_noted(row, registry.plugins, phase) for row in found]
    return rows


def _rows(phase: str, hook: str, placed: Sequence[Placed]) -> list[Row]:
    rows = []
    for number, place in enumerate(placed, 1):
        entry = place.entry
        changes = (*entry.updates, *entry.writes)
        rows.append(Row(phase, hook, number, entry.plugin, _access(entry), changes, place.reasons))
    return rows


def _noted(row: Row, plugins: Mapping[str, Any], phase: Phase) -> Row:
    explain = getattr(plugins[row.plugin], "explain", None)
    notes = [] if explain is None else [explain(phase, row.hook)]
    remarking = [plugin for plugin in plugins.values() if hasattr(plugin, "remark")]
    notes += [plugin.remark(phase, row.hook, row.plugin) for plugin in remarking]
    return replace(row, note="; ".join(filter(None, notes)))


def _chain(hook: str, parts: Sequence[str]) -> str:
    """One after the other, on lines of at most 100 characters."""
    first = f"  {hook}  "
    later = " " * len(first)
    return textwrap.fill(" > ".join(parts), 100, initial_indent=first, subsequent_indent=later)


def _access(entry: Entry) -> str:
    parts = []
    for verb, states in (("reads", entry.reads), ("updates", entry.updates), ("writes", entry.writes)):
        if states:
            parts.append(f"{verb} {', '.join(states)}")
    return "; ".join(parts)
