"""Plugins that each break one promise, with the words that the kit must say of them.

They were written from the documentation alone, as an author's mistakes are made, before the kit was asked. A break
stays here when it is found: it is what the kit promises to find.
"""

import atexit
import contextlib
import gc
import io
import locale
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from loopkit import TrainingPhase, hookimpl


@dataclass
class Break:
    """A plugin that breaks `check`, and what must be said of it."""

    name: str
    make: Callable[[], Any]
    check: str
    words: tuple[str, ...]
    tidy: Callable[[], None] = field(default=lambda: None)

    def __repr__(self) -> str:
        return self.name


BREAKS: list[Break] = []
FOLDERS = tempfile.TemporaryDirectory()


def breaks(check: str, *words: str, tidy: Callable[[], None] = lambda: None) -> Callable[[type], type]:
    def add(cls: type) -> type:
        BREAKS.append(Break(cls.__name__, cls, check, words, tidy))
        return cls

    return add


# -- what is read and not declared -------------------------------------------------------------------------------------


@breaks("declared_access", "reads 'batch'", 'reads=("batch",)')
class ReadsBatch:
    @hookimpl
    def step_begin(self, step):
        self.size = len(step.batch)


@breaks("declared_access", "reads 'inputs'", 'reads=("inputs",)')
class ReadsInputs:
    @hookimpl(phase=TrainingPhase)
    def loss_begin(self, step):
        self.kind = type(step.inputs)


@breaks("declared_access", "reads 'targets'", 'reads=("targets",)')
class ReadsTargets:
    @hookimpl(phase=TrainingPhase)
    def loss_begin(self, step):
        self.kind = type(step.targets)


@breaks("declared_access", "reads 'outputs'", 'reads=("outputs",)')
class ReadsOutputs:
    @hookimpl(phase=TrainingPhase)
    def loss_begin(self, step):
        self.kind = type(step.outputs)


@breaks("declared_access", "reads 'loss'", 'reads=("loss",)')
class ReadsLoss:
    @hookimpl(phase=TrainingPhase)
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.loss = step.loss.detach()


@breaks("declared_access", "reads 'grads'", 'reads=("grads",)')
class ReadsGrads:
    @hookimpl
    def update_begin(self, step):
        self.norm = nn.utils.get_total_norm([p.grad for p in step.params if p.grad is not None])


@breaks("declared_access", "reads 'params'", 'reads=("params",)')
class ReadsParams:
    @hookimpl
    def update_end(self, step):
        self.norm = nn.utils.get_total_norm([p.detach() for p in step.params])


@breaks("declared_access", "reads 'params'", 'reads=("params",)')
class ReadsParamsOfTheModel:
    @hookimpl
    def phase_end(self, learner):
        self.norm = sum(p.detach().square().sum() for m in learner.models.values() for p in m.parameters())


@breaks("declared_access", "reads 'buffers'", 'reads=("buffers",)')
class ReadsBuffers:
    @hookimpl
    def phase_end(self, learner):
        self.sums = [b.sum() for m in learner.models.values() for b in m.buffers()]


@breaks("declared_access", "reads 'optimizer", 'reads=("optimizer')
class ReadsLr:
    @hookimpl
    def update_end(self, step):
        self.lr = step.optimizer.param_groups[0]["lr"]


@breaks("declared_access", "reads 'metrics", 'reads=("metrics')
class ReadsMetrics:
    @hookimpl
    def phase_end(self, learner):
        self.loss = learner.metrics.get("val/loss")


@breaks("declared_access", "reads 'metrics", 'reads=("metrics')
class ReadsAllMetrics:
    @hookimpl
    def phase_end(self, learner):
        self.all = dict(learner.metrics)


# -- what is changed and not declared ----------------------------------------------------------------------------------


@breaks("declared_access", "'metrics", "mine", 'writes=("metrics')
class WritesMetrics:
    @hookimpl
    def epoch_end(self, learner, phase):
        learner.metrics[f"{phase.name}/mine"] = 1.0


@breaks("declared_access", "'grads'", 'updates=("grads",)')
class ChangesGrads:
    @hookimpl
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad.mul_(0.5)


@breaks("declared_access", "'grads'", 'updates=("grads",)')
class ChangesGradsByData:
    @hookimpl
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad.data.mul_(0.5)


@breaks("declared_access", "'grads'", 'updates=("grads",)')
class ReplacesGrads:
    @hookimpl(reads=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad = p.grad * 0.5


@breaks("declared_access", "'params'", 'updates=("params",)')
class ChangesParams:
    @hookimpl
    def update_end(self, step):
        with torch.no_grad():
            for p in step.params:
                p.mul_(0.99)


@breaks("declared_access", "'params'", 'updates=("params",)')
class ChangesParamsByData:
    @hookimpl(reads=("params",))
    def update_end(self, step):
        for p in step.params:
            p.data.mul_(0.99)


@breaks("declared_access", "'buffers'", 'updates=("buffers",)')
class ChangesBuffers:
    @hookimpl
    def step_end(self, learner):
        for model in learner.models.values():
            for buffer in model.buffers():
                buffer.fill_(2)


@breaks("declared_access", "'optimizer", 'updates=("optimizer')
class ChangesLr:
    @hookimpl
    def update_end(self, step):
        for group in step.optimizer.param_groups:
            group["lr"] *= 0.9


@breaks("declared_access", "'optimizer", 'updates=("optimizer')
class ChangesMomentum:
    @hookimpl
    def update_end(self, step):
        for values in step.optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(0.5)


@breaks("declared_access", "'targets'", 'updates=("targets",)')
class ReplacesTargets:
    @hookimpl(phase=TrainingPhase, reads=("targets",))
    def loss_begin(self, step):
        step.targets = step.targets.clone()


@breaks("declared_access", "'outputs'", 'updates=("outputs",)')
class ReplacesOutputs:
    @hookimpl(phase=TrainingPhase, reads=("outputs",))
    def loss_begin(self, step):
        step.outputs = step.outputs * 2


@breaks("declared_access", "'batch'", 'updates=("batch",)')
class ReplacesBatch:
    @hookimpl(reads=("batch",))
    def step_begin(self, step):
        step.batch = tuple(step.batch)


@breaks("declared_access", "'batch'", 'updates=("batch",)')
class MovesAnotherBatch:
    @hookimpl
    def move_batch(self, batch):
        inputs, targets = batch
        return inputs * 2, targets


@breaks("declared_access", "'step.extra'", "step.extra")
class PutsOnStep:
    @hookimpl
    def step_begin(self, step):
        step.extra = 1


@breaks("declared_access", "'rng'", 'updates=("rng",)')
class DrawsTorch:
    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


@breaks("declared_access", "'rng'", 'updates=("rng",)')
class DrawsPython:
    @hookimpl
    def step_begin(self):
        self.value = random.random()


@breaks("declared_access", "'rng'", 'updates=("rng",)')
class DrawsNumpy:
    @hookimpl
    def step_begin(self):
        self.value = np.random.rand()


@breaks("declared_access", "'trainable'", 'updates=("trainable",)')
class FreezesQuietly:
    @hookimpl
    def epoch_begin(self, learner):
        for model in learner.models.values():
            next(model.parameters()).requires_grad_(False)


# -- the loader's own tensors ------------------------------------------------------------------------------------------


@breaks("loader_kept", "in place", "the loader's", "step_begin")
class ScalesTheLoadersInputs:
    """Says that it changes the batch, but what it changes is the data set."""

    @hookimpl(phase=TrainingPhase, updates=("batch",))
    def step_begin(self, step):
        step.batch[0].mul_(1.01)


@breaks("loader_kept", "in place", "the loader's", "move_batch")
class NormalizesTheLoadersInputs:
    @hookimpl(phase=TrainingPhase, updates=("batch",))
    def move_batch(self, batch):
        batch[0].sub_(batch[0].mean())
        return batch


@breaks("loader_kept", "in place", "the loader's", "loss_begin")
class ClampsTheLoadersTargets:
    @hookimpl(phase=TrainingPhase, updates=("targets",))
    def loss_begin(self, step):
        step.targets.clamp_(0, 1)


# -- waiting for the device --------------------------------------------------------------------------------------------


class _AtStepEnd:
    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.look(step.loss.detach())


@breaks("no_device_sync", "item()", "breaks.py", "epoch_end")
class CallsItem(_AtStepEnd):
    def look(self, loss):
        self.value = loss.item()


@breaks("no_device_sync", "waits for the device", "breaks.py")
class CallsFloat(_AtStepEnd):
    def look(self, loss):
        self.value = float(loss)


@breaks("no_device_sync", "waits for the device", "breaks.py")
class Compares(_AtStepEnd):
    def look(self, loss):
        if loss > 1:
            self.value = loss


@breaks("no_device_sync", "waits for the device", "breaks.py")
class Formats(_AtStepEnd):
    def look(self, loss):
        self.value = f"{loss:.3f}"


@breaks("no_device_sync", "waits for the device", "breaks.py")
class CopiesToHost(_AtStepEnd):
    def look(self, loss):
        self.value = loss.cpu().numpy()


@breaks("no_device_sync", "waits for the device", "breaks.py")
class CallsTolist(_AtStepEnd):
    def look(self, loss):
        self.value = loss.tolist()


@breaks("no_device_sync", "waits for the device", "breaks.py")
class SelectsByMask(_AtStepEnd):
    def look(self, loss):
        losses = loss.reshape(1)
        self.value = losses[losses > 0]


@breaks("no_device_sync", "waits for the device", "breaks.py")
class AsksAllFinite(_AtStepEnd):
    def look(self, loss):
        if not torch.isfinite(loss).all():
            self.value = loss


@breaks("no_device_sync", "waits for the device", "breaks.py")
class SkipsByNorm:
    @hookimpl(reads=("grads",))
    def update_begin(self, step):
        if nn.utils.get_total_norm([p.grad for p in step.params if p.grad is not None]) > 1e9:
            step.skip_update("large gradient")


# -- what is kept ------------------------------------------------------------------------------------------------------


@breaks("no_graph_kept", "graph", "detach()")
class KeepsLoss:
    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.loss = step.loss


@breaks("no_graph_kept", "graph", "detach()")
class KeepsOutputs:
    @hookimpl(phase=TrainingPhase, reads=("outputs",))
    def step_end(self, step):
        self.outputs = getattr(step, "outputs", None)


@breaks("no_graph_kept", "graph", "detach()")
class KeepsStep:
    @hookimpl
    def step_end(self, step):
        self.step = step


@breaks("no_graph_kept", "graph", "detach()")
class SumsLosses:
    """The mean of an epoch, with the graphs of all its steps behind it."""

    @hookimpl(phase=TrainingPhase)
    def epoch_begin(self, epoch):
        self.total = 0.0

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.total = self.total + step.loss


@breaks("no_graph_kept", "graph", "detach()")
class KeepsGraphInStore:
    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, epoch, step):
        if hasattr(step, "loss"):
            epoch.keep(self)["loss"] = step.loss


@breaks("bounded_memory", "more with each step")
class KeepsEveryLoss:
    losses: list[torch.Tensor]

    def __init__(self):
        self.losses = []

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.losses.append(step.loss.detach())


_seen: list[Any] = []


@breaks("learner_freed", "learner", tidy=_seen.clear)
class KeepsLearner:
    @hookimpl
    def fit_begin(self, learner):
        _seen.append(learner)


# -- state -------------------------------------------------------------------------------------------------------------


@breaks("exact_resume", "state_dict")
class ForgetsItsCount:
    """Its noise is smaller with each update, and large again after a resume."""

    def __init__(self):
        self.count = 0

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        self.count += 1
        for p in step.params:
            if p.grad is not None:
                p.grad.mul_(1 / self.count)


@breaks("exact_resume", "state_dict")
class ForgetsItsMeans:
    def __init__(self):
        self.means: dict[Any, torch.Tensor] = {}

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        for i, p in enumerate(step.params):
            if p.grad is not None:
                mean = self.means.setdefault((step.optimizer_name, i), torch.zeros_like(p))
                mean.lerp_(p.grad, 0.5)
                p.grad.copy_(mean)


class _Mean:
    def __init__(self):
        self.mean = torch.zeros(())

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.mean.lerp_(step.loss.detach().float().cpu(), 0.1)


@breaks("state_round_trip", "state_dict", "clone")
class ReturnsItsOwnTensor(_Mean):
    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"].clone()


@breaks("state_round_trip", "load_state_dict", "clone")
class KeepsTheLoadedTensor(_Mean):
    def state_dict(self):
        return {"mean": self.mean.clone()}

    def load_state_dict(self, state):
        self.mean = state["mean"]


@breaks("state_round_trip", "load_state_dict")
class LoadsNothing(_Mean):
    def state_dict(self):
        return {"mean": self.mean.clone()}

    def load_state_dict(self, state):
        pass


@breaks("state_round_trip", "state_dict", "set")
class SavesASet:
    def __init__(self):
        self.seen: set[str] = set()

    @hookimpl
    def epoch_begin(self, phase):
        self.seen.add(phase.name)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = set(state["seen"])


@breaks("state_round_trip", "load_state_dict")
class HasHalfAState(_Mean):
    def state_dict(self):
        return {"mean": self.mean.clone()}


@breaks("exact_resume", "metrics", "epoch.store")
class ForgetsTheEpoch:
    """The sum of an epoch is an attribute: what came before a resume in mid-epoch is gone."""

    def __init__(self):
        self.total = torch.zeros(())

    @hookimpl(phase=TrainingPhase)
    def epoch_begin(self):
        self.total = torch.zeros(())

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.total += step.loss.detach().cpu()

    @hookimpl(phase=TrainingPhase, writes=("metrics.*/sum",))
    def epoch_end(self, learner, phase):
        learner.metrics[f"{phase.name}/sum"] = self.total.item()


@breaks("exact_resume", "metrics", "epoch.resumed")
class ClearsWhatWasLoaded:
    @hookimpl(phase=TrainingPhase)
    def epoch_begin(self, epoch):
        epoch.store(self)["total"] = torch.zeros(())

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, epoch, step):
        if hasattr(step, "loss"):
            epoch.store(self)["total"] += step.loss.detach().cpu()

    @hookimpl(phase=TrainingPhase, writes=("metrics.*/sum",))
    def epoch_end(self, learner, phase, epoch):
        learner.metrics[f"{phase.name}/sum"] = epoch.store(self)["total"].item()


@breaks("exact_resume", "state_dict")
class ForgetsItsGenerator:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                noise = torch.randn(p.shape, generator=self.generator)
                p.grad.add_(noise.to(p.grad), alpha=0.01)


@breaks("metrics_reset", "metrics", "epoch.store")
class NeverResets:
    """A sum that goes on from epoch to epoch, and from fit to fit."""

    def __init__(self):
        self.total = 0

    @hookimpl(phase=TrainingPhase)
    def step_end(self, step):
        self.total += step.samples

    @hookimpl(phase=TrainingPhase, writes=("metrics.*/samples",))
    def epoch_end(self, learner, phase):
        learner.metrics[f"{phase.name}/samples"] = self.total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@breaks("options_kept", "rate", "option")
class SpendsItsOption:
    def __init__(self, rate=0.5):
        self.rate = rate

    @hookimpl(phase=TrainingPhase)
    def phase_end(self):
        self.rate /= 2

    def state_dict(self):
        return {"rate": self.rate}

    def load_state_dict(self, state):
        self.rate = state["rate"]


# -- weights that stay moved -------------------------------------------------------------------------------------------


class _Sharpness:
    """Weights are moved for the forward, and moved back after backward."""

    def __init__(self):
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(self, learner):
        with torch.no_grad():
            for model in learner.models.values():
                for p in model.parameters():
                    self.kept.append((p, p.clone()))
                    p.mul_(1.01)

    def back(self):
        with torch.no_grad():
            for p, own in self.kept:
                p.copy_(own)
        self.kept.clear()


@breaks("cancelled_step", "params", "moved", "step_cancelled")
class MovedAfterACancel(_Sharpness):
    @hookimpl(phase=TrainingPhase, updates=("params",))
    def step_begin(self, learner):
        self.move(learner)

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def backward_end(self):
        self.back()


@breaks("error_elsewhere", "params", "moved", "step_context")
class MovedAfterAnError(_Sharpness):
    @hookimpl(phase=TrainingPhase, updates=("params",))
    def step_begin(self, learner):
        self.move(learner)

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def backward_end(self):
        self.back()

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def step_cancelled(self):
        self.back()


@breaks("error_elsewhere", "params", "moved")
class ContextWithoutFinally(_Sharpness):
    @hookimpl(phase=TrainingPhase, updates=("params",))
    def step_context(self, learner):
        return self.moved(learner)

    @contextlib.contextmanager
    def moved(self, learner):
        self.move(learner)
        yield
        self.back()


@breaks("cancelled_step", "params", "moved")
class BuffersMovedAfterACancel:
    """Says params, but moves a buffer too, and leaves it there when a step is cancelled."""

    def __init__(self):
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @hookimpl(phase=TrainingPhase, updates=("params", "buffers"))
    def step_begin(self, learner):
        with torch.no_grad():
            for model in learner.models.values():
                for t in [*model.parameters(), *model.buffers()]:
                    self.kept.append((t, t.clone()))
                    t.mul_(2)

    @hookimpl(phase=TrainingPhase, updates=("params", "buffers"))
    def backward_end(self):
        with torch.no_grad():
            for t, own in self.kept:
                t.copy_(own)
        self.kept.clear()


# -- what is left behind -----------------------------------------------------------------------------------------------

_threads: list[threading.Event] = []


def _end_threads() -> None:
    while _threads:
        _threads.pop().set()


@breaks("fit_twice", "thread", tidy=_end_threads)
class LeavesAThread:
    @hookimpl
    def fit_begin(self):
        end = threading.Event()
        _threads.append(end)
        threading.Thread(target=end.wait, args=(60,), name="watcher", daemon=True).start()


@breaks("fit_twice", "fit_end", "second")
class BlocksAtTheEnd:
    @hookimpl
    def fit_end(self):
        time.sleep(1.2)


@breaks("fit_twice", "hook")
class LeavesAForwardHook:
    @hookimpl
    def fit_begin(self, learner):
        for model in learner.models.values():
            model.register_forward_hook(_nothing)


def _nothing(*args: Any) -> None:
    return None


@breaks("fit_twice", "hook")
class LeavesAnOptimizerHook:
    @hookimpl
    def fit_begin(self, learner):
        for optimizer in learner.optimizers.values():
            optimizer.register_step_post_hook(_nothing)


@breaks("fit_twice", "hook")
class LeavesAGradientHook:
    @hookimpl
    def fit_begin(self, learner):
        for model in learner.models.values():
            next(model.parameters()).register_hook(_nothing)


@breaks("fit_twice", "SIGUSR2", tidy=lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL) and None)
class LeavesASignalHandler:
    @hookimpl
    def fit_begin(self):
        signal.signal(signal.SIGUSR2, _nothing)


_files: list[Any] = []


def _close_files() -> None:
    while _files:
        _files.pop().close()


@breaks("fit_twice", "file", tidy=_close_files)
class LeavesAFile:
    @hookimpl
    def fit_begin(self):
        _files.append(tempfile.TemporaryFile())  # noqa: SIM115 - that is the mistake


@breaks("fit_twice", "socket", tidy=_close_files)
class LeavesASocket:
    @hookimpl
    def fit_begin(self):
        _files.append(socket.socket())


@breaks("fit_twice", "LOOPKIT_LEFT", tidy=lambda: os.environ.pop("LOOPKIT_LEFT", None) and None)
class LeavesAVariable:
    @hookimpl
    def fit_begin(self):
        os.environ["LOOPKIT_LEFT"] = os.environ.get("LOOPKIT_LEFT", "") + "1"


def _tidy_path() -> None:
    sys.path[:] = [p for p in sys.path if p != "/nowhere"]


@breaks("fit_twice", "sys.path", tidy=_tidy_path)
class LeavesAPath:
    @hookimpl
    def fit_begin(self):
        sys.path.append("/nowhere")


@breaks("fit_twice", "warnings")
class LeavesAFilter:
    @hookimpl
    def fit_begin(self):
        warnings.simplefilter("ignore", ResourceWarning)


@breaks("fit_twice", "locale", tidy=lambda: locale.setlocale(locale.LC_NUMERIC, "C") and None)
class LeavesALocale:
    @hookimpl
    def fit_begin(self):
        now = locale.setlocale(locale.LC_NUMERIC)
        locale.setlocale(locale.LC_NUMERIC, "C.UTF-8" if now == "C" else "C")


_save = torch.save


def _put_save_back() -> None:
    torch.save = _save


@breaks("fit_twice", "torch.save", tidy=_put_save_back)
class LeavesAPatch:
    @hookimpl
    def fit_begin(self):
        own = torch.save
        torch.save = lambda *args, **options: own(*args, **options)


@breaks("fit_twice", "default", tidy=lambda: torch.set_default_dtype(torch.float32))
class LeavesADtype:
    @hookimpl
    def fit_end(self):
        torch.set_default_dtype(torch.float64)


@breaks("fit_twice", "grad", tidy=lambda: torch.set_grad_enabled(True) and None)
class LeavesGradOff:
    @hookimpl
    def fit_end(self):
        torch.set_grad_enabled(False)


@breaks("fit_twice", "autocast", tidy=lambda: torch.set_autocast_enabled("cpu", False))
class LeavesAutocast:
    @hookimpl
    def fit_end(self):
        torch.set_autocast_enabled("cpu", True)


@breaks("fit_twice", "mode")
class LeavesEvalMode:
    @hookimpl(updates=("model",))
    def phase_end(self, learner):
        for model in learner.models.values():
            model.eval()


_processes: list[Any] = []


def _end_processes() -> None:
    while _processes:
        process = _processes.pop()
        process.kill()
        process.wait()


@breaks("fit_twice", "process", tidy=_end_processes)
class LeavesAProcess:
    @hookimpl
    def fit_begin(self):
        _processes.append(subprocess.Popen(["sleep", "60"]))


_handlers: list[logging.Handler] = []


def _remove_handlers() -> None:
    while _handlers:
        logging.getLogger("loopkit").removeHandler(_handlers.pop())


@breaks("fit_twice", "handler", "loopkit", tidy=_remove_handlers)
class LeavesALogHandler:
    @hookimpl
    def fit_begin(self):
        _handlers.append(logging.NullHandler())
        logging.getLogger("loopkit").addHandler(_handlers[-1])


@breaks("fit_twice", "atexit", tidy=lambda: atexit.unregister(_nothing))
class LeavesAnExitFunction:
    @hookimpl
    def fit_begin(self):
        atexit.register(_nothing)


_cwd = os.getcwd()


@breaks("fit_twice", "directory", tidy=lambda: os.chdir(_cwd))
class LeavesADirectory:
    @hookimpl
    def fit_begin(self):
        os.chdir(tempfile.gettempdir() if os.getcwd() == _cwd else _cwd)


@breaks("fit_twice", "garbage collector", tidy=gc.enable)
class LeavesCollectorOff:
    @hookimpl
    def fit_end(self):
        gc.disable()


_stdout = sys.stdout


class _Tee:
    def __init__(self, under: Any):
        self.under = under

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)


def _put_stdout_back() -> None:
    while isinstance(sys.stdout, _Tee):
        sys.stdout = sys.stdout.under


@breaks("fit_twice", "sys.stdout", tidy=_put_stdout_back)
class LeavesATee:
    @hookimpl
    def fit_begin(self):
        sys.stdout = _Tee(sys.stdout)


@breaks("fit_twice", "second fit")
class WorksOnce:
    def __init__(self):
        self.file = io.BytesIO()

    @hookimpl
    def step_end(self):
        self.file.write(b"step\n")

    @hookimpl
    def fit_end(self):
        self.file.close()


# -- what it takes for granted -----------------------------------------------------------------------------------------


@breaks("unknown_phases", "loss")
class WantsALoss:
    @hookimpl(reads=("loss",))
    def step_end(self, step):
        self.loss = step.loss.detach()


@breaks("unknown_phases", "model")
class WantsOneModel:
    @hookimpl(reads=("params",))
    def epoch_end(self, learner):
        self.count = sum(p.numel() for p in learner.model.parameters())


@breaks("unknown_phases", "without a length")
class WantsALength:
    @hookimpl
    def step_end(self, epoch, step):
        self.share = (step.index + 1) / epoch.length


@breaks("unknown_phases", "grad")
class WantsEveryGradient:
    @hookimpl(reads=("grads",))
    def backward_end(self, learner):
        self.norms = [p.grad.norm() for m in learner.models.values() for p in m.parameters()]


@breaks("cancelled_step", "step_begin", "step_cancelled")
class CountsOnTheEnd:
    """Its step_end puts away what step_begin took, and step_begin wants it put away."""

    def __init__(self):
        self.open = False

    @hookimpl
    def step_begin(self):
        assert not self.open, "step_begin came twice without a step_end"
        self.open = True

    @hookimpl
    def step_end(self):
        self.open = False


@breaks("any_list_order", "order")
class CountsItsKind:
    """Its place among the others depends on how many like it were made before."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.name = f"counts_its_kind_{'a' if self.made % 2 else 'b'}"

    @hookimpl(phase=TrainingPhase, updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad.mul_(0.5)


@breaks("no_undeclared_effect", "other parameters")
class ChangesByAHook:
    """Halves gradients by hooks on the parameters, and declares nothing."""

    def __init__(self):
        self.handles: list[Any] = []

    @hookimpl
    def fit_begin(self, learner):
        for model in learner.models.values():
            for p in model.parameters():
                self.handles.append(p.register_hook(lambda grad: grad / 2))

    @hookimpl
    def fit_end(self):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


# -- a second list, from the documentation alone -----------------------------------------------------------------------


@breaks("declared_access", "reads 'optimizer", 'reads=("optimizer')
class LogsTheRateAtTheEnd:
    @hookimpl(writes=("metrics.*/rate",))
    def epoch_end(self, learner, phase):
        (optimizer, *_) = learner.optimizers.values()
        learner.metrics[f"{phase.name}/rate"] = optimizer.param_groups[0]["lr"]


@breaks("declared_access", "'loss'", 'updates=("loss",)')
class AddsAPenaltyQuietly:
    @hookimpl(phase="training", reads=("loss",))
    def backward_begin(self, step):
        step.loss = step.loss * 1.1


@breaks("no_device_sync", "waits for the device", "breaks.py")
class StopsByTheLoss:
    """Decides in each step whether the run is over."""

    @hookimpl(phase="training", reads=("loss",))
    def step_end(self, learner, step):
        if hasattr(step, "loss") and float(step.loss.detach()) > 1e9:
            learner.stop("diverged", by="stops_by_the_loss")


@breaks("loader_kept", "in place", "the loader's", "forward_begin")
class MixesInPlace:
    """Says that it changes inputs, but changes the loader's own tensor."""

    @hookimpl(phase="training", updates=("inputs",))
    def forward_begin(self, step):
        step.inputs.mul_(0.5)


@breaks("exact_resume", "epoch.store", "state_dict")
class DecaysByKeptSteps:
    """Counts in epoch.keep, which is not saved, what changes the gradients."""

    @hookimpl(phase="training", updates=("grads",))
    def update_begin(self, epoch, step):
        kept = epoch.keep(self)
        kept["count"] = kept.get("count", 0) + 1
        for p in step.params:
            if p.grad is not None:
                p.grad.mul_(1 / kept["count"])


@breaks("unknown_phases", "two models", "AttributeError")
class LooksForAHead:
    """Freezes what only its author's model has."""

    @hookimpl(updates=("trainable",))
    def epoch_begin(self, learner):
        learner.model.train()
        for p in learner.model[-1].parameters():
            p.requires_grad_(True)


@breaks("fit_twice", "hook")
class LeavesATensorHook:
    """A hook on each parameter that nobody removes."""

    @hookimpl
    def epoch_begin(self, learner):
        for model in learner.models.values():
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(_nothing)


class _MovesByAdding:
    """Moves weights by adding, and back by subtracting, but only after a backward."""

    far = 0.01

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def step_begin(self, learner):
        self.moved = [p for m in learner.models.values() for p in m.parameters()]
        with torch.no_grad():
            for p in self.moved:
                p.add_(self.far)

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def backward_end(self):
        with torch.no_grad():
            for p in self.moved:
                p.sub_(self.far)


@breaks("cancelled_step", "weights are left moved", "params[")
class AddsAndSubtractsAfterABackward(_MovesByAdding):
    pass


@breaks("error_elsewhere", "weights are left moved", "params[")
class AddsLittle(_MovesByAdding):
    far = 1e-5


@breaks("cancelled_step", "weights are left moved", "params[")
class AddsMuch(_MovesByAdding):
    far = 30.0


# -- runs that are no plain fit ----------------------------------------------------------------------------------------


@breaks("validated_within", "metrics train/mean", "Epochs nest")
class ForgetsInNestedEpochs:
    """A mean over the epoch, which an epoch within it sets to zero."""

    @hookimpl
    def epoch_begin(self):
        self.total = self.count = 0

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss"):
            self.total, self.count = self.total + step.loss.detach(), self.count + 1

    @hookimpl(writes=("metrics.*/mean",))
    def epoch_end(self, learner, phase):
        if self.count:
            learner.metrics[f"{phase.name}/mean"] = (self.total / self.count).item()


@breaks("validated_within", "weights[", "Epochs nest")
class WarmsUpInEachEpoch:
    """Scales gradients by the steps since an epoch began, of any phase."""

    @hookimpl
    def epoch_begin(self):
        self.steps = 0

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        self.steps += 1
        for p in step.params:
            if p.grad is not None:
                p.grad.mul_(min(1.0, self.steps / 4))


@breaks("validated_within", "the mode (training)", "model")
class PutsBackOneMode:
    """Remembers one mode for epochs that nest: the outer one gets that of the inner one."""

    @hookimpl(updates=("model",))
    def epoch_begin(self, learner):
        self.modes = [(m, m.training) for each in learner.models.values() for m in each.modules()]

    @hookimpl(updates=("model",))
    def fit_end(self):
        for module, training in self.modes:
            module.training = training


@breaks("validated_within", "AttributeError")
class DropsItsTotals:
    """Deletes at the end of each epoch what the one around it needs."""

    @hookimpl
    def epoch_begin(self):
        self.steps = 0

    @hookimpl(phase="training")
    def step_end(self):
        self.steps += 1

    @hookimpl
    def epoch_end(self):
        del self.steps


@breaks("paused_in_process", "a second fit of the same learner")
class LetsGoOfItsCount:
    """What decides the rate is set to zero when a fit ends, and a pause ends one."""

    def __init__(self):
        self.steps = 0

    @hookimpl(updates=("optimizer.lr",))
    def update_begin(self, step):
        self.steps += 1
        step.optimizer.param_groups[0]["lr"] = 0.1 / self.steps

    @hookimpl
    def fit_end(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@breaks("paused_in_process", "a second fit of the same learner")
class ClosesItsWindow:
    """Counts the batches of a window on itself, and a fit that ends empties it."""

    def __init__(self):
        self.seen = 0

    @hookimpl(phase="training", updates=("loss",))
    def backward_begin(self, step):
        self.seen += 1
        step.loss = step.loss * self.seen

    @hookimpl
    def update_end(self):
        self.seen = 0

    @hookimpl
    def fit_end(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@breaks("paused_in_process", "AttributeError")
class DropsWhatAnEpochNeeds:
    """Makes in epoch_begin, unless it goes on, what fit_end deletes."""

    @hookimpl
    def epoch_begin(self, phase, epoch):
        if phase.training and not epoch.resumed:
            self.scale = 0.5

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad.mul_(self.scale)

    @hookimpl
    def fit_end(self):
        del self.scale


@breaks("evaluated_between", "models.", "learner.current is None")
class HalvesAfterAnyValidation:
    """Halves the rate at each val/loss that is not the best, also in learner.evaluate."""

    best = float("inf")
    owns = ("optimizer.lr",)

    @hookimpl(phase="val", reads=("loss",), updates=("optimizer.lr",))
    def epoch_end(self, learner):
        for optimizer in learner.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] /= 2


@breaks("evaluated_between", "models.", "learner.current is None")
class DecaysInAnyEpoch:
    @hookimpl(updates=("params",))
    def phase_end(self, learner):
        with torch.no_grad():
            for model in learner.models.values():
                for p in model.parameters():
                    p.mul_(0.99)


@breaks("evaluated_between", "between two fits, an evaluation or a prediction raised", "AttributeError")
class NeedsItsFit:
    """Makes in a fit what an evaluation needs, and deletes it with it."""

    @hookimpl
    def fit_begin(self):
        self.count = 0

    @hookimpl
    def step_end(self):
        self.count += 1

    @hookimpl
    def fit_end(self):
        del self.count


class _Average:
    """An average that forgets one of its four parts."""

    name = "shadow"
    provides = "average"
    owns = ("weights.val",)

    def __init__(self):
        self.shadow = {}

    @hookimpl(reads=("params",))
    def update_end(self, learner):
        for name, p in learner.model.named_parameters():
            self.shadow.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)

    @hookimpl(phase="val", updates=("params",))
    def epoch_context(self, learner):
        return None if learner.models.weights.by or not self.shadow else self.put(learner)

    def put(self, learner):
        def swap():
            for name, p in learner.model.named_parameters():
                p.data, self.shadow[name] = self.shadow[name], p.data

        return learner.models.weights.replaced(swap, swap, by=self.name)

    def averaged(self, learner):
        return self.put(learner)

    def state_dict(self):
        return {"shadow": {name: tensor.clone() for name, tensor in self.shadow.items()}}

    def load_state_dict(self, state):
        self.shadow = {name: tensor.clone() for name, tensor in state["shadow"].items()}


@breaks("measured_weights", "after load_best into a learner with", "all of the run")
class AverageThatIsNotSaved(_Average):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@breaks("measured_weights", "val/loss was", "learner with the plugin")
class AverageOfFitsOnly(_Average):
    """Stands in the weights' place in the validations of fits, and not in learner.evaluate."""

    @hookimpl(phase="val", updates=("params",))
    def epoch_context(self, learner):
        return self.put(learner) if self.shadow and learner.current is not None else None


@breaks("measured_weights", "loading it by load_best", "KeyError")
class AverageOfAnotherForm(_Average):
    def load_state_dict(self, state):
        self.shadow = dict(state["average"])


@breaks("under_autocast", "beside MixedPrecision('bfloat16')", "dtype")
class AveragesOutputs:
    """A running mean of the outputs, in float32."""

    mean = None

    @hookimpl(phase="training", reads=("outputs",))
    def step_end(self, step):
        if hasattr(step, "outputs"):
            mean = step.outputs.detach().mean(0)
            self.mean = torch.zeros(mean.shape) if self.mean is None else self.mean
            self.mean.lerp_(mean, 0.1)


@breaks("under_autocast", "beside MixedPrecision('bfloat16'), after the fit", "the number of hooks")
class CastsOutputsBack:
    """A hook on the model, once outputs are of a lower precision, that nobody removes."""

    done = False

    @hookimpl(phase="training", reads=("outputs",))
    def step_end(self, learner, step):
        if not self.done and hasattr(step, "outputs") and step.outputs.dtype == torch.bfloat16:
            self.done = True
            learner.model.register_forward_hook(_nothing)


@breaks("under_autocast", "beside MixedPrecision('bfloat16')", "TypeError")
class ReadsNumPy:
    """Turns outputs into NumPy's, which has no bfloat16."""

    syncs = True

    @hookimpl(reads=("outputs",))
    def step_end(self, step):
        if hasattr(step, "outputs"):
            self.last = step.outputs.detach().numpy()


@breaks("nested_names", "'train/loss/step' is logged beside 'train/loss'", "TypeError")
class LogsInATree:
    """Makes folders of the parts of a name."""

    def __init__(self):
        self.tree = {}

    @hookimpl
    def log_value(self, record):
        *folders, leaf = record.name.split("/")
        tree = self.tree
        for folder in folders:
            tree = tree.setdefault(folder, {})
        tree[leaf] = len(folders)


@breaks("nested_names", "'train/loss/step' is logged beside 'train/loss'", "IsADirectoryError")
class LogsInFolders:
    """A file for each name, in folders."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(dir=FOLDERS.name)

    @hookimpl
    def log_value(self, record):
        path = os.path.join(self.folder, record.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a") as file:
            file.write("x")


@breaks("nested_names", "'train/loss/step' is logged beside 'train/loss'", "refused")
class RefusesNamesOfFolders:
    def __init__(self):
        self.folders = set()

    @hookimpl
    def log_value(self, record):
        self.folders.add(record.name.rpartition("/")[0])
        if record.name in self.folders:
            raise ValueError("refused: it is a folder")


# -- the data of a phase -----------------------------------------------------------------------------------------------


class _Served:
    """Batches, one after the other."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(self.data)


@breaks("data_wrapped", "another object", "return it again")
class WrapsAnew:
    @hookimpl(updates=("data",))
    def setup_data(self, data):
        return data if isinstance(data, _Served) else _Served(data)


class _Wraps:
    """Wraps each loader once."""

    wrapper = _Served

    def __init__(self):
        self.known = {}

    @hookimpl(updates=("data",))
    def setup_data(self, data):
        if isinstance(data, self.wrapper):
            return data
        if id(data) not in self.known:
            self.known[id(data)] = self.wrapper(data)
        return self.known[id(data)]


@breaks("data_wrapped", "wraps _Served", "again")
class WrapsItsOwn(_Wraps):
    @hookimpl(updates=("data",))
    def setup_data(self, data):
        return self.known.setdefault(id(data), _Served(data))


class _WithoutTheLast(_Served):
    def __iter__(self):
        return iter(list(self.data)[:-1])


@breaks("data_wrapped", "gives 3 batches", "len() is 4")
class LiesOnItsLength(_Wraps):
    wrapper = _WithoutTheLast


class _Once(_Served):
    def __init__(self, data):
        super().__init__(data)
        self.batches = iter(data)

    def __iter__(self):
        return self.batches


@breaks("data_wrapped", "gives 4 batches, then 0")
class ServesThemOnce(_Wraps):
    wrapper = _Once


class _ByTheClock(_Served):
    def __iter__(self):
        batches = list(self.data)
        random.Random(time.perf_counter_ns()).shuffle(batches)
        return iter(batches)


@breaks("data_wrapped", "same seeds and loaders")
class ShufflesByTheClock(_Wraps):
    wrapper = _ByTheClock


class _EasyFirst(_Served):
    """More batches in each epoch."""

    def __init__(self, data):
        super().__init__(list(data))
        self.volatile_epoch = 0

    def __iter__(self):
        self.volatile_epoch += 1
        return iter([self.data[(each + self.volatile_epoch) % len(self.data)] for each in range(len(self.data))])


@breaks("data_wrapped", "killed")
class ForgetsItsCurriculum(_Wraps):
    wrapper = _EasyFirst
    volatile = ("*",)


# -- files -------------------------------------------------------------------------------------------------------------


@breaks("files_within", "notes.txt", "take the folder as an option")
class WritesIntoTheWorkingDirectory:
    @hookimpl
    def fit_end(self):
        with open("notes.txt", "w") as file:
            file.write("done")


@breaks("files_within", "latest", "is outside")
class WritesBesideItsFolder:
    def __init__(self):
        self.folder = os.path.join(FOLDERS.name, "given")

    @hookimpl
    def phase_end(self):
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(os.path.dirname(self.folder), "latest"), "a") as file:
            file.write("x")


@breaks("files_within", "my-runs", "mkdir")
class MakesAFolderAtHome:
    @hookimpl
    def fit_begin(self):
        os.makedirs(os.path.expanduser("~/my-runs"), exist_ok=True)


@breaks("files_within", "weights.pt")
class SavesWeightsAnywhere:
    @hookimpl(phase=TrainingPhase, reads=("params",))
    def phase_end(self, learner):
        torch.save([m.state_dict() for m in learner.models.values()], "weights.pt")


@breaks("files_within", "lock", "remove")
class TakesAwayALock:
    def __init__(self):
        self.folder = os.path.join(FOLDERS.name, "given")

    @hookimpl
    def fit_begin(self):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(FOLDERS.name, "lock"))
