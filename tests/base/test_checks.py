"""Checks of options: which values they take, and the message for others."""

import math
from fractions import Fraction

import numpy as np
import pytest

from loopkit.author import checks
from loopkit.errors import LoopkitError, PluginError

LoaderError = type("LoaderError", (LoopkitError, ValueError), {})


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_whole_number_from_1_is_required(value):
    with pytest.raises(PluginError, match=rf"^Every: steps is {value!r}: it is a whole number, from 1$"):
        checks.whole("Every", steps=value)


def test_whole_number_from_the_least_on_is_taken():
    checks.whole("Every", 0, steps=0, epochs=3)


@pytest.mark.parametrize("value", [0, -0.5, math.nan, math.inf, False, "1"])
def test_positive_number_is_required(value):
    with pytest.raises(PluginError, match=r"^Wait: limit is .*: it is a number of seconds above 0$"):
        checks.positive("Wait", "seconds", limit=value)


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(2), Fraction(1, 2)])
def test_numbers_of_other_types_are_taken(value):
    checks.positive("Wait", limit=value)
    checks.not_negative("Wait", limit=value)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "0"])
def test_number_from_0_is_required(value):
    with pytest.raises(PluginError, match=r"^Wait: limit is .*: it is a number, from 0$"):
        checks.not_negative("Wait", limit=value)


def test_infinity_is_taken_where_it_is_allowed():
    checks.not_negative("Wait", limit=math.inf, margin=0, infinite=True)


def test_word_that_is_not_one_of_them_is_named_with_the_nearest():
    with pytest.raises(PluginError, match=r"over is 'al': it is 'each', 'all' or None \(did you mean 'all'\?\)$"):
        checks.one_of("Clip", ("each", "all", None), over="al")


@pytest.mark.parametrize("value", [1, [], "each "])
def test_value_of_another_type_is_none_of_them(value):
    with pytest.raises(PluginError, match="it is True or 'auto'"):
        checks.one_of("Clip", (True, "auto"), over=value)


def test_error_has_the_class_that_was_asked_for():
    with pytest.raises(LoaderError, match="block is 0"):
        checks.whole("Tokens", block=0, error=LoaderError)
