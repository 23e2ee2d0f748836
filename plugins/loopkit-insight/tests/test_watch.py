from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from distributed.processes import run
from loopkit_testing import tiny_problem
from torch import nn

from loopkit import CancelStep, Learner, Phase, hookimpl
from loopkit.data import TensorLoader
from loopkit.errors import PluginError
from loopkit.metrics import Mean
from loopkit.plugins import DDP
from loopkit_insight import Watch

SIZES = (4, 4, 3)  # the last batch is smaller


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential()
        self.encoder.add_module("hidden", nn.Linear(3, 5))
        self.encoder.add_module("act", nn.ReLU())
        self.head = nn.Linear(5, 1)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def batches(sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def make_learner(*plugins, model=None, **options):
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    return Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False, **options)


def weighted(values, sizes=SIZES):
    """Mean in float64, weighted by samples."""
    return sum(float(value) * n for value, n in zip(values, sizes, strict=True)) / sum(sizes)


# Values


@pytest.mark.parametrize(
    ("reduction", "by_hand"),
    [
        ("mean", lambda x: x.mean()),
        ("sum", lambda x: x.sum()),
        ("max", lambda x: x.flatten().sort().values[-1]),
        ("min", lambda x: x.flatten().sort().values[0]),
        ("norm", lambda x: (x * x).sum().sqrt()),
    ],
)
def test_value_is_the_sample_weighted_mean_of_the_reductions(reduction, by_hand):
    learner = make_learner(Watch({"encoder.hidden": reduction}))
    with torch.no_grad():
        expected = weighted([by_hand(learner.model.encoder.hidden(inputs)) for inputs, _ in batches()])
    metrics = learner.evaluate(batches())
    assert metrics == {"val/encoder.hidden": pytest.approx(expected, rel=1e-6)}  # a float32 sum in another order


def test_values_of_each_phase_and_path_are_put_into_the_metrics():
    learner = make_learner(Watch({"encoder": "min", "head": "norm"}))
    result = learner.fit(batches(), batches(), epochs=1)
    assert set(result.metrics) == {"train/encoder", "train/head", "val/encoder", "val/head"}
    assert result.metrics["val/encoder"] >= 0  # it ends in a ReLU


def test_values_are_those_of_one_pass():
    learner = make_learner(Watch({"encoder.hidden": "norm"}))
    first = learner.evaluate(batches())
    learner.evaluate(batches((2, 2)))
    assert learner.evaluate(batches()) == first


def test_training_values_are_those_of_the_weights_of_each_step():
    seen = []

    class Collect:
        @hookimpl
        def step_begin(self, learner, step):
            seen.append(torch.linalg.vector_norm(learner.model.encoder.hidden(step.batch[0]).detach()))

    learner = make_learner(Watch({"encoder.hidden": "norm"}, name="a_watch"), Collect())
    metrics = learner.run("train", batches())
    # the calls of the other plugin, made in its step_begin, come after the watch has cleared what it saw
    assert metrics["train/encoder.hidden"] == pytest.approx(weighted(seen), rel=1e-12)


def test_module_called_several_times_in_a_step_counts_each_time():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.head = nn.Linear(3, 1)

        def forward(self, inputs):
            return self.head(self.layer(self.layer(inputs)))

    learner = make_learner(Watch({"layer": "norm"}), model=Twice())
    with torch.no_grad():
        layer = learner.model.layer
        expected = [(layer(x).norm().item() + layer(layer(x)).norm().item()) / 2 for x, _ in batches()]
    assert learner.evaluate(batches())["val/layer"] == pytest.approx(weighted(expected), rel=1e-6)  # float32 norms


@pytest.mark.parametrize("wrap", [lambda x: (x, None), lambda x: {"a": None, "b": [x]}, lambda x: [0, (x, 2 * x)]])
def test_first_tensor_of_an_output_counts(wrap):
    class Inner(nn.Module):
        def forward(self, inputs):
            return wrap(inputs)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()
            self.head = nn.Linear(3, 1)

        def forward(self, inputs):
            self.inner(inputs)
            return self.head(inputs)

    learner = make_learner(Watch({"inner": "sum"}), model=Outer())
    expected = weighted([inputs.sum() for inputs, _ in batches()])
    assert learner.evaluate(batches())["val/inner"] == pytest.approx(expected, rel=1e-12)


def output_of(value):
    """A model with a module that returns this value."""

    class Inner(nn.Module):
        def forward(self, inputs):
            return value

    model = nn.Module()
    model.inner = Inner()
    model.head = nn.Linear(3, 1)
    model.forward = lambda inputs: (model.inner(inputs), model.head(inputs))[1]
    return model


@pytest.mark.parametrize(
    ("value", "reduction", "expected"),
    [
        (torch.full((3000,), 60000.0, dtype=torch.float16), "sum", 1.8e8),  # beyond float16
        (torch.full((4,), 40000.0, dtype=torch.float16), "norm", 80000.0),
        (torch.tensor([1, 2, 4]), "mean", 7 / 3),
        (torch.tensor([3, 4]), "norm", 5.0),
        (torch.tensor([True, False]), "max", 1.0),
        (torch.tensor([3 + 4j, 0j]), "max", 5.0),
    ],
)
def test_values_of_any_dtype_are_reduced_in_float32(value, reduction, expected):
    learner = make_learner(Watch({"inner": reduction}), model=output_of(value))
    assert learner.evaluate(batches())["val/inner"] == pytest.approx(expected, rel=1e-6)  # float32


def test_float64_outputs_are_reduced_in_float64():
    value = torch.tensor([1.0, 1e-12], dtype=torch.float64)
    learner = make_learner(Watch({"inner": "sum"}), model=output_of(value))
    assert learner.evaluate(batches((4,)))["val/inner"] == 1.0 + 1e-12


def test_empty_output_and_uncalled_module_make_no_metric():
    model = output_of(torch.zeros(0))
    model.spare = nn.Linear(1, 1)
    learner = make_learner(Watch({"inner": "max", "spare": "mean"}), model=model)
    assert learner.evaluate(batches()) == {}


def test_output_without_a_tensor_is_an_error_that_describes_it():
    learner = make_learner(Watch({"inner": "max"}), model=output_of((1, "x")))
    with pytest.raises(PluginError, match=r"'watch': the output of 'inner' holds no tensor: it is tuple\(int, str\)"):
        learner.evaluate(batches())


def test_cancelled_step_does_not_count():
    class Cancel:
        @hookimpl
        def loss_begin(self, step):
            if step.index == 1:
                raise CancelStep

    watched = make_learner(Watch({"encoder": "norm"}), Cancel()).evaluate(batches())
    data = batches()
    assert watched == make_learner(Watch({"encoder": "norm"})).evaluate([data[0], data[2]])


def test_phase_inside_another_does_not_count_for_the_outer_one():
    class Validate:
        @hookimpl
        def backward_begin(self, learner):
            learner.evaluate(batches((2, 2)))

    alone = make_learner(Watch({"encoder": "norm"})).run("train", batches())
    nested = make_learner(Watch({"encoder": "norm"}), Validate())
    assert nested.run("train", batches()) == alone
    assert nested.metrics["val/encoder"] > 0


def test_calls_outside_of_steps_do_not_count():
    class Call:
        @hookimpl
        def epoch_begin(self, learner):
            learner.model(torch.ones(1, 3))

        @hookimpl
        def epoch_end(self, learner):
            learner.model(torch.ones(1, 3))

    plain = make_learner(Watch({"encoder": "norm"})).evaluate(batches())
    assert make_learner(Watch({"encoder": "norm"}), Call()).evaluate(batches()) == plain


# Several models


class TwoNets(Phase):
    name = "adversarial"

    def step(self, learner, step):
        learner.models["critic"](learner.models["generator"](step.batch[0]))


def test_paths_in_a_mapping_of_models_begin_with_the_model():
    torch.manual_seed(0)
    models = {"generator": nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "critic": nn.Linear(4, 1)}
    watch = Watch({"generator.0": "norm", "generator": "max", "critic": "mean"})
    learner = Learner(models, phases=[TwoNets()], plugins=[watch], standard=False)
    metrics = learner.run("adversarial", batches())
    with torch.no_grad():
        expected = weighted([models["generator"][0](inputs).norm() for inputs, _ in batches()])
    assert set(metrics) == {f"adversarial/{path}" for path in ("generator.0", "generator", "critic")}
    assert metrics["adversarial/generator.0"] == pytest.approx(expected, rel=1e-6)  # float32 norms
    assert -1 <= metrics["adversarial/generator"] <= 1


def test_path_without_the_models_name_is_refused_in_a_mapping():
    models = {"generator": nn.Sequential(nn.Linear(3, 4)), "critic": nn.Linear(4, 1)}
    with pytest.raises(PluginError, match=r"no module has the path 'generatr\.0'; near it are: 'generator\.0'"):
        Learner(models, plugins=[Watch({"generatr.0": "norm"})])


# No trace


def hooks_on(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_training_is_bitwise_the_same():
    problem = tiny_problem()
    plain, watched = copy.deepcopy(problem), copy.deepcopy(problem)
    for each, plugins in ((plain, []), (watched, [Watch({"0": "norm", "1": "mean", "4": "max"})])):
        torch.manual_seed(0)
        each.learner(plugins=plugins, standard=False).fit(each.train, each.val, epochs=3)
    states = plain.model.state_dict(), watched.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_hooks_are_there_during_a_pass_alone():
    counts = []

    class Count:
        @hookimpl
        def step_end(self, learner):
            counts.append(hooks_on(learner.model))

    learner = make_learner(Watch({"encoder": "norm", "head": "max"}), Count())
    learner.fit(batches(), batches(), epochs=2)
    assert set(counts) == {2}
    assert hooks_on(learner.model) == 0


def test_hooks_are_removed_after_an_error():
    class Fail:
        @hookimpl
        def step_end(self):
            raise RuntimeError("broken")

    learner = make_learner(Watch({"encoder": "norm"}), Fail())
    with pytest.raises(RuntimeError, match="broken"):
        learner.run("train", batches())
    assert hooks_on(learner.model) == 0


def test_outputs_are_not_kept_alive():
    alive, outputs = [], []

    class Look:
        @hookimpl
        def step_begin(self):
            gc.collect()
            alive.append(sum(ref() is not None for ref in outputs))

    learner = make_learner(Watch({"encoder.hidden": "max"}), Look())
    learner.model.encoder.hidden.register_forward_hook(lambda m, i, output: outputs.append(weakref.ref(output)))
    learner.run("train", batches())
    assert alive == [0, 0, 0]
    assert len(outputs) == 3


def test_reductions_carry_no_graph():
    watch, seen = Watch({"encoder.hidden": "max"}), []

    class Look:
        @hookimpl
        def backward_begin(self):
            seen.extend(value.requires_grad for _, value in watch._seen["train"])

    make_learner(watch, Look()).run("train", batches())
    assert seen == [False, False, False]


# State


def test_state_in_mid_pass_is_a_copy_that_goes_on():
    watch, state = Watch({"encoder": "norm"}), {}

    class Take:
        name = "~take"

        @hookimpl
        def step_end(self, step):
            if step.index == 1:
                state.update(watch.state_dict())

    learner = make_learner(watch, Take())
    data = batches()
    expected = learner.evaluate(data)

    class Give:
        name = "~give"

        @hookimpl
        def epoch_begin(self):
            resumed.load_state_dict(state)

    resumed = Watch({"encoder": "norm"})
    assert make_learner(resumed, Give()).evaluate(data[2:]) == expected


# Refused


@pytest.mark.parametrize(
    ("reductions", "message"),
    [
        ("encoder", r"takes a mapping from paths of modules to reductions, .*; this is 'encoder'"),
        ({}, r"takes a mapping .*; this is \{\}"),
        ({"": "norm"}, r"'' is no path of a module"),
        ({3: "norm"}, r"3 is no path of a module"),
        (
            {"encoder": "nrom"},
            r"the reduction of 'encoder' is 'nrom' \(did you mean 'norm'\?\); it is one of mean, sum",
        ),
        (
            {"encoder": torch.mean},
            r"the reduction of 'encoder' is <built-in .*; it is one of mean, sum, max, min, norm",
        ),
    ],
)
def test_bad_options_are_refused(reductions, message):
    with pytest.raises(PluginError, match=message):
        Watch(reductions)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("encoder.hiden", "'encoder.hidden'"),
        ("heads", "'head'"),
        ("zzz", "'encoder', 'encoder.hidden', 'encoder.act', "),
    ],
)
def test_unknown_path_is_refused_when_the_learner_is_built_with_near_ones(path, near):
    with pytest.raises(PluginError, match=f"no module has the path '{path}'; near it are: {near}"):
        make_learner(Watch({path: "norm"}))


def test_two_watches_of_one_path_are_refused():
    with pytest.raises(PluginError, match=r"both write 'metrics\.\*/encoder'"):
        make_learner(Watch({"encoder": "norm"}), Watch({"encoder": "max"}, name="other"))


# Several processes


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator)


def evaluated(size, watch, **options):
    """What is watched in this process, together with the others if there are any."""
    return make_learner(watch, DDP(), **options).evaluate(TensorLoader(*data(), batch_size=size))


def test_watched_outputs_are_those_of_all_processes():
    one, other = run(lambda rank: evaluated(4, Watch({"encoder": "mean"})), 2)
    alone = evaluated(8, Watch({"encoder": "mean"}))
    assert one == other
    assert list(one) == list(alone) == ["val/encoder"]
    assert one["val/encoder"] == pytest.approx(alone["val/encoder"], rel=1e-5)  # sums in another order


class Both(nn.Module):
    """Calls a part in rank 1 alone."""

    def __init__(self, rank):
        super().__init__()
        self.part, self.linear, self.rank = nn.Identity(), nn.Linear(3, 1), rank

    def forward(self, inputs):
        return self.linear(self.part(inputs) if self.rank else inputs)


def test_module_that_one_process_calls_has_a_metric_in_all():
    one, other = run(lambda rank: evaluated(4, Watch({"part": "max"}), model=Both(rank)), 2)
    assert one == other
    assert list(one) == ["val/part"]


def test_state_goes_on_with_another_number_of_processes():
    states = []
    for inputs in ([1.0, 2.0], [4.0]):
        watch = Watch({"part": "mean"})
        mean = watch._phases.setdefault("train", {"part": Mean("part")})["part"]
        for value in inputs:
            mean.add(torch.tensor(value), 2)
        states.append(watch.state_dict())
    watch = Watch({"part": "mean"})
    assert watch.reshard(states, 1, 2) is states[1]
    one, two, three = (watch.reshard(states, rank, 3)["train"]["part"] for rank in range(3))
    assert (float(one["total"]), float(one["weight"])) == (14.0, 6.0)
    assert two == three == {"total": None, "weight": 0.0}


# Other phases


def test_plugin_works_under_unknown_phases():
    # the contract builds models of its own, so paths cannot suit all of them: here is one that does
    class Bare(Phase):
        name = "bare"

        def step(self, learner, step):
            learner.model(step.batch[0])

    learner = make_learner(Watch({"head": "norm"}), phases=[Bare()])
    assert set(learner.run("bare", batches())) == {"bare/head"}


def test_a_forward_aside_is_not_watched():
    class Probe:
        @hookimpl
        def loss_begin(self, learner):
            with learner.aside(), torch.no_grad():
                learner.model(torch.full((2, 3), 100.0))

    seen = []
    for plugins in ([], [Probe()]):
        learner = make_learner(Watch({"encoder.hidden": "max"}), *plugins)
        learner.fit(batches(), epochs=1)
        seen.append(learner.metrics["train/encoder.hidden"])
    assert seen[0] == seen[1]
