from __future__ import annotations

import random
import sys
from typing import Any

import numpy
import pytest
import torch

from loopkit.base import generators
from loopkit.errors import StateError


@pytest.fixture(autouse=True)
def same_afterwards() -> Any:
    state = generators.save()
    yield
    generators.restore(state)


def draw() -> tuple[Any, ...]:
    return (
        [random.random() for _ in range(700)],
        random.gauss(0, 1),
        numpy.random.rand(700).tolist(),
        numpy.random.randn(3).tolist(),
        torch.rand(700).tolist(),
        torch.randn(17).tolist(),
    )


def test_generators_restored_draw_the_same_numbers() -> None:
    draw()  # leaves a second normal number kept back in Python's and NumPy's generators
    state = generators.save()
    first = draw()
    assert draw() != first
    generators.restore(state)
    assert draw() == first
    generators.restore(state)
    assert draw() == first, "restoring must not hand out the saved arrays"


@pytest.mark.parametrize("index", range(6))
def test_generators_each_kind_is_restored(index: int) -> None:
    draw()
    state = generators.save()
    first = draw()
    generators.restore(state)
    assert draw()[index] == first[index]


def test_generators_state_is_plain_numbers_tuples_and_tensors() -> None:
    def check(value: Any) -> None:
        if type(value) is dict:
            assert all(type(key) is str for key in value)
            value = list(value.values())
        if type(value) in (list, tuple):
            for part in value:
                check(part)
        else:
            assert type(value) in (int, float, str, type(None), torch.Tensor), type(value)

    state = generators.save()
    check(state)
    assert state["numpy"]["state"]["key"].dtype == torch.uint32


def test_generators_numpy_not_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy = generators.save()
    monkeypatch.delitem(sys.modules, "numpy")
    without = generators.save()
    assert without["numpy"] is None
    generators.restore(without)
    with pytest.warns(UserWarning, match="NumPy is not imported"):
        generators.restore(with_numpy)


def test_generators_missing_cuda_devices_warn_once_and_restore_the_rest() -> None:
    state = generators.save()
    first = draw()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 2)
    if torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(0)] * (torch.cuda.device_count() + 2)
    with pytest.warns(UserWarning, match=r"CUDA devices were saved") as warned:
        generators.restore(state)
    assert len(warned) == 1
    assert draw() == first


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("python", (3, (1, 2), None)),
        ("python", (9, tuple(range(625)), None)),
        ("torch", torch.zeros(7, dtype=torch.uint8)),
        ("torch", torch.zeros(5056)),
        ("torch", None),
        ("numpy", {"bit_generator": "PCG64", "state": {}, "has_gauss": 0, "gauss": 0.0}),
        ("numpy", {"bit_generator": "MT19937", "state": {"pos": 1}, "has_gauss": 0, "gauss": 0.0}),
        ("numpy", 3),
    ],
)
def test_generators_malformed_state_is_refused_and_nothing_restored(name: str, value: Any) -> None:
    other = generators.save()
    draw()
    now = generators.save()
    expected = draw()
    generators.restore(now)
    with pytest.raises(StateError, match=f"'{name}'"):
        generators.restore({**other, name: value})
    assert draw() == expected


def test_generators_state_without_a_part_is_refused() -> None:
    state = generators.save()
    del state["torch"], state["python"]
    with pytest.raises(StateError, match="lacks python, torch"):
        generators.restore(state)


def test_generators_never_initialise_cuda() -> None:
    before = torch.cuda.is_initialized()
    generators.restore(generators.save())
    assert torch.cuda.is_initialized() == before
