"""`loopkit.every`: how often something is done."""

import math

import pytest

from loopkit import every
from loopkit.every import Every


@pytest.mark.parametrize("given", [{"epochs": 2}, {"epochs": 0.25}, {"updates": 100, "first": True}, {"minutes": 0.5}])
def test_every_is_equal_to_what_its_options_make(given):
    assert every(**given).options() == given
    assert Every(**every(**given).options()) == every(**given)


def test_every_shows_what_was_given():
    assert repr(every(updates=100)) == "every(updates=100)"
    assert repr(every(epochs=2, first=True)) == "every(epochs=2, first=True)"


def test_every_counts_minutes_in_seconds():
    assert every(minutes=10).seconds == 600.0
    assert every(updates=10).seconds == math.inf


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"every\(\): give exactly one of epochs, updates and minutes"),
        ({"first": True}, "give exactly one"),
        ({"epochs": 1, "minutes": 2}, r"every\(epochs=1, minutes=2\): give exactly one"),
        (
            {"epochs": 0},
            r"every\(epochs=0\): epochs are counted from 1, as in .*, or a part of one, as in every\(epochs=0.25",
        ),
        ({"epochs": 0.0}, "epochs are counted from 1"),
        ({"epochs": 1.5}, "epochs are counted from 1"),
        ({"epochs": math.nan}, "epochs are counted from 1"),
        ({"updates": 2.5}, r"every\(updates=2.5\): updates are counted from 1"),
        ({"updates": True}, "counted from 1"),
        ({"minutes": 0}, r"every\(minutes=0\): give a number above 0"),
        ({"minutes": math.inf}, "above 0"),
        ({"minutes": math.nan}, "above 0"),
        ({"minutes": "10"}, "above 0"),
        ({"epochs": 1, "first": 1}, r"every\(first=1\): it is True or False"),
    ],
)
def test_every_refuses_what_is_no_interval(given, message):
    with pytest.raises(ValueError, match=message):
        every(**given)


def test_every_says_what_it_takes_where_steps_are_given():
    with pytest.raises(TypeError, match="'steps': every takes epochs, updates or minutes"):
        every(steps=50)
