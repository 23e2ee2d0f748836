"""Saves a model again and again, each time killed at the next change of the file system, and looks at what is there.

A script: ``python kill_points.py directory`` prints how many kills there were.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from loopkit import Learner
from loopkit_huggingface import SavePretrained

EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
directory = Path(sys.argv[1])


class Model(nn.Linear):
    """Saves its version in two files; from then on, changes of the file system are counted."""

    def __init__(self, version, kill_at=None):
        super().__init__(1, 1)
        self.version, self.left = version, kill_at

    def save_pretrained(self, folder):
        if self.left is not None:
            sys.addaudithook(self.count)
        folder.mkdir()
        for name in ("weights", "config"):
            (folder / name).write_text(str(self.version))

    def count(self, event, arguments):
        if event in EVENTS:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def learner(model):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Learner(model, nn.MSELoss(), optimizer, plugins=[SavePretrained(directory, None)], standard=False)


def fit(model):
    learner(model).fit([(torch.zeros(1, 1), torch.zeros(1, 1))], epochs=1)


def found():
    """The version in the folder, after what a kill left was put right, as when the next fit begins."""
    used = learner(Model(0))
    used.plugins["save_pretrained"].fit_begin(used)
    assert os.listdir(directory) == ["last"], os.listdir(directory)
    versions = {file.name: file.read_text() for file in (directory / "last").iterdir()}
    assert len(versions) == 2, versions
    assert len(set(versions.values())) == 1, versions
    return int(versions["config"])


if __name__ == "__main__":
    fit(Model(0))
    version = kills = 0
    while True:
        child = os.fork()
        if not child:
            fit(Model(version + 1, kill_at=kills + 1))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        now = found()
        assert now in (version, version + 1), (now, version)
        if status == 0:
            assert now == version + 1
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        version, kills = now, kills + 1
    print(kills)
