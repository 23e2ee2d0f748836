"""Measures how loopkit is built: density, sizes, imports, private names, who calls whom. See `test_house`."""

from __future__ import annotations

import ast
import inspect
import io
import re
import statistics
import sys
import tokenize
from bisect import bisect_left
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
ROOT = HOME.parent
WRAPPER = "takes.<locals>.decorate.<locals>.call"
"""What checks the arguments of a function around it, and so stands for the one who calls it."""
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")

# Which files


def files(*patterns: str) -> list[Path]:
    """The files of loopkit that match."""
    return sorted({path for pattern in patterns for path in HOME.glob(pattern)})


def core() -> list[Path]:
    """All files of loopkit."""
    return files("**/*.py")


def distributions() -> list[Path]:
    """The files of all distributions, without templates."""
    return [path for path in sorted(ROOT.glob("plugins/*/loopkit_*/**/*.py")) if "templates" not in path.parts]


def short(path: str | Path) -> str:
    """``"plugins/history.py"``, and ``"loopkit_recipes/sam.py"`` in a distribution."""
    path = Path(path)
    return str(path.relative_to(HOME) if path.is_relative_to(HOME) else Path(*path.relative_to(ROOT).parts[2:]))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


ROOMS: list[tuple[float, list[str]]] = [
    (0, ["*.py", "base/*.py", "found/*.py", "logs/**/*.py"]),
    (1, ["hooks.py", "plugin.py", "phases.py"]),
    (1, ["schedules.py", "criteria/*.py", "metrics.py", "groups.py", "data/*.py", "losses.py"]),
    (2, ["engine/**/*.py"]),
    (2.1, ["engine/step/window.py"]),
    (2.2, ["engine/step/step.py"]),
    (2.3, ["engine/step/loop.py"]),
    (2.35, ["engine/step/loops.py"]),
    (
        2.4,
        [
            "engine/life/epoch.py",
            "engine/life/epochs.py",
            "engine/life/epoch_stages.py",
            "engine/life/epoch_data.py",
        ],
    ),
    (2.5, ["engine/life/fit.py", "engine/life/fit_loop.py", "engine/life/user_loop.py", "engine/life/forwards.py"]),
    (2.6, ["engine/life/engine.py"]),
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


def longest(kind: type[ast.AST], paths: list[Path]) -> int:
    """Code lines of the longest class or function."""
    longest = 0
    for path in paths:
        lines = code_lines(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, kind):
                longest = max(longest, len(lines & {*range(node.lineno, node.end_lineno + 1)}))
    return longest


def most_attributes(paths: list[Path]) -> int:
    """How many attributes the class with the most has: stored on ``self``, or annotated in its body."""
    return max(
        len(attributes(node)) for path in paths for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)
    )


def attributes(node: ast.ClassDef) -> set[str]:
    """The names of the attributes that a class gives its instances."""
    stored = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and _stored(each) and is_self(each.value)
    }
    return stored | {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


# Density

BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@cache
def token_starts(path: Path) -> list[tuple[int, int]]:
    """Where the tokens of code begin: line and column."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [token.start for token in tokens if token.type not in BLANK]


def tokens(paths: list[Path]) -> int:
    """Tokens on lines that hold code."""
    return sum(start[0] in code_lines(path) for path in paths for start in token_starts(path))


@cache
def statement_tokens(*paths: Path) -> list[int]:
    """Tokens of each statement, from the fewest; of a compound statement, of its head."""
    return sorted(
        bisect_left(token_starts(path), _end_of_head(node))
        - bisect_left(token_starts(path), (node.lineno, node.col_offset))
        for path in paths
        for node in ast.walk(tree(path))
        if isinstance(node, ast.stmt) and not is_docstring(node)
    )


def _end_of_head(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    if body:
        return body[0].lineno, body[0].col_offset
    return node.end_lineno or 0, node.end_col_offset or 0


def mean_statement(paths: list[Path]) -> float:
    return round(statistics.mean(statement_tokens(*paths)), 2)


def long_statement(paths: list[Path]) -> int:
    """The tokens that one statement in twenty has more than."""
    found = statement_tokens(*paths)
    return found[int(0.95 * len(found))]


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert)


def branches(function: ast.AST) -> int:
    """One, and one more for each branch of a function: ternaries, comprehensions, and each ``and`` and ``or``."""
    inside = list(ast.walk(function))
    operators = sum(len(node.values) - 1 for node in inside if isinstance(node, ast.BoolOp))
    return 1 + sum(isinstance(node, BRANCHES) for node in inside) + operators


def branched(most: int, paths: list[Path]) -> Iterator[str]:
    """The functions with more branches than that."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, FUNCTIONS) and branches(node) > most:
                yield f"{short(path)}:{node.lineno}: {node.name}, {branches(node)} branches"


def nested_ternaries(paths: list[Path]) -> Iterator[str]:
    """The ternaries of which one side is a ternary."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.IfExp) and (isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)):
                yield f"{short(path)}:{node.lineno}"


def paired_assignments(paths: list[Path]) -> Iterator[str]:
    """Assignments of several written values to several names in one line, but swaps."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and not _swaps(node):
                if any(isinstance(target, ast.Tuple) for target in node.targets):
                    yield f"{short(path)}:{node.lineno}: {ast.unparse(node)}"


def _swaps(node: ast.Assign) -> bool:
    value = node.value
    target = node.targets[0]
    if not (isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple)):
        return False
    return {ast.unparse(each) for each in value.elts} == {ast.unparse(each) for each in target.elts}


CLAUSE = re.compile(r"(What|Whose|Of|Those|It|That)\b")


def docstrings_with_a_clause(paths: list[Path]) -> Iterator[str]:
    """Docstrings that begin with no noun and no verb: those of modules, classes, functions and attributes."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                if CLAUSE.match(node.value.value.strip()):
                    yield f"{short(path)}:{node.lineno}"


# Private names


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
"""The classes that own the life of a fit, and what variables that hold them are called."""
OWNER_NAMES = {name: owner for owner, names in OWNERS.items() for name in names}


@cache
def own_names() -> set[str]:
    """The private names that the project gives to anything; another one that is read belongs to another library."""
    nodes = [node for path in (*core(), *distributions()) for node in ast.walk(tree(path))]
    named = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    kept = {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_self(node.value) and _stored(node)}
    of_torch = {*vars(nn.Module()), *dir(nn.Module), *dir(torch.optim.Optimizer)}
    return {name for name in (named | kept) - of_torch if name.startswith("_")}


def untyped(*patterns: str) -> Iterator[str]:
    """Arguments that are called as one of the engine's classes, but are annotated as Any."""
    for path in files(*patterns):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.arg) and node.arg in {name.lower() for name in ANYWHERE}:
                if node.annotation is not None and ast.unparse(node.annotation) == "Any":
                    yield f"{short(path)}:{node.lineno}: {node.arg}"


def last_part(owner: str) -> str:
    """``"asked"`` of ``"self.learner._asked"``."""
    return owner.rpartition(".")[2].lstrip("_")


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_reads(paths: list[Path]) -> Iterator[Access]:
    """Every read of a private name of another object that this very file does not define."""
    for path in paths:
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

ANYWHERE = {"Learner", "Epoch", "Step", "Phase"}
"""The classes that annotations may name from anywhere."""
ARGUMENTS_OF_HOOKS = {"Learner", "Epoch", "Step", "Phase"}
SPECIFICATIONS = {"hooks.py", "phases.py", "plugin.py"}
"""The files that specify the methods of plugins and phases that the engine calls: each of these is a hook."""


def module_of(path: Path) -> str:
    parts = path.relative_to(HOME.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(annotations: bool = False, exempt: bool = True) -> dict[str, set[str]]:
    """Which modules of loopkit each one imports, at its begin or in a function.

    Args:
        annotations: Also count the imports for annotations, without those of `ANYWHERE`.
        exempt: False counts those of `ANYWHERE`, too; only arguments of hooks may name `ARGUMENTS_OF_HOOKS`.
    """
    known = {module_of(path): path for path in core()}
    homes = _homes()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        free = ANYWHERE if exempt else ARGUMENTS_OF_HOOKS - _named_elsewhere(path)
        for node, typing in _import_nodes(tree(path)):
            if typing and not annotations:
                continue
            if isinstance(node, ast.Import):
                found[module] |= {alias.name for alias in node.names if alias.name in known}
            else:
                names = {alias.name for alias in node.names} - (free if typing else set())
                if node.module == "loopkit":
                    found[module] |= {homes[name] for name in names if name in homes}
                    names -= homes.keys()
                inner = {f"{node.module}.{name}" for name in names} & known.keys()
                found[module] |= inner | ({node.module} & known.keys() if len(names) > len(inner) else set())
    return found


def _homes() -> dict[str, str]:
    """The module of each name that ``loopkit`` itself has from another one."""
    nodes = [node for node, _ in _import_nodes(tree(HOME / "__init__.py")) if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in nodes for alias in node.names if node.module}


def _named_elsewhere(path: Path) -> set[str]:
    """The names of a module but those in the signatures of hooks and of their specifications."""
    module = tree(path)
    specified = path.parent == HOME and path.name in SPECIFICATIONS
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    hooks = [
        node for node in functions if specified or any("hookimpl" in ast.unparse(each) for each in node.decorator_list)
    ]
    signatures = [part for hook in hooks for part in (hook.args, hook.returns) if part is not None]
    inside = {each for signature in signatures for each in ast.walk(signature)}
    return {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and node not in inside}


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


# The names of distributions


def unpublished(public: dict[str, Any]) -> set[str]:
    """The names that distributions import from loopkit, and that no public module has.

    Args:
        public: The public modules by name.
    """
    published = {name for module in public.values() for name in module.__all__}
    found = set()
    for path in distributions():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "loopkit":
                for alias in node.names:
                    if alias.name not in published and f"{node.module}.{alias.name}" not in public:
                        found.add(f"{node.module}.{alias.name}")
    return found


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
            if code.co_qualname == WRAPPER:
                return
            caller = frame.f_back
            while caller is not None and (
                not caller.f_code.co_filename.startswith(home) or caller.f_code.co_qualname == WRAPPER
            ):
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
