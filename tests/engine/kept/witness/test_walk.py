"""walk: what an object of the user's holds."""

import functools
import random
from collections import deque

import numpy
import pytest
import torch

from loopkit.base.generators import is_generator, put_state, state_of
from loopkit.engine.kept.witness.walk import walk


def paths(root, **options):
    return [found.path for found in walk(root, **options)]


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Loud(dict):
    """Each question to it would run the user's code."""

    def __init__(self):
        vars(self)["inside"] = 1

    def __getattr__(self, name):
        raise AssertionError(name)

    def __iter__(self):
        raise AssertionError("iterated")

    def __len__(self):
        raise AssertionError("len")

    @property
    def loader(self):
        raise AssertionError("property")


def test_walk_finds_attributes_items_and_what_callables_hold():
    held = Plain(
        rng=random.Random(0),
        parts=[1, (2, {3})],
        by={"a": deque([4])},
        collate=functools.partial(max, key=Plain(deep=5)),
        method=Plain(n=6).__init__,
    )
    found = {each.path: each.value for each in walk(held)}
    assert found["rng"] is held.rng
    assert found["parts[1][0]"] == 2
    assert found["by['a'][0]"] == 4
    assert found["collate.keywords['key'].deep"] == 5
    assert found["method.__self__.n"] == 6


def test_walk_runs_no_code_of_the_users():
    assert paths(Plain(loud=Loud())) == ["", "loud", "loud.inside"]


def test_walk_yields_each_object_once_and_ends_in_circles():
    one, two = Plain(), Plain()
    one.other, two.other, one.again = two, one, two
    assert paths(one) == ["", "other"]


def test_walk_ends_at_its_depth_and_its_count():
    deep = Plain(a=Plain(b=Plain(c=Plain(d=Plain(e=1)))))
    assert paths(deep)[-1] == "a.b.c.d"
    assert len(paths(list(range(50_000)))) == 10_000


def test_walk_does_not_look_into_tensors_classes_modules_of_python_and_generators():
    assert paths(Plain(t=torch.ones(2), k=Plain, m=random, r=random.Random(0))) == ["", "t", "k", "m", "r"]


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
    "python": (lambda: random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
    "numpy": (lambda: numpy.random.default_rng(3), lambda g: [*g.random(3), *g.integers(0, 9, 3, dtype="int32")]),
    "philox": (lambda: numpy.random.Generator(numpy.random.Philox(3)), lambda g: list(g.random(3))),
    "sfc": (lambda: numpy.random.Generator(numpy.random.SFC64(3)), lambda g: list(g.random(3))),
    "old numpy": (lambda: numpy.random.RandomState(3), lambda g: [*g.rand(2), g.randn()]),
    "bits": (lambda: numpy.random.PCG64(3), lambda g: list(g.random_raw(3))),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_state_of_a_generator_is_put_back_into_another(kind, tmp_path):
    from loopkit.checkpoint.encoding import decode, encode

    make, draw = GENERATORS[kind]
    generator, other = make(), make()
    draw(generator)
    assert is_generator(generator)
    state = decode(*encode(state_of(generator)))
    expected = draw(generator)
    assert draw(other) != expected
    put_state(other, state)
    assert draw(other) == expected


def test_generator_without_a_state_is_none():
    assert not is_generator(random.SystemRandom())
    assert not is_generator(random)
