"""The names that TensorBoard shows."""

import pytest

from loopkit_tensorboard.tags import LONGEST, tag_of


@pytest.mark.parametrize(
    ("phase", "name", "tag"),
    [
        ("train", "loss", "train/loss"),
        ("val", "val/loss", "val/loss"),
        ("", "lr", "lr"),
        ("train", "grads/0.weight", "train/grads/0.weight"),
        ("train", "training", "train/training"),
        ("train", "<b>&amp;", "train/<b>&amp;"),
        ("train", "\N{FIRE} \N{FAMILY}\N{ZERO WIDTH JOINER}", "train/\N{FIRE} \N{FAMILY}\N{ZERO WIDTH JOINER}"),
    ],
)
def test_a_readable_name_is_kept(phase, name, tag):
    assert tag_of(phase, name) == tag


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("two\nlines", "train/two_lines~"),
        ("\x00", "train/_~"),
        ("half \ud800", "train/half _~"),
        ("line\u2028end", "train/line_end~"),
        ("x" * 10_000, "train/" + "x" * (LONGEST - 6) + "~"),
    ],
)
def test_an_unreadable_name_is_cleaned_and_told_apart(name, begin):
    tag = tag_of("train", name)
    assert tag.startswith(begin)
    assert len(tag) == len(begin) + 8
    tag.encode()


def test_names_that_are_cleaned_alike_stay_distinct():
    names = ["a\nb", "a\tb", "a_b", "x" * 201, "x" * 202, "\ud800", "\udfff"]
    assert len({tag_of("", name) for name in names}) == len(names)


def test_a_name_cannot_take_the_place_of_hyperparameters():
    assert tag_of("", "_hparams_/session_start_info").startswith("hparams_/session_start_info~")
