from __future__ import annotations

import copy
import os
import threading
import time
import warnings

import pytest
import torch
from loopkit_testing import check_plugin, tiny_problem
from torch import nn

from loopkit import Learner, Phase, every, hookimpl
from loopkit.errors import PluginError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.plugins import Checkpoint, SaveOptions
from loopkit_whole_step import CudaGraph


class Emulated(CudaGraph):
    """Graphs on the CPU: replays write to the same memory, and recording runs the module, as on a CUDA device."""

    device_type = "cpu"
    volatile = (*CudaGraph.volatile, "replays", "threads")

    def __init__(self, warmup=1, max_graphs=8):
        super().__init__(warmup, max_graphs)
        self.replays = 0

    def capture(self, module, args):
        for _ in range(3):
            output = module(*args)
        static_output = output.detach().clone()
        params = [p for p in module.parameters() if p.requires_grad]
        static_grads = [torch.zeros_like(p) for p in params]
        addresses = [p.data_ptr() for p in params]
        memory = {}
        plugin = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                assert [p.data_ptr() for p in params] == addresses
                plugin.replays += 1
                for static, value in zip(args, inputs, strict=False):
                    static.data.copy_(value)
                with torch.enable_grad():
                    memory["output"] = module(*args)
                return static_output.copy_(memory["output"].detach()).detach()

            @staticmethod
            def backward(ctx, gradient):
                for static, grad in zip(
                    static_grads, torch.autograd.grad(memory["output"], params, gradient), strict=True
                ):
                    static.copy_(grad)
                return *(None for _ in args), *(static.detach() for static in static_grads)

        return lambda *given: Replay.apply(*given, *params)


class Failing(Emulated):
    def capture(self, module, args):
        module(*args)
        raise RuntimeError("operation not permitted when stream is capturing")


def fitted(*plugins, epochs=3, **options):
    problem = tiny_problem(samples=21, batch_size=6)  # batches of 6, 6, 6 and 3
    learner = problem.learner(plugins=plugins, standard=False, **options)
    torch.manual_seed(0)
    learner.fit(problem.train, problem.val, epochs=epochs)
    return learner


def same(one, other):
    a, b = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_replays_train_bitwise_as_without(accumulate):
    plugin = Emulated()
    assert same(fitted(plugin, accumulate=accumulate), fitted(accumulate=accumulate))
    assert plugin.replays == 2 + 4 + 4  # each shape ran once as it is


def test_each_shape_has_a_graph():
    plugin = Emulated()
    fitted(plugin)
    shapes = {key[1][0] for key in plugin._graphed["model"].graphs}
    assert shapes == {(6, 4), (3, 4)}


def test_warmup_calls_run_as_they_are():
    plugin = Emulated(warmup=4)
    fitted(plugin, epochs=1)
    assert plugin.replays == 0


def test_shapes_above_max_graphs_run_as_they_are():
    plugin = Emulated(max_graphs=1)
    assert same(fitted(plugin), fitted())
    assert len(plugin._graphed["model"].graphs) == 1


def test_evaluation_runs_as_it_is():
    plugin = Emulated()
    learner = fitted(plugin)
    before = plugin.replays
    learner.evaluate(tiny_problem().val)
    assert plugin.replays == before


def key_of(plugin, *args, train=True, **kwargs):
    learner = Learner(nn.Linear(4, 2), plugins=[plugin], standard=False)
    learner.model.train(train)
    return plugin._graphed["model"].key(args, kwargs)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 4),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.zeros(2, 4, requires_grad=True),
        torch.zeros(4, 2).T,
    ],
    ids=["shape", "dtype", "requires_grad", "stride"],
)
def test_key_differs_for_other_inputs(other):
    plugin = Emulated()
    learner = Learner(nn.Linear(4, 2), plugins=[plugin], standard=False)
    graphed = plugin._graphed["model"]
    learner.model.train()
    assert graphed.key((torch.zeros(2, 4),), {}) != graphed.key((other,), {}) is not None


def test_key_is_the_same_for_other_values():
    plugin = Emulated()
    Learner(nn.Linear(4, 2), plugins=[plugin], standard=False)
    graphed = plugin._graphed["model"]
    assert graphed.key((torch.zeros(2, 4),), {}) == graphed.key((torch.ones(2, 4),), {})


def test_key_differs_under_autocast():
    plugin = Emulated()
    Learner(nn.Linear(4, 2), plugins=[plugin], standard=False)
    graphed = plugin._graphed["model"]
    plain = graphed.key((torch.zeros(2, 4),), {})
    with torch.autocast("cpu", torch.bfloat16):
        assert graphed.key((torch.zeros(2, 4),), {}) != plain


def test_no_key_in_eval_mode():
    assert key_of(Emulated(), torch.zeros(2, 4), train=False) is None


def test_no_key_without_gradients():
    with torch.no_grad():
        assert key_of(Emulated(), torch.zeros(2, 4)) is None


def test_no_key_for_arguments_that_are_no_tensors():
    assert key_of(Emulated(), torch.zeros(2, 4), 3) is None
    assert key_of(Emulated(), torch.zeros(2, 4), mask=None) is None


def test_no_key_with_hooks_on_modules():
    plugin = Emulated()
    learner = Learner(nn.Sequential(nn.Linear(4, 2)), plugins=[plugin], standard=False)
    graphed = plugin._graphed["model"]
    handle = learner.model[0].register_forward_hook(lambda *args: None)
    assert graphed.key((torch.zeros(2, 4),), {}) is None
    handle.remove()
    assert graphed.key((torch.zeros(2, 4),), {}) is not None


def test_outputs_survive_the_next_replay():
    plugin = Emulated()
    learner = Learner(nn.Linear(4, 2), plugins=[plugin], standard=False)
    learner.model(torch.ones(2, 4)).sum().backward()
    one = learner.model(torch.ones(2, 4))
    one.sum().backward()
    kept = one.detach().clone()
    learner.model(torch.zeros(2, 4)).sum().backward()
    assert plugin.replays == 2
    assert torch.equal(one, kept)


def test_second_call_before_the_backward_runs_as_it_is():
    plugin, plain = Emulated(), nn.Linear(4, 2)
    learner = Learner(copy.deepcopy(plain), plugins=[plugin], standard=False)
    learner.model(torch.ones(2, 4))
    learner.model.zero_grad()
    (learner.model(torch.ones(2, 4)) * learner.model(torch.full((2, 4), 2.0))).sum().backward()
    (plain(torch.ones(2, 4)) * plain(torch.full((2, 4), 2.0))).sum().backward()
    assert plugin.replays == 1
    assert torch.equal(learner.model.weight.grad, plain.weight.grad)


def test_call_whose_result_was_dropped_does_not_block_the_next():
    plugin = Emulated()
    learner = Learner(nn.Linear(4, 2), plugins=[plugin], standard=False)
    for _ in range(3):
        learner.model(torch.ones(2, 4))
    assert plugin.replays == 2


class TwoBackwards(Phase):
    name = "two"
    training = True
    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)

    def step(self, learner, step):
        step.inputs, step.targets = step.batch
        for factor in (1.0, 0.5):
            step.backward(learner.loss_fn(learner.model(step.inputs * factor), step.targets))
        step.update()


def test_two_backwards_of_one_update_add_up():
    learners = [fitted(*plugins, phases=[TwoBackwards()]) for plugins in ((Emulated(),), ())]
    assert same(*learners)


def test_recording_leaves_buffers_and_generators_alone():
    plugin = Emulated()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    learner = Learner(model, plugins=[plugin], standard=False)
    inputs = torch.randn(5, 4)
    results = []
    for module in (learner.model, plain):
        torch.manual_seed(0)
        results.append([module(inputs).detach() for _ in range(3)])
    assert plugin.replays == 2
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(model[0].running_mean, plain[0].running_mean)
    assert model[0].num_batches_tracked == 3


def test_inputs_are_not_written_to():
    plugin = Emulated()
    learner = Learner(nn.Linear(4, 2), plugins=[plugin], standard=False)
    batches = [torch.full((2, 4), float(i)) for i in range(4)]
    for batch in batches:
        learner.model(batch)
    assert [batch[0, 0].item() for batch in batches] == [0.0, 1.0, 2.0, 3.0]


def test_moved_parameters_are_recorded_anew():
    plugin = Emulated()
    learner = fitted(plugin)
    for p in learner.model.parameters():
        p.data = p.data.clone()
    learner.fit(tiny_problem().train, epochs=1)  # the emulation asserts that the addresses are those of the recording
    assert plugin._graphed["model"].graphs


def test_failed_recording_warns_once_and_trains_as_without():
    with pytest.warns(UserWarning, match=r"'model' cannot be recorded .*capturing.*without graphs") as caught:
        learner = fitted(Failing())
    assert len(caught) == 1
    assert same(learner, fitted())


def test_recording_waits_for_a_save_in_the_background(tmp_path, monkeypatch):
    class Beside(Emulated):
        def __init__(self):
            super().__init__()
            self.threads = []

        def capture(self, module, args):
            self.threads += [thread.name for thread in threading.enumerate()]
            return super().capture(module, args)

    def slowly(fd, fsync=os.fsync):
        time.sleep(0.02)
        written.append(threading.current_thread().name)
        return fsync(fd)

    written = []
    monkeypatch.setattr(os, "fsync", slowly)
    plugin = Beside()
    saver = Checkpoint(tmp_path, save=every(updates=1), options=SaveOptions(background=True))
    fitted(plugin, saver, epochs=1)
    assert "loopkit-checkpoint" in written
    assert plugin.threads
    assert "loopkit-checkpoint" not in plugin.threads


def test_modes_inside_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model[1].eval()
    Learner(model, plugins=[Emulated()], standard=False)
    assert model.training
    assert not model[1].training


def test_without_cuda_there_is_one_warning_and_the_models_run_as_they_are():
    models = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    with pytest.warns(UserWarning, match="model 'a' is on cpu, not on a CUDA device, so it runs without") as caught:
        learner = Learner(models, plugins=[CudaGraph()], standard=False)
    assert len(caught) == 1
    assert type(learner.models["a"]) is nn.Linear


def test_without_cuda_training_is_bitwise_as_without():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = fitted(CudaGraph())
    assert same(learner, fitted())


@pytest.mark.parametrize("options", [{"warmup": 0}, {"max_graphs": True}, {"warmup": 1.5}])
def test_option_out_of_range_is_refused(options):
    with pytest.raises(PluginError, match=next(iter(options))):
        CudaGraph(**options)


def test_emulated_keeps_the_contract():
    check_plugin(Emulated)


@pytest.mark.filterwarnings("ignore:plugin 'cuda_graph'")
@pytest.mark.slow
def test_fallback_keeps_the_contract():
    check_plugin(CudaGraph)


class Device:
    """Models and batches on the GPU."""

    name = "device"
    provides = "device"

    @hookimpl(updates=("model",))
    def setup_model(self, model):
        return model.cuda()

    @hookimpl(updates=("batch",))
    def move_batch(self, batch):
        return tuple(part.cuda() for part in batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gpu_training_is_as_without_graphs(accumulate):
    plugin = CudaGraph(warmup=1)
    with_graphs, without = (fitted(Device(), *plugins, accumulate=accumulate, epochs=10) for plugins in ((plugin,), ()))
    assert len(plugin._graphed["model"].graphs) == 2
    a, b = with_graphs.model.state_dict(), without.model.state_dict()
    for key in a:  # float32 sums whose order the kernels may choose, over 40 steps
        torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_model_that_reads_on_the_host_runs_as_it_is():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x) * (2.0 if x.sum().item() > 0 else 1.0)

    problem = tiny_problem()
    problem.model = Reading()
    learner = problem.learner(plugins=[Device(), CudaGraph(warmup=1)], standard=False)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        learner.fit(problem.train, epochs=3)
    assert learner.progress.steps == 12
