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
    fit = learner.current
    plugins = {name: unwrapped(each) for name, each in learner.plugins.items()}
    frozen = [path for m in learner.models.values() for path, p in m.named_parameters() if not p.requires_grad]
    return {
        **dict(_modules(learner.models)),
        "choice of trained parameters": {"": f"all but {', '.join(frozen)}" if frozen else "all"},
        **dict(_optimizers(learner)),
        "loss": parts(learner.loss_fn),
        **{f"phase {name!r}": parts(phase) for name, phase in learner.phases.items()},
        **{
            f"plugin {name!r}": parts(each, getattr(each, "per_process", ()))
            for name, each in plugins.items()
            if _counts(each)
        },
        "accumulate": {"": str(learner.accumulate)},
        **(
            {} if fit is None else {f"validate of phase {k!r}": {"": repr(v.every)} for k, v in fit.validations.items()}
        ),
    }


def changes(saved: Record, here: Record, left: Iterable[str] = ()) -> str:
    """List the first few differences, in words, without options that only one version of a class has.

    Args:
        saved: The record of the saved run.
        here: The record of this run.
        left: Plugins whose saved state no plugin here takes.
    """
    gone = [name for name in left if f"plugin {name!r}" not in saved]
    found = [*_changes(saved, here), *(f"plugin {name!r} is none, its saved state is left out" for name in gone)]
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "; ".join([plain(each, 300) for each in found[:MOST]] + more)


def _changes(saved: Record, here: Record) -> Iterator[str]:
    for what in {**saved, **here}:
        then = saved.get(what, {"": "none"})
        now = here.get(what, {"": "none"})
        for option in [""] if then[""] != now[""] else [option for option in then if option in now]:
            if then[option] != now[option]:
                was = plain(then[option])
                is_ = plain(now[option])
                name = f"{option} of {what}" if option else what
                if what.startswith(OPTIMIZER):
                    yield f"{name.removesuffix(f' of {OPTIMIZER}')} {is_} here, saved {was} holds"
                else:
                    yield f"{name} is {is_}, was {was}"


def _counts(plugin: Any) -> bool:
    """Whether training may be another one without a plugin; how it is saved makes no difference."""
    return has_a_say(plugin) and provided(plugin) != "checkpoint"


def _modules(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, dict[str, str]]]:
    for name, model in models.items():
        for path, module in model.named_modules():
            path = ".".join(part for part in (name if len(models) > 1 else "", path) if part)
            options = {k: fact(v) for k, v in vars(module).items() if k[0] != "_" and isinstance(v, (*PLAIN, tuple))}
            options.pop("training", None)  # a scripted module keeps it elsewhere
            yield f"module {path!r}" if path else "model", {"": class_of(module), **options}


def _optimizers(learner: Learner) -> Iterator[tuple[str, dict[str, str]]]:
    for name, optimizer in learner.optimizers.items():
        groups = optimizer.param_groups
        options = {"": type(optimizer).__qualname__}
        for index, group in enumerate(groups):
            of = f" of group {index}" if len(groups) > 1 else ""
            options.update({f"{key}{of}": fact(value) for key, value in group.items() if key != "params"})
        yield OPTIMIZER if len(learner.optimizers) == 1 else f"{OPTIMIZER} {name!r}", options
