from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from loopkit.engine.life.timeout import bounded_wait

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES = torch.arange(20.0)


class Faulty(Dataset[torch.Tensor]):
    """Its sample 13 ends or stops its worker."""

    def __init__(self, fault: Callable[[], Any]) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            self.fault()
        return torch.tensor(float(index))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(60)


def leave() -> None:
    os._exit(3)


def wait_for(data: Any, seconds: float | None) -> tuple[str, list[str]]:
    """The message and notes of a pass's error."""
    taken: list[Any] = []
    found: tuple[str, list[str]] | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # torch opens files to see whether it still can
        try:
            with bounded_wait(data, seconds, lambda: len(taken)):
                for batch in data:
                    taken += [batch]
        except Exception as error:
            found = str(error), error.__notes__
        gc.collect()
    assert found is not None
    return found


@pytest.mark.timeout(60)  # the limit is 300 seconds
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["", "persistent"])
@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
def test_a_killed_worker_ends_the_pass_at_once(make: Any, options: dict[str, Any]) -> None:
    _, (note,) = wait_for(make(Faulty(kill), batch_size=2, num_workers=2, **options), 300.0)
    assert "DataLoader with 2 workers, batch " in note
    assert re.search(r"worker \d+ was killed by SIGKILL", note)


@pytest.mark.slow
def test_a_killed_worker_that_is_spawned_ends_the_pass() -> None:
    data = DataLoader(Faulty(kill), batch_size=20, num_workers=1, multiprocessing_context="spawn")
    _, (note,) = wait_for(data, 300.0)
    assert "was killed by SIGKILL" in note


@pytest.mark.slow
def test_a_killed_worker_is_noticed_outside_the_main_thread() -> None:
    found: list[Any] = []
    data = DataLoader(Faulty(kill), batch_size=2, num_workers=2)
    thread = threading.Thread(target=lambda: found.extend(wait_for(data, 300.0)))
    thread.start()
    thread.join(60)  # torch looks every 5 seconds there
    assert "was killed by SIGKILL" in found[1][0]


def test_a_worker_is_named_that_torch_notices_while_the_reason_is_looked_for() -> None:
    class Noticed(ConnectionResetError):
        def __str__(self) -> str:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    with pytest.raises(Noticed) as caught, bounded_wait(DataLoader(SAMPLES, num_workers=2), 7.0):
        raise Noticed
    assert "worker 7 was killed by SIGKILL" in caught.value.__notes__[0]


def test_a_worker_that_exits_is_named_with_its_code() -> None:
    _, (note,) = wait_for(DataLoader(Faulty(leave), batch_size=2, num_workers=2), 300.0)
    assert "exited with code 3" in note


@pytest.mark.clock
def test_a_hanging_worker_ends_the_pass_after_the_limit() -> None:
    data = DataLoader(Faulty(hang), batch_size=2, num_workers=2)
    _, (note,) = wait_for(data, 3.0)
    assert "DataLoader with 2 workers, batch 6: no batch came within 3 s" in note
    assert "loader_timeout" in note


def test_the_limit_is_put_back() -> None:
    data = DataLoader(SAMPLES, num_workers=2)
    with bounded_wait(data, 7.0):
        assert data.timeout == 7.0
    assert data.timeout == 0
    with pytest.raises(KeyError), bounded_wait(data, 7.0):
        raise KeyError
    assert data.timeout == 0


@pytest.mark.parametrize(
    ("data", "seconds", "expected"),
    [
        (DataLoader(SAMPLES, num_workers=2, timeout=3), 7.0, 3),
        (DataLoader(SAMPLES, num_workers=2), None, 0),
        (DataLoader(SAMPLES), 7.0, 0),
    ],
    ids=["the user's own", "none", "no workers"],
)
def test_the_limit_is_left_alone(data: Any, seconds: float | None, expected: float) -> None:
    with bounded_wait(data, seconds):
        assert data.timeout == expected
    assert data.timeout == expected


def test_other_errors_get_no_note() -> None:
    for error in (RuntimeError("of the user"), OSError("no file"), ValueError("bad")):
        with pytest.raises(type(error)) as caught, bounded_wait(DataLoader(SAMPLES, num_workers=2), 7.0):
            raise error
        assert not hasattr(caught.value, "__notes__")


def test_bounded_wait_passes_anything_else_through() -> None:
    with bounded_wait([1], 7.0):
        pass
