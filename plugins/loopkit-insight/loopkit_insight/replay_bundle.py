"""Write down a step that failed, so that it can be run again."""

from __future__ import annotations

import pdb
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.author import (
    Buffers,
    Shown,
    bundle,
    describe,
    disk,
    encoding,
    generators,
    map_tensors,
    move,
    sharded,
    storage,
    tensors,
)
from loopkit.errors import Cancel, CheckpointError, PeerError, StateError, WorldError
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["ReplayBundle", "replay"]

WROTE = "loopkit: the step can be run again from "


class ReplayBundle(Shown):
    """Write what `replay` needs to run a step again that raised an error.

    That is: the batch, the parameters, the buffers, the state of optimizers and plugins, the random generators, and
    the gradients of an open accumulation window. Each bundle has its own directory below ``directory``, in the
    format of a checkpoint; a note on the error names it. Of several processes each writes of its own errors, with its
    own part of the batch; where they hold parts of the parameters (`FSDP`), a single one cannot write a bundle.

    Buffers, generators, counters and open windows are copied as each step begins, which is what the plugin costs. The
    rest is taken when the error comes. So if an update of the same step came before the error, the bundle holds the
    parameters after it, with a note; a batch that the step changed in place is written as changed; plugins are as they
    are at the error. Errors of the loader, of ``move_batch`` and of the end of an epoch are of no step: no bundle.

    Args:
        directory: A directory only for bundles; a relative one is resolved now.

    Raises:
        StateError: A batch holds something that cannot be saved; at the first step of an epoch.
        CheckpointError: The directory cannot be written; at the first step.
    """

    provides = "observer"
    name = "replay_bundle"
    volatile = ("_*",)

    def __init__(self, directory: str | Path) -> None:
        self.directory = disk.resolved(directory)
        self._tried = False
        self._begin: dict[str, Any] | None = None
        """The copies made as a step begins; None between two steps."""
        self._buffers = Buffers()
        self._seen = False
        """Whether this epoch has had its first batch."""

    @hookimpl(before=("sync",))  # which says whose error it is
    @contextmanager
    def epoch_context(self, learner: Learner, phase: Phase) -> Iterator[None]:
        """Write the bundle when an error comes through."""
        outer = self._begin, self._buffers, self._seen
        self._begin, self._buffers, self._seen = None, Buffers(), False
        try:
            yield
        except (Cancel, PeerError):  # another process has failed, and writes its own
            raise
        except Exception as error:
            if self._begin is not None and not any(WROTE in note for note in getattr(error, "__notes__", ())):
                try:
                    error.add_note(f"{WROTE}{self._write(learner, phase, error)}")
                except Exception as failure:  # the first error must not give way to this one
                    error.add_note(f"loopkit: ReplayBundle could not write the step: {failure!r}")
            raise
        finally:
            self._begin, self._buffers, self._seen = outer

    @hookimpl(writes=("*",))  # which makes it the first: what others change comes after it in the replay, too
    def step_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Copy what the step may change."""
        if not self._seen:
            self._check(step)
        self._buffers.take(learner)
        self._begin = {
            "index": step.index,
            "batch": step.batch,
            "generators": generators.save(),
            "progress": asdict(learner.progress),
            "length": step.epoch.length,
            "windows": {window.name: _copied(window.state_dict()) for window in step.epoch.windows if window.count},
        }

    @hookimpl(reads=("*",))
    def step_end(self) -> None:
        """Drop the copies."""
        self._begin = None

    @hookimpl(reads=("*",))
    def step_cancelled(self) -> None:
        """Drop the copies."""
        self._begin = None

    def _check(self, step: Step) -> None:
        try:
            _, found = encoding.encode(step.batch, "batch")
            tensors.check(found, "batch")
        except StateError as error:
            raise StateError(
                f"ReplayBundle cannot save this batch ({step.epoch.where(step)}): {error}. The batch is "
                f"{describe(step.batch)}; make batches of tensors, numbers, strings, lists, tuples and dicts"
            ) from error
        if not self._tried:
            storage.probe(self.directory)
            self._tried = True
        self._seen = True

    def _write(self, learner: Learner, phase: Phase, error: Exception) -> Path:
        begin = self._begin
        assert begin is not None
        if any(
            sharded.is_sharded(p)
            for each in learner.optimizers.values()
            for g in each.param_groups
            for p in g["params"]
        ):
            raise StateError(
                f"rank {learner.world.rank} of {learner.world.size} holds a part of the parameters only: to have a "
                f"bundle written, run one process, or DDP"
            )
        failed = Buffers()
        failed.take(learner)
        if phase.training:  # elsewhere they do not change, and may be those of an average
            self._buffers.restore(learner)
        try:
            state = learner.state_dict(positions=False)
            updates = learner.progress.updates - begin["progress"]["updates"]
            state["progress"], state["generators"], state["fit"] = begin["progress"], begin["generators"], None
            state["epochs"] = [
                {"phase": phase.name, "steps": begin["index"], "data": None, "windows": begin["windows"], "stores": {}}
            ]
            state["replay"] = {
                "batch": begin["batch"],
                "length": begin["length"],
                "on_model": _device(begin["batch"]) == _model_device(learner),
                "error": type(error).__name__,
                "message": str(error),
                "updates": updates,
            }
            contents = bundle.Contents.of(learner, state)
            about = bundle.describe(learner, contents, "error", error=f"{type(error).__name__}: {error}")
            label = "replay" if learner.world.size == 1 else f"replay-rank{learner.world.rank}"  # no two of one name
            return storage.write(self.directory, contents.files(), about, label=label).path
        finally:
            if phase.training:
                failed.restore(learner)


class _Again:
    """Puts the batch and the generators in the place of the ones that the replay began with."""

    name = "!replay"
    volatile = ("*",)

    def __init__(self, state: dict[str, Any], device: torch.device | None) -> None:
        self.state, self.device = state, device

    @hookimpl(writes=("*",))
    def step_begin(self, step: Step) -> None:
        batch = self.state["replay"]["batch"]
        step.batch = batch if self.device is None else move(batch, self.device)
        generators.restore(self.state["generators"])


class _Done(Exception):
    """Leaves the epoch after the step, without the events of its end."""


def replay(
    path: str | Path, learner: Learner, *, debugger: bool = False, anomaly: bool = True, allow: Collection[str] = ()
) -> Step:
    """Load a bundle into a learner, and run its one step again: the error comes again.

    The learner must be made as for the failed run, its plugins included. Those that save checkpoints or bundles are
    removed from it first. The step comes without the events of a fit, and without the end of its epoch. An
    error that `StopOnNonFinite` found late, on an accelerator, does not come in its step; look with ``late=False``.
    The step of one of several processes is run again in a single process.

    Args:
        path: The directory that the note on the error names.
        learner: Its weights and plugins are overwritten; do not train it afterwards.
        debugger: Start ``pdb`` where the error was raised.
        anomaly: Run under ``torch.autograd.set_detect_anomaly``: an error in backward comes with the forward call that
            it belongs to, as a warning; after a `NonFiniteError` a note on it names the function whose backward first
            gave a nan. For that the step is run twice.
        allow: Plugins that may be missing, in the bundle or here.

    Returns:
        The step, if the error did not come.

    Raises:
        CheckpointError: There is no bundle at ``path``, or it is damaged.
        StateError: It does not fit the learner.
        WorldError: The learner trains with other processes.
    """
    if learner.world.size > 1:
        raise WorldError(
            f"replay: the learner is one of {learner.world.size} processes, and a bundle is a step of one of them: "
            f"start the script by itself, without torchrun"
        )
    manifest = storage.read_manifest(Path(path).absolute())
    state = bundle.read_state(manifest)
    if "replay" not in state:
        raise CheckpointError(f"{manifest.path} is a checkpoint, not a bundle of ReplayBundle")
    savers = [n for n, p in learner.plugins.items() if getattr(p, "provides", "") == "checkpoint"]
    for name in [*savers, *(n for n, p in learner.plugins.items() if isinstance(p, ReplayBundle))]:
        learner.remove(name)
    allow = (*allow, *savers)
    found = ""
    if anomaly and state["replay"]["error"] == "NonFiniteError":
        try:
            _run(learner, state, allow, anomaly=True, check_nan=True)
        except Exception as error:
            found = f"loopkit: anomaly detection: {error}" if "returned nan" in str(error) else ""
    try:
        return _run(learner, state, allow, anomaly=anomaly, check_nan=False)
    except Exception as error:
        if found:
            error.add_note(found)
        if count := state["replay"]["updates"]:
            error.add_note(
                f"loopkit: {count} updates came before the error; the bundle holds the parameters after them"
            )
        if debugger:
            pdb.post_mortem(error.__traceback__)
        raise


def _run(learner: Learner, state: dict[str, Any], allow: Collection[str], *, anomaly: bool, check_nan: bool) -> Step:
    learner.load_state_dict(state, allow=allow)
    again = _Again(state, _model_device(learner) if state["replay"]["on_model"] else None)
    learner.add(again)
    step: Step | None = None
    try:
        with (
            torch.autograd.set_detect_anomaly(anomaly, check_nan),
            learner.epoch(state["epochs"][0]["phase"], state["replay"]["length"]) as epoch,
        ):
            if not epoch.resumed:  # an epoch that does not train goes on from a saved place in a fit alone
                epoch.go_on_at(state["epochs"][0]["steps"])
                generators.restore(state["generators"])
            step = epoch.step(state["replay"]["batch"])
            raise _Done
    except _Done:
        pass
    finally:
        learner.remove(again.name)
        learner.forget()
    assert step is not None
    return step


def _copied(window: dict[str, Any]) -> dict[str, Any]:
    return {**window, "grads": [None if grad is None else grad.clone() for grad in window["grads"]]}


def _device(batch: Any) -> torch.device | None:
    found: list[torch.device] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.device)
        return tensor

    map_tensors(batch, note)
    return found[0] if found else None


def _model_device(learner: Learner) -> torch.device | None:
    params: Iterator[Tensor] = (p for model in learner.models.values() for p in model.parameters())
    return next((p.device for p in params), None)
