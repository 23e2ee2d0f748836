"""What one process asks for takes effect in all of them at the same step, and costs few exchanges."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import on
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.processes import run, run_each
from loopkit import CancelEpoch, CancelFit, CancelStep, Learner, TrainingPhase, every, hookimpl, metrics
from loopkit.data import TensorLoader
from loopkit.distributed import member
from loopkit.engine.life import requests
from loopkit.engine.life.answers import Answers
from loopkit.errors import WorldError
from loopkit.plugins import DDP, Checkpoint, EarlyStopping, Metrics


def make_model(norm=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3))


def samples(steps, processes=2, size=2):
    generator = torch.Generator().manual_seed(1)
    count = steps * processes * size
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def make_learner(*plugins, accumulate=1, norm=False, **options):
    return Learner(
        make_model(norm),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        plugins=[DDP(timeout=60, **options), *plugins],
        accumulate=accumulate,
        standard=False,
    )


def ended(learner, result):
    """What must be equal in all processes at the end of a fit."""
    counts = (result.epochs, result.steps, result.updates, result.samples)
    return {
        "result": (result.reason, result.message, result.by, *counts, result.metrics),
        "progress": str(learner.progress),
        "position": str(learner.state_dict()["data"]),
        "weights": [value.clone() for value in learner.model.state_dict().values()],
    }


def same(one, other):
    weights = zip(one["weights"], other["weights"], strict=True)
    rest = [{key: value for key, value in each.items() if key != "weights"} for each in (one, other)]
    return rest[0] == rest[1] and all(torch.equal(*pair) for pair in weights)


def act(learner, what):
    if what == "stop":
        learner.stop("enough", by="somebody")
    elif what == "cancel_epoch":
        raise CancelEpoch("no more of this")
    elif what == "cancel_fit":
        raise CancelFit("no more of all this")
    elif what == "save":
        learner.current.request_save()
    else:
        os.kill(os.getpid(), getattr(signal, what))


class Asks:
    """Asks for something in one process alone."""

    def __init__(self, rank, what, hook="step_end", step=5, epoch=0):
        self.rank, self.what, self.hook = rank, what, hook
        self.when = epoch, step if hook in ("step_end", "update_end") else None
        self.at = None

    def _ask(self, learner, phase, hook, step):
        now = (learner.progress.epochs - (hook == "phase_end"), step)
        if learner.world.rank == self.rank and hook == self.hook and phase.training and now == self.when:
            self.at = learner.progress.steps
            act(learner, self.what)

    @hookimpl
    def epoch_begin(self, learner, phase):
        self._ask(learner, phase, "epoch_begin", None)

    @hookimpl
    def step_end(self, learner, phase, step):
        self._ask(learner, phase, "step_end", step.index)

    @hookimpl
    def update_end(self, learner, phase, step):
        self._ask(learner, phase, "update_end", step.index)

    @hookimpl
    def epoch_end(self, learner, phase):
        self._ask(learner, phase, "epoch_end", None)

    @hookimpl
    def phase_end(self, learner, phase):
        self._ask(learner, phase, "phase_end", None)


class Signalled:
    """Counts the saves that are asked for, and where."""

    def __init__(self):
        self.at = []

    @hookimpl
    def signal_begin(self, learner):
        self.at.append((learner.progress.steps, learner.current.signal and learner.current.signal.name))


def asked(rank, who, what, hook="step_end", accumulate=1, steps=40, val=False):
    asks, signalled = Asks(who, what, hook), Signalled()
    learner = make_learner(asks, signalled, accumulate=accumulate)
    data = TensorLoader(*samples(steps), batch_size=2, shuffle=True, seed=3)
    more = {"val": TensorLoader(*samples(3), batch_size=2)} if val else {}
    result = learner.fit(data, epochs=2, on_interrupt="return", **more)
    return {**ended(learner, result), "asked": asks.at, "signalled": signalled.at}


def outcome(rank, who, *args):
    told = asked(rank, who, *args)
    at = told.pop("asked")
    assert (at is None) == (rank != who)
    return told, at


REASONS = {
    "stop": ("stop", "enough", "somebody"),
    "cancel_epoch": ("epochs", "", ""),
    "cancel_fit": ("cancel", "no more of all this", "asks"),
    "SIGTERM": ("signal", "SIGTERM", ""),
    "SIGINT": ("signal", "SIGINT", ""),
}


HALVES = [0, pytest.param(1, marks=pytest.mark.slow)]
"""Of cases that differ in two ways."""
ASKED = [
    ("stop", "step_end"),
    ("stop", "update_end"),
    ("cancel_epoch", "step_end"),
    ("cancel_fit", "step_end"),
    ("SIGTERM", "step_end"),
    ("SIGTERM", "update_end"),
    ("SIGINT", "step_end"),
]


@pytest.mark.parametrize("half", HALVES)
def test_what_one_process_asks_for_ends_all_at_the_same_step(half):
    cases = [(asked, (number + half) % 2) for number, asked in enumerate(ASKED)]
    for (asked, who), found in zip(cases, run_each(outcome, 2, [(who, *asked) for asked, who in cases]), strict=True):
        what, _ = asked
        told, ats = zip(*found, strict=True)
        assert same(*told)
        reason, *counts = told[0]["result"][:3], *told[0]["result"][3:7]
        assert reason == REASONS[what]
        epochs, steps, updates, _ = counts
        first = steps - 40 if what == "cancel_epoch" else steps
        at = ats[who]
        assert at <= first <= 2 * at + 2  # the steps between two agreements at most double
        assert updates == steps
        assert epochs == {"cancel_epoch": 2, "SIGTERM": 0, "SIGINT": 0}.get(what, 1)


WHATS = ["stop", "cancel_epoch", "cancel_fit", "SIGTERM"]


def test_what_is_asked_for_in_the_last_step_is_not_lost():
    for what, found in zip(WHATS, run_each(outcome, 2, [(1, what, "step_end", 1, 6) for what in WHATS]), strict=True):
        told, _ = zip(*found, strict=True)
        assert same(*told)
        assert told[0]["result"][:3] == REASONS[what]
        assert told[0]["result"][4] == (12 if what == "cancel_epoch" else 6)


@pytest.mark.parametrize("half", HALVES)
def test_what_is_asked_for_at_the_ends_of_a_pass_takes_effect_there(half):
    cases = [(what, hook) for what in WHATS for hook in ("epoch_begin", "epoch_end", "phase_end")][half::2]
    ended = run_each(outcome, 2, [(1, what, hook, 1, 6, True) for what, hook in cases])
    for (what, hook), found in zip(cases, ended, strict=True):
        told, _ = zip(*found, strict=True)
        assert same(*told)
        assert told[0]["result"][:3] == REASONS[what]
        steps = told[0]["result"][4]
        begins = {"stop": 0, "cancel_epoch": 6, "cancel_fit": 0, "SIGTERM": 1}  # a signal, after the first step
        assert steps == (begins[what] if hook == "epoch_begin" else 12 if what == "cancel_epoch" else 6)


def test_an_open_window_delays_it_to_its_update():
    cases = ["stop", "cancel_fit", "SIGTERM"]
    for _, found in zip(cases, run_each(outcome, 2, [(1, what, "step_end", 3) for what in cases]), strict=True):
        told, ats = zip(*found, strict=True)
        assert same(*told)
        steps, updates = told[0]["result"][4:6]
        assert steps == 3 * updates
        assert ats[1] <= steps <= 2 * ats[1] + 4


def test_a_save_that_one_asks_for_is_made_by_all_at_one_step():
    cases = [("save", 0), ("save", 1), ("SIGUSR1", 1)]
    for (_, who), found in zip(cases, run_each(outcome, 2, [(who, what) for what, who in cases]), strict=True):
        told, ats = zip(*found, strict=True)
        assert same(*told)
        assert told[0]["result"][0] == "epochs"
        [(step, name)] = told[0]["signalled"]
        assert ats[who] <= step <= 2 * ats[who] + 2
        assert name is None


class SlowOnce:
    """One process sleeps, so that its time is up before the other's."""

    def __init__(self, seconds):
        self.seconds, self.began = seconds, time.monotonic()

    @hookimpl(phase=TrainingPhase)
    def step_end(self, learner, step):
        if learner.world.rank == 1 and step.index == 3:
            time.sleep(self.seconds)
        if learner.world.rank == 1 and time.monotonic() - self.began > self.seconds:
            learner.stop("the time is up", by="limit")


def limited(rank):
    learner = make_learner(SlowOnce(0.3))
    return ended(learner, learner.fit(TensorLoader(*samples(300), batch_size=2), epochs=1))


def test_a_time_limit_that_one_process_reaches_holds_for_all():
    one, other = run(limited, 2)
    assert same(one, other)
    assert one["result"][:3] == ("stop", "the time is up", "limit")
    assert one["result"][4] < 300


def bounded(rank, how):
    plugins = [Metrics(metrics.Accuracy())]
    if how == "early":
        plugins.append(EarlyStopping("val/loss", patience=1, min_delta=10.0))
    learner = make_learner(*plugins)
    data, val = TensorLoader(*samples(5), batch_size=2, shuffle=True, seed=3), TensorLoader(*samples(3), batch_size=2)
    limits = {"early": {"epochs": 9}, "max_steps": {"max_steps": 7}, "max_updates": {"max_updates": 7}}
    return ended(learner, learner.fit(data, val, **limits[how]))


def test_limits_that_all_see_need_no_more():
    cases = ["early", "max_steps", "max_updates"]
    for how, (one, other) in zip(cases, run_each(bounded, 2, [(how,) for how in cases]), strict=True):
        assert same(one, other)
        assert one["result"][0] == {"early": "stop"}.get(how, how)
        assert one["result"][4] == (10 if how == "early" else 7)


class Begins:
    def __init__(self, what):
        self.what = what

    @hookimpl
    def fit_begin(self, learner):
        if learner.world.rank == 1:
            act(learner, self.what)


def begins(rank, what):
    learner = make_learner(Begins(what))
    return ended(learner, learner.fit(TensorLoader(*samples(6), batch_size=2), epochs=2, on_interrupt="return"))


def test_what_is_asked_for_in_fit_begin_holds_for_all():
    cases = ["stop", "cancel_fit", "SIGTERM"]
    for what, (one, other) in zip(cases, run_each(begins, 2, [(what,) for what in cases]), strict=True):
        assert same(one, other)
        assert one["result"][:2] == (REASONS[what][0], REASONS[what][1])
        assert one["result"][4] <= 1


class InValidation:
    """Asks in a training step, or in a step of the validation that comes in the middle of it."""

    def __init__(self, what, phase):
        self.what, self.phase = what, phase

    @hookimpl
    def step_end(self, learner, phase, step):
        due = step.index == (3 if phase.training else 0)
        if learner.world.rank == 1 and phase.name == self.phase and due and learner.progress.updates == 4:
            act(learner, self.what)


class Validated:
    """Counts the steps of each validation."""

    def __init__(self):
        self.steps = []

    @hookimpl
    def phase_end(self, learner, phase, epoch):
        if not phase.training:
            self.steps.append((learner.progress.steps, epoch.steps))


def within(rank, what, phase):
    seen = Validated()
    learner = make_learner(InValidation(what, phase), Metrics(metrics.Accuracy()), seen)
    data, val = TensorLoader(*samples(24), batch_size=2), TensorLoader(*samples(3), batch_size=2)
    result = learner.fit(data, val, epochs=1, validate=every(updates=4), on_interrupt="return")
    return {**ended(learner, result), "seen": seen.steps, "val": result.metrics.get("val/accuracy")}


@pytest.mark.parametrize("half", HALVES)
def test_a_validation_in_the_middle_of_a_pass_keeps_what_the_pass_was_asked_for(half):
    cases = [(what, ("train", "val")[(number + half) % 2]) for number, what in enumerate(WHATS)]
    for (what, phase), (one, other) in zip(cases, run_each(within, 2, cases), strict=True):
        assert same(one, other)
        if what == "cancel_epoch" and phase == "val":  # it ends the validation alone, here and there
            assert one["result"][:2] == ("epochs", "")
            assert one["result"][4] == 24
        else:
            assert one["result"][0] == REASONS[what][0]
            assert 4 <= one["result"][4] <= 10


def again(rank):
    learner = make_learner()
    inputs, targets = samples(4)
    data = TensorLoader(inputs[:-1], targets[:-1], batch_size=4)  # the last parts are of 4 samples and of 3
    for _ in range(2):
        learner.fit(data, epochs=1)
    own = make_learner(shard=False)
    batch = inputs[:2], targets[:2]
    own.evaluate(lambda: iter([batch] * (3 + 4 * rank)))  # of a length that nobody knows, and another one here
    return learner.progress.steps, learner.progress.samples


def test_a_second_fit_after_uneven_parts_is_no_difference_of_the_processes():
    assert run(again, 2) == [(4, 16), (4, 14)]


class SkipsOne:
    @hookimpl(phase=TrainingPhase)
    def step_begin(self, step):
        if step.index in (2, 7):
            raise CancelStep("not this one")


def skipping(rank):
    learner = make_learner(SkipsOne(), Asks(1, "stop", step=8))
    return ended(learner, learner.fit(TensorLoader(*samples(40), batch_size=2), epochs=1))


def test_steps_that_all_cancel_count_for_the_agreement():
    one, other = run(skipping, 2)
    assert same(one, other)
    assert one["result"][:3] == REASONS["stop"]


def exits(rank):
    learner = make_learner(Asks(1, "SIGTERM"))
    try:
        learner.fit(TensorLoader(*samples(40), batch_size=2), epochs=1)
    except SystemExit as error:
        return error.code
    return None


def test_a_signal_to_one_process_ends_all_with_its_status():
    assert run(exits, 2) == [143, 143]


def saving(rank, directory, what=None, accumulate=1):
    plugins = [Checkpoint(directory, save=every(epochs=9), resume="auto"), Metrics(metrics.Accuracy())]
    if what is not None:
        plugins.append(Asks(1, what, step=4, epoch=1))
    learner = make_learner(*plugins, accumulate=accumulate)
    data = TensorLoader(*samples(10), batch_size=2, shuffle=True, seed=3)
    result = learner.fit(data, TensorLoader(*samples(3), batch_size=2), epochs=3, on_interrupt="return")
    return ended(learner, result), [value for p in learner.optimizer.state.values() for value in p.values()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_goes_on_from_the_agreed_step_with_the_same_bits(tmp_path, accumulate):
    whole = run(saving, 2, tmp_path / "whole", None, accumulate)
    (first, _), (second, _) = run(saving, 2, tmp_path / "cut", "SIGTERM", accumulate)
    assert same(first, second)
    assert first["result"][0] == "signal"
    assert 14 <= first["result"][4] < 20
    resumed = run(saving, 2, tmp_path / "cut", None, accumulate)
    for (told, moments), (theirs, expected) in zip(resumed, whole, strict=True):
        assert same(told, theirs)
        assert all(torch.equal(*pair) for pair in zip(moments, expected, strict=True))


def by_hand(model, wrapped, steps):
    """The loop that a careful person writes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()
    inputs, targets = samples(steps)
    for index in range(steps):
        at = slice(4 * index + 2 * dist.get_rank(), 4 * index + 2 * dist.get_rank() + 2)
        optimizer.zero_grad()
        loss_fn(wrapped(inputs[at]), targets[at]).backward()
        optimizer.step()


class Counted(TorchDispatchMode):
    """Counts what is sent, by the name of the collective; the reducer's included."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname.rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


class Counting(DDP):
    """Keeps the steps after which all agreed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.agreed = []

    def agree(self, epoch, *numbers):
        self.agreed.append(epoch.steps)
        return super().agree(epoch, *numbers)


def exchanges(rank, steps):
    """A loop by hand, then two passes of a fit, whose steps take a 64th of a second each."""
    dist.init_process_group("gloo")
    plain, ours = Counted(), Counted()
    model = make_model(norm=True)
    wrapped = DistributedDataParallel(model)
    by_hand(model, wrapped, 3)  # the reducer's first steps need more
    with plain:
        by_hand(model, wrapped, steps)
    now = [0.0]
    member.time = SimpleNamespace(monotonic=lambda: now[0])
    tick = on("step_begin", lambda **_: now.append(now.pop() + 1 / 64), "tick")
    ddp = Counting(timeout=60)
    learner = Learner(
        make_model(norm=True),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        plugins=[ddp, tick],
        standard=False,
    )
    data = TensorLoader(*samples(steps), batch_size=2)
    learner.fit(data, epochs=1)
    first, ddp.agreed = ddp.agreed, []
    with ours:
        learner.fit(data, epochs=1)
    return plain.counts, ours.counts, first, ddp.agreed


def test_a_pass_exchanges_little_more_than_a_loop_by_hand():
    steps = 200
    for plain, ours, first, agreed in run(exchanges, 2, steps):
        more = {key: ours[key] - plain[key] for key in {*plain, *ours}}
        assert plain == {"allreduce": steps, "broadcast": 2 * steps}
        assert first == [2, 6, 14, 30, 62, 126, 190]  # about once a second
        assert agreed == [64, 128, 192]  # the pace of the pass before is kept
        assert more == {
            "allreduce": len(agreed) + 3,  # in the steps; at the begin of the fit and of the pass, and at its end
            "allgather": 4,  # two to compare how the processes are set up, two to compare the pass
            "broadcast": 2,  # buffers of two dtypes, at the end of the pass
        }


def test_cancel_of_the_fit_outweighs_that_of_an_epoch_whoever_raised_it():
    said = [("CancelEpoch", "one", "a"), ("CancelFit", "two", "b"), ("CancelFit", "three", "c")]
    cancel = requests._strongest(said)
    assert (type(cancel).__name__, cancel.reason, cancel.by) == said[1]
    assert requests._strongest(said[:1]).reason == "one"
    assert requests._strongest([]) is None


def test_stop_that_waits_for_its_answer_is_asked_for():
    mailbox = requests.Requests()
    mailbox.join(SimpleNamespace(size=2))
    assert not mailbox.asks
    mailbox.stop("enough", "somebody")
    assert mailbox.asks
    put_off = requests.Requests(lambda reason, by: True)
    put_off.join(SimpleNamespace(size=2))
    put_off.stop("enough", "somebody")
    assert not put_off.asks


NOTHING, SAVE = (None, None, False, None, frozenset()), (None, None, True, None, frozenset())


def agreed(updates, theirs, *wishes, in_step=True, asks=()):
    """What a process has agreed on with another one, of so many updates, which wishes this, time after time."""

    def agree(wanted, most, least, *rest):
        return [max(wanted, float(left[0] is not NOTHING)), max(most, theirs), max(least, -theirs), *rest]

    def gather(own):
        gathered.append(own)
        return [own, left[0]]

    gathered, mailbox = [], requests.Requests()
    mailbox.join(SimpleNamespace(rank=0, size=2, in_step=in_step, agree=agree, gather=gather))
    mailbox.begin(None)
    for ask in asks:
        ask(mailbox)
    for wish in wishes or [NOTHING]:
        left = [wish]
        cancel, numbers = mailbox.agree(updates, None, (3.0,))
    assert numbers == [3.0]
    return mailbox, cancel, len(gathered)


def test_processes_that_have_made_other_numbers_of_updates_have_parted():
    for updates, theirs in ((7, 8), (8, 7)):
        with pytest.raises(WorldError, match=rf"made from 7 to 8 updates, rank 0 {updates}: .* their parameters have"):
            agreed(updates, theirs)
        agreed(updates, theirs, in_step=False)
    agreed(8, 8)


def test_what_another_process_wishes_holds_here():
    stop, cancel, ending = ("enough", "another"), ("CancelEpoch", "one", "a"), (15, "SIGTERM", "")
    mailbox, *_ = agreed(8, 8, (stop, *NOTHING[1:]))
    assert (mailbox.stopped, mailbox.waits, mailbox.version) == (stop, False, 1)
    _, found, _ = agreed(8, 8, (None, cancel, *NOTHING[2:]))
    assert (type(found).__name__, found.reason, found.by) == cancel
    for wishes in (SAVE, (None, None, False, ending, frozenset())):
        mailbox, *_ = agreed(8, 8, wishes)
        assert (mailbox.waits, mailbox.stopped) == (True, None)
    mailbox, *_ = agreed(8, 8, (*NOTHING[:4], frozenset(["val"])))
    assert (mailbox.validations, mailbox.waits) == ({"val"}, False)


def test_first_stop_counts_and_nothing_is_asked_for_twice():
    asks = [lambda box: box.stop("first", "here"), lambda box: box.save()]
    late = ("late", "another"), *NOTHING[1:]
    for wishes in ([late], [NOTHING, late]):
        mailbox, _, gathered = agreed(8, 8, *wishes, NOTHING, asks=asks)
        assert (mailbox.stopped, mailbox.waits) == (("first", "here"), True)
        assert gathered == len(wishes)
    assert agreed(8, 8)[0].version == 0


def test_save_waits_until_windows_are_closed_and_the_next_agreement_does_not_forget_it():
    mailbox, *_ = agreed(8, 8, SAVE, NOTHING)
    running = SimpleNamespace(can_save=True, window_open=True, fit=None)
    answers = Answers(mailbox, running, registry=None, hold=None)
    answers.answer()
    assert mailbox.waits
    running.window_open = False
    answers.answer()
    assert not mailbox.waits


@pytest.mark.parametrize("in_step", [True, False])
def test_member_agrees_in_steps_that_all_make_alike(in_step):
    plugin = type("Own", (member.Member,), {"agrees_in_steps": in_step})()
    plugin.world = SimpleNamespace(size=2)
    pace = member._Pace(9, 9, 0.0)
    epoch = SimpleNamespace(agrees=True, keep=lambda plugin: {"pace": pace})
    plugin.step_end(SimpleNamespace(), TrainingPhase(), epoch)
    assert pace.left == (8 if in_step else 9)
