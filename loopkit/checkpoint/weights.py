"""Weights by themselves: saved as a plain file, loaded into a model or a part of one."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from re import DOTALL, Pattern, escape
from re import compile as compile_pattern
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.base import checks, sharded
from loopkit.base.fingerprint import fingerprint, told
from loopkit.base.options import fresh
from loopkit.base.raw import raw
from loopkit.base.words import nearest
from loopkit.checkpoint import storage
from loopkit.checkpoint.bundle import (
    LEFT_OUT,
    STATE,
    STRUCTURE,
    best,
    check_whole,
    monitored,
    read_state,
    read_structures,
    weights_file,
)
from loopkit.checkpoint.manifest import MANIFEST, Manifest
from loopkit.checkpoint.streams import open_plain, write_plain
from loopkit.checkpoint.structure import (
    Structure,
    class_differences,
    named_tensors,
    near,
    plain,
    shown,
    structure,
    tie_of,
)
from loopkit.checkpoint.tensors import Buffer, BytesSource, Source, check, pack, unpack
from loopkit.errors import CheckpointError, CorruptCheckpointError, PluginError, ReentrancyError, StateError
from loopkit.plugin import declared, provided, unwrapped

if TYPE_CHECKING:
    from loopkit.learner import Learner

SUFFIX = ".safetensors"
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The parts of a name that wrappers add: compiled, distributed and checkpointed modules."""
Form = tuple[tuple[int, ...], torch.dtype]
EXTRA = "_extra_state"

Path_ = str | os.PathLike[str]


class Writable(Protocol):
    """A binary stream that can be written."""

    def write(self, data: Any, /) -> Any:
        """Write some or all of ``data``; return how many bytes."""


# -------------------------------------------------------------------------------------------------------------- saving


def save_weights(model: nn.Module, file: Path_ | Writable, *, metadata: Mapping[str, str] | None = None) -> None:
    """Save parameters and persistent buffers as a plain ``.safetensors`` file, which other tools read too.

    The names are the keys of ``model.state_dict()``. Tied parameters are written once. A path is replaced at once, when
    everything is on the disk, or stays as it was; its mode follows the umask.

    Args:
        model: The module; `load_weights` reads the file into one of the same names and shapes.
        file: A path, or a binary stream to write to from where it stands.
        metadata: Text to keep in the file's header. ``{"format": "pt"}``, which some tools ask for, is added.

    Raises:
        StateError: Something cannot be saved: a lazy, sparse or quantised parameter, a module's extra state, ...
        CheckpointError: The file cannot be written.

    >>> import io
    >>> from torch import nn
    >>> stream = io.BytesIO()
    >>> save_weights(nn.Linear(2, 1), stream, metadata={"trained on": "nothing"})
    """
    if not isinstance(model, nn.Module):
        raise StateError(f"save_weights takes a module, not a {type(model).__name__}: of a learner, learner.model")
    extra = [path for path, module in model.named_modules() if _has_extra_state(module)]
    if extra:
        raise StateError(
            f"save_weights: {shown([path or 'the model' for path in extra])} keeps its own state (get_extra_state), "
            f"which a file of weights cannot hold. Save a checkpoint, or keep it in a persistent buffer"
        )
    tensors = {name: tensor for name, tensor, persistent in named_tensors(model) if persistent}
    chunks = pack(tensors, {"format": "pt", **(metadata or {})})
    if not isinstance(file, (str, os.PathLike)):
        _write_stream(file, chunks)
        return
    if Path(file).suffix in TORCH_SUFFIXES:
        raise CheckpointError(
            f"save_weights: {os.fspath(file)!r} has the suffix of torch.save, but the file would be of another "
            f"format, safetensors. Use the suffix {SUFFIX}"
        )
    write_plain(os.fspath(file), chunks)


def _write_stream(file: Writable, chunks: Iterable[Buffer]) -> None:
    """Write to a stream that may take only a part of the bytes at once."""
    if isinstance(file, io.TextIOBase):
        raise StateError("save_weights: the stream is one of text; weights are bytes. Open it with mode 'wb'")
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            count = file.write(rest)
            if count == 0:
                raise CheckpointError("save_weights: the stream takes no more bytes (it wrote 0)")
            if count is None:
                count = len(rest)
            rest = rest[count:]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


# -------------------------------------------------------------------------------------------------------------- loading


@dataclass
class LoadReport:
    """The result of `load_weights`, or with problems the intended one. Names of the model are full names."""

    source: str
    """Where the weights came from."""
    loaded: list[str] = field(default_factory=list)
    """Names of the model whose values came from the file, tied ones included."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Loaded tensors with another name in the file: the name here -> there."""
    positional: dict[str, str] = field(default_factory=dict)
    """Loaded tensors that were found by shape and dtype only."""
    casts: dict[str, str] = field(default_factory=dict)
    """Loaded tensors with another dtype in the file, such as ``"float32 -> float16"``."""
    frozen: list[str] = field(default_factory=list)
    """Parameters that ``freeze=True`` excluded from training."""
    non_finite: list[str] = field(default_factory=list)
    """Loaded tensors with an infinite value or nan in the file."""
    overflowed: list[str] = field(default_factory=list)
    """Loaded tensors with values that are finite in the file, but not in the dtype here."""
    missing: list[str] = field(default_factory=list)
    """Names of the model that are not in the file."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """Names of the model whose value in the file does not fit, and why."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the file that the model does not have."""
    skipped: list[str] = field(default_factory=list)
    """Names in the file outside of ``prefix``, and extra state of modules, which is not loaded."""
    warnings: list[str] = field(default_factory=list)
    """Other warnings, such as newer checkpoints that were skipped because they are corrupt."""

    def __str__(self) -> str:
        lines = [f"{len(self.loaded):,} loaded from {self.source}"]
        lines += self._line("renamed", self._arrows(self.renamed), str)
        lines += self._line("only by shape", self._arrows(self.positional), str)
        lines += self._line("cast", [*self.casts], lambda name: f"{plain(name)} ({self.casts[name]})")
        lines += self._line("frozen", self.frozen)
        lines += self._line("warning: not finite in the file", self.non_finite)
        lines += self._line("warning: not finite in the dtype here", self.overflowed)
        lines += self._line("missing in the file", self.missing)
        lines += self._line("does not fit", [*self.mismatched], self._mismatch)
        lines += self._line("unexpected in the file", self.unexpected)
        lines += self._line("skipped in the file", self.skipped)
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n  ".join(lines)

    @staticmethod
    def _arrows(renamed: Mapping[str, str]) -> list[str]:
        return [f"{plain(old)} -> {plain(new)}" for new, old in renamed.items()]

    def _mismatch(self, name: str) -> str:
        return f"{plain(name)}: {self.mismatched[name]}"

    @staticmethod
    def _line(what: str, names: list[str], show: Callable[[str], str] = plain) -> list[str]:
        if not names:
            return []
        return [f"{len(names):,} {what}: {shown(names, show)}"]


def load_weights(
    model: nn.Module,
    source: Path_ | BinaryIO | Mapping[str, Tensor] | Manifest,
    *,
    into: str = "",
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    which: str | None = None,
    strict: bool = True,
    positional: bool = False,
    freeze: bool = False,
    weights: Literal["measured", "own"] = "measured",
) -> LoadReport:
    """Load parameters and persistent buffers by name, all that fit or, after any error, none.

    Everything is checked before the first value changes, and an error while values are copied restores the copied
    ones. A value of another floating (or complex) dtype is cast, and reported; any other difference in dtype, and any
    in shape, does not fit. Of tied parameters one name in the file is enough.

    Args:
        model: The module, as its names are meant: the user's own, not what ``torch.compile`` or DDP made of it.
        source: A ``.safetensors`` file of any tool, a checkpoint (its path, or what `best` returns), the directory of a
            run (its newest checkpoint that is not corrupt), a binary stream from where it stands, or tensors by name,
            such as ``loopkit_export.load_torch`` returns.
        into: The dotted path of a submodule: the file's names then begin there.
        prefix: Take only the names below this path in the file, without it: ``"encoder"`` makes
            ``encoder.conv.weight`` a ``conv.weight``.
        rename: From names in the file, without the prefix, to names in ``model``, below ``into``. A name stands for all
            below it, too: ``{"backbone": "encoder"}`` makes ``backbone.conv.weight`` an ``encoder.conv.weight``.
            A ``*`` stands for any text, the shortest that fits, and each on the right for the one on the left:
            ``{"layers.*.attn": "blocks.*.attention"}``; a leading ``*.`` may be empty:
            ``{"*.gamma": "*.weight"}``. The first entry that fits a name decides, and no name is renamed twice.
        which: The model's name, if a checkpoint holds several.
        strict: Raise, without loading, if something is missing, unexpected, or does not fit; else it is reported.
        positional: The rest after the names is assigned by shape and dtype, if each left over occurs just once on
            both sides.
        freeze: Exclude the loaded parameters from training: ``requires_grad`` is False, ``grad`` is None.
        weights: Of a checkpoint whose metric was measured with other weights than the model's own, such as an average:
            ``"measured"`` loads those, ``"own"`` the model's own, which were trained.

    Returns:
        What was done; print it.

    Raises:
        StateError: The weights or the arguments do not fit the model. The model is unchanged.
        CheckpointError: The source cannot be read, or is corrupt. The model is unchanged.

    >>> import io
    >>> from torch import nn
    >>> stream = io.BytesIO()
    >>> save_weights(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), stream)
    >>> _ = stream.seek(0)
    >>> print(load_weights(nn.ModuleDict({"encoder": nn.Linear(2, 2)}), stream, into="encoder", prefix="0"))
    2 loaded from a stream
      2 renamed: 0.bias -> encoder.bias, 0.weight -> encoder.weight
    """
    checks.one_of("load_weights", ("measured", "own"), weights=weights, error=StateError)
    found = _read(source, which, weights == "own")
    plan = _planned(model, found, into, prefix, rename or {}, strict=strict, positional=positional)
    plan.copy(freeze)
    return plan.report


def load_best(learner: Learner, directory: str | Path) -> Manifest:
    """Load the weights of the best checkpoint of a run into a learner's models, all or, after any error, none.

    They are the weights with which the metric was measured. If a plugin put them in the place of the models' own, such
    as an average, and the learner has that plugin, the models take their own weights and the plugin its state of then,
    so that ``learner.evaluate`` measures what the metric measured. If the learner has no such plugin, or only weights
    were saved, the models take what was measured, and averages begin anew. Optimizers, counters and other plugins stay
    as they are: to resume the training, `load` the checkpoint.

    Args:
        learner: Its models have the names and tensors of the saved ones. It may not be in a fit.
        directory: The run's directory, as it was given to `Checkpoint`.

    Returns:
        The checkpoint that was loaded.

    Raises:
        CheckpointError: None was saved with a monitored metric, or the best is damaged.
        StateError: The weights do not fit, or are sharded here. The model is unchanged.
        ReentrancyError: A fit is running.

    Example::

        learner.fit(train, val, epochs=10)
        load_best(learner, "runs/a")
        learner.evaluate(test)
    """
    if learner.current is not None:
        raise ReentrancyError("load_best: a fit is running; load after it")
    if any(sharded.is_sharded(p) for model in learner.models.values() for p in model.parameters()):
        raise StateError("load_best: the parameters are sharded; load into a learner without the plugin that shards")
    manifest = best(directory)
    if missing := set(models_in(manifest)) ^ set(learner.models):
        raise StateError(f"load_best: {manifest.path} and the learner do not have the same models: {sorted(missing)}")
    _, by = measured_by(manifest)
    averages = _restorable(learner, manifest, by, STATE not in manifest.files)
    states = _saved_states(manifest, averages)
    word = _word_to_load(learner, manifest, averages)
    plans = [_planned(model, _from_checkpoint(manifest, name, word)) for name, model in learner.models.items()]
    learner.models.modes.receive()
    copies: list[tuple[Tensor, Tensor]] = []
    for plan in plans:
        copies += plan.copies()
    with learner.models.module_modes.in_training_form():
        _load_all(averages, states, copies)
    return manifest


def _saved_states(manifest: Manifest, averages: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of averages by name; new ones if only weights were saved."""
    if STATE not in manifest.files:
        return {name: _first_state(plugin) for name, plugin in averages.items()}
    if not averages:
        return {}
    states: Mapping[str, Any] = read_state(manifest)["plugins"]
    return states


def _first_state(plugin: Any) -> Mapping[str, Any]:
    """The state of a new plugin with the same options; an empty one if none can be made."""
    try:
        state: Mapping[str, Any] = fresh(plugin).state_dict()
    except PluginError:
        return {}
    return state


def _word_to_load(learner: Learner, manifest: Manifest, averages: Mapping[str, Any]) -> str:
    """The word in the files of the weights that the models take; empty for their own."""
    word, by = measured_by(manifest)
    metric = monitored(manifest)
    phase = "" if metric is None else metric[0].partition("/")[0]
    plugin = unwrapped(learner.plugins[by]) if by in learner.plugins else None
    puts_it_there = plugin is not None and _stands_in(plugin, phase)
    if STATE in manifest.files:
        return "" if puts_it_there else word
    if puts_it_there and not hasattr(plugin, "state_dict"):
        return ""  # it needs nothing to do so again
    if word:
        return word
    for name, average in averages.items():  # an older manifest
        if _stands_in(average, phase):
            return name
    return ""


def _load_all(plugins: Mapping[str, Any], states: Mapping[str, Any], copies: list[tuple[Tensor, Tensor]]) -> None:
    """Load the states of plugins, and copy tensors; after an error the plugins have the states of before."""
    before = {name: deepcopy(plugin.state_dict()) for name, plugin in plugins.items()}
    begun: list[str] = []
    try:
        for name, plugin in plugins.items():
            begun.append(name)
            plugin.load_state_dict(states[name])
        _copy_all(copies)
    except BaseException:
        for name in begun:
            plugins[name].load_state_dict(before[name])
        raise


def _restorable(learner: Learner, manifest: Manifest, by: str, alone: bool) -> dict[str, Any]:
    """The learner's plugins whose states go back to what a checkpoint holds: averages, and what stood in their way."""
    saved = manifest.about.get("plugins")
    if not isinstance(saved, Mapping):
        return {}
    found = {}
    for name, plugin in learner.plugins.items():
        if name not in saved:
            continue
        if provided(plugin) == "average":
            found[name] = unwrapped(plugin) if alone else plugin
        elif name == by and not alone and hasattr(plugin, "load_state_dict"):
            found[name] = plugin
    return found


def _stands_in(plugin: Any, phase: str) -> bool:
    """Whether a plugin replaces the models' weights in a phase, by its ``owns``."""
    owned = declared(plugin, "owns", getattr(plugin, "owns", ()))
    if not owned:
        return provided(plugin) != "average"
    return not {"weights", f"weights.{phase}"}.isdisjoint(owned)


def _planned(
    model: nn.Module,
    found: _Found,
    into: str = "",
    prefix: str = "",
    rename: Mapping[str, str] = MappingProxyType({}),
    *,
    strict: bool = True,
    positional: bool = False,
) -> _Plan:
    """Plan the copies from a source to a model, and check that they fit."""
    targets = _targets(model, into)
    plan = _Plan(targets, found, into, prefix)
    plan.match(rename)
    if positional:
        plan.assign_rest()
    problems = plan.problems()
    if problems and strict:
        if not (into or prefix or rename):
            problems += found.class_differences(model)
        raise StateError(
            f"load_weights: {found.source} does not fit {_called(model, into)}, and no tensor was loaded: "
            f"{'; '.join(problems)}. {plan.hint()}, or strict=False to load what fits"
        )
    if not plan.pairs and found.tensors and targets:
        raise StateError(
            f"load_weights: no tensor of {found.source} fits {_called(model, into)}: {'; '.join(problems)}. "
            f"{plan.hint()}"
        )
    return plan


def _called(model: nn.Module, into: str) -> str:
    kind = type(model).__name__
    return f"{into!r} of {kind}" if into else f"the {kind}"


def _targets(model: nn.Module, into: str) -> dict[str, Tensor]:
    """The tensors that can be loaded, by their names in the submodule ``into``."""
    if not isinstance(model, nn.Module):
        raise StateError(f"load_weights: {type(model).__name__} is no module. Give learner.model, or one of its models")
    modules = dict(model.named_modules(remove_duplicate=False))
    if into not in modules:
        outermost = [path for path in modules if path and "." not in path]
        raise StateError(
            f"load_weights: into={into!r} is no module of {type(model).__name__}{near(into, modules)}; it has "
            f"{shown(outermost) or 'none'}"
        )
    targets = {name: tensor for name, tensor, persistent in named_tensors(modules[into]) if persistent}
    lazy = [name for name, tensor in targets.items() if is_lazy(tensor)]
    _check_values("lazy", lazy, "run one batch through the model first")
    meta = [name for name, tensor in targets.items() if tensor.is_meta]
    _check_values("meta", meta, "give it memory: to_empty()")
    return targets


def _check_values(kind: str, names: list[str], fix: str) -> None:
    """Raise if there are parameters of a kind that has no values."""
    if names:
        raise StateError(f"load_weights: {len(names)} {kind} parameters have no values yet: {shown(names)}; {fix}")


@dataclass
class _Found:
    """The contents of a source."""

    source: str
    tensors: Mapping[str, Tensor]
    warnings: list[str] = field(default_factory=list)
    saved: Structure | None = None
    """The structure of the model in a checkpoint."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the weights that a checkpoint leaves out, by name."""

    def class_differences(self, model: nn.Module) -> list[str]:
        if self.saved is None:
            return []
        return class_differences(self.saved.modules, structure(model).modules)


class _Plan:
    """Which tensor of a file goes where, and which do not fit. The model changes only at `copy`."""

    def __init__(self, targets: dict[str, Tensor], found: _Found, into: str, prefix: str) -> None:
        self.targets = targets
        self.tensors = found.tensors
        self.left_out = found.left_out
        self.others: list[str] = []
        """Names of weights that the checkpoint leaves out, and that are others here."""
        self.into = into
        self.prefix = prefix.rstrip(".")
        self.start = f"{self.prefix}." if self.prefix else ""
        """The beginning of the names to take."""
        self.report = LoadReport(found.source, warnings=found.warnings)
        self.pairs: dict[str, str] = {}
        """Names here (in ``into``) -> names in the file."""
        self.own: dict[str, str] = {}
        """Names in the file -> as they are meant here."""
        self.ties: dict[object, list[str]] = {}
        for name, tensor in targets.items():
            self.ties.setdefault(tie_of(tensor), []).append(name)

    def full(self, name: str) -> str:
        """The name in the whole model."""
        return f"{self.into}.{name}" if self.into else name

    def match(self, rename: Mapping[str, str]) -> None:
        """Match by name, and find what does not fit."""
        report = self.report
        stripped: dict[str, str] = {}
        for old in self.tensors:
            if old.startswith(self.start):
                stripped[old.removeprefix(self.start)] = old
            else:
                report.skipped.append(old)
        if not stripped and self.tensors:
            raise self._wrong_prefix()
        for new, old in self._sources(stripped, rename).items():
            self.own[old] = new
            if new in self.targets:
                self._pair(new, old)
            elif new.rsplit(".", 1)[-1] == EXTRA:
                report.skipped.append(old)
            else:
                report.unexpected.append(old)
        self._settle_ties()
        self._settle_left_out()

    def _pair(self, name: str, old: str) -> None:
        """Match a name here with one in the file, if the tensors fit."""
        why = _mismatch(self.tensors[old], self.targets[name])
        if why:
            self.report.mismatched[self.full(name)] = why
        else:
            self.pairs[name] = old

    def _wrong_prefix(self) -> StateError:
        paths: set[str] = set()
        for name in self.tensors:
            parts = name.split(".")
            paths.update(".".join(parts[:end]) for end in range(1, len(parts)))
        first = {name.split(".")[0] for name in self.tensors}
        return StateError(
            f"load_weights: prefix={self.prefix!r} begins no name in {self.report.source}"
            f"{near(self.prefix, sorted(paths))}; its names begin with {shown(sorted(first))}"
        )

    def _sources(self, stripped: Mapping[str, str], rename: Mapping[str, str]) -> dict[str, str]:
        """The names in the file by the names that they get."""
        sources: dict[str, str] = {}
        for name, new in _renamed(list(stripped), rename).items():
            old = stripped[name]
            if new in sources:
                raise StateError(
                    f"load_weights: {sources[new]!r} and {old!r} of {plain(self.report.source)} would both be {new!r}. "
                    f"Change rename= so that each has its own name"
                )
            sources[new] = old
        return sources

    def _settle_left_out(self) -> None:
        """Take weights that the checkpoint leaves out as they are here, if they have not changed since."""
        report = self.report
        tensors = {self.full(name): tensor for name, tensor in self.targets.items()}
        digests = {self.full(key.removeprefix(self.start)): digest for key, digest in self.left_out.items()}
        missing = []
        for name in report.missing:
            if name not in digests:
                missing.append(name)
            elif fingerprint(tensors[name]) != digests[name]:
                missing.append(name)
                self.others.append(name)
        report.missing = missing

    def _settle_ties(self) -> None:
        """Require one of several tied names, and that all that are there agree."""
        report = self.report
        mismatched = report.mismatched
        for names in self.ties.values():
            paired = [name for name in names if name in self.pairs]
            if paired:
                self._compare(paired)
            elif not any(self.full(name) in mismatched for name in names):
                report.missing += [self.full(name) for name in names]
        for name in list(self.pairs):
            if self.full(name) in mismatched:
                for other in self.ties[tie_of(self.targets[name])]:
                    self.pairs.pop(other, None)

    def _compare(self, tied: list[str]) -> None:
        """Note the tied names whose values in the file are not the first one's."""
        first = self.tensors[self.pairs[tied[0]]]
        for name in tied[1:]:
            if not _same(first, self.tensors[self.pairs[name]]):
                self.report.mismatched[self.full(name)] = (
                    f"tied to {plain(tied[0])} here, but the file has other values"
                )

    def assign_rest(self) -> None:
        """Assign by shape and dtype what is left, where that leaves no choice.

        Raises:
            StateError: It leaves a choice.
        """
        here = self._missing_by_form()
        there = self._unexpected_by_form()
        forms = [form for form in here if form in there]
        lines = []
        for form in forms:
            if len(here[form]) > 1 or len(there[form]) > 1:
                shape, dtype = form
                lines.append(f"{list(shape)} {dtype_name(dtype)}: {shown(there[form])} -> {shown(here[form])}")
        if lines:
            raise StateError(
                f"load_weights: positional=True is ambiguous, and no tensor was loaded: {shown(lines, str)}. "
                f"Give rename={{old: new}} for these"
            )
        taken: set[int] = set()
        for form in forms:
            name = here[form][0]
            old = there[form][0]
            self.pairs[name] = old
            self.report.positional[self.full(name)] = old
            taken.add(id(self.tensors[old]))
        found: set[str] = set()
        for names in self.ties.values():
            if any(name in self.pairs for name in names):
                found.update(map(self.full, names))
        self.report.missing = [name for name in self.report.missing if name not in found]
        self.report.unexpected = [old for old in self.report.unexpected if id(self.tensors[old]) not in taken]

    def _missing_by_form(self) -> dict[Form, list[str]]:
        """The names here that have no weight yet, one of each that are tied."""
        missing = {*self.report.missing}
        names = [tied[0] for tied in self.ties.values() if self.full(tied[0]) in missing]
        return _by_form(names, self.targets)

    def _unexpected_by_form(self) -> dict[Form, list[str]]:
        """The names in the file that have no place yet, one of each that are tied there."""
        first: dict[int, str] = {}
        for old in self.report.unexpected:
            first.setdefault(id(self.tensors[old]), old)
        return _by_form(list(first.values()), self.tensors)

    def problems(self) -> list[str]:
        """Describe the names that are missing, do not fit or are left over, a string for each of the three."""
        report = self.report
        targets = list(map(self.full, self.targets))
        unexpected = [self.full(self.own[old]) for old in report.unexpected]
        missing = {*report.missing}
        free = [name for name in targets if name in missing]

        def wanted(name: str) -> str:
            return plain(name) + near(name, unexpected)

        def left(old: str) -> str:
            return plain(old) + near(self.full(self.own[old]), free)

        lines = report._line("missing", report.missing, wanted)
        lines += report._line("unexpected", report.unexpected, left)
        lines += report._line("that does not fit", [*report.mismatched], report._mismatch)
        if self.others:
            lines.append(told(self.others))
        return lines

    def hint(self) -> str:
        """Which argument would make more names fit."""
        names = [self.own[old] for old in self.report.unexpected]
        total = f"{len(self.tensors):,}"
        path, count = self._fits_below(names)
        if count > len(self.pairs):
            whole = ".".join(part for part in (self.prefix, path) if part)
            return f"prefix={plain(whole)!r} would fit {count:,} of the {total} names"
        path, count = self._fits_into(names)
        if count > len(self.pairs):
            return f"into={self.full(path)!r} would fit {count:,} of the {total} names"
        wrappers = self._wrappers(names)
        if not wrappers:
            return "Give rename={old: new} where names have changed"
        old = min(wrappers, key=lambda path: (path.count("."), path))
        new = _without_wrappers(old.split("."))
        return f"A wrapper has left its mark in the names: rename={{{plain(old)!r}: {plain(new)!r}}} would fit some"

    def _fits_below(self, names: Iterable[str]) -> tuple[str, int]:
        """The beginning of names without which the most of them would be names here, and how many."""
        counts: Counter[str] = Counter()
        for name in names:
            cut = name.find(".")
            while cut >= 0:
                counts[name[:cut]] += name[cut + 1 :] in self.targets
                cut = name.find(".", cut + 1)
        return _most_common(counts)

    def _fits_into(self, names: Iterable[str]) -> tuple[str, int]:
        """The path here below which the most names would be found, and how many."""
        above: dict[str, set[str]] = {}  # the paths before an end of a name
        for target in self.targets:
            parts = target.split(".")
            for cut in range(1, len(parts)):
                end = ".".join(parts[cut:])
                above.setdefault(end, set()).add(".".join(parts[:cut]))
        counts: Counter[str] = Counter()
        for name in names:
            counts.update(above.get(name, ()))
        return _most_common(counts)

    def _wrappers(self, names: Iterable[str]) -> set[str]:
        """The beginnings of names, to the last part by a wrapper, that would be names here without such parts."""
        found: set[str] = set()
        for name in names:
            parts = name.split(".")
            if _without_wrappers(parts) in self.targets:
                last = max((i for i, part in enumerate(parts) if part in WRAPPERS), default=0)
                found.add(".".join(parts[: last + 1]))
        return found

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The model's tensors, each with the one to copy over it."""
        return [(self.targets[name], self.tensors[old].detach()) for name, old in self.pairs.items()]

    def copy(self, freeze: bool) -> None:
        """Copy the values; after an error everything is as it was."""
        loaded: dict[str, None] = {}
        for name, old in self.pairs.items():
            loaded.update(dict.fromkeys(self._tied(name)))
            self._report(self.full(name), old, self.tensors[old], self.targets[name])
        self.report.loaded = list(loaded)
        parameters = []
        if freeze:
            parameters = [name for name in self.pairs if isinstance(self.targets[name], nn.Parameter)]
        frozen: dict[str, None] = {}
        for name in parameters:
            frozen.update(dict.fromkeys(self._tied(name)))
        self.report.frozen = list(frozen)
        _copy_all(self.copies())
        for name in parameters:
            parameter = self.targets[name]
            parameter.requires_grad_(False)
            parameter.grad = None  # else an optimizer would go on with it

    def _tied(self, name: str) -> list[str]:
        """The full names of a tensor here."""
        return [self.full(each) for each in self.ties[tie_of(self.targets[name])]]

    def _report(self, name: str, old: str, source: Tensor, target: Tensor) -> None:
        """Note another name, another dtype, and values that are not finite."""
        report = self.report
        is_cast = source.dtype != target.dtype
        if name != old and name not in report.positional:
            report.renamed[name] = old
        if is_cast:
            report.casts[name] = f"{dtype_name(source.dtype)} -> {dtype_name(target.dtype)}"
        if not _is_finite(source):
            report.non_finite.append(name)
        elif is_cast and not _is_finite(source.detach().to(target.dtype)):
            report.overflowed.append(name)


def _without_wrappers(parts: list[str]) -> str:
    return ".".join(part for part in parts if part not in WRAPPERS)


def _most_common(counts: Counter[str]) -> tuple[str, int]:
    """The path with the largest count, and the last one in the alphabet of several."""
    return max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor over its first one; after an error all first ones are as they were."""
    memory = {target.untyped_storage().data_ptr() for target, _ in pairs}
    # A source may be the memory of a target, such as when two layers change places.
    copies = []
    for target, source in pairs:
        shared = source.untyped_storage().data_ptr() in memory
        copies.append((target, source.clone() if shared else source))
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        try:
            for target, source in copies:
                kept.append((target, target.detach().to("cpu", copy=True)))
                target.copy_(source)
        except BaseException as error:
            for target, values in reversed(kept):
                try:
                    target.copy_(values)
                except Exception as second:  # it cannot be written at all, which is why it was not changed either
                    error.add_note(f"load_weights: a tensor of shape {tuple(target.shape)} cannot be written: {second}")
            error.add_note("load_weights: no tensor was loaded, the model is unchanged")
            raise


def _renamed(names: list[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Each name, and what it becomes."""
    rules = [(old, new, *_rule(old, new)) for old, new in rename.items()]
    unused = dict.fromkeys(rename)
    result: dict[str, str] = {}
    for name in names:
        result[name] = name
        for old, new, pattern, dotted in rules:
            match = pattern.fullmatch(name)
            if match is None and dotted:
                match = pattern.fullmatch(f".{name}")
            if match is not None:
                result[name] = _filled(new, match.groups())
                unused.pop(old, None)
                break
    for old, new, pattern, _ in rules:
        if old in unused:
            raise StateError(
                f"load_weights: rename={{{old!r}: {new!r}}} {_why_unused(old, pattern, names)}; "
                f"the names are {shown(names) or 'none'}. Correct it, or leave it out"
            )
    return result


def _why_unused(old: str, pattern: Pattern[str], names: list[str]) -> str:
    """Why an entry renamed none of the names, in words."""
    if any(pattern.fullmatch(name) for name in names):
        return "fits only names that an entry before it renames"
    stems: set[str] = set()
    for name in names:
        parts = name.split(".")
        stems.update(".".join(parts[: end + 1]) for end in range(len(parts)))
    return f"fits no name{near(old, sorted(stems))}"


def _filled(new: str, groups: tuple[str, ...]) -> str:
    """The new name, with the texts that its stars stood for and the rest of the old name below it."""
    *texts, below = groups
    pieces = zip(new.split("*"), [*texts, ""], strict=True)
    name = "".join(piece + text for piece, text in pieces)
    return (name + below).removeprefix(".")


def _rule(old: str, new: str) -> tuple[Pattern[str], bool]:
    """The pattern of an entry, and whether it is tried on names with a dot before them, too."""
    if not isinstance(old, str) or not isinstance(new, str) or not old or old.count("*") != new.count("*"):
        raise StateError(
            f"load_weights: rename={{{old!r}: {new!r}}}: give a name, or a pattern, and what it becomes, "
            f"with as many * on the right as on the left"
        )
    text = "(.*?)".join(map(escape, old.split("*"))) + r"((?:\..*)?)"
    return compile_pattern(text, DOTALL), old.startswith("*.")


def _mismatch(source: Tensor, target: Tensor) -> str:
    """Why a tensor does not fit, or an empty string."""
    if source.shape != target.shape:
        return f"shape {tuple(source.shape)} in the file, {tuple(target.shape)} here"
    if source.dtype == target.dtype:
        return ""
    if source.is_floating_point() and target.is_floating_point():
        return ""
    if source.is_complex() and target.is_complex():
        return ""
    return f"dtype {dtype_name(source.dtype)} in the file, {dtype_name(target.dtype)} here"


def _by_form(names: list[str], tensors: Mapping[str, Tensor]) -> dict[Form, list[str]]:
    """The names of tensors of each shape and dtype."""
    found: dict[Form, list[str]] = {}
    for name in names:
        tensor = tensors[name]
        form = (tuple(tensor.shape), tensor.dtype)
        found.setdefault(form, []).append(name)
    return found


def dtype_name(dtype: Any) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same bits."""
    if one is other:
        return True
    if one.dtype != other.dtype:
        return False
    if one.numel() == 0:
        return True
    return torch.equal(raw(one.detach().cpu()), raw(other.detach().cpu()))


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype == torch.float4_e2m1fn_x2:
        return True  # which have no such values
    if tensor.dtype.itemsize == 1 or tensor.dtype == torch.complex32:  # isfinite knows the larger ones only
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return bool(torch.isfinite(tensor.detach()).all())  # host sync: before training


# -------------------------------------------------------------------------------------------------------------- sources


def _read(source: Path_ | BinaryIO | Mapping[str, Tensor] | Manifest, which: str | None, own: bool) -> _Found:
    """Read and verify everything that a source holds."""
    if isinstance(source, Manifest):
        source = source.path
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        path = Path(source)
        if os.path.lexists(path / MANIFEST):
            manifest = storage.read_manifest(path)
            return _from_checkpoint(manifest, which, _word(manifest, own))
        return _from_run(path, which, own)
    if which is not None:
        raise StateError(f"load_weights: which={which!r} is for checkpoints that hold several models. Leave it out")
    if isinstance(source, Mapping):
        check(source, "load_weights")
        return _Found("the tensors given", source)
    if isinstance(source, (str, os.PathLike)):
        with opened(source) as reader:
            tensors = _unpacked(reader, os.fspath(source))
        return _Found(os.fspath(source), tensors)
    if not callable(getattr(source, "read", None)):
        raise StateError(
            f"load_weights: {type(source).__name__} is no source of weights. Give a path, a binary stream, or "
            f"tensors by name"
        )
    return _Found("a stream", _unpacked(_stream(source), "a stream"))


def _word(manifest: Manifest, own: bool) -> str:
    """The word in the files of the measured weights; empty for the models' own."""
    return "" if own else measured_by(manifest)[0]


def _from_run(path: Path, which: str | None, own: bool) -> _Found:
    """The newest checkpoint of a run whose weights verify."""
    manifests = storage.listing(path)
    problems: dict[Path, Exception] = dict(manifests.problems)
    for manifest in manifests:
        try:
            found = _from_checkpoint(manifest, which, _word(manifest, own))
        except CorruptCheckpointError as error:
            problems[manifest.path] = error
        else:
            newer = sorted(each for each in problems if each.name > manifest.path.name)
            found.warnings += [f"{each.name} was passed over: {problems[each]}" for each in newer]
            return found
    raise nothing_in(path, problems)


def nothing_in(path: Path, problems: Mapping[Path, Exception]) -> CheckpointError:
    """The error about a directory without a checkpoint that can be used."""
    if problems:
        newest = max(problems, key=lambda each: each.name)
        return CorruptCheckpointError(
            f"none of the {len(problems)} checkpoints in {path} can be used; the newest, {newest.name}: "
            f"{problems[newest]}"
        )
    files = sorted(name for name in os.listdir(path) if name.endswith(SUFFIX))
    fix = f"It has {shown(files)}: give the path of one" if files else "Give a checkpoint, a run's directory or a file"
    return CheckpointError(f"{path} is a directory without checkpoints. {fix}")


def _from_checkpoint(manifest: Manifest, which: str | None, average: str = "") -> _Found:
    check_whole(manifest)
    models = models_in(manifest)
    if which is None and len(models) != 1:
        raise StateError(
            f"load_weights: {manifest.path} holds {len(models)} models: {shown(models) or 'none'}. "
            f"Give which=, the name of one"
        )
    name = models[0] if which is None else which
    if name not in models:
        raise StateError(
            f"load_weights: which={which!r} is no model of {manifest.path}{nearest(name, models)}; "
            f"it has {shown(models)}"
        )
    file = weights_file(name, len(models), average)
    where = f"{manifest.path / file}"
    with storage.open_file(manifest, file) as reader:
        try:
            tensors = _unpacked(reader, where)
        except CorruptCheckpointError:
            storage.verify(manifest.path)  # if it has changed since, that is what to say
            raise
        reader.finish()
    structures = read_structures(manifest) if STRUCTURE in manifest.files else {}
    left: Any = manifest.about.get(LEFT_OUT, {})
    return _Found(where, tensors, saved=structures.get(name), left_out=left.get(name, {}))


def measured_by(manifest: Manifest) -> tuple[str, str]:
    """Return where a checkpoint has the weights with which its metric was measured, and the plugin that put them there.

    The first is the word in the names of their files. Both are empty if the metric was measured with the models' own.
    """
    said = manifest.about.get("measured")
    if not isinstance(said, Mapping):
        return "", ""
    word = str(said.get("file", ""))
    by = str(said.get("by", ""))
    models = models_in(manifest)
    files = [weights_file(name, len(models), word) for name in models]
    return (word, by) if word and all(file in manifest.files for file in files) else ("", "")


def models_in(manifest: Manifest) -> list[str]:
    """The names of the models in a checkpoint."""
    hashes = manifest.about.get("structure")
    return list(hashes) if isinstance(hashes, dict) else []


@contextmanager
def opened(path: Path_) -> Iterator[Source]:
    """A file of weights, open."""
    if Path(path).suffix in TORCH_SUFFIXES and os.path.isfile(path):
        raise CheckpointError(
            f"{os.fspath(path)} is a file of torch.save, which may hold code. Read it by load_torch of loopkit-export, "
            f"and give load_weights what that returns"
        )
    with open_plain(os.fspath(path)) as reader:
        yield reader


def _unpacked(source: Source, where: str) -> dict[str, Tensor]:
    with located(source, where) as watched:
        return unpack(watched)[0]


@contextmanager
def located(source: Source, where: str) -> Iterator[Source]:
    """Name the source in errors, and its kind if it is another one."""
    watched = _Watched(source)
    try:
        yield watched
    except CheckpointError as error:
        opening = watched.opening
        if opening[:4] == b"PK\x03\x04" or (opening[:1] == b"\x80" and opening[8:9] != b"{"):
            raise CorruptCheckpointError(
                f"{where} is no safetensors but a file of torch.save or pickle, which may hold code. If you know where "
                f"it is from, read it with load_torch of loopkit-export, and give load_weights what that returns"
            ) from error
        if where in str(error):
            raise
        raise type(error)(f"{where}: {error}") from error


class _Watched:
    """A source whose first bytes are remembered."""

    def __init__(self, source: Source) -> None:
        self.size = source.size
        self.opening = b""
        self._source = source

    def readinto(self, buffer: memoryview, /) -> None:
        self._source.readinto(buffer)
        if len(self.opening) < 9:
            self.opening += bytes(buffer[:16])


class _StreamSource:
    """The rest of a stream that can be sought."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.size = size
        self._stream = stream

    def readinto(self, buffer: memoryview, /) -> None:
        filled = 0
        while filled < len(buffer):
            data = self._stream.read(min(len(buffer) - filled, 1 << 22))
            if not data:
                raise CorruptCheckpointError(f"the stream ends {len(buffer) - filled} bytes early")
            buffer[filled : filled + len(data)] = data
            filled += len(data)


def _stream(stream: BinaryIO) -> Source:
    if isinstance(stream, io.TextIOBase):
        raise StateError("load_weights: the stream is one of text; weights are bytes. Open it with mode 'rb'")
    try:
        start = stream.tell()
        size = stream.seek(0, os.SEEK_END) - start
        stream.seek(start)
    except (AttributeError, OSError, ValueError):  # a pipe or a socket: its size is known at its end
        return BytesSource(stream.read())
    return _StreamSource(stream, size)
