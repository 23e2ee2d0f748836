"""The checks of every package: a training by hand beside the same training with loopkit, compared bit for bit.

A file of this folder has the packages that it needs, and programs: subclasses of `Program`. ``python with_NAME.py``
runs their checks where the packages are installed; ``.ci/compat NAME`` makes the environment first.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import get_ema_multi_avg_fn

from loopkit import Learner, TrainingPhase, ValidationPhase, checkpoint, every, hookimpl
from loopkit.plugins import Checkpoint, ClipGradNorm, Metrics, MixedPrecision, WeightAverage

EQUAL = 1e-5
"""The largest relative difference that counts as equal: rounding of float32 over some twenty updates."""
DECAY = 0.9


class Differs(Exception):
    """Two values differ by more than rounding."""


class Program:
    """A training as its author writes it by hand. A package overrides the parts that it changes.

    ``known`` has the checks that are not bitwise, each with the reason; ``skipped`` those that say nothing here.
    """

    known: ClassVar[dict[str, str]] = {}
    skipped: ClassVar[dict[str, str]] = {}
    own_checks = False
    """Whether only the checks of the subclass are run."""
    kills = True
    """False: the run is ended by an error in place of SIGKILL, for packages with threads that do not survive a fork."""
    switches = False
    """Whether changing the mode changes weights: an evaluation between two fits is then compared with one of copies."""
    lr = 0.01

    @property
    def name(self) -> str:
        """The name in the results."""
        return type(self).__name__

    # What a package overrides

    def model(self) -> nn.Module:
        """A new model."""
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)
        return nn.Sequential(*layers)

    def optimizer(self, model: nn.Module) -> Any:
        """A new optimizer."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def train(self) -> Iterable[Any]:
        """New training data: 7 batches, of which the last is smaller."""
        return pairs((4, 4, 4, 4, 4, 4, 3), seed=2)

    def val(self) -> Iterable[Any]:
        """New validation data."""
        return pairs((4, 2), seed=9)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch."""
        inputs, targets = batch
        return inputs, targets

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """The outputs."""
        return model(inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The loss, a mean over the samples."""
        return mse_loss(outputs, targets)

    def samples(self, batch: Any) -> int:
        """The number of samples of a batch, for the loop by hand; loopkit counts by itself."""
        return len(batch[0])

    def to_train(self, model: nn.Module, optimizer: Any) -> None:
        """Begin to train, by hand; an optimizer with two forms of the weights is switched together with the model."""
        model.train()
        if is_switched(optimizer):
            optimizer.train()

    def to_eval(self, model: nn.Module, optimizer: Any) -> None:
        """Begin to validate, by hand."""
        model.eval()
        if is_switched(optimizer):
            optimizer.eval()

    def begin_epoch(self, data: Any, epoch: int) -> None:
        """Tell the training data of an epoch, by hand."""

    def plugins(self) -> list[Any]:
        """More plugins for the learner."""
        return []

    def phases(self) -> list[Any]:
        """The phases of the learner; only the parts that the program changes differ from the standard ones."""
        return [Training(self), Validation(self)]

    # The checks

    def check_plain(self) -> float:
        """Three epochs, each validated."""
        return compare(self.hand(), self.here())

    def check_clip_accumulate(self) -> float:
        """Clipped gradients of windows of three batches; the last window of an epoch has one, of fewer samples."""
        return compare(self.hand(accumulate=3, clip=0.5), self.here(ClipGradNorm(0.5), accumulate=3))

    def check_bf16(self) -> float:
        """Autocast in bfloat16."""
        return compare(self.hand(bf16=True), self.here(MixedPrecision("bfloat16")))

    def check_average(self) -> float:
        """An average of the weights, which is validated."""
        return compare(self.hand(average=True), self.here(WeightAverage(DECAY)))

    def check_resume(self) -> float:
        """Killed in the first epoch and in the second, and resumed each time from nothing but the files."""
        with tempfile.TemporaryDirectory() as folder:
            saving = lambda: Checkpoint(folder, save=every(updates=1), resume="auto")  # noqa: E731
            for step in (4, 9):
                self.die(step, saving)
            return compare(self.hand(), self.here(saving()))

    def check_best(self) -> float:
        """The best weights, loaded into a new model and evaluated by hand."""
        with tempfile.TemporaryDirectory() as folder:
            self.here(Checkpoint(folder, best="val/loss"))
            seed()
            model = self.model()
            checkpoint.load_best(Learner(model, standard=False), folder)
        model.eval()
        return worst(self.measured(model), min(self.hand().losses), "loss of the best weights")

    def check_evaluate(self) -> float:
        """An evaluation between two fits and after them, and a prediction that changes nothing."""
        seed()
        model = self.model()
        optimizer = self.optimizer(model)
        learner, train, val = self.learner(model, optimizer), self.train(), self.val()
        torch.manual_seed(3)
        losses = []
        for _ in range(2):
            learner.fit(train, epochs=1)
            losses.append(learner.evaluate(val)["val/loss"])
        aside = self.switches or is_switched(optimizer)
        return compare(self.hand(epochs=2, aside=aside), Trained(model, optimizer, losses))

    # How they are run

    def hand(
        self,
        *,
        epochs: int = 3,
        accumulate: int = 1,
        clip: float | None = None,
        bf16: bool = False,
        average: bool = False,
        aside: bool = False,
    ) -> Trained:
        """The loop of a careful person."""
        seed()
        model = self.model()
        optimizer = self.optimizer(model)
        train, val = self.train(), self.val()
        cast = autocast if bf16 else nullcontext
        mean = Average(model) if average else None
        torch.manual_seed(3)
        losses = []
        for epoch in range(epochs):
            self.to_train(model, optimizer)
            self.begin_epoch(train, epoch)
            weights: list[int] = []
            for batch, last in until_last(train):
                if not weights:
                    optimizer.zero_grad()
                inputs, targets = self.unpack(batch)
                with cast():
                    loss = self.loss(self.forward(model, inputs), targets)
                weights.append(self.samples(batch))
                if accumulate > 1:
                    loss = loss * (weights[-1] / weights[0] / accumulate)
                loss.backward()
                if len(weights) < accumulate and not last:
                    continue
                window = parameters_of(optimizer)
                if accumulate > 1:
                    scale(window, accumulate * weights[0] / sum(weights))
                if clip is not None:
                    nn.utils.clip_grad_norm_(window, clip)
                self.step(optimizer)
                weights = []
                if mean is not None:
                    mean.update(model)
            if mean is None:
                measured, its = copy.deepcopy((model, optimizer)) if aside else (model, optimizer)
                self.to_eval(measured, its)
            else:
                measured = mean.put_in(self.copy_of(model))
                measured.eval()
            losses.append(self.measured(measured, val, cast))
        optimizer.zero_grad()
        self.to_train(model, optimizer)
        return Trained(model, optimizer, losses)

    def copy_of(self, model: nn.Module) -> nn.Module:
        """A copy of a model, in train mode."""
        try:
            return copy.deepcopy(model)
        except RuntimeError:  # it holds tensors of a graph
            with torch.random.fork_rng():
                made = self.model()
            made.load_state_dict(model.state_dict())
            return made

    def step(self, optimizer: Any) -> None:
        """Update, by hand."""
        optimizer.step()

    def measured(self, model: nn.Module, val: Any = None, cast: Callable[[], Any] = nullcontext) -> float:
        """The mean loss over the samples of the validation data."""
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self.val() if val is None else val:
                inputs, targets = self.unpack(batch)
                with cast():
                    loss = self.loss(self.forward(model, inputs), targets)
                total += loss.item() * self.samples(batch)
                count += self.samples(batch)
        return total / count

    def learner(self, model: nn.Module, optimizer: Any, *plugins: Any, **options: Any) -> Learner:
        """The learner of the program."""
        if is_switched(optimizer) and any(isinstance(each, WeightAverage) for each in plugins):
            optimizer.train()  # an average owns the weights: then nothing is switched
        stack = [Metrics(), *self.plugins(), *plugins]
        return Learner(model, None, optimizer, plugins=stack, phases=self.phases(), standard=False, **options)

    def here(self, *plugins: Any, epochs: int = 3, **options: Any) -> Trained:
        """The same training with loopkit."""
        seed()
        model = self.model()
        optimizer = self.optimizer(model)
        train, val, losses = self.train(), self.val(), Losses()
        learner = self.learner(model, optimizer, losses, *plugins, **options)
        torch.manual_seed(3)
        learner.fit(train, val, epochs=epochs)
        return Trained(model, optimizer, losses.losses)

    def die(self, step: int, saving: Callable[[], Any]) -> None:
        """Run in a process that is killed in a step; of the steps of this process."""
        if not self.kills:
            if stopped(lambda: self.here(saving(), Dies(step, stop))):
                return
        elif not (process := os.fork()):
            try:
                self.here(saving(), Dies(step, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        elif os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL:
            return
        raise RuntimeError(f"the run that should be killed in step {step} ended otherwise")


class Parts:
    """The parts of a step, as the program has them by hand."""

    program: Program

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        """As by hand."""
        return self.program.unpack(batch)

    def forward(self, learner: Learner, inputs: Any) -> Any:
        """As by hand."""
        return self.program.forward(learner.model, inputs)  # type: ignore[arg-type]

    def loss(self, learner: Learner, outputs: Any, targets: Any) -> Tensor:
        """As by hand."""
        return self.program.loss(outputs, targets)


class Training(Parts, TrainingPhase):
    """Training by the parts of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program


class Validation(Parts, ValidationPhase):
    """Validation by the parts of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program


class Average:
    """An exponential average of the parameters, by torch's own function."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self.move = get_ema_multi_avg_fn(DECAY)

    def update(self, model: nn.Module) -> None:
        """After an update."""
        now = [parameter.detach() for parameter in model.parameters()]
        if self.tensors:
            self.move(self.tensors, now, 1)
        else:
            self.tensors = [each.clone() for each in now]

    def put_in(self, model: nn.Module) -> nn.Module:
        """The model, with the average in the place of its parameters."""
        with torch.no_grad():
            for parameter, average in zip(model.parameters(), self.tensors, strict=True):
                parameter.copy_(average)
        return model


class Losses:
    """Keeps the validation losses, also over a resume."""

    name = "losses"

    def __init__(self) -> None:
        self.losses: list[float] = []

    @hookimpl(phase="val")
    def phase_end(self, learner: Learner) -> None:
        """Keep one."""
        self.losses.append(learner.metrics["val/loss"])

    def state_dict(self) -> dict[str, Any]:
        """The losses so far."""
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""
        self.losses = list(state["losses"])


class Died(BaseException):
    """The run ends here."""


def stop() -> None:
    """End the run by an error."""
    raise Died


def stopped(run: Callable[[], Any]) -> bool:
    """Whether a run was ended by `stop`."""
    try:
        run()
    except Died:
        return True
    return False


class Dies:
    """Ends the process in a step."""

    name = "dies"

    def __init__(self, step: int, end: Callable[[], None]) -> None:
        self.steps, self.end = step, end

    @hookimpl(phase="train")
    def step_begin(self) -> None:
        """Count, and end it."""
        self.steps -= 1
        if self.steps < 0:
            self.end()

    volatile = ("*",)


class Trained:
    """What a training ends with."""

    def __init__(self, model: nn.Module, optimizer: Any, losses: list[float]) -> None:
        self.model, self.optimizer, self.losses = model, optimizer, losses


def pairs(sizes: Iterable[int], seed: int, inputs: int = 5, targets: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Batches of random numbers, of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [(draw(size, inputs), draw(size, targets)) for size in sizes]


def seed() -> None:
    """Seed every global generator."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def autocast() -> AbstractContextManager[None]:
    """Autocast in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


def is_switched(optimizer: Any) -> bool:
    """Whether an optimizer has two forms of the weights, and ``train()`` and ``eval()`` to change between them."""
    return all(callable(getattr(type(optimizer), name, None)) for name in ("train", "eval"))


def until_last(batches: Any) -> Iterator[tuple[Any, bool]]:
    """Batches, and whether each is the last; nothing is fetched ahead if the length is known."""
    try:
        length = len(batches)
    except TypeError:  # a stream has none
        length = 0
    if length:
        for index, batch in enumerate(batches):
            yield batch, index == length - 1
        return
    iterator = iter(batches)
    batch = next(iterator)
    for after in iterator:
        yield batch, False
        batch = after
    yield batch, True


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def scale(parameters: list[Tensor], factor: float) -> None:
    """Multiply the gradients."""
    for parameter in parameters:
        if factor != 1 and parameter.grad is not None:
            parameter.grad.mul_(factor)


# Comparing


def compare(hand: Trained, here: Trained) -> float:
    """The largest relative difference of all tensors and losses: 0.0 is bitwise.

    Raises:
        Differs: They differ by more than rounding.
    """
    found = [
        worst(hand.losses, here.losses, "losses"),
        worst(hand.model.state_dict(), here.model.state_dict(), "model"),
        worst(hand.optimizer.state_dict(), here.optimizer.state_dict(), "optimizer"),
    ]
    return max(found)


def worst(one: Any, other: Any, where: str) -> float:
    """The largest relative difference of two structures.

    Raises:
        Differs: It is larger than rounding, or the structures differ.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return tensors_differ(one, other, where)
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [keys_of(each) for each in (one, other)]
        if keys[0] != keys[1]:
            raise Differs(f"{where} has {keys[0]} by hand, {keys[1]} here")
        both = zip(one.values(), other.values(), strict=True)
        return max((worst(*each, f"{where}.{key}") for key, each in zip(one, both, strict=True)), default=0.0)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        if len(one) != len(other):
            raise Differs(f"{where} has {len(one)} by hand, {len(other)} here")
        return max((worst(*each, f"{where}.{i}") for i, each in enumerate(zip(one, other, strict=True))), default=0.0)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return tensors_differ(torch.tensor(one), torch.tensor(float(other)), where)
    if type(one) is not type(other):
        raise Differs(f"{where} is {one!r} by hand, {other!r} here"[:200])
    if hasattr(one, "__dict__") and not callable(one) and not isinstance(one, Enum):
        return worst(vars(one), vars(other), where)
    if callable(one) or one == other:
        return 0.0
    raise Differs(f"{where} is {one!r} by hand, {other!r} here"[:200])


def keys_of(mapping: dict[Any, Any]) -> list[str]:
    """The keys; numbers only by their order, since they can be addresses."""
    return sorted(str(key) for key in mapping if not isinstance(key, int))


def tensors_differ(one: Tensor, other: Tensor, where: str) -> float:
    """The difference, relative to the largest value.

    Raises:
        Differs: It is larger than rounding.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        kinds = [f"{each.dtype} of {tuple(each.shape)}" for each in (one, other)]
        raise Differs(f"{where} is {kinds[0]} by hand, {kinds[1]} here")
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if type(one).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # of fewer bits
        one, other = one.dequantize(), other.dequantize()
    one, other = one.detach(), other.detach()
    if torch.equal(one, other) or (torch.equal(one.isnan(), other.isnan()) and torch.equal(*map(filled, (one, other)))):
        return 0.0
    one, other = one.double(), other.double()
    difference = ((one - other).abs().max() / one.abs().max().clamp(min=1e-12)).item()
    if not difference <= EQUAL:
        raise Differs(f"{where} differs by {difference:.1e}")
    return difference


def filled(tensor: Tensor) -> Tensor:
    """The tensor without what is not a number."""
    return tensor.nan_to_num()


# Running


def checks_of(program: Program) -> list[str]:
    """The names of the checks of a program."""
    names = [name for name in dir(type(program)) if name.startswith("check_")]
    left = dir(Program) if program.own_checks else ()
    return [name.removeprefix("check_") for name in names if name not in left]


def quiet() -> AbstractContextManager[Any]:
    """Nothing of what loopkit and the packages print on stderr, unless ``-v`` is given."""
    return nullcontext() if "-v" in sys.argv else contextlib.redirect_stderr(io.StringIO())


def outcome(program: Program, check: str) -> dict[str, Any]:
    """The result of one check: bitwise, equal, differs, error or skipped; and whether it is as expected."""
    if check in program.skipped:
        return {"result": "skipped", "reason": program.skipped[check], "expected": True}
    found: dict[str, Any] = {}
    try:
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            within = getattr(program, f"check_{check}")()
        found = {"result": "equal", "within": within} if within else {"result": "bitwise"}
    except Differs as error:
        found = {"result": "differs", "seen": str(error)}
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        found = {"result": "error", "seen": f"{type(error).__name__}: {error}"[:300]}
    if check in program.known:
        found["reason"] = program.known[check]
    return {**found, "expected": (found["result"] != "bitwise") == (check in program.known)}


def main(needs: list[str], programs: Iterable[Program]) -> None:
    """Run all checks of all programs; write the results to the path in ``LOOPKIT_COMPAT_RESULTS``, if it is set.

    Exits with 1 if one is not as the file expects.
    """
    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if word != "-v"]
    results: dict[str, dict[str, Any]] = {}
    started = time.perf_counter()
    failed = 0
    for program in programs:
        if words and not any(word in program.name for word in words):
            continue
        results[program.name] = {check: outcome(program, check) for check in checks_of(program)}
        for check, found in results[program.name].items():
            good = found.pop("expected")
            failed += not good
            found.update({} if good else {"unexpected": True})
            said = found.get("seen", "") or found.get("within", "")
            print(f"{'' if good else 'UNEXPECTED '}{program.name} {check}: {found['result']} {said}", flush=True)
    names = [each.split("==")[0] for each in needs]
    made = {
        "packages": {name: version(name) for name in names},
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - started),
        "programs": results,
    }
    if path := os.environ.get("LOOPKIT_COMPAT_RESULTS"):
        Path(path).write_text(json.dumps(made, indent=1))
    sys.exit(1 if failed else 0)
