"""What is used of torch that has no public name, and the versions in which that was seen."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from loopkit_whole_step import private


def test_version_of_torch_is_one_that_is_known():
    assert ".".join(torch.__version__.split(".")[:2]) in private.KNOWN


def test_modules_keep_their_hooks_where_they_are_looked_for():
    registers = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
    for register in (*registers, "register_full_backward_pre_hook"):
        module = nn.Linear(1, 1)
        assert not any(private.hooks_of(module))
        getattr(module, register)(lambda *_: None)
        assert any(private.hooks_of(module)), register


def test_tensors_keep_their_hooks_where_they_are_looked_for():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        p = nn.Parameter(torch.ones(1))
        assert not private.have_hooks([p])
        getattr(p, register)(lambda *_: None)
        assert private.have_hooks([p]), register


def test_hooks_on_all_modules_are_kept_where_they_are_looked_for():
    registers = ("register_module_forward_hook", "register_module_forward_pre_hook")
    for register in (*registers, "register_module_full_backward_hook", "register_module_full_backward_pre_hook"):
        assert private.global_hooks() == 0
        handle = getattr(nn.modules.module, register)(lambda *_: None)
        assert private.global_hooks() == 1, register
        handle.remove()


def test_optimizers_keep_their_hooks_where_they_are_looked_for():
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        assert not private.step_hooks(optimizer)
        getattr(optimizer, register)(lambda *_: None)
        assert private.step_hooks(optimizer) == 1


def test_step_of_an_optimizer_calls_no_hooks_on_it():
    p, calls = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([p], lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    p.grad = torch.ones(1)
    private.step_of(optimizer)
    assert (p.item(), calls) == (0.5, [])
    assert not torch.compiler.is_compiling()


def test_number_that_is_read_of_a_tensor_becomes_a_product():
    def function(x, y, rate):
        x.add_(y, alpha=-rate)
        return x

    inputs = [torch.ones(3), torch.full((3,), 2.0), torch.tensor(0.25, dtype=torch.float64)]
    graph = private.trace(function, inputs)
    assert private.multiply(graph.graph) == []
    graph.recompile()
    assert torch.equal(graph(*inputs), torch.full((3,), 0.5))


def test_number_that_is_read_for_anything_else_is_told():
    graph = private.trace(lambda x, rate: x * rate.item(), [torch.ones(3), torch.tensor(0.25)])
    assert len(private.multiply(graph.graph)) == 1


def test_tensor_that_is_no_input_is_told():
    scale = torch.tensor(2.0)
    with pytest.raises(AssertionError) as caught:
        private.trace(lambda x: x * scale, [torch.ones(3)])
    assert private.meets_a_stranger(caught.value)
    assert not private.meets_a_stranger(AssertionError("another"))


def test_random_numbers_and_recurrent_operations_are_seen():
    drawing = private.trace(lambda x: nn.functional.dropout(x, 0.5), [torch.ones(3)])
    assert private.draws(drawing.graph)
    assert not private.draws(private.trace(lambda x: x + 1, [torch.ones(3)]).graph)
    lstm = nn.LSTM(2, 3)
    given = [torch.ones(4, 1, 2), torch.zeros(1, 1, 3), *(p.detach() for p in lstm.parameters())]
    graph = private.trace(
        lambda x, zero, *w: torch._VF.lstm(x, (zero, zero), w, True, 1, 0.0, False, False, False)[0], given
    )
    assert private.recurrent(graph.graph) == "aten.mkldnn_rnn_layer.default"
    assert private.recurrent(drawing.graph) == ""


def test_recurrent_module_lists_its_weights_anew():
    module = nn.GRU(2, 3)
    before = list(module._flat_weights)
    module._flat_weights = []
    private.list_weights(module)
    assert all(one is other for one, other in zip(before, module._flat_weights, strict=True))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize(("batch_first", "shape"), [(False, (5, 1, 2)), (True, (1, 5, 2)), (False, (5, 2))])
def test_length_of_a_sequence_is_seen(kind, batch_first, shape):
    module = kind(2, 3, batch_first=batch_first)
    with private.short_sequences(5, ValueError):
        module(torch.ones(shape))
    with pytest.raises(ValueError, match="5 steps to unroll, more than 4"), private.short_sequences(4, ValueError):
        module(torch.ones(shape))
    module(torch.ones(shape))


@pytest.mark.parametrize(
    ("channels", "fills"), [((1, 16, 32), True), ((6, 8, 1), True), ((1, 6, 16), False), ((3, 8, 8), True)]
)
def test_channels_that_fill_vectors_are_seen(channels, fills):
    one, two, three = channels
    inputs = [torch.ones(1, one, 4, 4), torch.ones(two, one, 1, 1), torch.ones(three, two, 1, 1)]
    graph = private.trace(lambda x, v, w: torch.conv2d(torch.conv2d(x, v), w), inputs)
    assert private.fills_vectors(graph.graph) == fills


def test_dropout_of_what_is_transposed_draws_as_in_eager():
    """Inductor makes a mask anew, in the order of its dimensions; what is given to it is drawn as it lies in memory."""

    def function(x):
        return [nn.functional.dropout(x.transpose(0, 1), 0.5), torch.rand_like(x.transpose(0, 2))]

    inputs = [torch.arange(24.0).reshape(2, 3, 4)]
    graph = private.trace(function, inputs)
    private.draw_in_memory_order(graph.graph)
    graph.recompile()
    drawn = [node for node in graph.graph.nodes if private.is_seeded(node)]
    assert [node.args[0].meta["val"].is_contiguous() for node in drawn] == [True, True]
    torch.manual_seed(1)
    eager = function(*inputs)
    torch.manual_seed(1)
    for one, other in zip(eager, graph(*inputs), strict=True):
        assert torch.equal(one, other)


HOLDS = """
import ctypes, sys, torch
from loopkit_whole_step import private

class Used(ctypes.Structure):
    names = "arena ordblks smblks mapped bytes usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

used = ctypes.CDLL(None).mallinfo2
used.restype = Used
if sys.argv[1] == "kept":
    private.keep_freed_memory()
before = used().mapped
held = torch.empty(20 << 20, dtype=torch.uint8)
print(used().mapped - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="other C libraries have other rules")
def test_what_a_step_needs_comes_from_memory_that_is_kept():
    """A block that has a mapping of its own is given back when it is freed, and mapped anew in the next step."""
    mapped, kept = (
        int(subprocess.run([sys.executable, "-c", HOLDS, how], capture_output=True, check=True, timeout=60).stdout)
        for how in ("mapped", "kept")
    )
    assert (mapped, kept) == (1, 0)


def test_vector_unit_is_taken_to_work_until_the_compiler_fails_for_it(tmp_path, monkeypatch):
    from torch._inductor import cpu_vec_isa

    tried, path = [], tmp_path / "units.json"
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda unit, code: tried.append(str(unit)) or False)

    def found(units):
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        with units.looked_up():
            return [str(unit) for unit in cpu_vec_isa.valid_vec_isa_list()]

    def forgotten(units):
        with units.looked_up():
            return units.disproved()

    other = private.VectorUnits(tmp_path / "other.json")
    other.assumed = ["a unit of a test before, whose answer torch remembers"]
    forgotten(other)
    tried.clear()
    units = private.VectorUnits(path)
    works = found(units)
    assert (len(works), tried, path.exists()) == (1, [], False)
    assert forgotten(units)
    assert found(units) == []
    assert tried
    assert not forgotten(units)  # what fails now fails by itself
    tried.clear()
    path.unlink()
    units = private.VectorUnits(path)
    found(units)
    units.assumed = units.assumed or ["one"]
    units.proved()
    assert all(json.loads(path.read_text()).values())
    assert tried == []
