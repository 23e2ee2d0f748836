"""Write the tables of docs/plugins.md from the code: ``python docs/make_plugins_table.py``."""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from loopkit import plugins
from loopkit.hooks import PROJECT, HookOptions, hooks
from loopkit.plugin import plugin_name
from loopkit.schedules import constant

PAGE = Path(__file__).parent / "plugins.md"
BEGIN, END = "<!-- made by docs/make_plugins_table.py -->", "<!-- end -->"
STANDARD = {type(plugin) for plugin in plugins.standard_set([])}
ARGUMENTS = {"float": 1.0, "int": 1, "str": "val/loss"}
"""Arguments to make a plugin with, by the annotation of a parameter that must be given."""
GIVEN: dict[str, tuple[Any, ...]] = {
    "Checkpoint": ("runs/a",),
    "EvalMode": ("encoder",),
    "Freeze": ("encoder",),
    "Schedule": (constant(),),
    "TorchSchedule": (torch.optim.lr_scheduler.ConstantLR,),
}
"""Arguments by the name of the class, where those above do not do."""


def make(cls: type) -> Any:
    """An instance to ask, or None if it cannot be made with simple arguments."""
    required = [
        str(parameter.annotation)
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if cls.__name__ not in GIVEN and not all(annotation in ARGUMENTS for annotation in required):
        return None
    arguments = GIVEN.get(cls.__name__) or [ARGUMENTS[annotation] for annotation in required]
    try:
        return cls(*arguments)
    except Exception:  # an argument of the right type can have a wrong value: the tables do without an instance
        return None


def declared(source: Any, names: Any) -> str:
    """The names of a declaration, or where they come from."""
    if not callable(names):
        return ", ".join(f"`{name}`" for name in names)
    try:
        names = ", ".join(f"`{name}`" for name in names(source))
    except Exception:  # there is only the class to ask
        names = ""
    return f"{names} (by its arguments)".strip()


def hook_rows(source: Any) -> list[tuple[str, str]]:
    """The hooks of a plugin (or its class), with what each reads and changes."""
    rows = []
    for hook in hooks():
        method = getattr(source, hook, None)
        if method is None or not hasattr(method, f"{PROJECT}_impl"):
            continue
        options: HookOptions = method.loopkit_options
        labels = ("reads", "updates", "writes", "before", "after")
        names = {label: declared(source, getattr(options, label) or getattr(source, label, ())) for label in labels}
        parts = [f"{label} {listed}" for label, listed in names.items() if listed]
        if options.phase is not None:
            phases = options.phase if isinstance(options.phase, tuple) else (options.phase,)
            parts.append("in " + ", ".join(f"`{getattr(phase, '__name__', phase)}`" for phase in phases))
        rows.append((hook, "; ".join(parts)))
    return rows


def saved(plugin: Any, cls: type) -> str:
    """What a plugin saves: the keys of its state, where there is an instance to ask that has some."""
    if not hasattr(cls, "state_dict"):
        return ""
    try:
        keys = list(plugin.state_dict())
    except Exception:  # no instance, or none that has a state before it was used
        keys = []
    return ", ".join(f"`{key}`" for key in keys) or "yes"


def first_line(thing: Any) -> str:
    """The first sentence of a docstring, on one line and fit for a table."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return text.replace("``", "`").replace("|", "\\|")


def tables() -> str:
    """The tables, as Markdown."""
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        public = {name: getattr(plugins, name) for name in sorted(plugins.__all__, key=str.lower)}
        classes = {name: thing for name, thing in public.items() if inspect.isclass(thing) and hook_rows(thing)}
        made = {name: make(cls) for name, cls in classes.items()}
    lines = ["| plugin | name | provides | owns | saved state | what it does |", "|---|---|---|---|---|---|"]
    for name, cls in classes.items():
        source = cls if made[name] is None else made[name]
        own = f"`{plugin_name(source)}`" if made[name] is not None else ""
        provides = f"`{word}`" if (word := getattr(source, "provides", "")) else ""
        owns = declared(source, getattr(source, "owns", ()))
        standard = " (standard)" if cls in STANDARD else ""
        cells = (f"`{name}`{standard}", own, provides, owns, saved(made[name], cls), first_line(cls))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Functions that make plugins, and records of their options:",
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {first_line(thing)} |" for name, thing in public.items() if name not in classes]
    lines += ["", "What each hook reads and changes:", "", "| plugin | hook | access and order |", "|---|---|---|"]
    for name, cls in classes.items():
        rows = hook_rows(cls if made[name] is None else made[name])
        lines += [f"| `{name}` | `{hook}` | {access} |" for hook, access in rows]
    return re.sub(r" +", " ", "\n".join(lines))


def updated(page: str) -> str:
    """The page with its tables made anew."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
