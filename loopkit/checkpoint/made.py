"""The make-up of a run, in words, so that a resumed run can list the changes of its script since the save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from loopkit.base.facts import PLAIN, fact, parts
from loopkit.base.sharded import class_of
from loopkit.checkpoint.structure import plain
from loopkit.plugin import has_a_say, provided, unwrapped

if TYPE_CHECKING:
    from loopkit.learner import Learner

Record = dict[str, dict[str, str]]
"""By name: a class, under ``""``, and its options."""
MOST = 10
"""How many differences are listed."""
OPTIMIZER = "optimizer"
"""The first part of optimizers' names: a loaded state brings their options along."""


def made(learner: Learner) -> Record:
    """Describe all that decides how a learner trains, without values.

    Call it before you train or load, which may change attributes of modules and options of plugins.
    """
    record = dict(_modules(learner.models))
    record["choice of trained parameters"] = {"": _trained(learner.models)}
    record.update(_optimizers(learner))
    record["loss"] = parts(learner.loss_fn)
    for name, phase in learner.phases.items():
        record[f"phase {name!r}"] = parts(phase)
    for name, plugin in learner.plugins.items():
        inner = unwrapped(plugin)
        if _counts(inner):
            record[f"plugin {name!r}"] = parts(inner, getattr(inner, "per_process", ()))
    record["accumulate"] = {"": str(learner.accumulate)}
    if learner.current is not None:
        for name, validation in learner.current.validations.items():
            record[f"validate of phase {name!r}"] = {"": repr(validation.every)}
    return record


def _trained(models: Mapping[str, nn.Module]) -> str:
    """Which parameters are trained, in words."""
    frozen = []
    for model in models.values():
        frozen += [path for path, p in model.named_parameters() if not p.requires_grad]
    return f"all but {', '.join(frozen)}" if frozen else "all"


def changes(saved: Record, here: Record, left: Iterable[str] = ()) -> str:
    """List the first few differences, in words, without options that only one version of a class has.

    Args:
        saved: The record of the saved run.
        here: The record of this run.
        left: Plugins whose saved state no plugin here takes.
    """
    found = list(_changes(saved, here))
    gone = [name for name in left if f"plugin {name!r}" not in saved]
    found += [f"plugin {name!r} is none, its saved state is left out" for name in gone]
    shown = [plain(each, 300) for each in found[:MOST]]
    if len(found) > MOST:
        shown.append(f"and {len(found) - MOST} more")
    return "; ".join(shown)


def _changes(saved: Record, here: Record) -> Iterator[str]:
    for what in {**saved, **here}:
        then = saved.get(what, {"": "none"})
        now = here.get(what, {"": "none"})
        for option in _changed_options(then, now):
            yield _change(what, option, plain(then[option]), plain(now[option]))


def _changed_options(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The options of both that differ; only the class if it is another one."""
    if then[""] != now[""]:
        return [""]
    return [option for option in then if option in now and then[option] != now[option]]


def _change(what: str, option: str, then: str, now: str) -> str:
    """A change in words; of an optimizer, the saved value is the one that holds."""
    name = f"{option} of {what}" if option else what
    if what.startswith(OPTIMIZER):
        return f"{name.removesuffix(f' of {OPTIMIZER}')} {now} here, saved {then} holds"
    return f"{name} is {now}, was {then}"


def _counts(plugin: Any) -> bool:
    """Whether training may be another one without a plugin; how it is saved makes no difference."""
    return has_a_say(plugin) and provided(plugin) != "checkpoint"


def _modules(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each module by its path, which begins with the model's name if there are several models."""
    for name, model in models.items():
        start = name if len(models) > 1 else ""
        for inner, module in model.named_modules():
            path = ".".join(part for part in (start, inner) if part)
            options = {"": class_of(module), **_module_options(module)}
            yield f"module {path!r}" if path else "model", options


def _module_options(module: nn.Module) -> dict[str, str]:
    """The public attributes of a module that are plain values."""
    options = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":  # a scripted module keeps this one elsewhere
            continue
        if isinstance(value, (*PLAIN, tuple)):
            options[name] = fact(value)
    return options


def _optimizers(learner: Learner) -> Iterator[tuple[str, dict[str, str]]]:
    for name, optimizer in learner.optimizers.items():
        groups = optimizer.param_groups
        options = {"": type(optimizer).__qualname__}
        for index, group in enumerate(groups):
            of = f" of group {index}" if len(groups) > 1 else ""
            options.update({f"{key}{of}": fact(value) for key, value in group.items() if key != "params"})
        yield OPTIMIZER if len(learner.optimizers) == 1 else f"{OPTIMIZER} {name!r}", options
