"""Values that are read when they have arrived; on the CPU that is at once."""

import pytest
import torch

from loopkit.plugins.late import LateValues, read

VALUES = {"a": torch.tensor(0.1, dtype=torch.float64), "b": torch.tensor([3]), "c": 2.5, "d": torch.tensor(True)}
READ = {"a": 0.1, "b": 3.0, "c": 2.5, "d": 1.0}


def test_read_gives_the_numbers_in_order():
    assert list(read(VALUES).items()) == list(READ.items())


def test_read_of_nothing_is_nothing():
    assert read({}) == {}


def test_read_widens_float32_exactly():
    assert read({"x": torch.tensor(0.1)}) == {"x": torch.tensor(0.1).item()}


def test_late_values_arrive_once():
    late = LateValues()
    late.send(VALUES)
    assert late.arrived() == READ
    assert late.arrived() == {}


def test_late_values_can_be_waited_for():
    late = LateValues()
    late.send(VALUES)
    assert late.wait() == READ
    assert late.wait() == {}


def test_late_values_sent_again_replace_the_first():
    late = LateValues()
    late.send({"x": 1.0})
    late.send({"y": 2.0})
    assert late.arrived() == {"y": 2.0}


def test_late_values_of_nothing_are_nothing():
    late = LateValues()
    late.send({"x": 1.0})
    late.send({})
    assert late.arrived() == {}


def test_late_values_are_those_of_the_moment():
    late, value = LateValues(), torch.ones(())
    late.send({"x": value})
    value.add_(1)
    assert late.arrived() == {"x": 1.0}


@pytest.mark.gpu
def test_late_values_on_a_gpu_wait_for_nothing_until_asked():
    late = LateValues()
    values = {"a": torch.full((), 0.5, device="cuda"), "b": torch.tensor(2), "c": 3.0}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        late.send(values)
        late.arrived()
        late.send(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert late.wait() == {"a": 0.5, "b": 2.0, "c": 3.0}


def test_value_with_a_graph_is_read_without_a_warning(recwarn):
    values = {"loss": torch.ones((), requires_grad=True), "half": torch.ones(1, dtype=torch.bfloat16), "whole": 2}
    assert read(values) == {"loss": 1.0, "half": 1.0, "whole": 2.0}
    assert not recwarn.list


class Part(torch.Tensor):
    """What a process holds of a tensor that several have together: its own number is not that of the whole."""

    def item(self):
        raise AssertionError("read by itself")


def test_tensor_of_another_class_is_not_read_as_if_it_were_whole():
    assert read({"a": torch.tensor(2.0).as_subclass(Part), "b": 1.0}) == {"a": 2.0, "b": 1.0}
