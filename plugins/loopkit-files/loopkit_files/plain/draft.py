"""A script in the making: lines by the place that they go to, and the skeleton that puts them together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch

from loopkit.author import Every, is_sum
from loopkit.learner import Learner
from loopkit_files.plain.code import number

__all__ = ["TAB", "Accumulator", "Draft", "Limits", "Place", "loop"]

Place = Literal[
    "model",  # once, before the optimizer is made
    "setup",  # once, before the first epoch
    "train_begin",  # before the first step of an epoch
    "modes",  # after model.train()
    "batch",  # what is done to inputs and targets
    "check",  # before backward
    "gradients",  # before the optimizer's step, in the plan's order
    "updated",  # after a step that was applied
    "train_end",  # after the last step of an epoch
    "val_begin",
    "val_end",  # after the last validation step; the averages are still in place
    "val_over",
    "finish",  # after the last epoch
]
TAB = "    "


@dataclass(frozen=True)
class Limits:
    """The arguments of ``fit`` that decide what is trained and when it is validated."""

    epochs: int | float | None = None
    max_steps: int | None = None
    max_updates: int | None = None
    validate: Every = Every(epochs=1)  # noqa: RUF009 - it is frozen

    @property
    def whole(self) -> int | None:
        """The number of epochs, if it is one."""
        return None if self.epochs is None or self.epochs == math.inf else int(self.epochs)


@dataclass
class Draft:
    """The parts of a script, before they are one text."""

    learner: Learner
    limits: Limits
    val: bool
    imports: set[str] = field(default_factory=lambda: {"import torch"})
    functions: list[list[str]] = field(default_factory=list)
    """Whole functions that stand above the loop."""
    places: dict[Place, list[str]] = field(default_factory=dict)
    metrics: dict[str, list[Accumulator]] = field(default_factory=dict)
    """By phase."""
    left_out: list[str] = field(default_factory=list)
    """Plugins that do not change the training."""
    problems: dict[str, str] = field(default_factory=dict)
    """Parts without a written form, each with the reason."""
    notes: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {"train_loader", "val_loader", "train_samples", "val_samples"})
    """Words made of names of plugins and metrics, and words taken by the script."""
    autocast: str = ""
    """The arguments of ``torch.autocast``, if there is any."""
    scaling: bool = False
    min_scale: float = 0.0
    counts_updates: bool = False
    counts_applied: bool = False
    """Whether the updates of an epoch are counted."""
    whole_fit: bool = False
    """Whether the number of updates of the whole fit is needed."""
    lists_params: bool = False
    stop: str = ""
    """The condition that ends the fit early."""
    stop_phase: str = ""
    """The phase after which it can become true."""
    val_grad_mode: str = "no_grad"
    returns: bool = True
    """Whether it returns the metrics of each epoch."""

    def add(self, place: Place, *lines: str) -> None:
        """Add lines to a place."""
        self.places.setdefault(place, []).extend(lines)

    def at(self, place: Place) -> list[str]:
        """The lines of a place."""
        return self.places.get(place, [])

    def name(self, wanted: str, *endings: str) -> str:
        """A free word of the script, by itself and with each of these endings; the wanted one if it is free."""
        words = chain([wanted], (f"{wanted}_{i}" for i in itertools.count(2)))
        word = next(word for word in words if not self.names & {word, *(word + ending for ending in endings)})
        self.names |= {word, *(word + ending for ending in endings)}
        return word

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for m in self.learner.models.values() for p in m.parameters()), torch.device("cpu"))


@dataclass(frozen=True)
class Accumulator:
    """A metric: lines before an epoch, after each step, and the entries that it comes to."""

    begin: tuple[str, ...]
    step: tuple[str, ...]
    values: tuple[str, ...]


def loop(draft: Draft) -> list[str]:
    """The lines from the setup to the end, without indentation."""
    learner, limits = draft.learner, draft.limits
    size = learner.accumulate
    mean = size > 1 and not is_sum(learner.loss_fn)
    lines: list[str] = []
    if draft.lists_params or mean:
        lines.append('params = [p for group in optimizer.param_groups for p in group["params"]]')
    lines += _planned(draft)
    lines += draft.at("setup")
    lines += [f"{name} = 0" for name in _counters(draft)]
    lines.append("optimizer.zero_grad()")
    if draft.returns:
        lines.append("history = []")
    epochs = f"range({limits.whole})" if limits.whole is not None else "itertools.count()"
    if limits.whole is None:
        draft.imports.add("import itertools")
    lines += ["", f"for epoch in {epochs}:", *_indented(_epoch(draft, mean))]
    lines += ["", *draft.at("finish")] if draft.at("finish") else []
    return [*lines, "return history"] if draft.returns else lines


def _counters(draft: Draft) -> list[str]:
    names = []
    if draft.limits.max_steps is not None:
        names.append("steps")
    if _needs_updates(draft):
        names.append("updates")
    if draft.limits.validate.updates is not None and draft.val:
        names.append("validated")
    if draft.scaling:
        names.append("skipped")
    return names


def _needs_updates(draft: Draft) -> bool:
    limits = draft.limits
    return draft.counts_updates or limits.max_updates is not None or (limits.validate.updates is not None and draft.val)


def _planned(draft: Draft) -> list[str]:
    """The number of updates of the whole fit."""
    limits, size = draft.limits, draft.learner.accumulate
    if not draft.whole_fit:
        return []
    epochs, most = limits.whole, limits.max_updates
    lines, value = [], ""
    if size > 1 and (epochs is not None or limits.max_steps is not None):
        draft.imports.add("import math")
    if limits.max_steps is not None:
        steps = str(limits.max_steps)
        if epochs is not None:
            steps = f"min({epochs} * len(train_loader), {steps})"
        value = steps
        if size > 1:
            lines = [f"full, rest = divmod({steps}, len(train_loader))"]
            value = f"full * math.ceil(len(train_loader) / {size}) + math.ceil(rest / {size})"
    elif epochs is not None:
        length = "len(train_loader)" if size == 1 else f"math.ceil(len(train_loader) / {size})"
        value = f"{epochs} * {length}"
    if most is not None:
        value = f"min({value}, {most})" if value else str(most)
    return [*lines, f"total_updates = {value}"]


def _epoch(draft: Draft, mean: bool) -> list[str]:
    limits = draft.limits
    train = draft.metrics.get("train", [])
    lines = ["metrics = {}", "model.train()", *draft.at("modes"), *draft.at("train_begin")]
    lines += [line for metric in train for line in metric.begin]
    if draft.counts_applied:
        lines.append("applied = 0")
    body = _step(draft, mean)
    numbered = draft.learner.accumulate > 1 or any("{step}" in line for line in draft.at("check"))
    if draft.learner.accumulate > 1:
        lines.append("window = []  # samples of the steps since the last update" if mean else "window = 0")
    head = (
        "for step, (inputs, targets) in enumerate(train_loader):"
        if numbered
        else "for inputs, targets in train_loader:"
    )
    lines += [head, *_indented(body)]
    lines += _values("train", train)
    if draft.scaling:
        lines += ['metrics["train/loss_scale"] = scaler.get_scale()', 'metrics["train/skipped"] = float(skipped)']
    lines += draft.at("train_end")
    over = _over(draft)
    last = [f"epoch + 1 == {limits.whole}"] if limits.whole is not None else []
    if over:
        last.append(over)
    if draft.stop and draft.stop_phase == "train":
        last.append(draft.stop)
    if draft.val and limits.validate.updates is None:
        due = [] if limits.validate.epochs == 1 else [f"(epoch + 1) % {limits.validate.epochs} == 0", *last]
        validation = _validation(draft)
        lines += ["", f"if {' or '.join(due)}:", *_indented(validation)] if due else ["", *validation]
    elif draft.val and last:  # the last weights are validated, if they were not
        lines += ["", f"if updates > validated and ({' or '.join(last)}):", *_indented(_validation(draft))]
    lines.append("")
    of = f"/{limits.whole}" if limits.whole is not None else ""
    if draft.returns:
        lines.append("history.append(metrics)")
    lines += [
        'row = [f"{name} {value:.6g}" for name, value in metrics.items()]',
        f'print(f"epoch {{epoch + 1}}{of}", *row, sep="  ")',
    ]
    ends = " or ".join(filter(None, (draft.stop, over)))
    if ends:
        lines += [f"if {ends}:", f"{TAB}break"]
    return lines


def _over(draft: Draft) -> str:
    limits = draft.limits
    steps = f"steps == {limits.max_steps}" if limits.max_steps is not None else ""
    updates = f"updates == {limits.max_updates}" if limits.max_updates is not None else ""
    return " or ".join(filter(None, (steps, updates)))


def _step(draft: Draft, mean: bool) -> list[str]:
    learner, limits = draft.learner, draft.limits
    size = learner.accumulate
    lines = [*draft.at("batch"), *_forward(draft), *draft.at("check")]
    loss = "loss"
    if mean:
        lines += ["window.append(inputs.shape[0])", f"share = window[-1] / window[0] / {size}"]
        loss = "loss * share"
    elif size > 1:
        lines.append("window += 1")
    if draft.scaling:
        lines.append(f"scaler.scale({loss}).backward()")
    else:
        lines.append("loss.backward()" if loss == "loss" else f"({loss}).backward()")
    if limits.max_steps is not None:
        lines.append("steps += 1")
    update = _update(draft, mean)
    if size > 1:
        count = "len(window)" if mean else "window"
        due = [f"{count} == {size}", "step + 1 == len(train_loader)"]
        if limits.max_steps is not None:
            due.append(f"steps == {limits.max_steps}")
        lines += [f"if {' or '.join(due)}:", *_indented(update), f"{TAB}window = {'[]' if mean else '0'}"]
    else:
        lines += update
    lines += [line for metric in draft.metrics.get("train", []) for line in metric.step]
    if draft.val and limits.validate.updates is not None:
        lines += [
            f"if updates - validated >= {limits.validate.updates}:",
            *_indented(["validated = updates", *_validation(draft)]),
        ]
        if draft.stop and draft.stop_phase == "val":
            lines += _indented([f"if {draft.stop}:", f"{TAB}break"])
        lines += _indented(["model.train()", *draft.at("modes")])
    if over := _over(draft):
        lines += [f"if {over}:", f"{TAB}break"]
    return lines


def _forward(draft: Draft, used: bool = True) -> list[str]:
    lines = ["outputs = model(inputs)", f"{'loss = ' if used else ''}loss_fn(outputs, targets)"]
    return [f"with torch.autocast({draft.autocast}):", *_indented(lines)] if draft.autocast else lines


def _update(draft: Draft, mean: bool) -> list[str]:
    lines = []
    if mean:
        lines = [
            f"factor = {draft.learner.accumulate} * window[0] / sum(window)",
            "if factor != 1:",
            f"{TAB}for p in params:",
            f"{TAB}{TAB}if p.grad is not None:",
            f"{TAB}{TAB}{TAB}p.grad.mul_(factor)",
        ]
    count = (["updates += 1"] if _needs_updates(draft) else []) + (["applied += 1"] if draft.counts_applied else [])
    updated = [*count, *draft.at("updated")]
    if not draft.scaling:
        return [*lines, *draft.at("gradients"), "optimizer.step()", "optimizer.zero_grad()", *updated]
    lines += [
        "scaler.unscale_(optimizer)",
        *draft.at("gradients"),
        "scale = scaler.get_scale()",
        "scaler.step(optimizer)",
        "scaler.update()",
        "optimizer.zero_grad()",
        "if scaler.get_scale() < scale:  # overflow: no step",
        f"{TAB}skipped += 1",
    ]
    lines += ["else:", *_indented(updated)] if updated else []
    if draft.min_scale:
        low = number(draft.min_scale)
        lines += [f"if scaler.get_scale() < {low}:", f"{TAB}scaler.update({low})"]
    return lines


def _validation(draft: Draft) -> list[str]:
    metrics = draft.metrics.get("val", [])
    lines = ["model.eval()", *draft.at("val_begin")]
    lines += [line for metric in metrics for line in metric.begin]
    body = [*draft.at("batch"), *_forward(draft, bool(metrics)), *(line for metric in metrics for line in metric.step)]
    loop = ["for inputs, targets in val_loader:", *_indented(body)]
    lines += [f"with torch.{draft.val_grad_mode}():", *_indented(loop)]
    return [*lines, *_values("val", metrics), *draft.at("val_end"), *draft.at("val_over")]


def _values(phase: str, metrics: Iterable[Accumulator]) -> list[str]:
    return [line for metric in metrics for line in metric.values]


def _indented(lines: Iterable[str], by: int = 1) -> list[str]:
    return [TAB * by + line if line else line for line in lines]
