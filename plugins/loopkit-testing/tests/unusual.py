"""Plugins that do something unusual and do it right: the kit must not accuse them."""

import contextlib
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopkit import CancelStep, TrainingPhase, hookimpl

UNUSUAL: list[Callable[[], Any]] = []


def right(make: Any) -> Any:
    UNUSUAL.append(make)
    return make


def _parameters(learner: Any) -> Iterator[nn.Parameter]:
    for model in learner.models.values():
        yield from model.parameters()


@right
class Sam:
    """Sharpness-aware minimization: a forward and a backward of its own, then the step at the moved weights."""

    def __init__(self, rho=0.05):
        self.rho = rho
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []

    @hookimpl(phase=TrainingPhase, reads=("batch",), updates=("params", "buffers", "rng"))
    def step_context(self, learner, step):
        return self.uphill(learner, step)

    @contextlib.contextmanager
    def uphill(self, learner, step):
        inputs, targets = step.batch
        params = [p for p in learner.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(learner.loss_fn(learner.model(inputs), targets), params)
        scale = self.rho / (nn.utils.get_total_norm(grads) + 1e-12)
        self.own = [(p, p.detach().clone()) for p in params]
        try:
            with torch.no_grad():
                for p, grad in zip(params, grads, strict=True):
                    p.add_(grad * scale)
            yield
        finally:
            self.back()

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def backward_end(self):
        self.back()

    def back(self):
        with torch.no_grad():
            for p, own in self.own:
                p.copy_(own)
        self.own = []


@right
class MoveAndBack:
    """Weight noise for the forward: moved at the begin of a step, back on each way out of it."""

    def __init__(self, scale=1.01):
        self.scale = scale
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def back(self):
        with torch.no_grad():
            for p, own in self.kept:
                p.copy_(own)
        self.kept.clear()

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def step_context(self, learner):
        return self.moved(learner)

    @contextlib.contextmanager
    def moved(self, learner):
        try:
            with torch.no_grad():
                for p in _parameters(learner):
                    self.kept.append((p, p.clone()))
                    p.mul_(self.scale)
            yield
        finally:
            self.back()

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def backward_end(self):
        self.back()


@right
class RDrop:
    """Two forwards of the same batch, and the gradient of their distance added to the step's."""

    @hookimpl(phase=TrainingPhase, reads=("inputs",), updates=("grads", "buffers", "rng"))
    def backward_end(self, learner, step):
        inputs = getattr(step, "inputs", None)
        if inputs is None or len(learner.models) > 1:
            return
        with torch.enable_grad():
            one, two = learner.model(inputs), learner.model(inputs)
            (one - two).square().mean().mul(0.1).backward()


@right
class Mixup:
    """Mixes inputs and targets by a share from a Beta distribution on the host."""

    def __init__(self, alpha=0.4):
        self.alpha = alpha
        self.beta = torch.distributions.Beta(alpha, alpha)

    @hookimpl(phase=TrainingPhase, updates=("batch", "rng"))
    def move_batch(self, batch):
        inputs, targets = batch
        share = self.beta.sample()
        order = torch.randperm(len(inputs))
        mixed = inputs * share + inputs[order] * (1 - share)
        return mixed.to(inputs.dtype), targets


@right
class BetaOnTheHost:
    """A Beta sampler that is made in each step, with its checks of arguments, and whose number is read."""

    @hookimpl(phase=TrainingPhase, updates=("batch", "rng"))
    def step_begin(self, step):
        share = float(torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample())
        inputs, *rest = step.batch
        step.batch = (inputs * (0.9 + 0.1 * share), *rest)


@right
class Lookahead:
    """Slow weights, every second update."""

    def __init__(self, every=2):
        self.every = every
        self.count = 0
        self.slow: dict[str, list[torch.Tensor]] = {}

    @hookimpl(updates=("params",))
    def update_end(self, step):
        slow = self.slow.setdefault(step.optimizer_name, [p.detach().clone() for p in step.params])
        self.count += 1
        if self.count % self.every == 0:
            with torch.no_grad():
                for s, p in zip(slow, step.params, strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)

    def state_dict(self):
        return {"count": self.count, "slow": {k: [t.clone() for t in v] for k, v in self.slow.items()}}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.slow = {k: [t.clone() for t in v] for k, v in state["slow"].items()}


@right
class OwnAverage:
    """An exponential average of one's own, for looking at afterwards."""

    def __init__(self):
        self.average: dict[str, list[torch.Tensor]] = {}

    @hookimpl(reads=("params",))
    def update_end(self, step):
        now = [p.detach() for p in step.params]
        mine = self.average.setdefault(step.optimizer_name, [t.clone() for t in now])
        torch._foreach_lerp_(mine, now, 0.1)

    def state_dict(self):
        return {k: [t.clone() for t in v] for k, v in self.average.items()}

    def load_state_dict(self, state):
        self.average = {k: [t.clone() for t in v] for k, v in state.items()}


@right
class Unfreeze:
    """Trains the last parameter alone in the first epoch, then all."""

    def __init__(self):
        self.epochs = 0

    def free(self, learner):
        for model in learner.models.values():
            first, *_ = model.parameters()
            first.requires_grad_(self.epochs > 0)

    @hookimpl(phase=TrainingPhase, updates=("trainable",))
    def epoch_context(self, learner):
        return self.partly(learner)

    @contextlib.contextmanager
    def partly(self, learner):
        was = [(p, p.requires_grad) for p in _parameters(learner)]
        if self.epochs == 0:
            for model in learner.models.values():
                next(model.parameters()).requires_grad_(False)
        try:
            yield
        finally:
            for p, value in was:
                p.requires_grad_(value)

    @hookimpl(phase=TrainingPhase)
    def phase_end(self):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


@right
class HardExamples:
    """Weighs samples by the distance of output and target, all on the device."""

    @hookimpl(phase=TrainingPhase, reads=("targets",), updates=("outputs",))
    def loss_begin(self, step):
        outputs = step.outputs
        if isinstance(outputs, torch.Tensor) and outputs.is_floating_point() and outputs.dim() > 1:
            size = outputs.detach().float().norm(dim=-1, keepdim=True)
            step.outputs = outputs * torch.where(size > size.mean(), 1.1, 1.0).to(outputs.dtype)


@right
class GradientNoise:
    """Noise that decays with the updates, from torch's generator."""

    def __init__(self):
        self.count = 0

    @hookimpl(updates=("grads", "rng"))
    def update_begin(self, step):
        self.count += 1
        for p in step.params:
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01 / self.count**0.5)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@right
class OwnNoise:
    """Noise from a generator of its own, which is saved."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad.add_(torch.randn(p.shape, generator=self.generator).to(p.grad), alpha=0.01)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


@right
class AdaptiveClip:
    """Clips each gradient by the norm of its parameter, without reading a number."""

    @hookimpl(reads=("params",), updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                limit = p.detach().norm().clamp(min=1e-3) * 0.1
                norm = p.grad.norm()
                p.grad.mul_(torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0))


@right
class Centralize:
    """Takes the mean of each row off the gradients."""

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None and p.grad.dim() > 1:
                p.grad -= p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True)


@right
class Sqlite:
    """Writes metrics into a database, from a connection that lives as long as the fit."""

    provides = "observer"

    def __init__(self):
        self.path = Path(tempfile.mkdtemp()) / "metrics.db"
        self.base: sqlite3.Connection | None = None

    @hookimpl
    def fit_begin(self):
        self.base = sqlite3.connect(self.path)
        self.base.execute(
            "create table if not exists metrics (phase, epoch, name, value, primary key (phase, epoch, name))"
        )

    @hookimpl(reads=("metrics", "progress"))
    def phase_end(self, learner, phase):
        if self.base is None:
            return
        rows = [(phase.name, learner.progress.epochs, k, float(v)) for k, v in learner.metrics.items()]
        self.base.executemany("insert or replace into metrics values (?, ?, ?, ?)", rows)
        self.base.commit()

    @hookimpl
    def fit_end(self):
        if self.base is not None:
            self.base.close()
            self.base = None


@right
class Notifier:
    """Tells another thread what happens, and ends the thread with the fit."""

    provides = "observer"

    def __init__(self):
        self.told = 0
        self.wake = threading.Event()
        self.over = False
        self.thread: threading.Thread | None = None

    def run(self):
        while not self.over:
            self.wake.wait(0.05)
            self.wake.clear()

    @hookimpl
    def fit_begin(self):
        self.over = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @hookimpl
    def phase_end(self):
        self.wake.set()

    @hookimpl
    def fit_end(self):
        self.over = True
        self.wake.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None


@right
class Activations:
    """Forward hooks that keep the mean activation of an epoch, and go with the fit."""

    provides = "observer"

    def __init__(self):
        self.handles: list[Any] = []
        self.mean: torch.Tensor | None = None

    def look(self, module, args, output):
        if isinstance(output, torch.Tensor):
            self.mean = output.detach().float().mean()

    @hookimpl
    def epoch_context(self, learner):
        return self.looking(learner)

    @contextlib.contextmanager
    def looking(self, learner):
        handles = [model.register_forward_hook(self.look) for model in learner.models.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.mean = None


@right
class LateLoss:
    """Keeps the loss of the step before, detached."""

    provides = "observer"

    def __init__(self):
        self.kept: torch.Tensor | None = None

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        loss = getattr(step, "loss", None)
        self.kept = None if loss is None else loss.detach()

    @hookimpl
    def phase_end(self):
        self.kept = None


@right
class CopiesTheBatch:
    """Changes the inputs in place, but of a copy of its own."""

    @hookimpl(phase=TrainingPhase, updates=("batch",))
    def step_begin(self, step):
        inputs, *rest = step.batch
        inputs = inputs.clone()
        inputs.mul_(0.99)
        step.batch = (inputs, *rest)


@right
class LabelSmoothing:
    """Pulls outputs a little to their mean."""

    @hookimpl(phase=TrainingPhase, updates=("outputs",))
    def loss_begin(self, step):
        if isinstance(step.outputs, torch.Tensor):
            step.outputs = step.outputs * 0.9 + step.outputs.mean(dim=-1, keepdim=True) * 0.1


@right
class Warmup:
    """A rate of its own for the first updates."""

    owns = ("optimizer.lr",)

    def __init__(self, updates=4):
        self.updates = updates
        self.count = 0
        self.target: dict[str, list[float]] = {}

    def rate(self, name, optimizer):
        target = self.target.setdefault(name, [group["lr"] for group in optimizer.param_groups])
        for group, lr in zip(optimizer.param_groups, target, strict=True):
            group["lr"] = lr * min(1.0, (self.count + 1) / self.updates)

    @hookimpl(updates=("optimizer.lr",))
    def update_end(self, step):
        self.count += 1
        self.rate(step.optimizer_name, step.optimizer)

    def state_dict(self):
        return {"count": self.count, "target": self.target}

    def load_state_dict(self, state):
        self.count, self.target = state["count"], dict(state["target"])


@right
class ReadsOnceInHundred:
    """Says that it waits for the device, and does so."""

    syncs = ("step_end",)
    provides = "observer"

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        if hasattr(step, "loss") and step.index % 100 == 0:
            self.shown = f"{step.loss.item():.3f}"


@right
class ExtremesOfTheEpoch:
    """The smallest and the largest loss of each epoch, in the epoch's store."""

    @hookimpl(reads=("loss",))
    def step_end(self, epoch, step):
        if not hasattr(step, "loss"):
            return
        store, loss = epoch.store(self), step.loss.detach()
        store["low"] = torch.minimum(store["low"], loss) if "low" in store else loss.clone()
        store["high"] = torch.maximum(store["high"], loss) if "high" in store else loss.clone()

    @hookimpl(writes=("metrics.*/low", "metrics.*/high"))
    def epoch_end(self, learner, phase, epoch):
        for name, value in epoch.store(self).items():
            learner.metrics[f"{phase.name}/{name}"] = value.item()


@right
class Penalty:
    """A penalty on the weights, added to the gradients."""

    @hookimpl(reads=("params",), updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            if p.grad is not None:
                p.grad.add_(p.detach().sign(), alpha=1e-3)


@right
class SkipsOdd:
    """Votes against every second update: votes are free."""

    @hookimpl
    def update_begin(self, step):
        if step.index % 2:
            step.skip_update("odd")


@right
class LeavesOneOut:
    """Cancels a step, as everybody may."""

    @hookimpl(phase=TrainingPhase)
    def step_begin(self, step):
        if step.index == 1:
            raise CancelStep("the second one")


@right
class AddsAndSubtracts:
    """Moves weights by adding, and back by subtracting, on each way out of a step: rounding is left."""

    def __init__(self):
        self.moved: list[torch.Tensor] = []

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def step_context(self, learner):
        return self.around(learner)

    @contextlib.contextmanager
    def around(self, learner):
        self.moved = list(_parameters(learner))
        with torch.no_grad():
            for p in self.moved:
                p.add_(0.01)
        try:
            yield
        finally:
            self.back()

    @hookimpl(phase=TrainingPhase, updates=("params",))
    def backward_end(self):
        self.back()

    def back(self):
        with torch.no_grad():
            for p in self.moved:
                p.sub_(0.01)
        self.moved = []


class _Padded:
    """Gives the first batch twice."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data) + 1

    def __iter__(self):
        batches = iter(self.data)
        first = next(batches)
        yield first
        yield first
        yield from batches


@right
class Pads:
    """Wraps each loader once, and knows its own."""

    def __init__(self):
        self.known: list[tuple[Any, _Padded]] = []

    @hookimpl(phase="training", updates=("data",))
    def setup_data(self, data):
        for given, made in self.known:
            if data is given or data is made:
                return made
        made = _Padded(data)
        self.known.append((data, made))
        return made


@right
class KeepsItsFiles:
    """Writes by a temporary file and a rename in its folder; what it needs for a moment is in a folder that goes."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp()) / "runs" / "state.json"

    @hookimpl(reads=("progress",))
    def phase_end(self, learner):
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "draft"
            draft.write_text(str(learner.progress.epochs))
            text = draft.read_text()
        self.path.parent.mkdir(exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.new")
        beside.write_text(text)
        beside.replace(self.path)
