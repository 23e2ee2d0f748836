"""Prechelt's criteria, against his definitions in exact arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopkit.criteria import Criterion, Patience, warmup
from loopkit.errors import PluginError
from loopkit_control import GeneralisationLoss, ProgressQuotient

NAN = float("nan")
errors = st.lists(st.integers(1, 20).map(lambda n: n / 4), min_size=1, max_size=30)


def fired(criterion: Criterion, values, mode="min", training=None) -> list[int]:
    """The positions at which it fires."""
    found = []
    for position, value in enumerate(values):
        if training is not None:
            criterion.observe_training(training[position])
        if criterion.update(value, mode):
            found.append(position)
    return found


@pytest.mark.parametrize(
    ("criterion", "values", "mode", "expected"),
    [
        (GeneralisationLoss(50), [4, 2, 3, 3.25, 1, 2], "min", [3, 5]),  # above 50 %, not at it
        (GeneralisationLoss(50), [1, 4, 2, 1.5], "max", [3]),
        (GeneralisationLoss(50), [NAN, 2, NAN, 4], "min", [3]),
        (GeneralisationLoss(50), [0.0, 0.0, 1e-9], "min", [2]),
        (GeneralisationLoss(50), [-4.0, -2.0, -1.0], "min", [2]),
    ],
)
def test_generalisation_loss_fires_above_its_limit(criterion, values, mode, expected):
    assert fired(criterion, values, mode) == expected


def test_generalisation_loss_says_why_it_fired():
    criterion = GeneralisationLoss(50)
    criterion.update(2)
    assert criterion.update(4) == "4 is 100 % worse than the best, 2; the limit is 50 %"


def test_progress_quotient_says_why_it_fired():
    criterion = ProgressQuotient(0.5, 2)
    for training in (3, 2):  # mean 2.5, min 2: a progress of 250
        criterion.observe_training(training)
    criterion.update(1)
    assert criterion.update(3) == (
        "3 is 200 % worse than the best, 1, while the last 2 training values made a progress of 250 per mille: "
        "the quotient is 0.8, the limit is 0.5"
    )


@given(errors, st.integers(1, 200))
def test_generalisation_loss_is_prechelts(values, alpha):
    exact = [Fraction(value) for value in values]
    losses = [100 * (exact[t] / min(exact[: t + 1]) - 1) for t in range(len(exact))]
    near = any(abs(loss - alpha) < Fraction(1, 10**9) for loss in losses)  # where rounding decides
    assert near or fired(GeneralisationLoss(alpha), values) == [t for t, loss in enumerate(losses) if loss > alpha]


@given(st.data(), st.integers(2, 4), st.sampled_from([0.05, 0.3, 0.7]))
def test_progress_quotient_is_prechelts(data, k, alpha):
    values = data.draw(errors)
    training = data.draw(st.lists(st.integers(1, 20).map(lambda n: n / 4), min_size=30, max_size=30))
    va, tr = [Fraction(value) for value in values], [Fraction(value) for value in training]
    expected, near = [], False
    for t in range(k - 1, len(va)):
        strip = tr[t - k + 1 : t + 1]
        loss = 100 * (va[t] / min(va[: t + 1]) - 1)
        progress = 1000 * (sum(strip) / (k * min(strip)) - 1)
        near = near or (progress > 0 and abs(loss / progress - Fraction(alpha)) < Fraction(1, 10**9))
        if loss > Fraction(alpha) * progress:
            expected.append(t)
    assert near or fired(ProgressQuotient(alpha, k), values, training=training) == expected


def test_progress_quotient_with_mode_max_mirrors_the_formula():
    criterion = ProgressQuotient(0.75, 2)
    for training in (0.5, 1.0):  # mean 0.75, best 1
        criterion.observe_training(training)
    assert criterion.progress("max") == 250


def test_progress_quotient_without_progress_fires_at_any_loss():
    assert fired(ProgressQuotient(100, 2), [1, 1, 1.25], training=[3, 3, 3]) == [2]


def test_progress_quotient_does_not_fire_before_a_full_strip():
    assert fired(ProgressQuotient(0.01, 3), [1, 9, 9], training=[3, 2, 1]) == [2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: GeneralisationLoss(40),
        lambda: ProgressQuotient(0.2, 3),
        lambda: Patience(2) | GeneralisationLoss(90),
        lambda: warmup(ProgressQuotient(0.5, 2), 3),
    ],
)
@pytest.mark.parametrize("cut", range(9))
def test_criterion_resumed_anywhere_fires_as_an_uninterrupted_one(make, cut):
    values = [3, 2, 2.5, 3, 1, 1.5, 2, NAN, 4]
    training = [5, 4, 4.5, 3, 3, 3, 2, 2, 2]
    first, second = make(), make()
    found = fired(first, values[:cut], training=training)
    second.load_state_dict(first.state_dict())
    found += [cut + t for t in fired(second, values[cut:], training=training[cut:])]
    assert found == fired(make(), values, training=training) != []


def test_state_is_a_copy():
    criterion = ProgressQuotient(1, 2)
    criterion.observe_training(1.0)
    state = criterion.state_dict()
    criterion.load_state_dict(state)
    criterion.recent.append(2.0)
    assert state["recent"] == [1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GeneralisationLoss(0), r"GeneralisationLoss: alpha is 0: it is a finite number above 0"),
        (lambda: ProgressQuotient(-1), r"ProgressQuotient: alpha is -1: it is a finite number above 0"),
        (lambda: ProgressQuotient(1, 1), r"ProgressQuotient: k is 1: it is a whole number, from 2"),
    ],
)
def test_criterion_with_a_bad_option_is_refused(make, message):
    with pytest.raises(PluginError, match=message):
        make()
