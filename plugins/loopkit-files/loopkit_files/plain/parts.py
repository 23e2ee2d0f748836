"""The lines that each plugin comes to in a script."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from loopkit import criteria
from loopkit import metrics as own_metrics
from loopkit.author import (
    covers,
    declared,
    devices,
    direction,
    implemented,
    is_sum,
    named_modules,
    options_of,
    unwrapped,
)
from loopkit.plugins import (
    ChannelsLast,
    Checkpoint,
    ClipGradNorm,
    ClipGradValue,
    EarlyStopping,
    EvalMode,
    Freeze,
    GradNoise,
    GradNorm,
    History,
    LogHyperparameters,
    LogMetrics,
    LogTo,
    Metrics,
    MixedPrecision,
    Plateau,
    Progress,
    SanityCheck,
    Schedule,
    StopOnNonFinite,
    ToDevice,
    TorchSchedule,
    WeightAverage,
)
from loopkit_files.plain.code import NoWrittenForm, call_of, identifier, literal, name_of, number, quoted
from loopkit_files.plain.draft import TAB, Accumulator, Draft
from loopkit_files.plain.formulas import formula

__all__ = ["write"]

Writer = Callable[[Any, Draft], None]
WRITERS: dict[type, Writer] = {}
NO_PART = {"checkpoint", "end_of_log", "history", "log", "observer", "progress", "sanity_check"}
"""The ``provides`` of plugins that do not change the training."""
NO_PART_CLASSES = (
    Checkpoint,
    History,
    LogHyperparameters,
    LogMetrics,
    LogTo,
    Progress,
    SanityCheck,
)
"""Exactly these: a subclass may do more."""
REASONS = {
    "AverageParameters": "it is for several processes",
    "Compile": "compiled code may round differently; call model.compile() before train",
    "CudaGraph": "it replays recorded steps",
    "DDP": "it is for several processes",
    "FSDP": "it is for several processes",
    "SkipSpikes": "which steps it skips depends on the losses of the last ones",
}
OWN_CODE = 'its own code does the work; if that leaves the training as it is, give its class provides = "observer"'
OF_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
"""The options of `MixedPrecision` that its scaler takes."""
SINGLE = (EarlyStopping, Metrics, Plateau, TorchSchedule, WeightAverage)


def writes(kind: type) -> Callable[[Writer], Writer]:
    """Register the function that writes plugins of exactly this class."""

    def register(function: Writer) -> Writer:
        WRITERS[kind] = function
        return function

    return register


def write(name: str, plugin: Any, draft: Draft) -> None:
    """Add what a plugin does to a draft, or note why that is not possible."""
    writer = WRITERS.get(type(plugin))
    if writer is None:
        own = unwrapped(plugin)
        reason = "" if type(own) in NO_PART_CLASSES else _more_than_looks_on(own, draft)
        if reason:
            draft.problems[f"plugin {name!r} ({type(own).__name__})"] = reason
        else:
            draft.left_out.append(name)
        return
    try:
        if isinstance(plugin, SINGLE) and any(type(plugin) is type(draft.learner.plugins[n]) for n in draft.written):
            raise NoWrittenForm("a script has room for one of its kind, and there are two")
        writer(plugin, draft)
    except NoWrittenForm as why:
        draft.problems[f"plugin {name!r} ({type(plugin).__name__})"] = str(why)
    else:
        draft.written.append(name)


def _more_than_looks_on(plugin: Any, draft: Draft) -> str:
    """Why a script may not leave a plugin out; empty if its own class, not one above it, says that it only observes."""
    monitored = [f"metrics.{monitor}" for p in draft.learner.plugins.values() if (monitor := getattr(p, "monitor", ""))]
    if vars(type(plugin)).get("provides") not in NO_PART:
        return REASONS.get(type(plugin).__name__, OWN_CODE)
    for hook in implemented(plugin):
        method = getattr(plugin, hook)
        for label in ("updates", "writes"):
            names = declared(plugin, label, getattr(method.loopkit_options, label) or getattr(plugin, label, ()))
            changed = [
                name  # "*" says where in the order it stands; a metric that no plugin monitors decides nothing
                for name in set(names) - {"*"}
                if not name.startswith("metrics.") or any(fnmatchcase(each, name) for each in monitored)
            ]
            if changed:
                return f"it provides 'observer', but its {hook} declares {label}={names!r}"
    return ""


# Models and batches


@writes(ToDevice)
def _to_device(plugin: ToDevice, draft: Draft) -> None:
    device = quoted(str(plugin.device))
    draft.places.setdefault("model", []).insert(0, f"model.to({device})")
    late = ", non_blocking=True" if devices.reads_late(plugin.device) else ""
    draft.places.setdefault("batch", [])[:0] = [f"{name} = {name}.to({device}{late})" for name in ("inputs", "targets")]


@writes(ChannelsLast)
def _channels_last(plugin: ChannelsLast, draft: Draft) -> None:
    draft.functions.append(
        [
            "def channels_last(tensor):",
            f"{TAB}if tensor.ndim == 4 and tensor.is_floating_point():",
            f"{TAB}{TAB}return tensor.contiguous(memory_format=torch.channels_last)",
            f"{TAB}return tensor",
        ]
    )
    draft.add("model", "model.to(memory_format=torch.channels_last)")
    draft.add("batch", "inputs = channels_last(inputs)", "targets = channels_last(targets)")


@writes(Freeze)
def _freeze(plugin: Freeze, draft: Draft) -> None:
    model = draft.learner.models["model"]
    thaws = plugin.epochs
    names = dict(plugin.names)
    for place in _together(model, set(names)):
        draft.add("model", f"{place}.requires_grad_(False)")
    for epoch in sorted(set(thaws.values())):
        patterns = [pattern for pattern, at in thaws.items() if at == epoch]
        thawed = {p for p, paths in names.items() if _covered(patterns, paths)}
        if thawed:
            lines = [f"{place}.requires_grad_(True)" for place in _together(model, thawed)]
            draft.add("modes", f"if epoch == {epoch}:", *(TAB + line for line in lines))
    if not plugin.norms:
        return
    found: dict[nn.Module, list[str]] = {}
    for path, module in named_modules(draft.learner.models):
        if isinstance(module, _NormBase):
            found.setdefault(module, []).append(path)
    stages: dict[float, list[nn.Module]] = {}
    for module, paths in found.items():
        until = _frozen_until(plugin, module, paths)
        if until > 0:
            stages.setdefault(until, []).append(module)
    for until, modules in sorted(stages.items(), key=lambda item: -item[0]):
        lines = [f"{_path(model, module)}.eval()" for module in modules]
        if until == math.inf:
            draft.add("modes", *lines)
        else:
            draft.add("modes", f"if epoch < {int(until)}:", *(TAB + line for line in lines))


def _frozen_until(plugin: Freeze, module: nn.Module, paths: list[str]) -> float:
    """The epoch in which a norm is no longer frozen; 0 if it never is frozen, infinite if it always is."""
    for epoch in (0, *sorted(set(plugin.epochs.values())), math.inf):
        thawed = [pattern for pattern, at in plugin.epochs.items() if at <= epoch]
        own = list(module.parameters(recurse=False))
        if own:
            frozen = all(p in plugin.names and not _covered(thawed, plugin.names[p]) for p in own)
        else:
            frozen = _covered(plugin.covered, paths) and not _covered(thawed, paths)
        if not frozen:
            return epoch
    return math.inf


def _covered(patterns: Iterable[str], paths: Iterable[str]) -> bool:
    return any(covers(pattern, path) for pattern in patterns for path in paths)


def _together(model: nn.Module, chosen: set[nn.Parameter]) -> list[str]:
    """The modules all of whose parameters are chosen, and the other chosen parameters, as expressions."""
    found: list[str] = []
    left = set(chosen)
    for module in model.modules():
        own = set(module.parameters())
        if own and own <= chosen and own & left:
            found.append(_path(model, module))
            left -= own
    return found + [f"model.get_parameter({quoted(path)})" for path, p in model.named_parameters() if p in left]


def _path(model: nn.Module, module: nn.Module) -> str:
    path = next(path for path, each in model.named_modules() if each is module)
    if not path:
        return "model"
    return f"model.{path}" if all(map(str.isidentifier, path.split("."))) else f"model.get_submodule({quoted(path)})"


@writes(EvalMode)
def _eval_mode(plugin: EvalMode, draft: Draft) -> None:
    model = draft.learner.models["model"]
    chosen = [m for path, m in named_modules(draft.learner.models) if _covered(plugin.patterns, [path])]
    inner = {each for module in chosen for each in module.modules() if each is not module}
    draft.add("modes", *(f"{_path(model, m)}.eval()" for m in dict.fromkeys(chosen) if m not in inner))


# Precision


@writes(MixedPrecision)
def _mixed_precision(plugin: MixedPrecision, draft: Draft) -> None:
    if plugin.dtype != torch.float32:
        draft.autocast = f"{quoted(plugin.device)}, dtype={plugin.dtype!r}"
    if plugin.scaler is None:
        return
    if getattr(draft.learner.optimizer, "_step_supports_amp_scaling", False):
        raise NoWrittenForm("a fused optimizer skips overflows on the device, where the script cannot count them")
    given = options_of(plugin)
    defaults = inspect.signature(MixedPrecision).parameters
    changed = [key for key in OF_SCALER if given[key] != defaults[key].default]
    more = "".join(f", {key}={literal(given[key])}" for key in changed)
    draft.add("setup", f"scaler = torch.amp.GradScaler({quoted(plugin.device)}{more})")
    draft.scaling = True
    draft.min_scale = plugin.min_scale


@writes(StopOnNonFinite)
def _stop_on_non_finite(plugin: StopOnNonFinite, draft: Draft) -> None:
    if plugin.policy != "raise":
        raise NoWrittenForm(f"policy {plugin.policy!r} undoes steps")
    gradients = bool(plugin.gradients)
    if gradients and _scales(draft):
        raise NoWrittenForm("gradients=True together with loss scaling")
    late = draft.device.type != "cpu" if plugin.late is None else plugin.late
    if late and any(isinstance(each, Metrics) for each in draft.learner.plugins.values()):
        draft.notes.append("An infinite or undefined loss is noticed at the end of the epoch.")
        draft.add(
            "train_end",
            'if not math.isfinite(metrics.get("train/loss", 0.0)):',
            f'{TAB}raise FloatingPointError(f"epoch {{epoch + 1}}: a loss was infinite or undefined")',
        )
    else:
        draft.add(
            "check",
            "if not math.isfinite(loss.item()):",
            f'{TAB}raise FloatingPointError(f"epoch {{epoch + 1}}, step {{step}}: loss {{loss}}")',
        )
    draft.imports.add("import math")
    if gradients:
        draft.lists_params = True
        draft.add(
            "gradients",
            "grads = [p.grad for p in params if p.grad is not None]",
            "if not all(grad.isfinite().all() for grad in grads):",
            f'{TAB}raise FloatingPointError(f"epoch {{epoch + 1}}: a gradient is infinite or undefined")',
        )


def _scales(draft: Draft) -> bool:
    plugins = draft.learner.plugins.values()
    return any(isinstance(plugin, MixedPrecision) and plugin.scaler is not None for plugin in plugins)


# Gradients


@writes(ClipGradNorm)
def _clip_grad_norm(plugin: ClipGradNorm, draft: Draft) -> None:
    draft.lists_params = True
    more = "" if plugin.norm_type == 2 else f", norm_type={number(plugin.norm_type)}"
    if plugin.norm_type == math.inf:
        draft.imports.add("import math")
    draft.add("gradients", f"torch.nn.utils.clip_grad_norm_(params, {number(plugin.max_norm)}{more})")


@writes(ClipGradValue)
def _clip_grad_value(plugin: ClipGradValue, draft: Draft) -> None:
    draft.lists_params = True
    draft.add("gradients", f"torch.nn.utils.clip_grad_value_(params, {number(plugin.max_value)})")


@writes(GradNoise)
def _grad_noise(plugin: GradNoise, draft: Draft) -> None:
    draft.lists_params = draft.counts_updates = True
    device = draft.device
    where = "" if device.type == "cpu" else quoted(str(device))
    draft.add("setup", f"noise_generator = torch.Generator({where}).manual_seed({plugin.seed})")
    draft.add(
        "gradients",
        f"std = {number(plugin.std)} * (1 + updates) ** {number(-plugin.decay)}",
        "for p in params:",
        f"{TAB}if p.grad is not None:",
        f"{TAB}{TAB}noise = torch.empty_like(p.grad).normal_(generator=noise_generator)",
        f"{TAB}{TAB}p.grad.add_(noise, alpha=std)",
    )


@writes(GradNorm)
def _grad_norm(plugin: GradNorm, draft: Draft) -> None:
    if len(draft.learner.optimizer.param_groups) > 1:
        raise NoWrittenForm("it measures each of several parameter groups")
    draft.lists_params = draft.counts_applied = True
    kind = "" if plugin.norm_type == 2 else f", {number(plugin.norm_type)}"
    name = draft.name("grad_norm")
    draft.add("train_begin", f"{name}_sum = 0.0")
    draft.add(
        "gradients",
        "grads = [p.grad for p in params if p.grad is not None]",
        f"{name} = torch.nn.utils.get_total_norm(grads{kind})",
    )
    draft.add("updated", f"{name}_sum += {name}")
    key = quoted(f"train/{plugin.name}")
    draft.add("train_end", "if applied:", f"{TAB}metrics[{key}] = ({name}_sum / applied).item()")


# Schedules


@writes(Schedule)
def _schedule(plugin: Schedule, draft: Draft) -> None:
    if plugin.of_modules:
        raise NoWrittenForm(f"it sets an attribute of modules, {plugin.key!r}")
    key, _, index = plugin.key.partition("[")
    groups = draft.learner.optimizer.param_groups
    chosen = [
        number
        for number, group in enumerate(groups)
        if fnmatchcase(str(group.get("name", number)), plugin.groups) and key in group
    ]
    at = int(index.rstrip("]")) if index else None
    for group in (groups[i] for i in chosen):
        value = group[key] if at is None else group[key][at]
        if isinstance(value, torch.Tensor):
            raise NoWrittenForm(f"{plugin.key!r} is a tensor in this optimizer")
    if not chosen or not fnmatchcase("optimizer", plugin.optimizer):
        raise NoWrittenForm("it matches no parameter group")
    written = formula(plugin.schedule, draft.imports)
    word = identifier(plugin.key)
    kind = "value" if plugin.absolute else "factor"
    stem = draft.name(word)
    name = f"{stem}_{kind}"
    total = _total(plugin, draft, written.total)
    if written.lines:
        parameters = "update, total" if written.total else "update"
        draft.functions.append([f"def {name}({parameters}):", *(TAB + line for line in written.lines)])
    else:
        expression = written.expression.replace("total_updates", total)
        if expression != name:
            draft.add("setup", f"{name} = {expression}")
    rest = f", {total}" if written.lines and written.total else ""
    members = "optimizer.param_groups"
    if chosen != list(range(len(groups))):
        draft.add("setup", f"{stem}_groups = [optimizer.param_groups[i] for i in {literal(chosen)}]")
        members = f"{stem}_groups"
    item = f'group["{key}"]' if at is None else f'group["{key}"][{at}]'
    if not plugin.absolute:
        draft.add("setup", f"base_{stem} = [{item} for group in {members}]")

    def put(k: str) -> list[str]:
        value = f"{name}({k}{rest})" if plugin.absolute else f"base * {name}({k}{rest})"
        loop = f"for group in {members}:" if plugin.absolute else f"for group, base in zip({members}, base_{stem}):"
        if at is None:
            return [loop, f'{TAB}group["{key}"] = {value}']
        return [
            loop,
            f'{TAB}items = list(group["{key}"])',
            f"{TAB}items[{at}] = {value}",
            f'{TAB}group["{key}"] = tuple(items)',
        ]

    draft.add("setup", *put(str(plugin.start)))
    more = f"{plugin.start} + " if plugin.start else ""
    if plugin.every == "update":
        draft.counts_updates = True
        draft.add("updated", *put(f"{more}updates"))
    else:
        draft.add("train_end", *put(f"{more}epoch + 1"))


def _total(plugin: Schedule, draft: Draft, needed: bool) -> str:
    """The length of a schedule over the whole fit."""
    if not needed:
        return ""
    limits = draft.limits
    if plugin.every == "epoch":
        if limits.whole is None:
            raise NoWrittenForm("its schedule spans the whole fit, whose number of epochs is open: give epochs")
        return str(limits.whole + plugin.start)
    if limits.whole is None and limits.max_steps is None and limits.max_updates is None:
        raise NoWrittenForm("its schedule spans the whole fit, whose number of updates is open: give epochs")
    draft.whole_fit = True
    return f"{plugin.start} + total_updates" if plugin.start else "total_updates"


@writes(TorchSchedule)
def _torch_schedule(plugin: TorchSchedule, draft: Draft) -> None:
    if plugin.given is plugin.scheduler:
        raise NoWrittenForm("the scheduler is an object already; give a class or a functools.partial of one")
    draft.add("setup", f"scheduler = {call_of(plugin.given, 'optimizer', draft.imports)}")
    draft.add("updated" if plugin.every == "update" else "train_end", "scheduler.step()")


@writes(Plateau)
def _plateau(plugin: Plateau, draft: Draft) -> None:
    phase = plugin.monitor.partition("/")[0]
    if _scales(draft):
        raise NoWrittenForm("it skips an epoch whose updates were all skipped for an overflow")
    if phase == "val" and not draft.val:
        draft.notes.append(f"{plugin.name} never acts, since there is no validation.")
        return
    if phase not in ("train", "val"):
        raise NoWrittenForm(f"its metric is of phase {phase!r}")
    draft.imports.add("from torch.optim.lr_scheduler import ReduceLROnPlateau")
    mode = direction(plugin, draft.learner.plugins.values())
    of_plugin = inspect.signature(Plateau).parameters
    options = {name: value for name, value in options_of(plugin).items() if name not in of_plugin}
    if mode != "min":
        options = {"mode": mode, **options}
    more = "".join(f", {key}={literal(value)}" for key, value in options.items())
    draft.add("setup", f"plateau = ReduceLROnPlateau(optimizer{more})")
    draft.add("val_over" if phase == "val" else "train_end", f"plateau.step(metrics[{quoted(plugin.monitor)}])")


# Averages, the end of the fit


@writes(WeightAverage)
def _weight_average(plugin: WeightAverage, draft: Draft) -> None:
    if plugin.update_bn is not None:
        raise NoWrittenForm("update_bn estimates the statistics of batch norm anew")
    if plugin.use_buffers:
        raise NoWrittenForm("use_buffers=True averages buffers, too")
    if len({(p.device, p.dtype) for p in draft.learner.models["model"].parameters()}) > 1:
        raise NoWrittenForm("the parameters are of several devices or dtypes")
    name = "get_swa_multi_avg_fn" if plugin.decay is None else "get_ema_multi_avg_fn"
    draft.imports.add(f"from torch.optim.swa_utils import {name}")
    draft.add("setup", "weights = list(model.parameters())", "average, averaged = [], 0")
    if plugin.decay is None:
        move = ["get_swa_multi_avg_fn()(average, weights, torch.tensor(averaged))"]
    elif plugin.warmup:
        move = [
            f"decay = min({number(plugin.decay)}, (1 + averaged) / (10 + averaged))",
            "get_ema_multi_avg_fn(decay)(average, weights, averaged)",
        ]
    else:
        move = [f"get_ema_multi_avg_fn({number(plugin.decay)})(average, weights, averaged)"]
    lines = [
        "if averaged:",
        *(TAB + line for line in move),
        "else:",
        f"{TAB}average = [p.detach().clone() for p in weights]",
        "averaged += 1",
    ]
    conditions = [f"epoch >= {plugin.start_epoch}"] if plugin.start_epoch else []
    if plugin.every == "epoch":
        draft.counts_applied = True
        conditions.insert(0, "applied")
        if plugin.start_update:
            draft.counts_updates = True
            conditions.insert(1, f"updates > {plugin.start_update}")
    else:
        if plugin.start_update or plugin.every != 1:
            draft.counts_updates = True
        if plugin.start_update:
            conditions.insert(0, f"updates > {plugin.start_update}")
        if plugin.every != 1:
            since = f"(updates - {plugin.start_update})" if plugin.start_update else "updates"
            conditions.append(f"{since} % {plugin.every} == 0")
    if conditions:
        lines = [f"if {' and '.join(conditions)}:", *(TAB + line for line in lines)]
    draft.add("train_end" if plugin.every == "epoch" else "updated", *lines)
    exchange = ["for p, a in zip(weights, average):", f"{TAB}p.data, a.data = a.data, p.data"]
    draft.add("val_begin", *exchange)
    draft.add("val_over", *exchange)
    draft.notes.append("Validation uses the averaged weights; the model ends with its own, `average` is for you.")


@writes(EarlyStopping)
def _early_stopping(plugin: EarlyStopping, draft: Draft) -> None:
    phase = plugin.phase
    if phase == "val" and not draft.val:
        draft.notes.append(f"{plugin.name} never acts, since there is no validation.")
        return
    if phase not in ("train", "val"):
        raise NoWrittenForm(f"its metric is of phase {phase!r}")
    criterion = plugin.given
    low = not plugin.needs_mode or direction(plugin, draft.learner.plugins.values()) == "min"
    draft.imports.add("import math")
    worst = "math.inf" if low else "-math.inf"
    value = f"metrics[{quoted(plugin.monitor)}]"
    sign = "<" if low else ">"
    better = f"math.isfinite(value) and value {sign} best"
    keep = []
    if plugin.restore_best:
        where = "" if plugin.best_device is None else f".to({quoted(str(plugin.best_device))}, copy=True)"
        tensors = "tensors = [*model.parameters(), *model.buffers()]"
        keep = [tensors, f"best_weights = [t.detach(){where or '.clone()'} for t in tensors]"]
        draft.add("setup", "best_weights = None")
        draft.add(
            "finish",
            "if best_weights is not None:",
            f"{TAB}{tensors}",
            f"{TAB}with torch.no_grad():",
            f"{TAB}{TAB}for tensor, kept in zip(tensors, best_weights):",
            f"{TAB}{TAB}{TAB}tensor.copy_(kept)",
        )
    if type(criterion) is criteria.NumberSinceBest:
        draft.stop = f"waited >= {criterion.n}"
        if criterion.min_delta:
            gain = "record - value" if low else "value - record"
            draft.add("setup", f"record, waited = {worst}, 0")
            watch = [
                f"if math.isfinite(value) and {gain} > {number(criterion.min_delta)}:",
                f"{TAB}record, waited = value, 0",
                "else:",
                f"{TAB}waited += 1",
            ]
            if keep:
                draft.add("setup", f"best = {worst}")
                watch += [f"if {better}:", f"{TAB}best = value", *(TAB + line for line in keep)]
        else:
            draft.add("setup", f"best, waited = {worst}, 0")
            watch = [
                f"if {better}:",
                f"{TAB}best, waited = value, 0",
                *(TAB + line for line in keep),
                "else:",
                f"{TAB}waited += 1",
            ]
    else:
        if keep:
            draft.add("setup", f"best = {worst}")
        watch = [f"if {better}:", f"{TAB}best = value", *(TAB + line for line in keep)] if keep else []
        if type(criterion) is criteria.Threshold:
            draft.add("setup", f"value = {worst}")
            draft.stop = f"value {sign}= {number(criterion.value)}"
        elif type(criterion) is criteria.Patience:
            draft.add("setup", "last, worse = None, 0")
            draft.stop = f"worse >= {criterion.n}"
            rose = f"value {'>' if low else '<'} last"
            watch += [
                f"if last is not None and (math.isnan(value) or {rose}):",
                f"{TAB}worse += 1",
                "else:",
                f"{TAB}worse = 0",
                "last = value",
            ]
        else:
            raise NoWrittenForm(f"criterion {type(criterion).__name__.strip('_')} has none; patience has")
    draft.stop_phase = phase
    draft.add("val_end" if phase == "val" else "train_end", f"value = {value}", *watch)


# Metrics


@writes(Metrics)
def _metrics(plugin: Metrics, draft: Draft) -> None:
    for phase in ("train", "val") if draft.val else ("train",):
        made = [_accumulator(phase, name, metric, draft) for name, metric in plugin.prototypes.items()]
        draft.metrics[phase] = [each for each in made if each is not None]


def _accumulator(phase: str, name: str, metric: Any, draft: Draft) -> Accumulator | None:
    word = draft.name(f"{phase}_{identifier(name)}", "_count")
    key = quoted(f"{phase}/{name}")
    kind = type(metric)
    if kind is own_metrics.Loss:
        dtype = str(devices.exact(draft.device)).removeprefix("torch.")
        where = "" if draft.device.type == "cpu" else f", device={quoted(str(draft.device))}"
        weight = "" if is_sum(draft.learner.loss_fn) else ", alpha=inputs.shape[0]"
        return Accumulator(
            (f"{word}, {phase}_samples = torch.zeros((), dtype=torch.{dtype}{where}), 0",),
            (
                f"{word} = {word}.add(loss.detach(){weight})",
                f"{phase}_samples += inputs.shape[0]",
            ),
            (f"metrics[{key}] = ({word} / {phase}_samples).item()",),
        )
    if kind is own_metrics.Mean:
        return None  # the standard phases put no such number on a step
    wide = "double" if devices.exact(draft.device) == torch.float64 else "float"
    values = f"{word} = {word}.{wide}() / {word}_count", f"metrics[{key}] = {word}.item()"
    begin = (f"{word}, {word}_count = 0, 0",)
    counts = f"{word} += correct.sum()", f"{word}_count += targets.numel()"
    if kind is own_metrics.Accuracy:
        correct = _correct(metric, draft)
        if metric.ignore_index is None:
            return Accumulator(begin, (*correct, *counts), values)
        counted = f"counted = targets.ne({metric.ignore_index})"
        counts = f"{word} += (correct & counted).sum()", f"{word}_count += counted.sum()"
        return Accumulator(begin, (*correct, counted, *counts), values)
    if kind is own_metrics.BinaryAccuracy:
        above = f"above = outputs.reshape(targets.shape).gt({number(metric.limit)})"
        return Accumulator(begin, (above, "correct = above.eq(targets.bool())", *counts), values)
    if kind in (own_metrics.F1, own_metrics.Precision, own_metrics.Recall):
        draft.imports.add(f"from loopkit.metrics import {kind.__name__}")
        given = {"average": metric.average, "ignore_index": metric.ignore_index, "axis": metric.axis}
        options = ", ".join(f"{k}={literal(v)}" for k, v in given.items() if v is not None and v != "macro")
        return Accumulator(
            (f"{word} = {kind.__name__}({options})",),
            (f"{word}.update(outputs, targets)",),
            (f"metrics[{key}] = float({word}.compute())",),
        )
    if kind is own_metrics.FunctionMetric:
        try:
            function = name_of(metric.function, draft.imports)
        except NoWrittenForm as why:
            draft.problems[f"metric {name!r}"] = str(why)
            return None
        draft.imports.add("from loopkit.metrics import FunctionMetric")
        return Accumulator(
            (f"{word} = FunctionMetric({function})",),
            (f"{word}.update(outputs.detach(), targets, inputs.shape[0])",),
            (f"metrics[{key}] = float({word}.compute())",),
        )
    draft.problems[f"metric {name!r}"] = f"{kind.__name__} is your own class"
    return None


def _correct(metric: own_metrics.Accuracy, draft: Draft) -> tuple[str, ...]:
    """The lines that find the correct classes; torch's losses for classes have these in the second axis."""
    loss = draft.learner.loss_fn
    second = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss is nn.functional.cross_entropy
    if metric.axis is not None or second:
        return (f"correct = outputs.argmax({1 if metric.axis is None else metric.axis}).eq(targets)",)
    axis = "axis = -1 if outputs.shape[:-1] == targets.shape else 1"
    return axis, "correct = outputs.argmax(axis).eq(targets)"
