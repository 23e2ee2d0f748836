"""The stages of an epoch: their order."""

from __future__ import annotations

import pytest
from house import bare


def test_epoch_begins_by_these_stages_in_this_order():
    epoch = bare().epoch("train")
    assert [stage.name for stage in epoch._life.stages] == [
        "requests",
        "saved state",
        "data",
        "phase",
        "witness",
        "steps",
        "open",
        "modules",
        "metrics",
        "contexts and epoch_begin",
        "processes",
    ]


def test_stage_that_fails_leaves_those_that_have_begun_in_reverse():
    epoch = bare().epoch("train")
    left = []

    class Noted:
        def __init__(self, name, fails=False):
            self.name = name
            self.fails = fails

        def begin(self, epoch):
            if self.fails:
                raise OSError("disk")

        def leave(self, epoch, error):
            left.append((self.name, repr(error)))

    epoch._life.stages = [Noted("one"), Noted("two", fails=True), Noted("three")]
    try:
        epoch.__enter__()
    except OSError:
        left.append("raised")
    assert left == [("two", "OSError('disk')"), ("one", "OSError('disk')"), "raised"]


def test_interrupt_that_comes_before_an_epoch_is_open_is_the_error(monkeypatch):
    learner = bare()
    epoch = learner.epoch("train")

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(epoch, "nest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        epoch.__enter__()
    with learner.epoch("train"):
        pass
    assert learner.progress.epochs == 1
