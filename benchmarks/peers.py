"""Other trainers, each with a model, an optimizer and batches that it is given: a `Work` that trains one epoch.

`found` has those that are installed; ``requirements-peers.txt`` installs them all.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sides import Work
from torch import nn

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]
Make = Callable[[nn.Module, torch.optim.Optimizer, nn.Module, Batches], Work]


class Loader:
    """The batches, for trainers that would take a list for a list of loaders."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    from accelerate import Accelerator

    engine = Accelerator(cpu=not batches[0][0].is_cuda)
    model, optimizer = engine.prepare(model, optimizer)

    def epoch() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            engine.backward(loss_fn(model(inputs), targets))
            optimizer.step()

    return epoch


def ignite(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    from ignite.engine import create_supervised_trainer

    trainer = create_supervised_trainer(model, optimizer, loss_fn, device=batches[0][0].device)
    return lambda: trainer.run(batches, max_epochs=1)


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> torch.Tensor:
            return loss_fn(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    module, loader = Module(), Loader(batches)
    kind = "gpu" if batches[0][0].is_cuda else "cpu"

    def epoch() -> None:
        pl.Trainer(max_epochs=1, accelerator=kind, devices=1, barebones=True).fit(module, loader)

    return epoch


def transformers(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    from torch.utils.data import DataLoader
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_fn(self.model(inputs), labels)}

    class Cut(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(rows, batch_size=None)

    rows = [{"inputs": inputs, "labels": targets} for inputs, targets in batches]
    options = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=1,
        max_grad_norm=0.0,
        use_cpu=not batches[0][0].is_cuda,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = Cut(Module(), options, train_dataset=rows, optimizers=(optimizer, schedule))
    trainer.remove_callback(PrinterCallback)
    return trainer.train


def keras(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras as k

    class Module(k.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inside = k.layers.TorchModuleWrapper(model)

        def call(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inside(inputs)

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> torch.Tensor:
            return loss_fn(y_pred, y)

    warnings.filterwarnings("ignore", message="`shuffle=True` was passed")
    module = Module()
    module.compile(optimizer=k.optimizers.Adam(optimizer.param_groups[0]["lr"]), jit_compile=False)

    def epoch() -> None:
        module.fit((pair for pair in batches), steps_per_epoch=len(batches), epochs=1, verbose=0)

    return epoch


def skorch(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    from skorch import NeuralNet

    device = str(batches[0][0].device)
    net = NeuralNet(
        model,
        criterion=loss_fn,
        optimizer=lambda params, **_: optimizer,
        iterator_train=lambda dataset, **_: batches,
        train_split=None,
        callbacks=None,
        verbose=0,
        device=device,
    )
    net.initialize()
    return lambda: net.partial_fit(batches[0][0], batches[0][1], epochs=1)


def fastai(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner, Recorder
    from fastai.optimizer import OptimWrapper

    loaders = DataLoaders(Loader(batches), [], device=batches[0][0].device)
    learner = Learner(loaders, model, loss_fn)
    learner.remove_cbs([each for each in learner.cbs if isinstance(each, Recorder)])
    learner.opt = OptimWrapper(opt=optimizer)
    return lambda: learner.fit(1, lr=optimizer.param_groups[0]["lr"])


MAKERS: dict[str, Make] = {
    "accelerate": accelerate,
    "ignite": ignite,
    "lightning": lightning,
    "transformers": transformers,
    "keras": keras,
    "skorch": skorch,
    "fastai": fastai,
}


def found(names: Sequence[str] = tuple(MAKERS)) -> dict[str, Make]:
    """Those of these that are installed; a line for each that is not."""
    here = {}
    for name in names:
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: skipped")
        else:
            here[name] = MAKERS[name]
    return here
