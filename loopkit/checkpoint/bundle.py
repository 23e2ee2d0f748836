"""A learner's state as the files of a checkpoint, and back."""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import torch
from torch import Tensor

from loopkit.base import sharded
from loopkit.base.fingerprint import without_same
from loopkit.base.notes import add_note, warn
from loopkit.base.version import DISTRIBUTION, __version__
from loopkit.checkpoint import disk, storage
from loopkit.checkpoint.encoding import decode, dumps, encode, loads
from loopkit.checkpoint.manifest import MANIFEST, Manifest
from loopkit.checkpoint.skipping import Skip, skipped
from loopkit.checkpoint.streams import Reader
from loopkit.checkpoint.structure import Structure, plain, structure
from loopkit.checkpoint.tensors import Buffer, check, pack, unpack
from loopkit.checkpoint.upgrade import upgrade
from loopkit.errors import ArgumentError, CheckpointError, CorruptCheckpointError, LoopkitError, StateError
from loopkit.found.discovery import plugin_versions
from loopkit.plugin import provided, unwrapped

if TYPE_CHECKING:
    from loopkit.learner import Learner

STATE = "state.json"
TENSORS = "state.safetensors"
STRUCTURE = "structure.json"
LEFT_OUT = "left_out"
"""The part of a state, and of a manifest, with the fingerprints of weights that are in no file."""
PARTS = "parts.json"
"""The file that lists where the parts of sharded tensors are, in a checkpoint by several processes."""
ONCE = "once-"
"""How the names of files begin that hold a large value of ``rounds.once``, which the next checkpoints link to."""
PART = "part-"
"""How the names of files with such parts begin."""


@dataclass
class Contents:
    """The contents of a checkpoint's files."""

    value: Any
    """The state without tensors, as plain JSON; None if only weights are kept."""
    tensors: dict[str, dict[str, Tensor]]
    """Tensors by file and name."""
    structures: dict[str, Structure]
    """By model."""
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict, kw_only=True)
    """Fingerprints of the frozen weights that are not in the files, by model and name."""

    @property
    def together(self) -> bool:
        """Whether other processes write parts of the same checkpoint."""
        return False

    @classmethod
    def of(cls, learner: Learner, state: Mapping[str, Any]) -> Contents:
        """Take a learner's state apart; its tensors are not copied.

        Raises:
            StateError: Something cannot be saved; names it.
        """
        return cls.made(state, {name: structure(model) for name, model in learner.models.items()})

    @classmethod
    def made(cls, state: Mapping[str, Any], structures: dict[str, Structure]) -> Contents:
        """Take the state of models of these structures apart."""
        models = state["models"]
        weights: dict[str, dict[str, Tensor]] = {}
        rest: dict[str, dict[str, Any]] = {}
        for name, values in models.items():
            weights[weights_file(name, len(models))] = _tensors(values)
            rest[name] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        weights.update(measured_files(state))

        plain = dict(state)
        plain.pop("weights", None)  # the measured weights
        plain["models"] = rest
        value, tensors = encode(plain, where="")
        large = _large_values(state, tensors)
        files = {**weights, TENSORS: tensors, **large}
        for file, named in files.items():
            check(named, file)
        return Contents(value, files, structures, left_out=state.get(LEFT_OUT, {}))

    @classmethod
    def weights(
        cls,
        learner: Learner,
        own: Mapping[str, Mapping[str, Tensor]],
        measured: Mapping[str, Any] | None = None,
        left_out: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> Contents:
        """The models' ``own`` weights, and in files beside them each average's weights; all processes call it.

        Args:
            learner: The learner.
            own: Its models' weights, by model.
            measured: The state's entry ``"weights"``, as far as no average has a file.
            left_out: The state's entry ``"left_out"``: weights that no file needs to have.

        Raises:
            StateError: Something in them is no tensor, or cannot be saved; names it.
        """
        files = {weights_file(name, len(own)): dict(values) for name, values in own.items()}
        for file, named in files.items():
            check(named, file)
        for average, plugin in learner.plugins.items():
            if provided(plugin) != "average":
                continue
            with unwrapped(plugin).averaged(learner):
                averaged = {name: sharded.weights(model) for name, model in learner.models.items()}
                for name, values in without_same(averaged, left_out).items():
                    files[weights_file(name, len(own), average)] = deepcopy(values)
        files.update(measured_files({"models": own, "weights": measured or {}}))
        structures = {name: structure(model) for name, model in learner.models.items()}
        return cls(None, files, structures, left_out=left_out)

    def files(self) -> dict[str, Iterable[Buffer]]:
        """The bytes of each file, made when they are asked for."""
        files: dict[str, Iterable[Buffer]] = {name: pack(tensors) for name, tensors in self.tensors.items()}
        structures = dumps({name: found.as_json() for name, found in self.structures.items()})
        if self.value is not None:
            files[STATE] = [dumps(self.value)]
        files[STRUCTURE] = [structures]
        return files


def _large_values(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Take the tensors of large values of ``rounds.once`` out of the others, by the file that they go to."""
    rounds = {"round.": state.get("round")}
    for rank, each in enumerate(state.get("ranks", ())):
        rounds[f"ranks.{rank}.round."] = each.get("round")
    found = {}
    for path, round in rounds.items():
        if round is None:
            continue
        for name, value in round["values"].items():
            if value["digest"] is None:
                continue
            prefix = f"{path}values.{name}.value"
            names = [key for key in tensors if key == prefix or key.startswith(f"{prefix}.")]
            if names:
                digest = hashlib.sha256(f"{prefix} {value['digest']}".encode()).hexdigest()
                found[f"{ONCE}{digest[:32]}.safetensors"] = {key: tensors.pop(key) for key in names}
    return found


def measured_files(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The files with the weights under which a metric was measured: ``model.weights.val.safetensors``."""
    count = len(state["models"])
    files = {}
    for phase, models in state.get("weights", {}).items():
        for name, values in models.items():
            files[weights_file(name, count, f"weights.{phase}")] = _tensors(values)
    return files


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values that are tensors."""
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def weights_file(model: str, models: int, average: str = "") -> str:
    """The file that holds a model's weights: ``model.safetensors``, or with several ``model-<name>.safetensors``.

    Weights averaged by a plugin are in ``model.<plugin>.safetensors``.
    """
    words = ""
    if models != 1:
        words += f"-{model}"
    if average:
        words += f".{average}"
    quoted = quote(words, safe="").replace("~", "=7E").replace("%", "=")
    return f"model{quoted}.safetensors"


def describe(
    learner: Learner, contents: Contents, reason: str, metrics: Mapping[str, float] | None = None, **more: Any
) -> dict[str, Any]:
    """The notes about the run in a checkpoint's manifest; ``metrics`` are by default the latest."""
    if metrics is None:
        metrics = learner.metrics
    about: dict[str, Any] = {
        "reason": reason,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "progress": asdict(learner.progress),
        "metrics": {name: number(value) for name, value in metrics.items()},
        "versions": {
            "loopkit": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "plugins": {name: _class_path(plugin) for name, plugin in learner.plugins.items()},
        "plugin_versions": plugin_versions(learner.plugins),
        "structure": {name: found.hash for name, found in contents.structures.items()},
        "threads": torch.get_num_threads(),
    }
    if contents.left_out:
        about[LEFT_OUT] = contents.left_out
    about.update(more)
    return about


def _class_path(plugin: Any) -> str:
    kind = type(plugin)
    return f"{kind.__module__}.{kind.__qualname__}"


def number(value: Any) -> float | str:
    """A metric's value as JSON has it: a number, or a text for what it has no number for."""
    try:
        made = float(value)
    except (TypeError, ValueError):
        return repr(value)
    return made if math.isfinite(made) else repr(made)


def read_state(manifest: Manifest, *, parts: bool = False) -> dict[str, Any]:
    """Read and verify a whole state; with ``parts`` also one by several processes, with empty sharded tensors.

    Raises:
        CheckpointError: Several processes wrote it.
        CorruptCheckpointError: A file is not what was written.
    """
    if not parts:
        check_whole(manifest)
    if STATE not in manifest.files:
        raise CheckpointError(
            f"{manifest.path} lists no {STATE}: it holds only weights, by Checkpoint(weights_only=True), and no run "
            f"can resume from them: load_weights and load_best read them; start a new run in another directory"
        )
    try:
        files = _read_tensors(manifest)
        tensors = dict(files[TENSORS])
        for name, named in files.items():
            if name.startswith(ONCE):
                tensors.update(named)
        state: dict[str, Any] = decode(loads(storage.read_file(manifest, STATE)), tensors)
        models = state["models"]
        for name, rest in models.items():
            rest.update(files[weights_file(name, len(models))])
        state = upgrade(state)
    except (StateError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{manifest.path / STATE} holds no state of a learner: {error}") from error
    if STRUCTURE in manifest.files:
        read_structures(manifest)
    return state


def _read_tensors(manifest: Manifest) -> dict[str, dict[str, Tensor]]:
    """The tensors of the state and of the models' own weights, by file."""
    beside = _beside(manifest)
    names = [name for name in manifest.files if name.endswith(".safetensors") and not name.startswith(PART)]
    names = [name for name in names if name not in beside]
    names.sort(key=lambda name: -manifest.files[name].size)
    with ExitStack() as stack:  # the hashing of the largest goes on while the next is read
        files = {name: stack.enter_context(storage.open_file(manifest, name, kept=True)) for name in names}
        found = {name: _unpacked(manifest, name, file) for name, file in files.items()}
        for file in files.values():
            file.finish()
    return found


def _beside(manifest: Manifest) -> list[str]:
    """The files of weights that stood in the place of the models' own, which no run needs to resume."""
    said = manifest.about.get("measured")
    models = manifest.about.get("structure")
    if not isinstance(said, Mapping) or not isinstance(models, Mapping):
        return []
    word = str(said.get("file", "weights."))
    return [weights_file(name, len(models), word) for name in models]


def check_whole(manifest: Manifest) -> None:
    """Raise for a checkpoint that holds the parts of several processes.

    Raises:
        CheckpointError: It does.
    """
    if PARTS in manifest.files:
        raise CheckpointError(
            f"{manifest.path} holds the parts of several processes. Load it by ShardedCheckpoint or load of "
            f"loopkit-sharded, or make one of it that is in one piece: loopkit sharded export {manifest.path} DIR"
        )


def read_structures(manifest: Manifest) -> dict[str, Structure]:
    """The structures of the models, as they were saved.

    Raises:
        CorruptCheckpointError: The file is not what was written, or not of these models.
    """
    try:
        said = loads(storage.read_file(manifest, STRUCTURE))
        found = {name: Structure.from_json(value) for name, value in said.items()}
    except (StateError, AttributeError) as error:
        raise CorruptCheckpointError(f"{manifest.path / STRUCTURE} is malformed: {error}") from error
    noted = manifest.about.get("structure")
    hashes = {name: each.hash for name, each in found.items()}
    if isinstance(noted, Mapping) and noted != hashes:
        raise CorruptCheckpointError(
            f"{manifest.path / STRUCTURE} is not of the models that were saved: its hash is not the one in the "
            f"manifest. Use an older checkpoint"
        )
    return found


def _unpacked(manifest: Manifest, name: str, file: Reader) -> dict[str, Tensor]:
    try:
        tensors, _ = unpack(file)
    except CorruptCheckpointError as error:
        storage.verify(manifest.path)  # if it has changed since, that is what to say
        raise CorruptCheckpointError(f"{manifest.path / name}: {error}") from error
    return tensors


def find(path: Path) -> Manifest:
    """The checkpoint at a path, or the newest in a directory of checkpoints.

    Raises:
        CheckpointError: There is none.
    """
    if (path / MANIFEST).exists():
        return storage.read_manifest(path)
    found = storage.listing(path)
    if not found:
        broken = "".join(f"; {error}" for error in found.problems.values())
        raise CheckpointError(f"{path} is no checkpoint, and holds none that is whole{broken}")
    return found[0]


def monitored(manifest: Manifest) -> tuple[str, str, float] | None:
    """The metric that was monitored at a save, its mode and its value; None if none was, or it is nan."""
    noted: Any = manifest.about.get("monitored")
    try:
        metric = str(noted["metric"])
        mode = str(noted["mode"])
        value = float(noted["value"])
    except (TypeError, KeyError, ValueError):
        return None
    return None if math.isnan(value) else (metric, mode, value)


def best(directory: str | Path) -> Manifest:
    """The best checkpoint of a run, by the metric that its `Checkpoint` monitored last.

    Raises:
        CheckpointError: There is none, or none was saved with a monitored metric.

    Example::

        print(best("runs/a"))
    """
    path = Path(directory)
    manifests = storage.listing(path.absolute())
    if not manifests:
        lacks = "holds no checkpoint that can be read" if path.is_dir() else "is not there"
        raise CheckpointError(f"{directory} {lacks}: give the directory of a run, as Checkpoint was given it")
    known = []
    for manifest in manifests:
        value = monitored(manifest)
        if value is not None:
            known.append((manifest, value))
    if not known:
        raise CheckpointError(
            f"{directory} holds no checkpoint that was saved with a value of a monitored metric: give "
            f"Checkpoint(best='val/loss'); if it was given, did the metric's phase run, as in fit(train, val)?"
        )
    _, (metric, mode, _) = known[0]
    ranked = [(value, manifest) for manifest, (of, _, value) in reversed(known) if of == metric]
    choose = max if mode == "max" else min
    _, chosen = choose(ranked, key=itemgetter(0))
    return chosen


def save(learner: Learner, directory: str | Path, reason: str = "asked for") -> Manifest:
    """Save a learner as a new checkpoint below a directory; for your own loops; the plugin does it by itself.

    Raises:
        CheckpointError: It cannot be written.
        StateError: Something cannot be saved, or a step is under way.
        ArgumentError: The learner and the directory are in the wrong order.
    """
    _check_order(learner, "save(learner, directory)")
    contents = Contents.of(learner, learner.state_dict())
    about = describe(learner, contents, reason)
    label = f"step-{learner.progress.steps}"
    return storage.write(disk.resolved(directory), contents.files(), about, label=label, kept=(ONCE,))


def load(
    learner: Learner, path: str | Path, *, allow: Collection[str] = (), replay: bool = True, skip: Skip = ()
) -> Manifest:
    """Load a checkpoint into a learner, whose next ``fit`` resumes the saved one.

    Args:
        learner: Made as the one that was saved.
        path: A checkpoint, or a directory of checkpoints, of which the newest is taken.
        allow: As in ``Learner.load_state_dict``.
        replay: Likewise.
        skip: Patterns of parameters, as in `loopkit.groups`, whose weights, averages and moments stay as they are here,
            such as ``"head"``, of another number of classes. Or a mapping of ``"weights"`` or ``"moments"`` to them.
            Names of a loss function's parameters begin with ``"loss function."``.

    Raises:
        ArgumentError: ``skip`` is neither.
        CheckpointError: There is no such checkpoint, or it is damaged.
        StateError: It does not fit; the learner is unchanged.
        ArgumentError: The learner and the path are in the wrong order.
    """
    _check_order(learner, "load(learner, path)")
    manifest = find(Path(path).absolute())
    state = read_state(manifest)
    if skip:
        state = skipped(learner, state, skip)
    restore(learner, manifest, state, allow=allow, replay=replay)
    return manifest


def _check_order(learner: object, order: str) -> None:
    if isinstance(learner, (str, Path)):
        raise ArgumentError(f"learner is {learner!r}, a path: the order is checkpoint.{order}")


def restore(
    learner: Learner,
    manifest: Manifest,
    state: dict[str, Any],
    *,
    allow: Collection[str],
    replay: bool,
    data: Literal["stop", "warn"] = "stop",
) -> None:
    """Load a state that was read from a checkpoint.

    Raises:
        StateError: It does not fit, or a plugin cannot read its own; the learner is unchanged.

    Warns of plugins of which another version is installed than at the save.
    """
    if changed := _other_versions(learner, manifest.about.get("plugin_versions")):
        warn(
            f"{manifest.path} was saved with other versions of plugins: {'; '.join(changed)}. The run may continue "
            f"differently"
        )
    try:
        learner.load_state_dict(state, allow=allow, replay=replay, own=True, data=data)
    except LoopkitError as error:
        add_note(error, f"the state is from {manifest.path}")
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        where = "; ".join(str(note).removeprefix("loopkit: ") for note in getattr(error, "__notes__", ()))
        raise StateError(
            f"the state of {manifest.path} cannot be loaded, and the learner is unchanged: {type(error).__name__}, "
            f"{error} "
            f"({where}). Take another checkpoint, or make the learner as it was then"
        ) from error


def _other_versions(learner: Learner, saved: Any) -> list[str]:
    """The plugins that come from another version or distribution than in a manifest, grouped by change."""
    if not isinstance(saved, Mapping):
        return []
    changes: dict[str, list[str]] = {}
    for name, here in plugin_versions(learner.plugins).items():
        then = saved.get(name)
        if not isinstance(then, Mapping):
            continue
        if then.get("distribution") == "loopkit":  # its name at first
            then = {**then, "distribution": DISTRIBUTION}
        if then != here:
            change = f"{_version(then)} then, {_version(here)} now"
            changes.setdefault(change, []).append(name)
    return [f"{', '.join(map(repr, names))}: {change}" for change, names in changes.items()]


def _version(noted: Mapping[str, Any]) -> str:
    """The distribution of a plugin and its version, in words."""
    return plain(f"{noted.get('distribution')} {noted.get('version')}", 80)
