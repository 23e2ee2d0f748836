"""A graph that another process compiles while the training runs eager steps."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import on
from test_whole_step import OPTIMIZERS, apart, batches, make, modes, reasons, whole
from torch import nn

from loopkit.errors import PluginError
from loopkit_whole_step import estimate, private, worker
from loopkit_whole_step.compiling import looks, steps_left
from loopkit_whole_step.handover import NotHandedOver, Written
from loopkit_whole_step.worker import Build, Failed


class Pretends:
    """A worker that compiles nothing: the graph is the one that was written, and is there after so many looks."""

    def __init__(self, looks=0, error=None):
        self.looks, self.error, self.given, self.closed = looks, error, [], 0

    def begin(self):
        pass

    def start(self, written):
        build = Build(None, str(len(self.given)))
        self.given.append(written)
        build.module = written.read()
        return build

    def ready(self, build):
        self.looks -= 1
        return self.looks < 0

    def take(self, build):
        if self.error is not None:
            raise self.error
        return build.module

    def close(self):
        self.closed += 1


def beside(when="always", eager_steps=5, looks=0, error=None, **options):
    step = whole(when, backend="inductor", eager_steps=eager_steps, **options)
    step._compiling.worker = Pretends(looks, error)
    return step


def watched(step, seen):
    """A plugin that keeps how many steps of the shape are behind it, and its mode."""

    def look(learner):
        seen.extend(shape.mode for shape in step.shapes.values())

    return on("step_end", look, "watched")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
    """A folder of libraries of each test's own."""
    if "first" not in request.fixturenames:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "loopkit_whole_step"


# When it takes over


@pytest.mark.parametrize("eager_steps", [0, 1, 7])
def test_graph_takes_over_after_so_many_steps(eager_steps):
    step, seen = beside(eager_steps=eager_steps), []
    make(watched(step, seen), step).fit(batches(16), epochs=1)
    assert seen.count("building") == eager_steps
    assert seen[3:].index("compared") == eager_steps
    assert modes(step) == ["graph"]
    assert step._compiling.worker.closed > 0


def test_step_at_which_it_takes_over_is_no_matter_of_when_it_is_there():
    models = []
    for late in (0, 3, 1000):
        step = beside(looks=late)
        learner = make(step, optimizer=OPTIMIZERS["adam"])
        learner.fit(batches(16), epochs=1)
        models.append(learner)
    assert apart(models[0], models[1]) == apart(models[0], models[2]) == 0.0


def test_graph_that_does_not_wait_takes_over_when_it_is_there_and_names_the_run(capsys):
    for late in (2, 6):
        step, seen = beside(eager_steps=None, looks=late, wait=False, show=True), []
        learner = make(watched(step, seen), step)
        learner.fit(batches(16), epochs=1)
        assert seen.count("building") == late
    said = "".join(capsys.readouterr())
    assert "cannot be repeated bit for bit" in said
    assert "cannot be repeated bit for bit" in str(learner.explain("train"))
    assert not step.state_dict()["repeatable"]
    assert beside().state_dict()["repeatable"]


def test_graph_takes_over_at_a_share_of_the_planned_steps():
    made = []
    for epochs in (2, 4):
        step = beside("auto", None)
        step._compiling.began = 0.0  # before the library of the first one was kept
        step._compiling.worth = lambda *_: ""
        make(step).fit(batches(20), epochs=epochs)
        (shape,) = step.shapes.values()
        made.append(shape.takes)
    assert made == [4 + (40 - 3) // 2, 4 + (80 - 3) // 2]


def test_two_shapes_are_compiled_by_one_process_and_take_over_each_after_its_own_steps():
    step = beside(eager_steps=3)
    data = [batch for pair in zip(batches(12), batches(12, size=5), strict=True) for batch in pair]
    make(step).fit(data, epochs=1)
    assert modes(step) == ["graph", "graph"]
    assert len(step._compiling.worker.given) == 2


def test_what_changes_meanwhile_is_recorded_anew():
    step = beside()

    def freeze(learner):
        if learner.progress.steps == 6:
            learner.model[0].bias.requires_grad_(False)

    make(on("step_end", freeze), step).fit(batches(24), epochs=1)
    assert modes(step) == ["graph"]
    assert len(step._compiling.worker.given) == 2


def test_library_of_before_lets_the_graph_take_over_at_once_and_one_of_the_same_run_does_not():
    steps = [beside("auto", None) for _ in range(3)]
    for step in steps:
        step._compiling.worth = lambda *_: ""
    make(steps[0]).fit(batches(40), epochs=1)
    steps[1]._compiling.began += 1000  # whatever the first fit took
    steps[2].load_state_dict(steps[0].state_dict())  # killed, and resumed from before it was recorded
    steps[2].shapes.clear()
    for step in steps[1:]:
        make(step).fit(batches(40), epochs=1)
    assert [shape.takes for step in steps for shape in step.shapes.values()] == [22, 4, 22]


def test_compiler_is_started_before_the_step_is_recorded_and_ended_if_it_is_not():
    seen, step = [], beside()
    step._compiling.worker.begin = lambda: seen.append([shape.recording for shape in step.shapes.values()])

    step._compiling.worth = lambda shape, learner, taken, nodes: "it is too large" if nodes else ""
    make(step).fit(batches(6), epochs=1)
    assert seen == [[None]]
    assert reasons(step) == ["it is too large"]
    assert step._compiling.worker.closed > 0


@pytest.mark.parametrize(("seconds", "part"), [(1.0, 0.8), (1e-4, 0.35)])
def test_steps_that_compute_keep_more_of_their_time_than_steps_that_call(seconds, part):
    assert estimate.part_left(4, seconds) == pytest.approx(part, abs=0.001)


class Fit:
    """What is asked of a fit of 100 steps, which began after so many of others."""

    def __init__(self, begun, planned=100):
        self.result = SimpleNamespace(planned=SimpleNamespace(steps=planned))
        self.position = SimpleNamespace(start=SimpleNamespace(steps=begun))


@pytest.mark.parametrize("begun", [0, 10_000])
@pytest.mark.parametrize(
    ("trains", "done", "expected"),
    [(True, 0, 100), (True, 30, 70), (False, 10, 4 + 5 * 9), (False, 50, 4 + 5 * 1), (False, 100, 4)],
)
def test_steps_that_are_left_are_those_of_this_fit(begun, trains, done, expected):
    learner = SimpleNamespace(current=Fit(begun), progress=SimpleNamespace(steps=begun + done))
    assert steps_left(learner, SimpleNamespace(trains=trains, length=5, steps=1)) == expected


@pytest.mark.parametrize("length", [None, 0])
@pytest.mark.parametrize("planned", [100, None])
def test_validation_without_a_length_plans_no_steps(planned, length):
    learner = SimpleNamespace(current=Fit(0, planned), progress=SimpleNamespace(steps=5))
    assert steps_left(learner, SimpleNamespace(trains=False, length=length, steps=1)) == 0


def test_steps_outside_of_a_fit_are_those_of_the_epoch():
    learner = SimpleNamespace(current=None)
    assert steps_left(learner, SimpleNamespace(trains=False, length=5, steps=1)) == 4


def test_larger_step_passes_fewer_times_while_it_is_compiled():
    def steps(size):
        graph = private.trace(lambda x, w: [torch.relu(x @ w)], [torch.ones(size, size), torch.ones(size, size)])
        return estimate.steps_beside(graph.graph)

    assert steps(8) > steps(256) > steps(2048) > 0


# What goes wrong


def test_graph_that_is_not_compiled_leaves_the_step_eager():
    eager, step = make(), beside(error=Failed("the process that compiles it has ended (SIGKILL)"))
    learner = make(step)
    for each in (eager, learner):
        each.fit(batches(), epochs=2)
    assert reasons(step) == ["the process that compiles it has ended (SIGKILL)"]
    assert apart(eager, learner) == 0.0


def test_graph_that_cannot_be_handed_over_is_compiled_here(monkeypatch):
    monkeypatch.setattr("loopkit_whole_step.private.inductor", lambda graph, inputs: graph)
    step = beside(error=NotHandedOver("it returns a view of its argument"))
    left = []
    worker_of = step._compiling.worker
    step._compiling.start = lambda *given, start=step._compiling.start: left.append(worker_of.closed) or start(*given)
    make(step, on("step_end", lambda: left.append(worker_of.closed))).fit(batches(), epochs=2)
    assert modes(step) == ["graph"]
    assert left.index(1) < len(left) - 1  # the process ends with the record, not with the fit


def test_process_that_cannot_be_started_is_done_without(monkeypatch):
    monkeypatch.setattr("loopkit_whole_step.private.inductor", lambda graph, inputs: graph)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    step = whole(backend="inductor", eager_steps=5)
    make(step).fit(batches(), epochs=2)
    assert modes(step) == ["graph"]


def test_fit_that_is_shorter_begins_anew_the_next_time():
    step = beside(eager_steps=100)
    learner = make(step)
    learner.fit(batches(), epochs=1)
    assert modes(step) == ["counted"]
    assert step._compiling.worker.closed
    learner.fit(batches(60), epochs=2)
    assert modes(step) == ["graph"]


def test_options_are_checked():
    for eager_steps in (-1, 2.5, True, "3"):
        with pytest.raises(PluginError, match="it is a whole number, from 0"):
            whole(eager_steps=eager_steps)


def test_fit_that_is_too_short_for_a_compiler_is_long_enough_for_a_library(cache, monkeypatch):
    """500 steps of 20 ms save 3 s: less than compiling costs, and more than recording."""
    made = []
    for kept in (False, True):
        step = beside("auto", None)
        learner = make(on("step_end", lambda learner: learner.progress.steps == 20 and learner.stop("enough")), step)
        if kept:
            (shape,) = made[0].shapes.values()
            worker.remember(looks(shape, learner))
            step._compiling.began += 1
        clock = count(step=0.02)
        monkeypatch.setattr("loopkit_whole_step.whole_step.time.perf_counter", lambda clock=clock: next(clock))
        learner.fit(batches(500), epochs=1)
        made.append(step)
    assert reasons(made[0]) == ["497 steps are too few to repay 8 s of compiling"]
    assert modes(made[1]) == ["timed"]
    assert len(made[1]._compiling.worker.given) == 1


# Going on


@pytest.mark.parametrize("at", [4, 6, 9, 10, 14])
def test_run_that_goes_on_is_bitwise_the_one_in_one_piece(at):
    """Before it is recorded, while it is compiled, at the step at which it takes over, and after it."""

    def learner():
        return make(beside(), optimizer=OPTIMIZERS["adam"])

    one, first, second = learner(), learner(), learner()
    one.fit(batches(), epochs=2)
    states = []
    first.add(
        on("step_end", lambda learner, **_: learner.progress.updates == at and learner.pause("test"), "stop"),
        on("signal_begin", lambda learner: states.append(copy.deepcopy(learner.state_dict())), "save"),
    )
    first.fit(batches(), epochs=2, on_interrupt="return")
    plugins = {k: v for k, v in states[0]["plugins"].items() if k not in ("stop", "save")}
    second.load_state_dict({**states[0], "plugins": plugins})
    second.fit(batches(), epochs=2)
    assert apart(one, second) == 0.0
    takes = [shape.takes for each in (one, second) for shape in each.plugins["whole_step"].shapes.values()]
    assert takes == [9, 9]


def test_fit_that_was_paused_goes_on_in_the_same_process():
    one, two = make(beside()), make(beside())
    one.fit(batches(), epochs=2)
    two.add(on("step_end", lambda learner, **_: learner.progress.updates == 6 and learner.pause("test"), "stop"))
    two.fit(batches(), epochs=2, on_interrupt="return")
    two.remove("stop")
    two.fit(batches(), epochs=2)
    assert modes(two.plugins["whole_step"]) == ["graph"]
    assert apart(one, two) == 0.0


def test_graph_that_was_decided_is_compared_once_more_after_a_resume(monkeypatch):
    first, step = make(beside(eager_steps=0)), beside(eager_steps=0)
    first.fit(batches(8), epochs=1)
    second, compared = make(step), []
    own = step._comparing.check
    monkeypatch.setattr(step._comparing, "check", lambda *given: compared.append(second.progress.steps) or own(*given))
    second.load_state_dict(first.state_dict())
    second.fit(batches(8), epochs=2)
    assert (modes(step), compared[0]) == (["graph"], 8)


def test_folder_of_libraries_that_others_can_write_is_not_used(cache):
    assert worker.cache_folder() == cache
    assert cache.stat().st_mode & 0o077 == 0
    cache.chmod(0o775)
    assert worker.cache_folder() is None


def test_copy_of_a_worker_has_no_process(cache):
    made = worker.Worker()
    made.start(small())
    other = copy.deepcopy(made)
    other.close()
    assert made._process.poll() is None
    made.close()


# What is written down


def written(function, inputs):
    graph = private.trace(function, inputs)
    return Written.of(graph, inputs)


def test_graph_that_is_written_down_computes_the_same():
    def function(x, y):
        x.add_(y, alpha=float("inf") if False else 2.5)
        found = torch.sort(x, dim=0)
        return [found[0][1:], x.to(torch.float64).mean(), torch.cat([x, y]) + torch.tensor([1.0, 2.0])]

    inputs = [torch.rand(3, 2), torch.rand(3, 2)]
    made, constants = written(function, inputs)
    one, other = ([each.clone() for each in inputs] for _ in range(2))
    for eager, ours in zip(function(*one), made.read()(*other, *constants), strict=True):
        assert torch.equal(eager, ours)
    assert torch.equal(one[0], other[0])


def test_graph_that_changes_what_two_inputs_share_is_not_handed_over():
    held = torch.zeros(4)
    with pytest.raises(NotHandedOver, match="shares memory"):
        written(lambda x, y: [x.view(2).add_(1), y + 1], [held[:2], held[1:3]])
    made, _ = written(lambda x, y: [x + y], [held[:2], held[1:3]])
    assert len(made.kinds) == 2


def test_operation_of_ones_own_is_not_handed_over():
    with torch.library._scoped_library("beside_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        with pytest.raises(NotHandedOver, match=r"beside_test\.double"):
            written(lambda x: [torch.ops.beside_test.double(x)], [torch.ones(2)])


# The process itself, which takes seconds to start


def small():
    made, _ = written(lambda x: [x + 1], [torch.ones(2)])
    return made


def is_alive(process):
    """Whether it runs; one that has ended stays in the list until its parent has looked."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_process_that_is_killed_is_told_and_leaves_nothing(cache):
    made = worker.Worker()
    build = made.start(small())
    os.kill(made._process.pid, signal.SIGKILL)
    with pytest.raises(Failed, match=r"has ended \(SIGKILL\)"):
        made.take(build)
    made.close()
    assert not list(cache.glob("work-*"))


def test_process_that_hangs_is_ended(cache, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 0.3)
    made = worker.Worker()
    build = made.start(small())
    process = made._process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(Failed, match="not compiled within"):
        made.take(build)
    assert process.poll() is not None
    assert not list(cache.glob("work-*"))


def test_worker_that_is_dropped_ends_its_process(cache):
    made = worker.Worker()
    made.start(small())
    process = made._process
    del made
    assert process.poll() is not None
    assert not list(cache.glob("work-*"))


TRAINS = """
import os, sys, time
import torch
sys.path[:0] = sys.argv[1:3]
from test_beside import small
from loopkit_whole_step import estimate, private, worker
made = worker.Worker()
made.start(small())
print(made._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_training_that_is_killed_takes_its_process_along(cache):
    here = Path(__file__).parent
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(here), str(here.parents[2] / "tests")], stdout=subprocess.PIPE
    )
    child = int(training.stdout.readline())
    assert until(lambda: list(cache.glob("work-*")))
    training.kill()
    training.wait()
    training.stdout.close()
    assert until(lambda: not is_alive(child))
    assert until(lambda: not list(cache.glob("work-*")))


@pytest.mark.parametrize("eager_steps", [6, None])
def test_run_that_finds_the_library_has_the_bits_of_one_that_does_not_or_is_named(eager_steps, monkeypatch):
    monkeypatch.setattr("loopkit_whole_step.comparing.KEPT", 1e9)  # however slow the graph is
    learners, takes = [], []
    for later in (0.0, 1000.0):
        step = beside("auto", eager_steps)
        step._compiling.worth = lambda *_: ""
        step._compiling.began += later
        learners.append(make(step, optimizer=OPTIMIZERS["adam"]))
        learners[-1].fit(batches(40), epochs=1)
        takes += [shape.takes for shape in step.shapes.values()]
    named = ["its library was kept" in str(learner.explain("train")) for learner in learners]
    if eager_steps is None:
        assert takes == [22, 4]
        assert named == [False, True]
    else:
        assert takes == [10, 10]
        assert named == [False, False]
        assert apart(*learners) == 0.0


# A library, compiled once for all of these: it takes some 10 seconds


def model():
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def trained(**options):
    step = whole(backend="inductor", **options)
    learner = make(step, model=model, optimizer=OPTIMIZERS["adam"])
    torch.manual_seed(1)
    learner.fit(batches(16), epochs=1)
    return learner, step


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield (*trained(), folder / "loopkit_whole_step")


def test_library_trains_as_the_eager_step(first):
    learner, step, _ = first
    eager = make(model=model, optimizer=OPTIMIZERS["adam"])
    torch.manual_seed(1)
    eager.fit(batches(16), epochs=1)
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 1e-5  # of numbers below 2, after 16 updates in float32


def test_nothing_but_the_library_is_left(first):
    *_, folder = first
    assert {path.name for path in folder.iterdir()} >= {"vector-units.json"}
    (library,) = [path for path in folder.iterdir() if path.is_dir() and path.name != "known"]
    assert {path.name for path in library.iterdir()} == {"library.so", "constants.pt", "said.json"}


def test_library_of_before_is_loaded_without_a_process(first, monkeypatch):
    monkeypatch.setattr(worker.Worker, "_begin", lambda self: pytest.fail("a process was started"))
    learner, step = trained()
    assert modes(step) == ["graph"]
    assert apart(learner, first[0]) == 0.0


@pytest.mark.parametrize("name", ["library.so", "constants.pt", "said.json"])
def test_damaged_library_is_removed(first, name, monkeypatch):
    *_, folder = first
    (library,) = [path for path in folder.iterdir() if path.is_dir() and path.name != "known"]
    (broken := folder / f"broken-{name}").mkdir()
    for path in library.iterdir():
        content = path.read_bytes()
        (broken / path.name).write_bytes(content[: len(content) // 2] if path.name == name else content)
    assert worker.kept(broken.name) is None
    assert not broken.exists()
    assert worker.kept(library.name) is not None


def test_vector_units_after_the_first_that_works_are_not_tried(first):
    *_, folder = first
    answers = json.loads((folder / "vector-units.json").read_text())
    assert len({name.partition(":")[0] for name, works in answers.items() if works}) == 1
