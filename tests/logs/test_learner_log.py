"""``learner.log``: what it takes, what listeners get, and where a record says that it came from."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import EVENTS, batches, make_learner, on, raising
from torch import nn

from loopkit import CancelEpoch, CancelFit, CancelStep, Learner, TrainingPhase, hookimpl
from loopkit.errors import LogError, PluginError
from loopkit.logs import Backend, Histogram, JsonLines, Record, Text, Value, read_log
from loopkit.plugins import LogTo


class Listener:
    """Keeps what is logged."""

    def __init__(self, name: str = "listener") -> None:
        self.name = name
        self.records: list[Record] = []

    @hookimpl
    def log_value(self, record: Record) -> None:
        self.records.append(record)

    @property
    def places(self) -> list[tuple[Any, ...]]:
        return [(r.name, r.phase, r.epoch, r.step, r.update) for r in self.records]


def logging_at(hook: str) -> Any:
    return on(hook, lambda learner, **given: learner.log(hook, 1.0), f"logs_at_{hook}")


def test_log_without_listeners_does_nothing() -> None:
    make_learner().log("x", object())


@pytest.mark.parametrize(
    "value",
    [2, 2.0, True + 1, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor(2), torch.tensor([2.0]), Value(2)],
)
def test_log_makes_a_float_of_a_number(value: Any) -> None:
    listener = Listener()
    make_learner(listener).log("x", value)
    assert type(listener.records[0].value) is float
    assert listener.records[0].value == 2.0


def test_log_keeps_the_sign_of_zero() -> None:
    listener = Listener()
    make_learner(listener).log("x", torch.tensor(-0.0))
    assert str(listener.records[0].value) == "-0.0"


def test_log_takes_booleans_parameters_and_halves() -> None:
    listener = Listener()
    learner = make_learner(listener)
    for value in (True, torch.tensor(True), nn.Parameter(torch.tensor(1.0)), torch.tensor(1.0, dtype=torch.bfloat16)):
        learner.log("x", value)
    assert [record.value for record in listener.records] == [1.0] * 4


def test_log_keeps_kinds_as_they_are() -> None:
    listener, text = Listener(), Text("a")
    make_learner(listener).log("x", text)
    assert listener.records[0].value is text


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (torch.zeros(2), r"learner\.log\('x'\): it is Tensor\[2\] float32 cpu: log a scalar, such as \.mean\(\)"),
        (torch.zeros(0), r"log a scalar"),
        (torch.tensor(1j), r"\.abs\(\)"),
        (torch.tensor(1.0, device="meta"), r"has no value: log a tensor of another device"),
        ("0.5", r"log Text\(\.\.\.\)"),
        (None, r"log only where there is a value"),
        ([1.0], r"log a number, a scalar tensor or a kind"),
        (Histogram, r"Histogram is a class"),
    ],
)
def test_log_refuses(value: Any, fix: str) -> None:
    with pytest.raises(LogError, match=fix):
        make_learner(Listener()).log("x", value)


@pytest.mark.parametrize("name", ["", None, 5, b"x"])
def test_log_refuses_a_name_that_is_none(name: Any) -> None:
    with pytest.raises(LogError, match=r"the name is .*: give a string"):
        make_learner(Listener()).log(name, 1.0)


@pytest.mark.parametrize("name", ["a/b", "<b>", "\N{GRINNING FACE}", "two\nlines", "x" * 10_000, "\udc80", "\0"])
def test_log_takes_any_name(name: str) -> None:
    listener = Listener()
    make_learner(listener).log(name, 1.0)
    assert listener.records[0].name == name


def test_log_says_the_error_at_its_line() -> None:
    class Phase(TrainingPhase):
        def step(self, learner: Learner, step: Any) -> None:
            super().step(learner, step)
            learner.log("outputs", step.outputs)

    learner = make_learner(Listener(), phases=[Phase()])
    with pytest.raises(LogError, match="log a scalar") as caught:
        learner.run("train", batches(1))
    assert caught.value.__notes__[0].startswith("loopkit: in Phase.step, phase 'train', epoch 1, step 0")


def test_log_keeps_the_value_that_it_was_given() -> None:
    listener, value = Listener(), torch.ones(())
    make_learner(listener).log("x", value)
    value.add_(1)
    assert listener.records[0].value == 1.0


def test_log_keeps_no_graph() -> None:
    listener = Listener()
    learner = make_learner(listener)
    kept: list[Any] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.held = Listener()
            kept.append(weakref.ref(ctx.held))
            return x * 2

    doubled = Double.apply(torch.ones(3, requires_grad=True))
    learner.log("loss", doubled.sum())
    learner.log("histogram", Histogram(doubled))
    assert kept[0]() is not None
    del doubled
    gc.collect()
    assert kept[0]() is None
    assert listener.records[0].value == 6.0


def test_record_says_where_it_was_made() -> None:
    listener = Listener()
    hooks = ["fit_begin", "epoch_begin", "step_begin", "update_end", "step_end", "epoch_end", "phase_end", "fit_end"]
    learner = make_learner(listener, *map(logging_at, hooks))
    learner.fit(batches(2), batches(1), epochs=1)
    assert listener.places == [
        ("fit_begin", "", 0, 0, 0),
        ("epoch_begin", "train", 1, 0, 0),
        ("step_begin", "train", 1, 1, 0),
        ("update_end", "train", 1, 1, 1),
        ("step_end", "train", 1, 1, 1),
        ("step_begin", "train", 1, 2, 1),
        ("update_end", "train", 1, 2, 2),
        ("step_end", "train", 1, 2, 2),
        ("epoch_end", "train", 1, 2, 2),
        ("phase_end", "train", 1, 2, 2),
        ("epoch_begin", "val", 1, 2, 2),
        ("step_begin", "val", 1, 2, 2),
        ("step_end", "val", 1, 2, 2),
        ("epoch_end", "val", 1, 2, 2),
        ("phase_end", "val", 1, 2, 2),
        ("fit_end", "", 1, 2, 2),
    ]


def test_record_of_a_pass_in_a_hook_has_its_phase_and_the_step_around_it() -> None:
    listener = Listener()

    def evaluate(learner: Learner, phase: Any, **given: Any) -> None:
        if phase.training:
            learner.evaluate(batches(1))
            learner.log("after", 1.0)

    hooks = ["step_begin", "phase_end"]
    learner = make_learner(listener, *(on(hook, evaluate, f"evaluates_at_{hook}") for hook in hooks))
    learner.add(logging_at("step_end"))
    learner.run("train", batches(1))
    assert [(name, phase, step) for name, phase, _, step, _ in listener.places] == [
        ("step_end", "val", 1),
        ("after", "train", 1),
        ("step_end", "train", 1),
        ("step_end", "val", 1),
        ("after", "train", 1),
    ]


@pytest.mark.parametrize("evaluates_at", [None, "step_begin", "update_end", "step_end", "phase_end"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_place_of_a_record_is_that_of_its_moment(evaluates_at: str | None, accumulate: int) -> None:
    """A place that was looked up before, in any hook, is never taken for one that is not the same any more."""
    listener, seen = Listener(), set()

    def look(learner: Learner, **given: Any) -> None:
        learner.log("x", 1.0)
        learner._logbook.place = None
        assert listener.records[-1][2:6] == learner._logbook.look()
        seen.add(listener.records[-1][2:6])

    def cancel(phase: Any, step: Any, **given: Any) -> None:
        if phase.training and step.index == 2:
            raise CancelStep("no")

    def skip(step: Any, **given: Any) -> None:
        if step.index == 5:
            step.skip_update("no")

    def evaluate(learner: Learner, phase: Any, **given: Any) -> None:
        if phase.training:
            learner.evaluate(batches(1))

    plugins = [on(hook, look, f"looks_at_{hook}") for hook in EVENTS]
    if evaluates_at is not None:
        plugins.append(on(evaluates_at, evaluate, "z_evaluates"))
    plugins += [on("step_begin", cancel, "cancels"), on("update_begin", skip, "skips")]
    learner = make_learner(listener, *plugins, accumulate=accumulate)

    def data() -> Iterator[Any]:
        for batch in batches(7):
            look(learner)
            yield batch

    learner.fit(data, batches(2), epochs=2)
    look(learner)
    learner.run("train", batches(1))
    saved = learner.state_dict()
    learner.run("train", batches(1))
    look(learner)
    learner.load_state_dict(saved)
    look(learner)
    assert len(seen) > 20


def test_place_that_another_thread_has_looked_up_is_not_kept() -> None:
    """The engine may have moved on when it would be."""
    listener, kept = Listener(), []

    def act(learner: Learner, **given: Any) -> None:
        thread = threading.Thread(target=learner.log, args=("x", 1.0))
        thread.start()
        thread.join(60)
        kept.append(learner._logbook.place)

    make_learner(listener, on("step_begin", act)).fit(batches(2), epochs=1)
    assert kept == [None, None]
    assert [record.step for record in listener.records] == [1, 2]


def test_record_after_an_error_is_of_no_phase() -> None:
    listener = Listener()
    learner = make_learner(listener, raising("step_end", ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        learner.run("train", batches(1))
    learner.log("x", 1.0)
    assert listener.places[-1][1] == ""


def test_record_time_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    listener = Listener()
    before = time.time()
    make_learner(listener).log("x", 1.0)
    assert before <= listener.records[0].time <= time.time()


def test_every_listener_gets_the_record_although_one_cancels() -> None:
    first, last = Listener("a"), Listener("z")

    def cancel(record: Record, **given: Any) -> None:
        raise CancelFit("enough")

    learner = make_learner(first, on("log_value", cancel, "middle"), last, logging_at("step_end"))
    result = learner.fit(batches(3), epochs=1)
    assert (result.reason, result.by, result.steps) == ("cancel", "middle", 1)
    assert (len(first.records), len(last.records)) == (1, 1)


def test_strongest_cancel_of_listeners_counts() -> None:
    def cancel(kind: type[Exception]) -> Any:
        def act(**given: Any) -> None:
            raise kind("enough")

        return act

    learner = make_learner(
        on("log_value", cancel(CancelEpoch), "a"), on("log_value", cancel(CancelFit), "b"), logging_at("step_end")
    )
    assert learner.fit(batches(3), epochs=2).by == "b"


def test_error_of_a_listener_says_whose_it_is() -> None:
    learner = make_learner(raising("log_value", ValueError("no")), logging_at("step_end"))
    with pytest.raises(ValueError, match="no") as caught:
        learner.run("train", batches(1))
    assert caught.value.__notes__ == ["loopkit: in log_value of plugin 'acting', of 'step_end'"]


def test_listeners_come_and_go_during_a_fit() -> None:
    listener = Listener()

    def act(learner: Learner, step: Any, **given: Any) -> None:
        if step.index == 1:
            learner.add(listener)
        if step.index == 3:
            learner.remove("listener")
        learner.log("index", step.index)

    make_learner(on("step_end", act)).fit(batches(5), epochs=1)
    assert [record.value for record in listener.records] == [1.0, 2.0]


def test_instrument_sees_listeners() -> None:
    seen = []

    class Spy:
        @hookimpl
        def instrument_call(self, target: Any, call: Any) -> Any:
            return lambda record: (seen.append((target.hook, target.plugin)), call(record))[1]

    listener = Listener()
    make_learner(listener, Spy()).log("x", 1.0)
    assert seen == [("log_value", "listener")]
    assert listener.records[0].value == 1.0


def test_log_value_of_no_phase_takes_no_phase() -> None:
    class Limited:
        @hookimpl(phase=TrainingPhase)
        def log_value(self, record: Record) -> None:
            """Never."""

    with pytest.raises(PluginError, match="log_value belongs to no phase"):
        make_learner(Limited())


def test_backend_is_no_plugin(tmp_path: Any) -> None:
    with pytest.raises(PluginError, match=r"JsonLines is where a log goes, and no plugin: wrap it, LogTo\(JsonLines"):
        make_learner(JsonLines(tmp_path / "log.jsonl"))
    assert Backend().name == ""


def test_log_of_several_is_one_call_for_each() -> None:
    values = {"a": 1, "b": torch.tensor(2.5), "c": Text("three"), "d": torch.tensor([4]), "e": np.float32(0.5)}

    def one_by_one(learner: Learner, **given: Any) -> None:
        for name, value in values.items():
            learner.log(name, value)

    def at_once(learner: Learner, **given: Any) -> None:
        learner.log(values)

    found = []
    for act in (one_by_one, at_once):
        listener = Listener()
        make_learner(listener, *(on(hook, act, name=hook) for hook in ("fit_begin", "step_end", "epoch_end"))).fit(
            batches(2), batches(1), epochs=1
        )
        found.append([record._replace(time=0.0) for record in listener.records])
    assert found[0] == found[1]
    assert len(found[0]) == 5 * (1 + 3 + 2)


def test_all_listeners_get_all_values_although_one_cancels() -> None:
    first, last = Listener("a"), Listener("z")

    def cancel(record: Record, **given: Any) -> None:
        if record.name == "x":
            raise CancelFit("enough")

    act = on("step_end", lambda learner, **given: learner.log({"x": 1.0, "y": 2.0}), "logs")
    result = make_learner(first, on("log_value", cancel, "middle"), last, act).fit(batches(3), epochs=1)
    assert (result.reason, result.steps, result.by) == ("cancel", 1, "middle")
    assert [record.name for record in first.records] == [record.name for record in last.records] == ["x", "y"]


def test_log_of_several_takes_what_has_items() -> None:
    class Columns:
        values = np.ones(2)

        def items(self) -> Any:
            return zip(["a", "b"], self.values, strict=True)

    listener = Listener()
    make_learner(listener, on("step_end", lambda learner, **given: learner.log(Columns()))).fit(batches(1), epochs=1)
    assert [(record.name, record.value) for record in listener.records] == [("a", 1.0), ("b", 1.0)]


def test_log_of_several_logs_all_or_none() -> None:
    listener = Listener()

    def act(learner: Learner, **given: Any) -> None:
        with pytest.raises(LogError, match=r"'bad'.*no number"):
            learner.log({"good": 1.0, "bad": object(), "late": 2.0})

    make_learner(listener, on("step_end", act)).fit(batches(1), epochs=1)
    assert listener.records == []


def test_log_of_no_values_logs_nothing(tmp_path: Path) -> None:
    act = on("step_end", lambda learner, **given: learner.log({}))
    make_learner(LogTo(tmp_path), act).fit(batches(1), epochs=1)
    assert read_log(tmp_path).records == []


@pytest.mark.parametrize("name", ["", 3, None])
@pytest.mark.parametrize("value", [1.0, 2, torch.tensor(1.0)])
def test_log_of_several_refuses_what_is_no_name(name: Any, value: Any) -> None:
    learner = make_learner(Listener())
    with pytest.raises(LogError, match=r"the name is .*: give a string"):
        learner.log({"a": value, name: value})


class Name(str):
    """A name that a library gives."""


@pytest.mark.parametrize(
    "values",
    [
        {"a": 1, "b": torch.tensor(2.5)},
        {"a": torch.tensor(1), "b": torch.tensor(2.5)},
        {"a": torch.tensor(1.0), "b": torch.tensor([2.5])},
        {"a": torch.tensor(1.0, requires_grad=True), "b": nn.Parameter(torch.tensor(2.5))},
        {Name("a"): 1.0, "b": 2.5},
        OrderedDict(a=1.0, b=2.5),
        MappingProxyType({"a": 1.0, "b": 2.5}),
    ],
)
def test_log_of_several_takes_all_that_log_does(tmp_path: Path, values: Any) -> None:
    make_learner(LogTo(tmp_path), on("step_end", lambda learner, **given: learner.log(values))).fit(
        batches(1), epochs=1
    )
    assert [(record.name, record.value) for record in read_log(tmp_path).records] == [("a", 1.0), ("b", 2.5)]


def test_log_of_several_keeps_the_values_that_it_was_given() -> None:
    class Memory(Backend):
        def write(self, records: Any) -> None:
            seen.extend(records)

    seen: list[Record] = []
    floats, tensors = {"a": 1.0}, {"b": torch.ones(())}

    def act(learner: Learner, **given: Any) -> None:
        for values in (floats, tensors):
            learner.log(values)
        floats["a"], floats["late"] = 3.0, 4.0
        tensors["b"].fill_(5.0)

    make_learner(LogTo(Memory()), on("step_begin", act)).fit(batches(1), epochs=1)
    assert [(record.name, record.value) for record in seen] == [("a", 1.0), ("b", 1.0)]


@pytest.mark.parametrize("values", [None, 3, [("a", 1.0)], torch.tensor(1.0), np.ones(2)])
def test_log_of_several_refuses_what_is_no_mapping(values: Any) -> None:
    def act(learner: Learner, **given: Any) -> None:
        with pytest.raises(LogError, match="is no name, and no mapping of names to values"):
            learner.log(values)

    make_learner(Listener(), on("step_end", act)).fit(batches(1), epochs=1)
