"""Measures how loopkit is built: sizes, imports, who writes whose attributes, who calls whom. See `test_house`."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import loopkit
from loopkit import Learner

HOME = Path(loopkit.__file__).parent
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")

# Which files


def files(*patterns: str) -> list[Path]:
    """Those of loopkit that are there and match, but templates."""
    found = {path for pattern in patterns for path in HOME.glob(pattern)}
    return sorted(path for path in found if "templates" not in path.parts)


def short(path: str | Path) -> str:
    """``"plugins/history.py"``."""
    return str(Path(path).relative_to(HOME))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


GROUND = [
    "errors.py",
    "lazy.py",
    "words.py",
    "notes.py",
    "batches.py",
    "devices.py",
    "events.py",
    "every.py",
    "progress.py",
    "result.py",
    "kinds.py",
    "options.py",
    "tabular.py",
    "generators.py",
    "world.py",
    "sharded.py",
]
LOGS = ["logs/**/*.py"]
BETWEEN = ["hooks.py", "plugin.py", "phases.py"]
LIBRARY = ["schedules.py", "criteria.py", "metrics.py", "groups.py", "data.py", "shards.py", "losses.py"]
ENGINE = ["engine/**/*.py"]

ROOMS: list[tuple[float, list[str]]] = [
    (0, [*GROUND, *LOGS]),
    (1, [*BETWEEN, *LIBRARY]),
    (2, ENGINE),
    (2.1, ["engine/window.py"]),
    (2.2, ["engine/step.py"]),
    (2.3, ["engine/loop.py"]),
    (2.4, ["engine/epoch.py"]),
    (2.5, ["engine/fit.py", "engine/fit_loop.py", "engine/user_loop.py", "engine/outputs.py"]),
    (3, ["learner.py"]),
    (4, ["checkpoint/**/*.py", "distributed/**/*.py"]),
    (5, ["plugins/**/*.py"]),
]
"""The rooms from below; a file is in the last one that names it."""


def rooms() -> dict[str, float]:
    """The room of each file that is in one."""
    return {short(path): height for height, patterns in ROOMS for path in files(*patterns)}


# Sizes


@cache
def code_lines(path: Path) -> set[int]:
    """The numbers of the lines that hold code: without docstrings, comments and blanks."""
    text = path.read_text()
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in blank]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def size(*patterns: str) -> int:
    """Code lines of files."""
    return sum(len(code_lines(path)) for path in files(*patterns))


def longest(kind: Any, *patterns: str) -> int:
    """Code lines of the longest class or function."""
    longest = 0
    for path in files(*patterns):
        lines = code_lines(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, kind):
                longest = max(longest, len(lines & {*range(node.lineno, node.end_lineno + 1)}))
    return longest


# Who writes whose attributes


class Access(NamedTuple):
    """An attribute of another object."""

    where: str
    owner: str
    """The expression before the dot."""
    name: str

    def __str__(self) -> str:
        return f"{self.where}: {self.owner}.{self.name}"


OWNERS = {
    "Learner": ("learner",),
    "Fit": ("fit", "fitting", "at", "position"),
    "Epoch": ("epoch", "outer", "around"),
    "Requests": ("requests", "asked", "due", "agreed", "signals"),
    "Resume": ("resume", "pending"),
    "Window": ("window",),
    "Models": ("models",),
}
"""The classes that own the life of a fit, and what variables and attributes of theirs are called."""
CLASSES = {*OWNERS, "Fitting", "Position", "Agreement", "Signals", "Pending"}
OWNER_NAMES = {name: owner for owner, names in OWNERS.items() for name in names}


@cache
def own_names() -> set[str]:
    """The private names that loopkit gives to anything; another one that is read belongs to another library."""
    nodes = [node for path in files("**/*.py") for node in ast.walk(tree(path))]
    named = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    kept = {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_self(node.value) and _stored(node)}
    return {name for name in (named | kept) if name.startswith("_")}


def stores(*patterns: str) -> Iterator[tuple[Access, bool]]:
    """Every assignment to an attribute of another object, and whether that is one of `OWNERS`."""
    for path in files(*patterns):
        annotated = {
            node.arg
            for node in ast.walk(tree(path))
            if isinstance(node, ast.arg) and CLASSES & set(_words(node.annotation))
        }
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                owner, name = node.value, node.attr
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("setattr", "delattr")
            ):
                owner, name = node.args[0], ast.unparse(node.args[1])
            else:
                continue
            text = ast.unparse(owner)
            if not is_self(owner) and text != "self.position":  # a record of its own
                owned = last_part(text) in OWNER_NAMES or text in annotated
                yield Access(f"{short(path)}:{node.lineno}", text, name), owned


def untyped(*patterns: str) -> Iterator[str]:
    """Arguments that are called as one of the engine's classes, but are annotated as Any."""
    for path in files(*patterns):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.arg) and node.arg in {name.lower() for name in ANYWHERE}:
                if node.annotation is not None and ast.unparse(node.annotation) == "Any":
                    yield f"{short(path)}:{node.lineno}: {node.arg}"


def _words(node: ast.AST | None) -> list[str]:
    """The names in an annotation."""
    return [] if node is None else [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]


def last_part(owner: str) -> str:
    """``"asked"`` of ``"self.learner._asked"``."""
    return owner.rpartition(".")[2].lstrip("_")


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_reads(*patterns: str) -> Iterator[Access]:
    """Every read of a private name of another object that this very file does not define."""
    for path in files(*patterns):
        modules = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        defined = {node.name for node in ast.walk(tree(path)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own = defined | {
            n.attr for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute) and is_self(n.value) and _stored(n)
        }
        own |= {n.id for n in ast.walk(tree(path)) if isinstance(n, ast.Name) and _stored(n)}
        nodes: list[Any] = list(ast.walk(tree(path)))
        for node in nodes:
            if isinstance(node, ast.Attribute) and not _stored(node):
                owner: ast.AST = node.value
                name = node.attr
            elif (named := _named_by_text(node)) is not None:
                owner, name = named
            else:
                continue
            text = ast.unparse(owner)
            owner_class = OWNER_NAMES.get(last_part(text))
            here = name in own and (owner_class is None or owner_class in defined)
            private = name.startswith("_") and not name.startswith("__") and name in own_names()
            if private and not here and not is_self(owner) and text.split(".")[0] not in modules:
                yield Access(f"{short(path)}:{node.lineno}", text, name)


def _stored(node: Any) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def _named_by_text(node: ast.AST) -> tuple[ast.AST, str] | None:
    """The object and the name in ``getattr(x, "_y")``, ``vars(x)["_y"]`` and ``vars(x).get("_y")``."""
    if isinstance(node, ast.Subscript):
        owner, given = node.value, [node.slice]
    elif isinstance(node, ast.Call):
        owner, given = node.func, node.args
    else:
        return None
    constants = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if not constants:
        return None
    if isinstance(owner, ast.Name) and owner.id in ("getattr", "hasattr"):
        return given[0], constants[0]
    return (owner, constants[0]) if ast.unparse(owner).startswith("vars(") else None


# Imports

ANYWHERE = {"Learner", "Core", "Epoch", "Step", "Phase"}
"""What annotations may name from anywhere."""


def module_of(path: Path) -> str:
    parts = path.relative_to(HOME.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(annotations: bool = False) -> dict[str, set[str]]:
    """Which modules of loopkit each one imports, at its begin or in a function; with those for annotations alone."""
    known = {module_of(path): path for path in files("**/*.py")}
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for node, typing in _import_nodes(tree(path)):
            if typing and not annotations:
                continue
            if isinstance(node, ast.Import):
                found[module] |= {alias.name for alias in node.names if alias.name in known}
            else:
                names = {alias.name for alias in node.names} - (ANYWHERE if typing else set())
                inner = {f"{node.module}.{name}" for name in names} & known.keys()
                found[module] |= inner | ({node.module} & known.keys() if len(names) > len(inner) else set())
    return found


def _import_nodes(within: ast.AST, typing: bool = False) -> Iterator[tuple[Any, bool]]:
    for node in ast.iter_child_nodes(within):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, typing
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _import_nodes(node, True)
        else:
            yield from _import_nodes(node, typing)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, by Tarjan's algorithm, the largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in graph:
        if module not in index:
            visit(module)
    return sorted(found, key=len, reverse=True)


def in_circles(graph: dict[str, set[str]]) -> int:
    """How many modules are in a circle."""
    return sum(map(len, circles(graph)))


# Calls


class Call(NamedTuple):
    """A call of loopkit's code, by loopkit's code or through another library."""

    caller: str
    file: str
    name: str


def traced(act: Callable[[], Any]) -> list[Call]:
    """The Python calls of loopkit's code while something runs, in order; comprehensions are none, from 3.12 on."""
    found: list[Call] = []
    home = f"{HOME}/"

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(home) and code.co_name not in COMPREHENSIONS:
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(home):
                caller = caller.f_back
            by = "" if caller is None else short(caller.f_code.co_filename)
            found.append(Call(by, short(code.co_filename), code.co_qualname))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def calls(act: Callable[[], Any]) -> Counter[Call]:
    """The same, counted."""
    return Counter(traced(act))


def bare() -> Learner:
    """A learner without plugins."""
    return Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), standard=False)


def batches(count: int) -> list[Any]:
    return [(torch.ones(4, 3), torch.ones(4, 1))] * count


def step_calls() -> Counter[Call]:
    """The calls of one training step: what an epoch of 11 steps has more than one of 10."""
    learner = bare()
    learner.run("train", batches(3))
    return calls(lambda: learner.run("train", batches(11))) - calls(lambda: learner.run("train", batches(10)))


def calls_before_first_batch() -> int:
    """The calls from ``fit`` to the first batch of a list."""

    class Batches(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            sys.setprofile(None)
            return super().__iter__()

    learner, data = bare(), Batches(batches(1))
    return calls(lambda: learner.fit(data, epochs=1)).total()


def upward_calls() -> Counter[Call]:
    """The calls from a lower room to a higher one in a training epoch and a validation; a phase's own step is apart."""
    bare().fit(batches(1), epochs=1)  # what torch imports late is imported
    learner = bare()
    height = rooms()
    return Counter(
        {
            call: count
            for call, count in calls(lambda: learner.fit(batches(1), batches(1), epochs=1)).items()
            if call.caller in height
            and call.file in height
            and call.caller != "phases.py"
            and height[call.file] > height[call.caller]
        }
    )


def arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments of a method, without self."""
    return list(inspect.signature(function).parameters)[1:]
