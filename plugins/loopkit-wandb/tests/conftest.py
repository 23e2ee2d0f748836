import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from loopkit import Learner


@pytest.fixture
def records():
    """What wandb's own reader says of a folder: its records."""

    def read(folder):
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
            env={**os.environ, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    return read


@pytest.fixture
def rows(records):
    """The history of folders, in their order, without what the clock says."""

    def read(*folders):
        found = []
        for folder in folders:
            found += [each["history"]["item"] for each in records(folder) if each["type"] == "history"]
        return [{key: row[key] for key in row if key not in ("_runtime", "_timestamp")} for row in found]

    return read


@pytest.fixture
def make_learner():
    def make(*plugins, **options):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        options.setdefault("standard", False)
        return Learner(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), plugins=plugins, **options)

    return make


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
