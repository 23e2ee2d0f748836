"""What `Monitor` adds to a training that already logs the same values.

    python benchmarks/monitor_overhead.py [--rounds 40] [--runs 5] [--watchers 10] [--attack] [--json FILE]

The sides take turns in one process, in blocks of an epoch; what is compared is the processor time of its only thread,
which other processes disturb least, as the median of the rounds' ratios. The work: digits in batches of 32 that are cut
beforehand, an MLP 64-256-256-10, SGD with momentum, torch on one thread: a step of about 0.6 ms. All sides have loss,
accuracy, norm clipping, a log, and metrics and learning rates in it after every tenth step; ``same values`` also logs
the four figures that `Monitor` logs then, by a plugin of a few lines. ``absent`` is a second such learner: the ratio
that measuring nothing gives. With ``--watchers``, that many clients follow the run of `Monitor` on a server meanwhile;
their work is not in the times, which are of one thread; with ``--attack``, random bytes are thrown at one.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from sides import digit_batches, machine, measure, report, wide_problem
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.metrics import Accuracy
from loopkit.plugins import ClipGradNorm, LogMetrics, LogTo, Metrics

EVERY = 10
BOUNDS = {"with Monitor": 1.01, "absent": 1.01}


class SameValues:
    """Logs four figures after every tenth step."""

    @hookimpl(reads=("progress", "grads"))
    def step_end(self, learner: Any, phase: Any) -> None:
        if learner.progress.steps % EVERY or not phase.training:
            return
        learner.log("run/throughput/steps_per_second", 1700.0)
        learner.log("run/throughput/samples_per_second", 54000.0)
        learner.log("run/time_left", 3600.0)
        learner.log("run/grad_norm", learner.plugins["clip_grad_norm"].norm)


def make(directory: str, *plugins: Any) -> Learner:
    model, optimizer = wide_problem()
    stack = [Metrics(Accuracy()), ClipGradNorm(1.0), LogTo(directory, seconds=1.0), LogMetrics(every=EVERY)]
    return Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[*stack, *plugins])


@contextmanager
def watched(root: str, watchers: int) -> Iterator[None]:
    """A server for a folder, and clients that follow all that it sends."""
    if not watchers:
        yield
        return
    from loopkit_monitor.background import Background

    server = Background(Path(root))
    address = urllib.parse.urlsplit(server.address)

    received = [0] * watchers

    def follow(number: int) -> None:
        connection = http.client.HTTPConnection(address.netloc, timeout=60)
        connection.request("GET", f"/?{address.query}")
        answer = connection.getresponse()
        answer.read()
        cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
        query = urllib.parse.urlencode({"id": "monitor", "name": "train/loss/step"})
        connection.request("GET", f"/api/series?{query}", headers=cookie)
        connection.getresponse().read()
        connection.request("GET", "/events", headers=cookie)
        try:
            events = connection.getresponse()
            while some := events.read1(65536):
                received[number] += len(some)
        except (OSError, http.client.HTTPException):
            pass  # the server was ended

    threads = [threading.Thread(target=follow, args=(number,), daemon=True) for number in range(watchers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        server.end()
        print(f"the {watchers} watchers got {min(received) / 1e6:.2f} MB or more each\n")


ATTACK = """
import os, socket, sys
while True:
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) as attacked:
            attacked.sendall(b"GET /api/runs HTTP/1.1\\r\\nHost: " + os.urandom(2000))
            attacked.recv(4096)
    except OSError:
        pass
"""


@contextmanager
def attacked(root: str, attack: bool) -> Iterator[None]:
    """A server for a folder that gets random bytes without end, and is killed and started anew each 3 seconds."""
    if not attack:
        yield
        return
    from loopkit_monitor.background import Background

    over, starts = threading.Event(), [0]

    def go_on() -> None:
        while not over.is_set():
            server = Background(Path(root))
            starts[0] += 1
            port = str(urllib.parse.urlsplit(server.address).port)
            with subprocess.Popen([sys.executable, "-c", ATTACK, port]) as attacker:
                over.wait(3)
                attacker.kill()
            server.end()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
        print(f"a server was attacked, and started {starts[0]} times\n")


def compared(rounds: int, runs: int, watchers: int, attack: bool) -> tuple[float, dict[str, list[float]]]:
    """What `measure` gives for the three sides, with their fits open and the watchers there."""
    from loopkit_monitor import Monitor

    with tempfile.TemporaryDirectory() as root, ExitStack() as fits:
        learners = {
            "same values": make(f"{root}/same", SameValues()),
            "with Monitor": make(f"{root}/monitor", Monitor(every=EVERY)),
            "absent": make(f"{root}/absent", SameValues()),
        }
        for learner in learners.values():
            learner.remove("progress")
            fits.enter_context(learner.rounds(on_interrupt=None))
        fits.enter_context(watched(root, watchers))
        fits.enter_context(attacked(root, attack))
        return measure(learners, digit_batches(), rounds, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each run")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--watchers", type=int, default=0, help="clients that follow the run meanwhile")
    parser.add_argument("--attack", action="store_true", help="attack a server meanwhile, and end it again and again")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, runs, watchers = arguments.rounds, arguments.runs, arguments.watchers
    print(f"{datetime.date.today()}, {machine()}; {runs} runs of {rounds} rounds, {watchers} watchers\n")
    step, ratios = compared(rounds, runs, watchers, arguments.attack)
    report("a step, same values", step, ratios, BOUNDS, arguments, digits=4)


if __name__ == "__main__":
    main()
