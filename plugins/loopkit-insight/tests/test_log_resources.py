"""``LogResources``: a thread that looks, and nothing else that shows."""

from __future__ import annotations

import sys
import threading
import time
from itertools import cycle
from typing import Any

import psutil
import pytest
import torch
from helpers import batches, keeps_contract, make_learner, on, raising

import loopkit_insight.log_resources
from loopkit.errors import PluginError
from loopkit_insight import LogResources

NAMES = ["resources/cpu", "resources/process_cpu", "resources/memory", "resources/process_memory"]


def test_plugin_keeps_the_contract() -> None:
    keeps_contract(LogResources, "log_resources")


def test_plugin_keeps_the_contract_while_it_looks() -> None:
    keeps_contract(lambda: LogResources(every=0.001), skip=["exact_resume"])  # it logs by the clock


def thread() -> threading.Thread | None:
    return next((each for each in threading.enumerate() if each.name == "loopkit-resources"), None)


def run(*plugins: Any, until: int = 1) -> list[tuple[str, float]]:
    """What is logged in a fit that ends when there is enough of it, and after a minute in any case."""
    found: list[tuple[str, float]] = []
    begun = time.monotonic()

    def wait(learner: Any, **given: Any) -> None:
        time.sleep(0.005)
        if len(found) >= until or time.monotonic() > begun + 60:
            learner.stop("enough")

    listen = on("log_value", lambda record, **given: found.append((record.name, record.value)), "listen")
    make_learner(*plugins, listen, on("step_end", wait)).fit(cycle(batches(1)), epochs=1)
    return found


def test_log_resources_logs_what_psutil_says() -> None:
    found = run(LogResources(every=0.02), until=8)
    assert [name for name, _ in found[:8]] == NAMES * 2
    values = dict(found)
    assert 0 <= values["resources/cpu"] <= 100
    assert values["resources/process_cpu"] >= 0  # by two clocks, so that there is no upper bound
    assert 0 < values["resources/memory"] < 100
    rss = psutil.Process().memory_info().rss
    assert rss / 2 < values["resources/process_memory"] < rss * 2


def test_log_resources_logs_nothing_in_a_short_fit() -> None:
    assert run(LogResources(every=60), on("step_begin", lambda learner, **given: learner.stop("now"), "end")) == []


def test_log_resources_logs_in_a_pass_of_one_long_step() -> None:
    found: list[str] = []
    listen = on("log_value", lambda record, **given: found.append(record.name), "listen")

    def wait(**given: Any) -> None:
        limit = time.monotonic() + 60
        while not plugin._sampler.news and time.monotonic() < limit:  # type: ignore[union-attr]
            time.sleep(0.005)

    plugin = LogResources(every=0.02)
    make_learner(plugin, listen, on("epoch_end", wait)).fit(batches(1), epochs=1)
    assert found[:4] == NAMES


@pytest.mark.parametrize("fails", [False, True])
def test_log_resources_ends_its_thread_with_the_fit(fails: bool) -> None:
    seen: list[bool] = []
    look = on("step_end", lambda **given: seen.append(thread() is not None), "a_look")
    more = [raising("step_end", RuntimeError("test"))] if fails else []
    learner = make_learner(LogResources(), look, *more)
    if fails:
        with pytest.raises(RuntimeError, match="test"):
            learner.fit(batches(2), epochs=1)
    else:
        learner.fit(batches(2), epochs=1)
    assert seen[0] is True
    assert thread() is None


def test_log_resources_that_cannot_look_any_more_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise OSError("no /proc")

    monkeypatch.setattr(psutil, "virtual_memory", broken)

    def wait(**given: Any) -> None:
        limit = time.monotonic() + 60
        while thread() is not None and time.monotonic() < limit:
            time.sleep(0.005)

    learner = make_learner(LogResources(every=0.001), on("step_begin", wait))
    with pytest.warns(UserWarning, match=r"'log_resources' has stopped looking: OSError: no /proc") as seen:
        learner.fit(batches(3), epochs=1)
    assert len(seen) == 1


def test_log_resources_leaves_out_what_a_gpu_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(device: int) -> int:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "utilization", silent)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 1024 + device)
    gauges = loopkit_insight.log_resources._Gauges()
    found = gauges.read()
    assert {name: value for name, value in found.items() if name.startswith("gpu")} == {
        "gpu0_memory": 1024.0,
        "gpu1_memory": 1025.0,
    }


def test_log_resources_without_psutil_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match=r"LogResources needs psutil: pip install 'loopkit-insight\[resources\]'"):
        LogResources()


@pytest.mark.parametrize("every", [0, -1, True, "10", float("nan"), float("inf")])
def test_log_resources_refuses(every: Any) -> None:
    with pytest.raises(PluginError, match=r"LogResources: every is .*a number of seconds above 0"):
        LogResources(every=every)


@pytest.mark.gpu
def test_log_resources_of_a_gpu() -> None:
    torch.zeros(1, device="cuda")
    found = loopkit_insight.log_resources._Gauges().read()
    assert 0 <= found["gpu0"] <= 100
    assert found["gpu0_memory"] > 0
