"""The problem under the real Trainer of Lightning."""

import tempfile
import warnings
from types import SimpleNamespace

import torch
from problems import TRAIN, VAL, make_model
from torch import nn
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.loggers.logger import Logger


class Net(pl.LightningModule):
    def __init__(self, make_optimizers):
        super().__init__()
        self.net = make_model()
        self.make_optimizers = make_optimizers

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val/loss", loss, batch_size=len(batch[0]))

    def configure_optimizers(self):
        return self.make_optimizers(self.parameters())


class Lines(Logger):
    """Keeps what callbacks log, as (name, value, step)."""

    name = version = "lines"

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines += [
            (name, value, step) for name, value in metrics.items() if "/loss" not in name and name != "epoch"
        ]

    def log_hyperparams(self, *args, **options):
        pass


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fit(callback, *, make_optimizers=sgd, train=TRAIN, val=VAL, **options):
    """Fit under the real Trainer; the module, the trainer and what was logged."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore")  # about workers, the device and itself
        lines = Lines()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[callback],
            logger=lines,
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            **options,
        )
        module = Net(make_optimizers)
        loaders = [None if data is None else DataLoader(data, batch_size=None) for data in (train, val)]
        trainer.fit(module, *loaders)
    return SimpleNamespace(model=module.net, trainer=trainer, lines=lines.lines)
