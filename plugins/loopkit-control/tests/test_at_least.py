"""Stops that are put off: when they take effect, and that a run goes on with them."""

import threading

import pytest
from helpers import on
from loopkit_testing import check_plugin
from training import bits, data, made

from loopkit.criteria import NumberLimit
from loopkit.errors import PluginError
from loopkit.plugins import EarlyStopping
from loopkit_control import AtLeast


def stopping():
    return EarlyStopping("train/loss", criterion=NumberLimit(1))


def test_stop_of_a_plugin_takes_effect_after_so_many_updates():
    steps = len(data())
    learner = made(stopping(), AtLeast(updates=steps + 5))
    result = learner.fit(data(), epochs=9)
    assert (result.reason, result.by, result.updates) == ("stop", "early_stopping", steps + 5)
    assert result.message == "train/loss: measured 1 times, the limit is 1"


def test_stop_of_a_plugin_takes_effect_after_so_many_epochs():
    result = made(stopping(), AtLeast(epochs=3)).fit(data(), epochs=9)
    assert (result.reason, result.epochs) == ("stop", 3)


@pytest.mark.parametrize("later", [False, True])
def test_stop_that_comes_late_enough_or_from_own_code_is_not_put_off(later):
    by = {"by": "asking"} if later else {}
    asking = on("step_end", lambda learner: learner.progress.steps == 4 and learner.stop("why", **by), "asking")
    result = made(asking, AtLeast(updates=4 if later else 99)).fit(data(), epochs=9)
    assert (result.reason, result.updates) == ("stop", 4)


@pytest.mark.parametrize("at", [3, 2])
def test_run_goes_on_with_the_stop_that_was_put_off(at):
    def plugins():
        return stopping(), AtLeast(updates=len(data()) + 6)

    whole, first, again = made(*plugins()), made(*plugins()), made(*plugins())
    ended = whole.fit(data(), epochs=9)
    pause = lambda learner: learner.progress.steps == len(data()) + at and learner.pause("test")  # noqa: E731
    first.add(on("step_end", pause, "pausing"))
    assert first.fit(data(), epochs=9, on_interrupt="return").reason == "pause"
    first.remove("pausing")
    again.load_state_dict(first.state_dict())
    result = again.fit(data(), epochs=9)
    assert (result.reason, result.by, result.message) == (ended.reason, ended.by, ended.message)
    assert again.progress == whole.progress
    assert bits(whole) == bits(again)
    assert again.plugins["early_stopping"].state_dict() == whole.plugins["early_stopping"].state_dict()


def test_another_fit_begins_anew():
    learner = made(stopping(), AtLeast(epochs=2))
    assert [learner.fit(data(), epochs=9).epochs for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("given", [{"updates": 0}, {"epochs": True}, {}])
def test_at_least_refuses(given):
    with pytest.raises(PluginError, match=r"AtLeast: (updates|epochs) is|AtLeast: give updates="):
        AtLeast(**given)


def test_plugin_keeps_the_contract():
    check_plugin(lambda: AtLeast(updates=3))


@pytest.mark.parametrize("updates", [2, 99])
def test_holder_is_asked_in_the_thread_of_the_fit_whoever_asks_for_the_stop(updates):
    asked, requests = [], []

    class Holds(AtLeast):
        def hold_stop(self, learner, reason, by):
            asked.append((threading.current_thread() is threading.main_thread(), learner.progress.updates))
            return super().hold_stop(learner, reason, by)

    def ask(learner):
        if learner.progress.updates == 1:  # in the second step, before its update
            thread = threading.Thread(target=lambda: requests.append(learner.stop("why", by="asking")))
            thread.start()
            thread.join()
            assert asked == []

    result = made(on("loss_begin", ask, "asking"), Holds(updates=updates)).fit(data(), epochs=1)
    assert asked == [(True, 2)]
    assert requests[0].put_off == (updates == 99)
    assert (result.reason, result.updates) == (("stop", 2) if updates == 2 else ("epochs", len(data())))
