"""Parameter groups by name, and the patterns that names are chosen with.

A pattern is a path with ``*``, ``?`` or ``[...]``, as in ``fnmatch``; alternatives are separated by ``|``. A match
includes everything below: ``"encoder"`` and ``"encoder.*"`` both cover ``encoder.conv.weight``. A
pattern that begins with ``*.`` covers names without a dot, too: ``"*.bias"`` covers ``bias``. With several models a
path begins with the model's name: ``"generator.encoder.*"``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from loopkit.base.words import nearest, some, takes
from loopkit.errors import ArgumentError

__all__ = ["auto_fused", "param_groups"]
__dir__ = __all__.copy

DEFAULT = "default"


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches this very path.

    >>> matches("*.dropout", "encoder.dropout"), matches("*.dropout", "dropout"), matches("*.dropout", "dropout.inner")
    (True, True, False)
    """
    return any(fnmatchcase(path, one) or fnmatchcase(f".{path}", one) for one in pattern.split("|"))


def covers(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path, or one above it.

    >>> covers("encoder.layer?", "encoder.layer1.weight"), covers("*.bias|*norm*", "norm1.weight")
    (True, True)
    """
    parts = path.split(".")
    return any(matches(pattern, ".".join(parts[:end])) for end in range(1, len(parts) + 1))


def named_modules(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, under each of its names; with several models it begins with the model's name."""
    for name, model in models.items():
        start = name if len(models) > 1 else ""
        for path, module in model.named_modules(remove_duplicate=False):
            yield ".".join(part for part in (start, path) if part), module


def named_parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter with its path, a shared one under each of its names; as in `named_modules`."""
    for name, model in models.items():
        prefix = f"{name}." if len(models) > 1 else ""
        for path, parameter in model.named_parameters(remove_duplicate=False):
            yield f"{prefix}{path}", parameter


def nothing_matches(pattern: str, names: Iterable[str]) -> str:
    """The end of an error message for a pattern without a match: the nearest spelling, and the known names."""
    names = list(names)
    known: set[str] = set()
    for name in names:
        parts = name.split(".")
        for end, last in enumerate(parts, 1):
            path = ".".join(parts[:end])
            known |= {path, f"{path}.*", f"*.{last}", f"*{last}*", f"*{last}"}
    hints = [nearest(one, known) for one in pattern.split("|")]
    hint = next(filter(None, hints), "")
    return f"{pattern!r} has no match{hint}; there are: {some(names, 8) or 'none'}"


def params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@takes(weight_decay='give it by a pattern, {"*": {"weight_decay": ...}}', lr='give it by a pattern, {"*": {"lr": ...}}')
def param_groups(
    model: nn.Module | Mapping[str, nn.Module], options: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, chosen by patterns of parameter names.

    A parameter gets the options of every pattern that covers it; where they disagree, the later pattern wins. The
    parameters that the same patterns cover make a group, uncovered ones the first group. A group's ``"name"``
    is made of its patterns (or of the ``name`` in their options), joined by ``+``, or is ``"default"``; a schedule
    finds it by ``groups=``.

    Args:
        model: A module, or a mapping of named ones, whose names then begin the paths.
        options: Optimizer options by pattern.

    Returns:
        The groups that hold a parameter, the default one first. A shared parameter is in only one group; a pattern
        covers it if it covers any of its names.

    Raises:
        ArgumentError: A pattern has no match, options hold ``params``, or ``model`` is something else.

    >>> from torch import nn
    >>> model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    >>> groups = param_groups(model, {"head": dict(lr=0.1), "*.bias": dict(weight_decay=0.0, name="bias")})
    >>> [(group["name"], len(group["params"])) for group in groups]
    [('default', 1), ('head', 1), ('bias', 1), ('head+bias', 1)]
    """
    models = dict(model) if isinstance(model, Mapping) else {"model": model}
    for each in models.values():
        if not isinstance(each, nn.Module):
            raise ArgumentError(f"param_groups: model is {type(each).__name__}: give the module, not its parameters")

    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters(models):
        names.setdefault(parameter, []).append(name)
    _check_patterns(options, list(itertools.chain(*names.values())))

    members: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter, own in names.items():
        chosen = tuple(pattern for pattern in options if any(covers(pattern, name) for name in own))
        members.setdefault(chosen, []).append(parameter)

    number = {pattern: index for index, pattern in enumerate(options)}
    groups = []
    for chosen in sorted(members, key=lambda chosen: (len(chosen), [number[pattern] for pattern in chosen])):
        group: dict[str, Any] = {"params": members[chosen]}
        for pattern in chosen:
            group.update(options[pattern])
        words = [str(options[pattern].get("name", pattern)) for pattern in chosen]
        group["name"] = "+".join(words) or DEFAULT
        groups.append(group)
    return groups


def _check_patterns(options: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise for a pattern that matches no name, or whose options hold ``params``."""
    for pattern, given in options.items():
        if "params" in given:
            raise ArgumentError(f"param_groups: the options of {pattern!r} hold params, which the pattern chooses")
        if not any(covers(pattern, name) for name in names):
            raise ArgumentError(f"param_groups: pattern {nothing_matches(pattern, names)}")


def auto_fused(
    cls: type[torch.optim.Optimizer], *, bitwise: bool = False, **options: Any
) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of optimizers that gives ``fused=True`` where torch can run it for the parameters' devices and dtypes.

    Where it cannot, or the class has no fused form, the optimizer is made without. A fused optimizer is faster on CUDA
    and often not bitwise equal to the other forms; which one it is stands in ``optimizer.defaults["fused"]``.

    Args:
        cls: An optimizer class, such as ``torch.optim.AdamW``.
        bitwise: Only where some steps on tensors of several sizes have the bits of the other form, as of SGD without
            momentum on the CPU.
        options: Its options, except ``fused``.

    Raises:
        ArgumentError: ``cls`` is no class.
        ValueError: ``fused`` is among the options.

    Example::

        Learner(model, loss_fn, auto_fused(torch.optim.AdamW, lr=1e-3))
    """
    if not callable(cls):
        raise ArgumentError(
            f"auto_fused was given {cls if isinstance(cls, str) else type(cls).__name__!r}, which is no class: give "
            f"the class and its options, such as auto_fused(torch.optim.AdamW, lr=1e-3)"
        )
    if "fused" in options:
        raise ValueError(f"auto_fused(fused={options['fused']!r}): it decides this itself; leave it out")
    has_fused = "fused" in inspect.signature(cls).parameters

    def fits(params: list[Any]) -> bool:
        if not has_fused or not _can_fuse(cls, params, options):
            return False
        return not bitwise or not _fused_differs(cls, params, options)

    def factory(params: Any) -> torch.optim.Optimizer:
        params = [_with_list(each) for each in params]
        if fits(params):
            return cls(params, fused=True, **options)  # type: ignore[call-arg]
        return cls(params, **options)

    name = getattr(cls, "__name__", type(cls).__name__)
    factory.__name__ = factory.__qualname__ = f"auto_fused({name})"
    return factory


def _with_list(given: Any) -> Any:
    """A parameter as it is, a group with its parameters in a list."""
    if not isinstance(given, dict):
        return given
    params = given["params"]
    return {**given, "params": [params] if isinstance(params, torch.Tensor) else list(params)}


def _tensors(params: Iterable[Any]) -> list[torch.Tensor]:
    """The parameters of a group; torch takes pairs of a name and a parameter, too."""
    return [each[1] if isinstance(each, tuple) else each for each in params]


def _kinds(tensors: Iterable[torch.Tensor]) -> set[tuple[torch.device, torch.dtype]]:
    return {(tensor.device, tensor.dtype) for tensor in tensors}


def _can_fuse(cls: type[torch.optim.Optimizer], params: list[Any], options: Mapping[str, Any]) -> bool:
    """Whether a fused step works, found by taking one with a number of each device and dtype."""
    members: list[Any] = []
    for each in params:
        members += each["params"] if isinstance(each, dict) else [each]
    probes = [torch.zeros(1, device=device, dtype=dtype) for device, dtype in _kinds(_tensors(members))]
    for probe in probes:
        probe.requires_grad_().grad = torch.zeros_like(probe)
    try:
        if probes:
            cls(probes, fused=True, **options).step()  # type: ignore[call-arg]
    except RuntimeError:  # torch has no list of what it supports but this one
        return False
    return bool(probes)


SMALL = 1e-3
"""The size of small parameters for an optimizer without a rate."""
SIZES = (1, 3, 7, 8, 33, 1000, 4099)
"""Lengths of the tensors whose bits are compared, with and without a tail of a vector unit."""


def _fused_differs(cls: type[torch.optim.Optimizer], params: list[Any], options: Mapping[str, Any]) -> bool:
    """Whether some fused steps have other bits than the default form, with the options of any group."""
    groups = [each for each in params if isinstance(each, dict)] or [{"params": params}]
    for group in groups:
        given = {key: value for key, value in group.items() if key not in ("params", "name")}
        own = {**options, **given}
        for device, dtype in _kinds(_tensors(group["params"])):
            for small in (False, True):
                fused = _stepped(cls, device, dtype, {**own, "fused": True}, small=small)
                default = _stepped(cls, device, dtype, {**own, "fused": None}, small=small)
                if len(fused) != len(default) or not all(map(torch.equal, fused, default)):
                    return True
    return False


def _stepped(
    cls: type[torch.optim.Optimizer],
    device: torch.device,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    *,
    small: bool,
) -> list[torch.Tensor]:
    """Parameters and the optimizer's state after some steps from the same values and gradients.

    Args:
        cls: The class of the optimizer.
        device: Of the parameters.
        dtype: Of the parameters.
        options: Of the optimizer.
        small: Begin with parameters as small as an update: added to a large one, its last bits are lost.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(6, size, generator=generator).to(device, dtype) for size in SIZES]
    made = [each[0].clone().requires_grad_() for each in drawn]
    optimizer = cls(made, **options)
    if small:
        factor = optimizer.param_groups[0].get("lr") or SMALL
        with torch.no_grad():
            for each in made:
                each.mul_(factor)
    for step in range(1, 6):
        for parameter, each in zip(made, drawn, strict=True):
            parameter.grad = each[step].clone()
        optimizer.step()
    held = [(str(name), value) for each in made for name, value in optimizer.state[each].items()]
    held.sort(key=itemgetter(0))
    parameters = [each.detach() for each in made]
    states = [value.cpu() for _, value in held if isinstance(value, torch.Tensor)]
    return parameters + states
