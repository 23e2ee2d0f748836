"""``Records``: records in groups, and what is kept until it is written."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import batches, make_learner, on

from loopkit.logs import Backend, Record, Records, Text, transfer
from loopkit.logs.transfer import Transfer
from loopkit.plugins import LogTo

BEGIN = 1_700_000_000.0


def records(*times: float, step: int = 1) -> list[Record]:
    return [Record(f"name {i}", float(i), "train", 0, step, step, BEGIN + time) for i, time in enumerate(times)]


def test_records_of_a_place_and_a_millisecond_are_a_group() -> None:
    (group,) = Records.of(records(0, 0.0002, 0.0009)).groups
    assert list(group.values.items()) == [("name 0", 0.0), ("name 1", 1.0), ("name 2", 2.0)]
    assert (group.place, group.time) == (("train", 0, 1, 1), BEGIN)


@pytest.mark.parametrize("other", [{"phase": "val"}, {"epoch": 1}, {"step": 2}, {"update": 2}, {"time": BEGIN + 0.002}])
def test_record_of_another_place_or_time_is_in_another_group(other: dict[str, object]) -> None:
    (first,) = records(0)
    given = [first, first._replace(**other), first]
    assert [list(group) for group in Records.of(given).groups] == [[each] for each in given]


@pytest.mark.parametrize("later", [0.002, -0.002])
def test_record_of_another_name_and_time_is_in_another_group(later: float) -> None:
    given = records(0, later)
    assert [list(group) for group in Records.of(given).groups] == [[each] for each in given]


def test_group_whose_tensors_have_arrived_has_floats_alone() -> None:
    at = ("", 0, 0, 0)
    made = Records([("a", torch.tensor(0.1), at, BEGIN), ("b", 2.0, at, BEGIN), ("c", torch.tensor(3), at, BEGIN)])
    read = Transfer(made).records()
    (group,) = read.groups
    assert group.values == {"a": torch.tensor(0.1).item(), "b": 2.0, "c": 3.0}
    assert group.kinds == read.kinds == {float}


def test_tensors_of_several_dtypes_are_sent_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(transfer.devices, "to_host", lambda tensor: sent.append(tensor) or tensor)
    values = {"a": torch.tensor(0.5), "b": torch.tensor(3), "c": torch.tensor(1.5), "d": torch.tensor(True)}
    read = Transfer(Records([(None, dict(values), ("", 0, 0, 0), BEGIN)])).records()
    assert len(sent) == 1
    assert read.groups[0].values == {"a": 0.5, "b": 3.0, "c": 1.5, "d": 1.0}


def test_name_that_comes_again_begins_a_group() -> None:
    (first, second) = records(0, 0)
    given = [first, second, second._replace(value=7.0), first, first]
    made = Records.of(given)
    assert [list(group) for group in made.groups] == [[given[0], given[1]], [given[2], given[3]], [given[4]]]
    assert list(made) == given


def test_groups_are_made_of_copies() -> None:
    several = {"a": 1.0}
    made = Records([(None, several, ("", 0, 0, 0), BEGIN), ("b", 2.0, ("", 0, 0, 0), BEGIN)])
    assert made.groups[0].values == {"a": 1.0, "b": 2.0}
    assert several == {"a": 1.0}


def test_records_are_a_sequence_in_their_order() -> None:
    given = [*records(0, 0), *records(0, step=2)]
    made = Records.of([*given[:2], given[2]._replace(value=Text("a"))])
    assert len(made) == 3
    assert made[1] == given[1]
    assert made[1:] == list(made)[1:]
    assert made.kinds == {float, Text}
    assert [group.kinds for group in made.groups] == [{float}, {Text}]
    assert Records.of(made) is made


def test_threads_that_log_at_once_mix_up_nothing() -> None:
    seen: list[Record] = []

    class Memory(Backend):
        def write(self, records):
            seen.extend(records)

    def work(learner, **given):
        def many(number):
            for i in range(2_000):
                learner.log(f"{number}", number + i / 10_000)

        threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    make_learner(LogTo(Memory()), on("step_end", work)).fit(batches(1), epochs=1)
    for number in range(4):
        assert [record.value for record in seen if record.name == str(number)] == [
            number + i / 10_000 for i in range(2_000)
        ]
