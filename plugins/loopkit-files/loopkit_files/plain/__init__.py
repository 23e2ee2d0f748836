"""Write the loop that a learner runs as a plain PyTorch script, equal bit for bit.

`eject` writes a function for a learner, `eject_config` a whole program for a configuration file. Parts without a
written form are listed, with the reason, before anything is written.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from loopkit.author import Every, check_count, nearest, no_loss_fn
from loopkit.errors import LoopkitError
from loopkit.events import UpdateBegin
from loopkit.learner import Learner
from loopkit.phases import Phase, PredictionPhase, TrainingPhase, ValidationPhase
from loopkit_files.document import Config
from loopkit_files.plain.code import WIDTH, NoWrittenForm, expression, literal, sorted_imports, wrapped
from loopkit_files.plain.draft import TAB, Draft, Limits, loop
from loopkit_files.plain.parts import write

__all__ = ["EjectError", "eject", "eject_config"]

STANDARD = (TrainingPhase, ValidationPhase, PredictionPhase)
WITHOUT_PART = ("on_interrupt", "loader_timeout", "train", "val")
"""Arguments of ``fit`` that a script can do without, or that are arguments of the function."""
NO_LOSS = "no loss_fn"


class EjectError(LoopkitError, ValueError):
    """A configuration has parts without a written form; `problems` names them."""

    def __init__(self, message: str, problems: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.problems = dict(problems or {})


def eject(learner: Learner, fit: Mapping[str, Any], *, val: bool | None = None, partial: bool = False) -> str:
    """The training loop of a learner as a function ``train(model, train_loader, val_loader, optimizer, loss_fn)``.

    The function is given a new model and optimizer, as they were given to the learner, and trains them as
    ``learner.fit(train_loader, val_loader, **fit)`` does: parameters, buffers, the optimizer's state and metrics are
    bitwise the same. It prints the metrics of each epoch and returns them, one dict for each.

    Args:
        learner: One that has not trained yet. It stays unchanged.
        fit: The arguments of ``fit``, such as ``{"epochs": 3}``.
        val: Whether there is validation; by default as in ``fit``, else there is.
        partial: Write what can be written, and list the rest in comments at the top.

    Returns:
        The source of a script.

    Raises:
        EjectError: A plugin or an option has no written form; or the learner has trained already.

    Batches are pairs ``(inputs, targets)`` of tensors, the samples along the first axis.

    Example::

        learner = Learner(model, loss_fn, optimizer, plugins=[ClipGradNorm(1.0)], accumulate=2)
        Path("train_loop.py").write_text(eject(learner, {"epochs": 3}))
    """
    draft = drafted(learner, fit, val)
    check(draft, partial)
    arguments = ["model", "train_loader", *(["val_loader"] if draft.val else []), "optimizer", "loss_fn"]
    body = ['"""Train the model; returns the metrics of each epoch."""', *draft.at("model"), *loop(draft)]
    function = [f"def train({', '.join(arguments)}):", *(TAB + line if line else line for line in body)]
    return script("The training loop of a loopkit learner, written out.", draft, [function])


def eject_config(config: Config, *, partial: bool = False, save: str | None = None) -> str:
    """A configuration as a whole program.

    It does what ``config.build().run()`` does, bit for bit, with the callables that the configuration names, and prints
    the metrics of each epoch. The model and the optimizer are made to learn of them; no data is.

    Args:
        config: As `loopkit_files.load` reads it.
        partial: Write what can be written, and list the rest in comments at the top.
        save: Where the program saves the weights at its end; by default nowhere.

    Returns:
        The source of a script, to be started where the configuration's modules are found.

    Raises:
        EjectError: A plugin or an option has no written form.
        ConfigError: The configuration is wrong.

    Example::

        Path("train.py").write_text(eject_config(loopkit_files.load("config.toml")))
    """
    values = config.values
    fit = {name: Every(**value) if name == "validate" else value for name, value in values["fit"].items()}
    draft = drafted(config.learner(), fit, "val" in values["data"])
    draft.returns = False
    lines = _seeded(values.get("learner", {}), draft)
    for name, place in (("train_loader", "train"), ("val_loader", "val")):
        if place in values["data"]:
            lines.append(f"{name} = {_made(values['data'][place], draft, f'data.{place}')}")
    lines.append(f"model = {_made(values['model'], draft, 'model')}")
    if "loss" in values:
        lines.append(f"loss_fn = {_made(values['loss'], draft, 'loss')}")
    table = values["optimizer"]
    parameters = "model.parameters()" if table["call"].startswith("torch.") else "list(model.parameters())"
    lines += [*draft.at("model"), f"optimizer = {_made(table, draft, 'optimizer', parameters)}"]
    check(draft, partial)
    end = [] if save is None else [f"torch.save(model.state_dict(), {literal(str(save))})"]
    body = ["def main():", *(TAB + line if line else line for line in [*lines, "", *loop(draft), *end])]
    title = f"The run of {config.path.name if config.path else 'a configuration'}, written out."
    return script(title, draft, [body], ['if __name__ == "__main__":', f"{TAB}main()"])


def _seeded(learner: Mapping[str, Any], draft: Draft) -> list[str]:
    """The lines of `loopkit.seed_everything`."""
    if "seed" not in learner:
        return []
    seed = learner["seed"]
    draft.imports |= {"import random", "import numpy as np"}
    lines = [f"random.seed({seed})", f"np.random.seed({seed})", f"torch.manual_seed({seed})"]
    if learner.get("deterministic"):
        draft.imports.add("import os")
        lines += [
            'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")',
            "torch.use_deterministic_algorithms(True)",
            "torch.backends.cudnn.deterministic = True",
            "torch.backends.cudnn.benchmark = False",
        ]
    return lines


def _made(table: Mapping[str, Any], draft: Draft, place: str, *positional: str) -> str:
    """The expression that a table stands for; notes a problem if there is none."""
    try:
        return expression(table, draft.imports, *positional)
    except NoWrittenForm as why:
        draft.problems[f"[{place}]"] = str(why)
        return "None"


def drafted(learner: Learner, fit: Mapping[str, Any], val: bool | None) -> Draft:
    """Draft a script from a learner and the arguments of ``fit``.

    Raises:
        EjectError: An argument is unknown, there is no limit, or the learner has trained already.
        ValueError: A limit is out of range.
    """
    known = [field.name for field in fields(Limits)]
    for name in fit:
        if name == "minutes":
            raise EjectError("minutes has no written form: a script ends by epochs, max_steps or max_updates")
        if name not in (*known, *WITHOUT_PART):
            raise EjectError(f"fit has no argument {name!r}{nearest(name, known)}; it has {', '.join(known)}")
    if learner.progress.steps:
        raise EjectError(
            f"the learner has trained {learner.progress.steps} steps: a script begins at the first; give a new learner"
        )
    limits = Limits(**{name: value for name, value in fit.items() if name in known and value is not None})
    if limits.epochs is None and limits.max_steps is None and limits.max_updates is None:
        raise EjectError('the fit has no end: give epochs, max_steps or max_updates, as in {"epochs": 3}')
    for name in ("epochs", "max_steps", "max_updates"):
        check_count(name, getattr(limits, name), endless=name == "epochs")
    when, validates = limits.validate, val if val is not None else fit.get("val", True) is not None
    own = isinstance(when, Mapping) or any(isinstance(fit.get(role), Mapping) for role in ("train", "val"))
    written = limits if isinstance(when, Every) else replace(limits, validate=Every(epochs=1))
    draft = Draft(learner, written, validates)
    if own:
        draft.problems["data by the names of phases"] = "only the standard phases have a written form"
    elif not isinstance(when, Every):
        raise EjectError(f"validate is {when!r}: write every(epochs=1), of `from loopkit import every`")
    elif when.minutes is not None or when.first or when.in_parts:
        draft.problems[f"validate={when!r}"] = "a script validates after so many epochs or updates"
    _look_at(draft)
    if draft.problems and not _is_standard(draft):
        return draft
    rows = learner.explain("train").rows
    order = [row.plugin for row in rows if row.phase and row.hook == UpdateBegin.hook]
    names = [*order, *(name for name in learner.plugins if name not in order)]  # gradients are changed in this order
    for name in names:
        write(name, learner.plugins[name], draft)
    for each in (draft.left_out, draft.written):
        each.sort()
    return draft


def _is_standard(draft: Draft) -> bool:
    """Whether the learner is one whose plugins can be written at all."""
    learner = draft.learner
    return list(learner.models) == ["model"] and list(learner.optimizers) == ["optimizer"]


def _look_at(draft: Draft) -> None:
    """Find the parts of the learner itself that have no written form."""
    learner, limits, problems = draft.learner, draft.limits, draft.problems
    if list(learner.models) != ["model"]:
        problems[f"the models {', '.join(learner.models)}"] = "which of them a step uses is in the phase's code"
    if list(learner.optimizers) != ["optimizer"]:
        found = ", ".join(learner.optimizers)
        problems[f"the optimizers {found}" if found else "no optimizer"] = "a script trains with one"
    for name, optimizer in learner.models.modes.optimizers.items():
        problems[f"optimizer {name!r}"] = f"a script does not call train() and eval() of {type(optimizer).__name__}"
    if learner.loss_fn is no_loss_fn:
        problems[NO_LOSS] = "the standard phases need one"
    for phase in learner.phases.values():
        if type(phase) not in STANDARD:
            problems[f"phase {phase.name!r} ({type(phase).__name__})"] = "it has its own step"
        elif phase.skip_none:
            problems[f"phase {phase.name!r}"] = "skip_none=True"
    valid = learner.phases.get("val")
    if isinstance(valid, Phase) and valid.grad_mode != "no_grad":
        draft.val_grad_mode = {"inference_mode": "inference_mode", "grad": "enable_grad"}[valid.grad_mode]
    mid_epoch = draft.val and limits.validate.updates is not None
    if mid_epoch and learner.accumulate > 1 and limits.max_steps is not None:
        problems["validate=every(updates=...) with max_steps and accumulate"] = (
            "whether the last, short window is followed by a validation depends on where it ends"
        )


def check(draft: Draft, partial: bool) -> None:
    """Raise one error for all that has no written form.

    Raises:
        EjectError: There is such a part without ``partial``, or no part that can be written.
    """
    problems = draft.problems
    needed = [part for part in problems if part.startswith("[") or part == NO_LOSS]  # what a script cannot do without
    writable = _is_standard(draft) and not needed
    if not problems or (partial and writable):
        return
    count = "1 part has" if len(problems) == 1 else f"{len(problems)} parts have"
    listed = "; ".join(f"{part}: {reason}" for part, reason in problems.items())
    fix = f"leave {'it' if len(problems) == 1 else 'them'} out"
    fix += ", or write the rest with partial=True (--partial)" if writable else ""
    raise EjectError(f"{count} no written form: {listed}. To write a script, {fix}", problems)


def script(title: str, draft: Draft, functions: list[list[str]], more: list[str] | None = None) -> str:
    """The text of a script.

    Args:
        title: The first line of its docstring.
        draft: The source of its imports, notes and helper functions.
        functions: The lines of its functions.
        more: Lines at its end.
    """
    paragraphs = [title, ""]
    if draft.written:
        paragraphs += [f"Plugins written out: {', '.join(draft.written)}."]
    if draft.left_out:
        paragraphs += [f"Left out, since they do not change the training: {', '.join(draft.left_out)}."]
    paragraphs += ["Batches are pairs (inputs, targets) of tensors, the samples along the first axis.", *draft.notes]
    paragraphs = [text.replace("\\", "/").replace('"""', "'''") for text in paragraphs]
    head = [line for text in paragraphs for line in (textwrap.wrap(text, WIDTH) or [""])]
    lines = ['"""' + head[0], *head[1:], '"""', ""]
    if draft.problems:
        lines += ["# NOT written out, so this loop may train something else:"]
        for part, reason in draft.problems.items():
            lines += textwrap.wrap(f"- {part}: {reason}", WIDTH, initial_indent="# ", subsequent_indent="#   ")
        lines += [""]
    lines += sorted_imports(draft.imports)
    for function in [*draft.functions, *functions]:
        lines += ["", "", *(part for line in function for part in wrapped(line))]
    if more:
        lines += ["", "", *more]
    return "\n".join(lines) + "\n"
