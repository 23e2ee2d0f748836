"""The plugin in two processes that train together."""

from __future__ import annotations

import copy
import faulthandler
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any, Literal

from torch.utils.data import DataLoader

from loopkit import launch
from loopkit.author import count_samples, plugin_name, provided
from loopkit.errors import WorldError
from loopkit.plugins import DDP
from loopkit_testing.bits import difference
from loopkit_testing.case import Case, alone, described

SECONDS = 120.0
"""How long the processes may take, and wait for each other."""
START: Literal["spawn", "forkserver"] = (
    "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
)
PRELOADED = ["pytest", "torch._dynamo", "loopkit_testing"]
"""Modules to import once for both processes; the imports are half of their time."""


def two_processes(make: Callable[[], Case]) -> list[str]:
    """In two processes that train together, parameters stay equal, and saved state can be resumed.

    The processes are started by `loopkit.launch` and talk by gloo on this machine. `DDP` joins them, unless the plugin
    or a companion provides ``"sync"``.

    Args:
        make: A function that can be pickled; it is called in each process.
    """
    if START == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOADED)
    try:
        found = launch(_watched, make, processes=2, timeout=SECONDS, start=START)
    except WorldError as error:
        notes = "".join(getattr(error, "__notes__", ()))
        return [f"in two processes it {described(error)}" if not notes else f"in two processes: {error}\n{notes}"]
    return compared(found)


def compared(found: list[tuple[dict[str, Any], dict[str, Any], list[str]]]) -> list[str]:
    """One message for each difference between what `train_together` returned in the processes."""
    (params, own, broken), *others = found
    for their_params, their_own, theirs in others:
        broken = broken or theirs
        if path := difference(params, their_params, "parameters", ()):
            broken.append(
                f"two processes that train together end with other parameters each: {path} differs. Decide changes "
                f"by values that both know, such as learner.world.highest(value)"
            )
        if path := difference(own, their_own, "state_dict()", ()):
            broken.append(
                f"two processes that train together have other states each: {path} differs. A plugin whose state "
                f"differs between processes has reshard(states, rank, size)"
            )
    return broken


def train_together(case: Case) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Within a process: fit, save, make all anew, load, fit on; the weights, the plugin's state, and what is broken."""
    with alone():
        learner, plugin = _learner(case)
        try:
            learner.train(load=_load)
        except WorldError as error:
            return {}, {}, [f"two processes that train together: the fit {described(error)}"]
        state = copy.deepcopy(learner.state_dict())
        learner, plugin = _learner(case)
        try:
            learner.load_state_dict(state)
            learner.train(load=_load)
        except Exception as error:
            return {}, {}, [f"resuming in two processes from a save of two {described(error)}"]
        shared = not hasattr(plugin, "reshard") and hasattr(plugin, "state_dict")
        own = {} if not shared else learner.state_dict()["plugins"].get(plugin_name(plugin), {})
        ignored = case.ignored([plugin])
        trained = {name for model in learner.models.values() for name, _ in model.named_parameters()}
        models = learner.state_dict()["models"].items()  # whole, where each process holds a part
        params = {f"{top}.{name}": p for top, state in models for name, p in state.items() if name in trained}
        return params, _without(own, ignored), []


def _load(batches: list[Any]) -> Any:
    """A loader that can be shared out, of batches of one size, as then the processes count the same."""
    batches = [batch for batch in batches if count_samples(batch) == count_samples(batches[0])]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _learner(case: Case) -> tuple[Any, Any]:
    plugins = case.plugins()
    if not any(provided(each) == "sync" for each in plugins):
        plugins.append(DDP(backend="gloo", overlap=False, timeout=SECONDS / 2))
    return case.bench(plugins), plugins[0]


def _without(value: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, (list, tuple)) else value


def _watched(make: Callable[[], Case]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # launch then ends the other one
    try:
        return train_together(make())
    finally:
        faulthandler.cancel_dump_traceback_later()


def case_of(file: str, module: str, function: str) -> Case:
    """The case of a suite that `plugin_contract` made, from the module of tests that holds it."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    case: Case = getattr(loaded, function).case
    return case
