"""`StopOn` and `AtLeast` on two processes: one mean over both, and one stop for both, also from a state."""

import pytest
from distributed.processes import run
from helpers import on
from test_at_least import stopping
from test_stop_on import Seen
from training import bits, data, made

from loopkit.criteria import NumberLimit
from loopkit.plugins import DDP
from loopkit_control import AtLeast, StopOn

STEPS = 11
"""Of an epoch of one of two processes."""


def ended(learner, result):
    return result.reason, result.by, result.message, result.updates, bits(learner)


def in_process(rank):
    losses, seen = [], StopOn(Seen(), every=3)
    note = on("step_end", lambda step: losses.append((step.loss.double().item(), step.weight)), "note")
    made(DDP(), seen, note).fit(data(), epochs=1)
    stopped = made(DDP(), StopOn(NumberLimit(2), every=3))
    mine = ended(stopped, stopped.fit(data(), epochs=9))

    def plugins():
        return DDP(), stopping(), AtLeast(updates=STEPS + 5)

    whole = made(*plugins())
    kept = ended(whole, whole.fit(data(), epochs=9))
    first = made(*plugins(), on("step_end", pause, "pausing"))
    first.fit(data(), epochs=9, on_interrupt="return")
    first.remove("pausing")
    again = made(*plugins())
    again.load_state_dict(first.state_dict())
    return losses, seen.criterion.values, mine, kept, ended(again, again.fit(data(), epochs=9))


def pause(learner):
    if learner.progress.steps == STEPS + 2:
        learner.pause("test")


def test_processes_ask_about_one_mean_and_stop_together():
    one, other = run(in_process, 2)
    steps = list(zip(one[0], other[0], strict=True))
    assert len(steps) == STEPS
    sums = [(sum(loss * weight for loss, weight in pair), sum(weight for _, weight in pair)) for pair in steps]
    thirds = [sums[low : low + 3] for low in (0, 3, 6)]
    means = [sum(above for above, _ in each) / sum(below for _, below in each) for each in thirds]
    assert one[1] == other[1] == pytest.approx(means, rel=1e-12)  # sums in another order
    assert one[2] == other[2]
    assert one[2][:3] == ("stop", "stop_on", "loss after update 6: measured 2 times, the limit is 2")
    assert 6 <= one[2][3] <= STEPS  # they agree about once a second, and at the end of each epoch
    assert one[3] == other[3]
    assert one[4] == other[4]
    for put_off in (one[3], one[4]):
        assert put_off[:2] == ("stop", "early_stopping")
        assert STEPS + 5 <= put_off[3] <= 2 * STEPS
    assert one[3][3] != one[4][3] or one[3][4] == one[4][4]
