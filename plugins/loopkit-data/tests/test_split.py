"""Splits: every sample in one part, by seed, with the strata's shares."""

import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split

from loopkit.data import LoaderError
from loopkit_data import train_val_split


def test_split_is_by_the_seed_and_has_every_sample_once():
    inputs, targets = torch.arange(20), np.arange(20)
    (train, labels), (val, others) = train_val_split(inputs, targets, val=0.25, seed=1)
    assert (train.numpy() == labels).all()
    assert (val.numpy() == others).all()
    assert len(val) == 5
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(20))
    again = train_val_split(inputs, val=5, seed=1)[1]
    assert torch.equal(again, val)
    assert not torch.equal(train_val_split(inputs, val=5, seed=2)[1], val)


def test_strata_have_the_shares_that_scikit_learn_gives():
    generator = np.random.default_rng(0)
    for _ in range(200):
        classes = np.concatenate([np.arange(3).repeat(3), generator.integers(0, 3, generator.integers(10, 60))])
        val = int(generator.integers(4, len(classes) - 4))
        _, expected = train_test_split(classes, test_size=val, stratify=classes, random_state=0)
        _, found = train_val_split(classes, val=val, strata=classes)
        difference = np.bincount(found, minlength=3) - np.bincount(expected, minlength=3)
        assert len(found) == len(expected)
        assert abs(difference).max() <= 1  # it draws which class is rounded up


def test_split_of_a_dataset_gives_subsets():
    train, val = train_val_split(list("abcdefghij"), val=3)
    assert sorted([*train, *val]) == list("abcdefghij")


def test_split_refuses_lengths_and_empty_parts():
    with pytest.raises(LoaderError, match="of one length, not 2, 3"):
        train_val_split([1, 2], [1, 2, 3])
    for val in (0, 1.0, 4):
        with pytest.raises(LoaderError, match="both parts need one at least"):
            train_val_split(np.arange(4), val=val)
