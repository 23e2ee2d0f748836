"""The process that compiles graphs beside the training: it reads folders from its input, one a line."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

LOOK = 0.5
"""Seconds between two looks whether the training is still there."""
TRIES = 20
ENDING = threading.Lock()
NICE = 5
"""The priority of the compiling process: training goes first where no core is free."""


def build(folder: Path, answers: Path) -> dict[str, Any]:
    """Compile the graph of a folder into a library there; returns its description."""
    import torch

    from loopkit_whole_step import private
    from loopkit_whole_step.handover import NotHandedOver

    started = time.process_time()
    written, settings = pickle.loads((folder / "job").read_bytes())
    units = private.VectorUnits(answers)
    try:
        with private.as_in(settings), units.looked_up(), torch.no_grad():
            library, constants = _library(written, units)
    except NotHandedOver as reason:
        return {"not": str(reason)}
    code = Path(library).read_bytes()
    (folder / "library.so").write_bytes(code)
    torch.save(constants, folder / "constants.pt")
    digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("library.so", "constants.pt")]
    return {"digests": digests, "seconds": time.process_time() - started}


def _library(written: Any, units: Any) -> Any:
    """Compile a graph, for another vector unit if the compiler fails for the one that was taken to work."""
    from loopkit_whole_step import private
    from loopkit_whole_step.handover import NotHandedOver

    try:
        made = private.library(written.read(), written.inputs())
    except NotHandedOver:
        raise
    except Exception:
        if not units.disproved():
            raise
        return private.library(written.read(), written.inputs())
    units.proved()
    return made


def _end(folder: Path) -> None:
    """End all compilers that were started, and remove the folder."""
    with ENDING:
        os.killpg(os.getpgrp(), signal.SIGTERM)
        for _ in range(TRIES):  # the graph that is being compiled may still be written to it
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(LOOK / TRIES)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch(folder: Path, parent: int) -> None:
    """End when the training has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    _end(folder)


def _read(folder: Path, given: queue.Queue[str]) -> None:
    for line in sys.stdin:
        given.put(line.rstrip("\n"))
    _end(folder)


def main(folder: str, answers: str, parent: int) -> None:
    """Compile what comes, until the input ends or the training does.

    Args:
        folder: Everything is written there.
        answers: Keeps what the compiler can build for.
        parent: The number of the process that trains.
    """
    work, given = Path(folder), queue.Queue[str]()
    signal.signal(signal.SIGTERM, lambda *_: None)  # which a compiler that it starts does not inherit
    threading.Thread(target=_watch, args=(work, parent), daemon=True).start()
    threading.Thread(target=_read, args=(work, given), daemon=True).start()
    os.nice(NICE)
    importlib.import_module("torch._inductor.compile_fx")  # while the step is recorded
    gc.disable()  # a tenth of the compiler's time, in a process that ends soon
    while True:
        job = Path(given.get())
        try:
            said = build(job, Path(answers))
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            said = {"error": f"{type(error).__name__}: {lines[0][:200]}"}
        (job / "said.new").write_text(json.dumps(said))
        os.replace(job / "said.new", job / "said.json")
        gc.collect()
