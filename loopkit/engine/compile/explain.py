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
        around = hooks()[self.hook].kind != "event" and "step" in self.arguments
        return around or bool(self.note) or any(not state.startswith("metrics") for state in self.changes)

    @property
    def why(self) -> str:
        """Its note, and why it stands where it does."""
        return "; ".join(filter(None, (self.note, *self.reasons)))

    @property
    def text(self) -> str:
        """The plugin, with its changes and its note."""
        states = f" ({', '.join(self.changes)})" if self.changes else ""
        return f"{self.plugin}{states}{f': {self.note}' if self.note else ''}"


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
        rows: list[Row] = []
        for name in ("instrument_call", *SETUPS, "fit_begin", "fit_end"):
            entries = {impl.entry.plugin: impl.entry for impl in registry.implementations(name)}
            if name in ("instrument_call", *SETUPS):
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
        idle = tuple(registry.idle(phases)) if len(phases) > 1 else ()
        return cls(tuple(rows), full, idle, tuple(modes), tuple(unproved))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = self._whole() if self.full else self._short()
        for more in (self.never_called, self.modes, self.unproved):
            lines += ["", *more] if more else []
        return "\n".join(lines).lstrip("\n") or "no plugins"

    def _repr_html_(self) -> str:
        if self.full:
            cells = [
                (row.phase or "the learner", row.hook, row.position, row.plugin, row.access, row.why)
                for row in self.rows
            ]
            parts = [html(("phase", "hook", "", "plugin", "access", "why"), cells)]
        else:
            parts = [
                paragraph(title)
                + html(("hook", "plugins"), [(hook, " > ".join(each)) for hook, each in chains.items()])
                for title, chains in self._groups()
            ]
            parts += map(paragraph, self._onlookers())
        if not (self.rows or self.modes or self.unproved):
            return paragraph("no plugins")
        return "".join([*parts, *map(paragraph, (*self.never_called, *self.modes, *self.unproved))])

    def _groups(self) -> list[tuple[str, dict[str, list[str]]]]:
        """List the changes of gradients and weights by hook: steps first, phases with equal lists together."""
        groups: list[tuple[list[str], dict[str, list[str]]]] = []
        for phase in dict.fromkeys(row.phase for row in self.rows):
            told = [row for row in self.rows if row.phase == phase and row.changes_training]
            chains: dict[str, list[str]] = {}
            for row in sorted(told, key=lambda row: "step" not in row.arguments):
                chains.setdefault(row.hook, []).append(row.text)
            title = f"phase {phase!r}" if phase else "the learner"
            same = next((titles for titles, others in groups if list(others.items()) == list(chains.items())), None)
            if same is None:
                groups.append(([title], chains))
            else:
                same.append(title)
        groups.sort(key=lambda item: item[0] == ["the learner"])
        return [(", ".join(titles), chains) for titles, chains in groups]

    def _onlookers(self) -> list[str]:
        # one whose name begins with "~" is a part of another
        changing = {row.plugin for row in self.rows if row.changes_training}
        names = sorted({row.plugin for row in self.rows if row.plugin[0] != "~"} - changing)
        return [f"look on: {', '.join(names)}"] if names else []

    def _short(self) -> list[str]:
        lines: list[str] = []
        for title, chains in self._groups():
            width = max(map(len, chains), default=0)
            told = [_chain(hook.ljust(width), parts) for hook, parts in chains.items()]
            lines += [title, *(told or ["  nothing is changed"]), ""]
        lines += self._onlookers()
        return [*lines, "explain(full=True) shows every hook, and why each plugin stands there"] if lines else []

    def _whole(self) -> list[str]:
        lines: list[str] = []
        phase: str | None = None
        hook = ""
        width = max((len(row.plugin) for row in self.rows), default=0)
        for row in self.rows:
            if row.phase != phase:
                phase = row.phase
                hook = ""
                title = f"phase {phase!r}" if phase else "the learner"
                lines += ["", title, "=" * len(title)] if lines else [title, "=" * len(title)]
            if row.hook != hook:
                hook = row.hook
                lines.append(hook + (" (in reverse of fit_begin)" if hook == "fit_end" else ""))
            lines.append(f"  {row.position}. {row.plugin:{width}}  {row.access}".rstrip())
            lines += [f"     {'':{width}}    {row.note}"] if row.note else []
            lines += [f"     {'':{width}}    because {reason}" for reason in row.reasons]
        return lines


def _rows(phase: str, hook: str, placed: Sequence[Placed]) -> list[Row]:
    return [
        Row(phase, hook, number, place.entry.plugin, _access(place.entry), _changes(place.entry), place.reasons)
        for number, place in enumerate(placed, 1)
    ]


def _noted(row: Row, plugins: Mapping[str, Any], phase: Phase) -> Row:
    explain = getattr(plugins[row.plugin], "explain", None)
    notes = [] if explain is None else [explain(phase, row.hook)]
    remarks = (plugin.remark for plugin in plugins.values() if hasattr(plugin, "remark"))
    notes += [remark(phase, row.hook, row.plugin) for remark in remarks]
    return replace(row, note="; ".join(filter(None, notes)))


def _changes(entry: Entry) -> tuple[str, ...]:
    return (*entry.updates, *entry.writes)


def _chain(hook: str, parts: Sequence[str]) -> str:
    """One after the other, on lines of at most 100 characters."""
    return textwrap.fill(" > ".join(parts), 100, initial_indent=f"  {hook}  ", subsequent_indent=" " * (len(hook) + 4))


def _access(entry: Entry) -> str:
    parts = (("reads", entry.reads), ("updates", entry.updates), ("writes", entry.writes))
    return "; ".join(f"{verb} {', '.join(states)}" for verb, states in parts if states)
