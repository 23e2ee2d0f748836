#!/usr/bin/env bash
# lightning 2.6.6: with accumulate_grad_batches=4 and 6 batches, the last two count half.
#
# Guess: the update of the last window is the mean over its two batches. Seen: each loss is divided by 4, also
# in the window that has two batches, so that update is half as long. With a gradient of 1 and a rate of 1, two
# updates move by 1.5, not 2.
#
# Why a training loop cares: the last update of each epoch has a smaller weight, by how many batches happen to
# be left. The same data with another batch size trains another way. A loop has to weigh a window by what is in
# it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 lightning==2.6.6 numpy
env/bin/python -W ignore - <<'END'
import logging
import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, index):
        return (self.weight * batch[0]).mean()  # a gradient of 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=4, accelerator="cpu", **quiet)
model = Model()
trainer.fit(model, DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=1))
assert trainer.global_step == 2 and model.weight.item() == -1.5, (trainer.global_step, model.weight)
print(f"lightning {lightning.__version__}: two updates of means of 1 move the weight by {-model.weight.item()}, not by 2")
END
