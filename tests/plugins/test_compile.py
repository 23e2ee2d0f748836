from __future__ import annotations

import copy
import io

import pytest
import torch
from loopkit_testing import check_plugin, tiny_problem
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.plugins.compile import Compile
from loopkit.plugins.to_device import ToDevice


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts the graphs that it is given, and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def failing(graph, inputs):
    raise OSError("no compiler was found")


class Breaking(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


class Own(nn.Module):
    """A module with a ``forward`` of the user's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x).tanh()


def containers():
    return [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), Own()]


def fitted(*plugins, epochs=2, dropout=True):
    problem = tiny_problem()
    if not dropout:
        problem.model[3].p = 0.0
    learner = problem.learner(plugins=plugins, standard=False)
    torch.manual_seed(0)
    learner.fit(problem.train, problem.val, epochs=epochs)
    return learner


def same(one, other):
    a, b = one.model.state_dict(), other.model.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("model", containers(), ids=["linear", "sequential", "own"])
def test_model_goes_through_the_backend_in_one_graph(model):
    backend = Counting()
    Learner(model, plugins=[Compile(backend=backend)], standard=False)
    model(torch.ones(1, 2))
    assert backend.graphs == 1


def test_second_call_is_not_compiled_again():
    backend, model = Counting(), Own()
    Learner(model, plugins=[Compile(backend=backend)], standard=False)
    model(torch.ones(1, 2))
    model(torch.zeros(1, 2))
    assert backend.graphs == 1


def test_each_of_many_models_is_compiled():
    backend = Counting()
    models = {f"model{i}": nn.Linear(2, 2) for i in range(12)}  # torch compiles one function 8 times at most
    Learner(models, plugins=[Compile(backend=backend)], standard=False)
    for model in models.values():
        model(torch.ones(1, 2))
    assert backend.graphs == 12


def test_learner_keeps_the_model_and_its_names():
    model = Own()
    learner = Learner(model, plugins=[Compile(backend="eager")], standard=False)
    assert learner.model is model
    assert type(model) is Own
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]


def test_eager_backend_trains_bitwise_as_without():
    assert same(fitted(Compile(backend="eager")), fitted())


def test_dynamic_is_passed_on():
    backend, model = Counting(), Own()
    Learner(model, plugins=[Compile(dynamic=True, backend=backend)], standard=False)
    for size in (3, 4, 5, 6):  # not 2, the number of features
        model(torch.ones(size, 2))
    assert backend.graphs == 1


def test_static_shapes_are_compiled_one_by_one():
    backend, model = Counting(), Own()
    Learner(model, plugins=[Compile(dynamic=False, backend=backend)], standard=False)
    for size in (3, 4, 5, 6):
        model(torch.ones(size, 2))
    assert backend.graphs == 4


def test_failing_backend_warns_once_and_trains_bitwise_as_without():
    with pytest.warns(UserWarning, match=r"could not compile model 'model'.*no compiler was found") as caught:
        learner = fitted(Compile(backend=failing))
    assert len(caught) == 1
    assert same(learner, fitted())


def test_failing_backend_warns_once_for_several_models():
    models = nn.ModuleDict({"a": Own(), "b": Own()})
    Learner(dict(models), plugins=[Compile(backend=failing)], standard=False)
    with pytest.warns(UserWarning, match="model 'a'") as caught:
        [model(torch.ones(1, 2)) for model in models.values()]
    assert len(caught) == 1


def test_missing_backend_warns_once_and_offers_the_nearest():
    with pytest.warns(UserWarning, match="did you mean 'inductor'") as caught:
        learner = fitted(Compile(backend="inducktor"))
    assert len(caught) == 1
    assert same(learner, fitted())


def test_error_of_the_model_is_no_failure_of_the_backend():
    class Wrong(nn.Module):
        def forward(self, x):
            raise KeyError("of the user")

    plugin = Compile(backend="eager")
    model = Wrong()
    Learner(model, plugins=[plugin], standard=False)
    with pytest.raises(KeyError, match="of the user"):
        model(torch.ones(1))
    assert not plugin.failed


def total(t, x):
    t.copy_(t + x.sum())
    return t + 0


def test_torch_still_loses_writes_to_float64_scalars():
    """When this fails, torch has mended it, and the plugin need not look for such buffers any more."""
    for dtype, expected in ((torch.float32, 12.0), (torch.float64, 0.0)):
        t = torch.zeros((), dtype=dtype)
        compiled = torch.compile(total, backend="aot_eager")  # the part of inductor, too, that loses them
        for _ in range(3):
            compiled(t, torch.ones(4, dtype=dtype))
        assert t.item() == expected


class Counter(nn.Module):
    """Counts what it has seen in a buffer."""

    def __init__(self, dtype, shape=()):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(shape, dtype=dtype))

    def forward(self, x):
        self.seen.copy_(self.seen + len(x))
        return self.linear(x)


def test_model_whose_buffer_torch_would_lose_is_not_compiled():
    model, backend = nn.ModuleDict({"counter": Counter(torch.float64)}), Counting()
    model.forward = lambda x: model["counter"](x)
    with pytest.warns(
        UserWarning, match=r"model 'model' is not compiled.* as 'counter\.seen' is: make it float32"
    ) as said:
        Learner(model, plugins=[Compile(backend=backend)], standard=False)
    assert len(said) == 1
    for _ in range(3):
        model(torch.ones(4, 2))
    assert (model["counter"].seen.item(), backend.graphs) == (12.0, 0)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, ()), (torch.float64, (1,)), (torch.int64, ())])
def test_model_with_other_buffers_is_compiled(dtype, shape):
    model = Counter(dtype, shape)
    Learner(model, plugins=[Compile(backend="aot_eager")], standard=False)
    for _ in range(3):
        model(torch.ones(4, 2))
    assert model.seen.item() == 12


def test_model_with_such_a_buffer_is_compiled_by_a_backend_that_does_not_lose_it():
    model = Counter(torch.float64)
    Learner(model, plugins=[Compile(backend="eager")], standard=False)
    for _ in range(3):
        model(torch.ones(4, 2))
    assert model.seen.item() == 12


def test_fullgraph_refuses_a_model_in_pieces():
    model = Breaking()
    Learner(model, plugins=[Compile(backend="eager", fullgraph=True)], standard=False)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.ones(1))


def test_unknown_mode_is_an_error():
    with pytest.raises(RuntimeError, match="mode"):
        Learner(Own(), plugins=[Compile(mode="fastest")], standard=False)


def replaying(graph, inputs, **options):
    """A backend that writes its outputs to the same memory in each call, as a replayed graph does."""
    kept = []

    def run(*given):
        outputs = graph.forward(*given)
        kept.extend(outputs[len(kept) :])
        return tuple(old.copy_(new) for old, new in zip(kept, outputs, strict=True))

    return run


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune"])
def test_outputs_of_replayed_graphs_can_be_kept(mode):
    model = Own()
    Learner(model, plugins=[Compile(backend=replaying, mode=mode)], standard=False)
    with torch.no_grad():
        first, second = (model(torch.full((1, 2), value)) for value in (0.0, 1.0))
        expected = model.linear(torch.zeros(1, 2)).tanh()
    assert torch.equal(first, expected) == (mode is not None)
    assert (first.data_ptr() == second.data_ptr()) == (mode is None)


def test_copies_and_pickles_are_not_compiled():
    model = Own()
    Learner(model, plugins=[Compile(backend="eager")], standard=False)
    assert copy.deepcopy(model)._compiled_call_impl is None
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)._compiled_call_impl is None


def test_compile_comes_after_device_layout_and_freezing():
    class Freezing:
        name = "freezing"
        provides = "freeze"

        @hookimpl(updates=("model",))
        def setup_model(self, model):
            return model

    class Layout(Freezing):
        name = "layout"
        provides = "memory_format"
        before = ("freeze",)

    plugins = [Compile(backend="eager"), Freezing(), Layout(), ToDevice("cpu")]
    learner = Learner(Own(), plugins=plugins, standard=False)
    order = [impl.entry.plugin for impl in learner._engine.registry.ordered("setup_model")]
    assert order == ["to_device", "layout", "freezing", "compile"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on the first use of its compiler
def test_inductor_trains_as_without():
    plugin = Compile()
    compiled, plain = fitted(plugin, dropout=False), fitted(dropout=False)  # it draws random numbers of its own
    assert not plugin.failed
    for key, value in plain.model.state_dict().items():  # fused kernels round differently, over 8 steps
        torch.testing.assert_close(compiled.model.state_dict()[key], value, rtol=1e-4, atol=1e-5)


DEAR = ["exact_resume", "unknown_phases", "error_elsewhere"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, as it compiles for inputs that require grad
def test_compile_keeps_the_contract():
    skip = ["no_graph_kept", *DEAR]  # the first would compile the check's hook too
    check_plugin(lambda: Compile(backend="eager"), skip=skip)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("check", DEAR)
def test_compile_keeps_what_takes_many_compilations(check):
    check_plugin(lambda: Compile(backend="eager"), checks=[check])
