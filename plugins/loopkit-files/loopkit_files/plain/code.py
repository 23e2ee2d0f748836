"""Small pieces of code as text."""

from __future__ import annotations

import keyword
import math
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from loopkit import schedules
from loopkit_files.calls import parameters_of, public_name

__all__ = [
    "WIDTH",
    "NoWrittenForm",
    "call_of",
    "expression",
    "identifier",
    "imported",
    "is_taken",
    "literal",
    "name_of",
    "number",
    "quoted",
    "sorted_imports",
    "wrapped",
]

WIDTH = 88
TAKEN = frozenset(
    {
        "F1",
        "FunctionMetric",
        "Precision",
        "Recall",
        "ReduceLROnPlateau",
        "a",
        "above",
        "applied",
        "average",
        "axis",
        "correct",
        "grad",
        "averaged",
        "base",
        "best",
        "best_weights",
        "channels_last",
        "counted",
        "decay",
        "epoch",
        "factor",
        "full",
        "get_ema_multi_avg_fn",
        "get_swa_multi_avg_fn",
        "grads",
        "group",
        "history",
        "i",
        "inputs",
        "items",
        "itertools",
        "kept",
        "last",
        "loss",
        "loss_fn",
        "main",
        "math",
        "metrics",
        "model",
        "name",
        "noise",
        "noise_generator",
        "np",
        "optimizer",
        "os",
        "outputs",
        "p",
        "params",
        "plateau",
        "random",
        "record",
        "resolve",
        "rest",
        "row",
        "scale",
        "scaler",
        "scheduler",
        "share",
        "skipped",
        "std",
        "step",
        "steps",
        "t",
        "targets",
        "tensor",
        "tensors",
        "torch",
        "total",
        "total_updates",
        "train",
        "update",
        "updates",
        "validated",
        "value",
        "waited",
        "weights",
        "window",
        "worse",
    }
)
"""The words that scripts use for themselves."""
ENDINGS = ("_bases", "_factor", "_groups", "_norm", "_sum", "_value")
BRACKETS = {")": "(", "]": "[", "}": "{"}


class NoWrittenForm(Exception):
    """Something that cannot be written into a script; the message is the reason."""


def number(value: float) -> str:
    """A number such that it is read back with the same bits."""
    if math.isfinite(value):
        return repr(value)
    return "math.nan" if math.isnan(value) else "math.inf" if value > 0 else "-math.inf"


def literal(value: Any) -> str:
    """A value as source.

    Raises:
        NoWrittenForm: It is more than None, a boolean, number, string, dtype, device, or a list, tuple or dict of such.

    >>> literal({"betas": (0.9, 0.99)})
    '{"betas": (0.9, 0.99)}'
    """
    if isinstance(value, float):
        return number(value)
    if value is None or isinstance(value, (bool, int, torch.dtype)):
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.device):
        return quoted(str(value))
    if type(value) is list:
        return f"[{', '.join(map(literal, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(key)}: {literal(part)}" for key, part in value.items()) + "}"
    raise NoWrittenForm(f"{value!r:.60} is no plain value that a script can hold")


def quoted(text: str) -> str:
    """A string in double quotes, unless it holds more of those than of single ones."""
    shown = repr(text)
    if shown[0] == "'" and text.count('"') <= text.count("'"):
        inner = shown[1:-1].replace("\\'", "'").replace('"', '\\"')
        return f'"{inner}"'
    return shown


def identifier(text: str) -> str:
    """The text as a word of a script.

    >>> identifier("betas[0]")
    'betas_0'
    """
    word = re.sub(r"\W+", "_", text).strip("_")
    return word if word.isidentifier() and not keyword.iskeyword(word) else f"x_{word}"


def name_of(value: Any, imports: set[str]) -> str:
    """The name of a function or class in a script, which imports it.

    Args:
        value: The function or class.
        imports: Gets the line.

    Raises:
        NoWrittenForm: It has no name in a module that a script can import.

    >>> imports = set()
    >>> name_of(torch.optim.SGD, imports), imports
    ('SGD', {'from torch.optim import SGD'})
    """
    name = public_name(value)
    if not name or name.startswith("__main__:"):
        shown = getattr(value, "__qualname__", "") or f"{value!r:.60}"
        raise NoWrittenForm(f"{shown} has no name in a module that a script could import; define it in a module")
    return imported(name, imports)


def imported(name: str, imports: set[str]) -> str:
    """The name of ``"package.module:name"`` in a script, which imports it under a free word.

    >>> imports = set()
    >>> imported("package.data:train_loader", imports), imports
    ('make_train_loader', {'from package.data import train_loader as make_train_loader'})
    """
    module, _, path = name.partition(":")
    first, dot, rest = path.partition(".")
    bound = {re.split(r" import | as |, ", line)[-1]: line for line in imports}
    for word in (first, f"make_{first}", f"{identifier(module)}_{first}"):
        line = f"from {module} import {first}" + ("" if word == first else f" as {word}")
        if not is_taken(word) and bound.get(word, line) == line:
            break
    imports.add(line)
    return word + dot + rest


def is_taken(word: str) -> bool:
    """Whether a script may use a word as its own name."""
    return (
        word in TAKEN
        or word in schedules.__all__
        or word.startswith(("train_", "val_", "base_"))
        or word.endswith(ENDINGS)
    )


def call_of(value: Any, first: str, imports: set[str]) -> str:
    """The call of a function or class, or of a `functools.partial` of one, with one more argument at the front.

    >>> call_of(partial(torch.optim.lr_scheduler.StepLR, step_size=2), "optimizer", set())
    'StepLR(optimizer, step_size=2)'
    """
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    if isinstance(value, partial):
        value, args, options = value.func, value.args, value.keywords
    if args:
        raise NoWrittenForm("its functools.partial has positional arguments; name them")
    given = [first, *(f"{key}={literal(item)}" for key, item in options.items())]
    return f"{name_of(value, imports)}({', '.join(given)})"


def expression(value: Any, imports: set[str], *positional: str) -> str:
    """A value of a configuration as source: tables with ``call`` are calls, with ``use`` names.

    Args:
        value: The value.
        imports: Gets the imports that it needs.
        positional: The first arguments of the call.

    Raises:
        NoWrittenForm: A value is of a kind that has no literal.

    >>> imports = set()
    >>> expression({"call": "torch.nn:Linear", "in_features": 3, "out_features": 1}, imports)
    'Linear(in_features=3, out_features=1)'
    >>> imports
    {'from torch.nn import Linear'}
    """
    if isinstance(value, list):
        return f"[{', '.join(expression(item, imports) for item in value)}]"
    if not isinstance(value, dict):
        return literal(value)
    named = value.get("use", value.get("call"))
    options = {key: expression(item, imports) for key, item in value.items() if key not in ("call", "use")}
    if named is None:
        return "{" + ", ".join(f"{quoted(key)}: {item}" for key, item in options.items()) + "}"
    word = imported(named, imports)
    if "use" in value:
        return word
    given = list(positional)
    parameters = parameters_of(found(named)) or []
    spread = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    if spread is not None and isinstance(items := value.get(spread), list):
        before = [p for p in parameters[len(given) :] if p.kind is p.POSITIONAL_OR_KEYWORD]
        given += [options.pop(p.name) if p.name in options else literal(p.default) for p in before]
        del options[spread]
        given += [expression(item, imports) for item in items]
    words = [f"{key}={item}" for key, item in options.items() if key.isidentifier() and not keyword.iskeyword(key)]
    if len(words) < len(options):
        raise NoWrittenForm(f"{named} has options that are no words of Python")
    return f"{word}({', '.join([*given, *words])})"


def found(name: str) -> Any:
    """Import the object that ``"package.module:name"`` names."""
    module, _, path = name.partition(":")
    value: Any = import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    return value


def sorted_imports(lines: Iterable[str]) -> list[str]:
    """Imports as formatters sort them: the standard library, a blank line, the others; joined by module.

    Args:
        lines: Each imports one name.
    """
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith("import "):
            plain.add(line.removeprefix("import "))
        else:
            module, _, imported = line.removeprefix("from ").partition(" import ")
            names.setdefault(module, set()).add(imported)
    blocks: list[list[str]] = []
    for standard in (True, False):
        chosen = [m for m in sorted(plain, key=str.lower) if _is_standard(m) == standard]
        block = [f"import {module}" for module in chosen]
        for module in sorted(names, key=str.lower):
            if _is_standard(module) == standard:
                renamed = sorted(name for name in names[module] if " as " in name)
                if own := sorted(names[module].difference(renamed), key=_isort):
                    block += wrapped(f"from {module} import {', '.join(own)}")
                block += [f"from {module} import {name}" for name in renamed]
        if block:
            blocks.append(block)
    return [line for block in blocks for line in ([""] if block is not blocks[0] else []) + block]


def _isort(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2, name)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def wrapped(line: str) -> list[str]:
    """A line that is too long, with the contents of its last bracket spread out, one part to a line.

    >>> wrapped("optimizer = SGD(model.parameters(), " + ", ".join(f"option_{i}=0.25" for i in range(5)) + ")")[1]
    '    model.parameters(),'
    """
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    if line.lstrip().startswith("from ") and " import " in line:
        head, _, names = line.partition(" import ")
        return [f"{head} import (", *(f"{indent}    {name}," for name in names.split(", ")), f"{indent})"]
    signs = list(_signs(line))
    closing = [(i, depth) for i, sign, depth in signs if sign in BRACKETS]
    if not closing:
        return [line]
    end, depth = closing[-1]
    begin = max(i for i, sign, at in signs if i < end and at == depth and sign in BRACKETS.values())
    commas = [i for i, sign, at in signs if begin < i < end and sign == "," and at == depth + 1]
    parts = [line[i + 1 : j].strip() for i, j in pairwise([begin, *commas, end])]
    spread = [each for part in parts if part for each in wrapped(f"{indent}    {part},")]
    return [line[: begin + 1], *spread, indent + line[end:]] if spread else [line]


def _signs(line: str) -> Iterator[tuple[int, str, int]]:
    """The brackets and commas outside of strings: where, which, and in how many brackets."""
    depth, quote, escaped = 0, "", False
    for i, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote and not escaped else quote
            escaped = sign == "\\" and not escaped
        elif sign in "\"'":
            quote = sign
        elif sign == "#":
            return
        elif sign in BRACKETS.values():
            yield i, sign, depth
            depth += 1
        elif sign in BRACKETS:
            depth -= 1
            yield i, sign, depth
        elif sign == ",":
            yield i, sign, depth
