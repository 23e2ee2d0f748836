"""The global random generators: Python's, NumPy's and torch's, seeded, saved and restored together."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsIndex

import torch

from loopkit.base import devices
from loopkit.base.notes import warn
from loopkit.errors import ArgumentError, StateError

_PYTHON = random.random.__self__  # type: ignore[attr-defined]
COMMON = ("python", "numpy", "torch")
"""The generators that every state has."""


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's (if it is imported) and torch's generators on every device.

    Args:
        seed: From 0 to 2**32 - 1.
        deterministic: Also make torch raise for operations that have no deterministic form, choose deterministic
            convolutions, and switch off the search for the fastest ones. On CUDA set the environment variable
            ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` before the process starts; it is set here if it is unset,
            which is in time only if cuBLAS was not used yet.

    Raises:
        ArgumentError: The seed is no whole number, or out of range.
    """
    if not isinstance(seed, SupportsIndex) or not 0 <= int(seed) < 2**32:
        raise ArgumentError(f"seed is {seed!r}: it must be a whole number from 0 to 2**32 - 1")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def save() -> dict[str, Any]:
    """The states of Python's, NumPy's (if it is imported) and torch's global generators.

    An accelerator's are saved if it is in use by now; CUDA's without waiting for a device. The result shares no memory
    with the generators. It takes less than 0.1 ms, most of it for NumPy's.

    Returns:
        ``python``: a tuple; ``numpy``: a dict with tensors for arrays, or None; ``torch``: a tensor; an accelerator's
        type, such as ``cuda``: a list of one tensor for each device.

    Example::

        state = generators.save()
        first = torch.rand(3)
        generators.restore(state)
        assert torch.equal(first, torch.rand(3))
    """
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else _numpy_state(numpy.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        **devices.generator_states(),
    }


def restore(state: Mapping[str, Any]) -> None:
    """Put the generators into a state from `save`, all of them or none.

    If the state is of more or fewer devices than there are, or of NumPy, which is not imported now, the others are
    restored, with a warning. It does not initialise CUDA: unused devices get their state at their first use.

    Raises:
        StateError: The state is malformed, or of another kind of generator.
    """
    missing = [name for name in COMMON if name not in state]
    if missing:
        raise StateError(
            f"the state of the random generators lacks {', '.join(missing)}: it is what generators.save made"
        )
    before = save()
    try:
        lost = _set(state)
    except BaseException:
        _set(before)
        raise
    if lost:
        warn(f"not all random generators are as they were saved: {' and '.join(lost)}; numbers drawn there will differ")


def is_generator(value: Any) -> bool:
    """Whether an object is a random generator with a state: of torch, of NumPy, or Python's ``random.Random``."""
    if isinstance(value, random.SystemRandom):
        return False
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def is_global(value: Any) -> bool:
    """Whether `save` saves a generator, or one that it draws from."""
    if value is torch.default_generator or value is _PYTHON:
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return getattr(value, "_bit_generator", None) is numpy.random.get_bit_generator()
    return devices.is_default_generator(value)


def state_of(generator: Any) -> Any:
    """The state of one random generator, which shares no memory with it: numbers, tuples, dicts and tensors.

    Args:
        generator: One that `is_generator` accepts.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _tensors(_numpy_source(generator))


def comparable_state(generator: Any) -> Any:
    """Return the state of one random generator in a form that can be compared."""
    return _comparable(state_of(generator))


def _comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, Mapping):
        return tuple((key, _comparable(each)) for key, each in state.items())
    return state


def put_state(generator: Any, state: Any) -> None:
    """Put one random generator into a state from `state_of`.

    Raises:
        StateError: The state is malformed, or of another kind of generator.
    """
    put: Callable[[Any], object] = partial(_put_numpy, generator)
    if isinstance(generator, torch.Generator):
        put = generator.set_state
    elif isinstance(generator, random.Random):
        put = generator.setstate
    name = type(generator).__name__
    _try(name, {name: state}, put)


def _numpy_source(generator: Any) -> dict[str, Any]:
    """The state of a generator of NumPy, as a dict."""
    if hasattr(generator, "get_state"):  # a RandomState, which also keeps a second Gaussian number
        return dict(generator.get_state(legacy=False))
    return dict(getattr(generator, "bit_generator", generator).state)


def _put_numpy(generator: Any, state: Any) -> None:
    if hasattr(generator, "set_state"):
        generator.set_state(_arrays(state))
    else:
        getattr(generator, "bit_generator", generator).state = _arrays(state)


def _tensors(value: Any) -> Any:
    """A copy of a state of NumPy, with tensors for arrays."""
    if isinstance(value, Mapping):
        return {key: _tensors(part) for key, part in value.items()}
    if isinstance(value, sys.modules["numpy"].ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, sys.modules["numpy"].generic) else value


def _set(state: Mapping[str, Any]) -> list[str]:
    """Set the states; returns what could not be."""
    lost = []
    _try("python", state, random.setstate)
    _try("torch", state, torch.set_rng_state)
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        _try("numpy", state, lambda value: numpy.random.set_state(_arrays(value)))
    elif numpy is None and state["numpy"] is not None:
        lost.append("NumPy is not imported (import it first)")
    for kind in sorted(state.keys() - COMMON):
        _try(kind, {kind: {kind: state[kind]}}, lambda states: lost.extend(devices.set_generator_states(states)))
    return lost


def _try(name: str, state: Mapping[str, Any], put: Callable[[Any], object]) -> None:
    try:
        put(state[name])
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
        raise StateError(f"the state of the random generator {name!r} cannot be restored: {error}") from error


def _numpy_state(state: dict[str, Any]) -> dict[str, Any]:
    """NumPy's state, with a tensor for the array in it."""
    inner = state["state"]
    return {**state, "state": {**inner, "key": torch.from_numpy(inner["key"])} if "key" in inner else inner}


def _arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _arrays(part) for key, part in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
