"""What plugins and phases keep with an epoch: ``epoch.store`` is saved with it, ``epoch.keep`` lives as long."""

from __future__ import annotations

import pytest

from engine.life.runs import STEPS, VALIDATED, at, end, make, same, script, sigterm, train, val, whole
from loopkit import Epoch, TrainingPhase, hookimpl
from loopkit.plugins import Checkpoint


class Watches:
    """Listens to hooks of epochs and of steps, and notes which epoch they were given."""

    name = "watches"

    def __init__(self):
        self.seen = []

    def note(self, hook, epoch, *others):
        assert type(epoch) is Epoch
        assert all(other is epoch for other in others)
        self.seen.append((hook, epoch.phase.name))


def listening():
    """A plugin with hooks that ask for the epoch; before they can, its class is refused."""

    class Listens(Watches):
        @hookimpl
        def epoch_begin(self, epoch):
            self.note("epoch_begin", epoch)

        @hookimpl
        def step_begin(self, epoch, step):
            self.note("step_begin", epoch, step.epoch)

        @hookimpl
        def update_end(self, learner, phase, epoch, step):
            self.note("update_end", epoch, step.epoch)
            assert epoch.phase is phase

        @hookimpl
        def step_end(self, epoch):
            self.note("step_end", epoch)

        @hookimpl
        def epoch_end(self, phase, epoch):
            self.note("epoch_end", epoch)

        @hookimpl
        def phase_end(self, epoch):
            self.note("phase_end", epoch)

    return Listens()


def test_hooks_are_given_the_epoch_that_runs():
    plugin = listening()
    make(plugin).fit(train(), val(), epochs=1)
    around = lambda phase, *inner: [("epoch_begin", phase), *inner, ("epoch_end", phase), ("phase_end", phase)]  # noqa: E731
    trained = [("step_begin", "train"), ("update_end", "train"), ("step_end", "train")] * STEPS
    validated = [("step_begin", "val"), ("step_end", "val")] * VALIDATED
    assert plugin.seen == around("train", *trained) + around("val", *validated)


def summing(evaluate=None):
    """A plugin that sums the losses of each epoch, in its store and in what it keeps; it has no state of its own."""

    class Sums:
        name = "sums"
        volatile = ("rows",)

        def __init__(self):
            self.rows = []

        @hookimpl(reads=("loss",))
        def step_end(self, learner, epoch, step):
            for room in (epoch.store(self), epoch.keep(self)):
                room["steps"] = room.get("steps", 0) + 1
                room["total"] = room.get("total", 0.0) + step.loss.item()
                room["last"] = step.loss.detach()
            if evaluate is not None and epoch.phase.training:
                learner.evaluate(evaluate)

        @hookimpl
        def epoch_end(self, phase, epoch):
            told = [{**room, "last": room["last"].item()} for room in (epoch.store(self), epoch.keep(self))]
            self.rows.append((phase.name, *told))

    return Sums()


def test_rooms_begin_empty_with_each_epoch():
    plugin = summing()
    make(plugin).fit(train(), val(), epochs=2)
    assert [(name, store["steps"]) for name, store, _ in plugin.rows] == [("train", STEPS), ("val", VALIDATED)] * 2
    assert all(store == kept for _, store, kept in plugin.rows)


@pytest.mark.parametrize(("phase", "epochs", "index"), [("train", 1, 1), ("val", 1, 0), ("train", 0, 0), ("val", 2, 1)])
def test_store_goes_on_in_mid_epoch_and_what_is_kept_does_not(phase, epochs, index, tmp_path):
    straight = summing()
    make(straight).fit(train(), val(), epochs=2)
    before, after = summing(), summing()
    with pytest.raises(SystemExit):
        script(tmp_path, before, at(sigterm, phase=phase, epochs=epochs, index=index)).fit(train(), val(), epochs=2)
    again = script(tmp_path, after, again=True)
    again.fit(train(), val(), epochs=2)
    stored = [(name, store) for name, store, _ in before.rows + after.rows]
    assert stored == [(name, store) for name, store, _ in straight.rows]
    name, store, kept = after.rows[0]
    assert name == phase
    assert kept["steps"] == store["steps"] - (index + 1)
    same(whole(2), end(again))


def test_nested_epochs_have_rooms_of_their_own():
    plugin = summing(evaluate=val())
    make(plugin).fit(train(), epochs=1)
    names = [(name, store["steps"], kept["steps"]) for name, store, kept in plugin.rows]
    assert names == [("val", VALIDATED, VALIDATED)] * STEPS + [("train", STEPS, STEPS)]


def test_plugins_have_rooms_of_their_own():
    one, other = summing(), summing()
    other.name = "others"
    make(one, other).fit(train(), epochs=1)
    assert one.rows == other.rows
    assert one.rows[0][1]["steps"] == STEPS


class Counts(TrainingPhase):
    """Counts its steps in its store, and scales the loss by them."""

    volatile = ("scale",)

    def loss(self, learner, outputs, targets):
        return learner.loss_fn(outputs, targets) * self.scale

    def step(self, learner, step):
        step.store["seen"] = step.store.get("seen", 0) + 1
        self.scale = 1.0 + 0.1 * step.store["seen"]
        super().step(learner, step)


def test_phase_finds_its_store_at_the_step(tmp_path):
    straight = make(phases=[Counts()])
    straight.fit(train(), epochs=2)
    interrupted = make(Checkpoint(tmp_path), at(sigterm, epochs=1, index=1), phases=[Counts()])
    with pytest.raises(SystemExit):
        interrupted.fit(train(), epochs=2)
    again = make(Checkpoint(tmp_path, resume="auto"), phases=[Counts()], seed=99)
    again.fit(train(), epochs=2)
    same(end(straight), end(again))
