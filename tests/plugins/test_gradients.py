"""Clipping, norms and noise of gradients."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import batches, make_learner, on, raising
from loopkit_testing import check_plugin
from torch import nn

from loopkit import CancelStep, Learner, Phase, hookimpl
from loopkit.errors import OrderError, PluginError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.plugins.gradients import ClipGradNorm, ClipGradValue, GradNoise, GradNorm, clip, norm_of

SHAPES = ((3, 4), (5,), (2, 3, 2), (1,))
NORM_TYPES = (1.0, 2, 2.0, 3.5, math.inf)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(values="random", dtypes=(torch.float32,) * 4, factor=1.0):
    """Parameters with gradients; ``values`` says which."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
    for i, p in enumerate(params):
        p.grad = factor * torch.randn(p.shape, generator=generator).to(p.dtype)
        if values == "none" or (values == "some" and i in (0, 2)):
            p.grad = None
        elif values == "zero":
            p.grad.zero_()
        elif values in ("nan", "inf") and i == 1:
            p.grad[2] = float(values)
    return params


class GivenGradients(Phase):
    """Gives the optimizer gradients that are known beforehand, instead of those of a loss."""

    name = "train"
    training = True
    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)

    def __init__(self, grads):
        super().__init__()
        self.grads = grads

    def step(self, learner, step):
        params = [p for group in learner.optimizer.param_groups for p in group["params"]]
        step.backward(sum(p.sum() for p in params))
        for p, grad in zip(params, self.grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        step.update()


def after_update(plugin, params):
    """The gradients that the optimizer gets, when ``params`` have theirs and ``plugin`` is there."""
    seen = []
    look = on("update_end", lambda step, **_: seen.extend(copy.deepcopy([p.grad for p in step.params])))
    phase = GivenGradients([p.grad for p in params])
    learner = Learner(
        nn.ParameterList(params), None, lambda p: torch.optim.SGD(p, lr=0.0), plugins=[plugin, look], phases=[phase],
        standard=False,
    )  # fmt: skip
    learner.run("train", [torch.zeros(1)])
    return seen


def assert_same_gradients(got, params):
    """Bitwise, with nan equal to nan."""
    assert len(got) == len(params)
    for grad, p in zip(got, params, strict=True):
        if p.grad is None:
            assert grad is None
        else:
            assert grad.dtype == p.grad.dtype
            torch.testing.assert_close(grad, p.grad, rtol=0, atol=0, equal_nan=True)


# Clipping by norm


@pytest.mark.parametrize("values", ["random", "some", "none", "zero", "nan", "inf"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.1, 1, 1e3])
def test_clip_grad_norm_equals_torch(values, norm_type, max_norm):
    expected = parameters(values)
    norm = nn.utils.clip_grad_norm_(expected, max_norm, norm_type)
    plugin = ClipGradNorm(max_norm, norm_type)
    assert_same_gradients(after_update(plugin, parameters(values)), expected)
    if values == "none":
        assert plugin.norm is None
    else:
        torch.testing.assert_close(plugin.norm, norm, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("factor", [1e-30, 1e-7, 0.3, 1e5, 1e18])
@pytest.mark.parametrize("max_norm", [1e-30, 1 / 3, 1e36, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clip_grad_norm_rounds_as_torch(factor, max_norm, dtype):
    expected = parameters(dtypes=(dtype,) * 4, factor=factor)
    nn.utils.clip_grad_norm_(expected, max_norm)
    given = parameters(dtypes=(dtype,) * 4, factor=factor)
    assert_same_gradients(after_update(ClipGradNorm(max_norm), given), expected)


def test_clip_grad_norm_reads_nothing_of_a_device():
    grads = [torch.ones(3, device="meta")]  # which has no values: to read one fails
    clip(grads, norm_of(grads, 2.0), 1.0)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_grad_norm_of_several_dtypes_equals_torch(norm_type):
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float64)
    expected = parameters(dtypes=dtypes)
    nn.utils.clip_grad_norm_(expected, 0.5, norm_type)
    assert_same_gradients(after_update(ClipGradNorm(0.5, norm_type), parameters(dtypes=dtypes)), expected)


def test_clip_grad_norm_of_large_gradients_changes_them():
    got = after_update(ClipGradNorm(1.0), parameters(factor=100.0))
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in got))
    assert norm == pytest.approx(1.0, rel=1e-5)  # float32 rounding of about 30 elements, and torch's 1e-6 in the norm


def test_clip_grad_norm_of_small_gradients_keeps_every_bit():
    assert_same_gradients(after_update(ClipGradNorm(1e3), parameters()), parameters())


def test_clip_grad_norm_clips_each_optimizer_by_itself():
    torch.manual_seed(0)
    models = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
    norms = {}

    def look(step, **_):
        norms[step.optimizer_name] = float(nn.utils.get_total_norm([p.grad for p in step.params]))

    class Both(Phase):
        name = "train"
        training = True

        def step(self, learner, step):
            step.backward(sum(100 * m(step.batch[0]).sum() for m in learner.model.values()))
            step.update()

    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    learner = Learner(
        models,
        None,
        {"a": make, "b": make},
        plugins=[ClipGradNorm(1.0), on("update_end", look)],
        phases=[Both()],
        standard=False,
    )
    learner.run("train", batches(1))
    assert norms == {"a": pytest.approx(1.0, rel=1e-5), "b": pytest.approx(1.0, rel=1e-5)}  # as above


def in_parts(model):
    """Two optimizers, as of Muon and AdamW: the matrices, and the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return {"matrices": torch.optim.SGD(matrices, 0.1, momentum=0.9), "rest": torch.optim.AdamW(rest, 0.1)}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_grad_norm_over_all_is_one_norm_of_the_model(accumulate, norm_type):
    by_hand, loss_fn = net(), nn.MSELoss()
    optimizers = in_parts(by_hand)
    data = batches(5)
    norms = []
    for start in range(0, len(data), accumulate):
        window = data[start : start + accumulate]
        for x, y in window:
            (loss_fn(by_hand(x), y) / len(window)).backward()
        norms.append(nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1, norm_type))
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    model = net()
    clipper = ClipGradNorm(0.1, norm_type, over="all")
    learner = Learner(model, loss_fn, in_parts(model), plugins=[clipper], standard=False, accumulate=accumulate)
    learner.fit(data, epochs=1)
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        # a tail of one step is rescaled here from half, and by hand it is whole
        assert torch.equal(p, q) if accumulate == 1 else torch.allclose(p, q, atol=1e-6)
    assert float(clipper.norm) == pytest.approx(float(norms[-1]), rel=1e-6)


def test_clip_grad_norm_over_all_takes_what_the_step_updates():
    seen = []

    class InTurn(Phase):
        name, training = "train", True

        def step(self, learner, step):
            for name, model in learner.model.items():
                step.backward(100 * model(step.batch[0]).sum(), name)
                step.update(name)

    def look(step):
        seen.append(float(nn.utils.get_total_norm([p.grad for p in step.params])))

    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    learner = Learner(
        {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)},
        None,
        {"a": make, "b": make},
        plugins=[ClipGradNorm(1.0, over="all"), on("update_end", look)],
        phases=[InTurn()],
        standard=False,
    )
    learner.run("train", batches(2))
    assert seen == [pytest.approx(1.0, rel=1e-5)] * 4  # 1e-6 is added to the norm


def test_clip_grad_norm_over_all_refuses_gradients_that_are_not_ready():
    class Scaling:
        loss_scale = 8.0

        @hookimpl
        def update_begin(self):
            pass

    model = net()
    learner = Learner(
        model, nn.MSELoss(), in_parts(model), plugins=[Scaling(), ClipGradNorm(1.0, over="all")], standard=False
    )
    with pytest.raises(PluginError, match=r"over='all'.*'scaling' unscales"):
        learner.fit(batches(2), epochs=1)
    with pytest.raises(PluginError, match="it is 'each' or 'all'"):
        ClipGradNorm(1.0, over="both")


@pytest.mark.parametrize(
    "option",
    [
        *({"max_norm": value} for value in (0, -1.0, math.nan, "1", True)),
        *({"max_norm": 1, "norm_type": value} for value in (0, math.nan, "inf")),
    ],
)
def test_clip_grad_norm_refuses_what_is_no_positive_number(option):
    name, value = list(option.items())[-1]
    with pytest.raises(PluginError, match=rf"ClipGradNorm: {name} is {value!r}: it is a number above 0"):
        ClipGradNorm(**option)


# Clipping by value


@pytest.mark.parametrize("values", ["random", "some", "zero", "nan", "inf"])
@pytest.mark.parametrize("max_value", [0.1, 1, 1e3])
def test_clip_grad_value_equals_torch(values, max_value):
    expected = parameters(values)
    nn.utils.clip_grad_value_(expected, max_value)
    assert_same_gradients(after_update(ClipGradValue(max_value), parameters(values)), expected)


def test_clip_grad_value_without_gradients_does_nothing():
    assert_same_gradients(after_update(ClipGradValue(0.1), parameters("none")), parameters("none"))


def test_clip_grad_value_limits_every_element():
    got = after_update(ClipGradValue(0.25), parameters(factor=100.0))
    assert all(grad.abs().max() == 0.25 for grad in got)


@pytest.mark.parametrize("value", [0, -0.5, math.nan, None, "1"])
def test_clip_grad_value_refuses_what_is_no_positive_number(value):
    with pytest.raises(PluginError, match=rf"ClipGradValue: max_value is {value!r}: it is a number above 0"):
        ClipGradValue(value)


def test_two_clippers_are_refused_without_an_order():
    with pytest.raises(OrderError) as refused:
        make_learner(ClipGradNorm(1.0), ClipGradValue(0.1))
    assert str(refused.value) == (
        "update_begin: plugins 'clip_grad_norm' and 'clip_grad_value' both update 'grads', and nothing says which "
        'comes first. Give the learner order=["clip_grad_norm", "clip_grad_value"] (or the reverse)'
    )


@pytest.mark.parametrize("order", [["clip_grad_norm", "clip_grad_value"], ["clip_grad_value", "clip_grad_norm"]])
def test_two_clippers_run_in_the_order_that_is_given(order):
    model = nn.Linear(3, 1)
    own = copy.deepcopy(model)
    learner = make_learner(ClipGradNorm(1.0), ClipGradValue(0.1), model=own, order=order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches(3)
    for inputs, targets in data:
        optimizer.zero_grad()
        (100 * nn.functional.mse_loss(model(inputs), targets)).backward()
        for name in order:
            if name == "clip_grad_norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
    learner.loss_fn = lambda outputs, targets: 100 * nn.functional.mse_loss(outputs, targets)
    learner.fit(data, epochs=1)
    assert torch.equal(own.weight, model.weight)
    assert torch.equal(own.bias, model.bias)


# Norms


def recorded_norms(learner, data, norm_type=2.0):
    """The norm of each update's gradients by a plugin that looks last."""
    seen = []

    def look(step, **_):
        seen.append(nn.utils.get_total_norm([p.grad for p in step.params if p.grad is not None], norm_type).double())

    learner.add(on("update_end", look, "recorder"))
    learner.fit(data, epochs=1)
    return seen


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_grad_norm_is_the_mean_over_the_updates(norm_type, accumulate):
    learner = make_learner(GradNorm(norm_type), accumulate=accumulate)
    seen = recorded_norms(learner, batches(7), norm_type)
    assert len(seen) == -(-7 // accumulate)
    # the plugin sums in float32, this line in float64
    assert learner.metrics["train/grad_norm"] == pytest.approx(float(sum(seen) / len(seen)), rel=1e-6)


def test_grad_norm_of_one_update_is_exact():
    learner = make_learner(GradNorm())
    assert learner.metrics == {}
    seen = recorded_norms(learner, batches(1))
    assert learner.metrics == {"train/grad_norm": float(seen[0])}


def test_grad_norm_has_a_metric_for_each_group():
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    data = batches(1)
    nn.functional.mse_loss(model(data[0][0]), data[0][1]).backward()
    expected = {
        "train/grad_norm": float(nn.utils.get_total_norm([model.weight.grad, model.bias.grad])),
        "train/grad_norm_group0": float(nn.utils.get_total_norm([model.weight.grad])),
        "train/grad_norm_group1": float(nn.utils.get_total_norm([model.bias.grad])),
    }
    learner = Learner(model, nn.MSELoss(), torch.optim.SGD(groups, lr=0.1), plugins=[GradNorm()], standard=False)
    learner.fit(data, epochs=1)
    assert learner.metrics == expected


class TwoModels(Phase):
    """Trains ``b`` in every second step alone."""

    name = "train"
    training = True

    def step(self, learner, step):
        for name in ("a", "b") if step.index % 2 == 0 else ("a",):
            step.loss = learner.model[name](step.batch[0]).square().mean()
            step.backward(step.loss, name)
            step.update(name)


def two_models(*plugins, **options):
    torch.manual_seed(0)
    make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    models = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
    options.setdefault("standard", False)
    return Learner(models, None, {"a": make, "b": make}, plugins=plugins, phases=[TwoModels()], **options)


def test_grad_norm_has_a_metric_for_each_optimizer():
    seen = {"a": [], "b": []}

    def look(step, **_):
        seen[step.optimizer_name].append(float(nn.utils.get_total_norm([p.grad for p in step.params])))

    learner = two_models(GradNorm(), on("update_end", look))
    learner.run("train", batches(3))
    assert [len(values) for values in seen.values()] == [3, 2]
    assert set(learner.metrics) == {"train/grad_norm_a", "train/grad_norm_b"}
    for name, values in seen.items():  # the plugin sums in float32
        assert learner.metrics[f"train/grad_norm_{name}"] == pytest.approx(sum(values) / len(values), rel=1e-6)


def test_grad_norm_measures_what_clipping_gets():
    unclipped = make_learner(GradNorm(), lr=0.0)
    unclipped.fit(batches(1), epochs=1)
    learner = make_learner(ClipGradNorm(0.01), GradNorm(), lr=0.0)
    learner.fit(batches(1), epochs=1)
    assert learner.metrics["train/grad_norm"] == unclipped.metrics["train/grad_norm"] > 0.01


def test_grad_norm_measures_what_the_optimizer_gets_if_asked():
    learner = make_learner(ClipGradNorm(0.01), GradNorm(clipped=True))
    seen = recorded_norms(learner, batches(1))
    assert learner.metrics["train/grad_norm"] == float(seen[0]) == pytest.approx(0.01, rel=1e-3)  # 1e-6 in the norm


def test_grad_norm_stands_twice_under_two_names():
    learner = make_learner(ClipGradNorm(0.01), GradNorm(), GradNorm(clipped=True, name="clipped_norm"))
    learner.fit(batches(1), epochs=1)
    assert learner.metrics["train/clipped_norm"] < learner.metrics["train/grad_norm"]


def test_grad_norm_measures_before_clipping_and_later_noise():
    learner = make_learner(
        ClipGradNorm(0.01), GradNoise(10.0), GradNorm(), order=["clip_grad_norm", "grad_noise"], lr=0.0
    )
    learner.fit(batches(1), epochs=1)
    plain = make_learner(GradNorm(), lr=0.0)
    plain.fit(batches(1), epochs=1)
    assert learner.metrics == plain.metrics


def test_grad_norm_goes_with_the_standard_metrics():
    learner = make_learner(GradNorm(), standard=True)
    learner.fit(batches(2), epochs=1)
    assert {"train/loss", "train/grad_norm"} <= set(learner.metrics)


def test_grad_norm_reads_nothing_before_the_end():
    plugin = GradNorm()
    kinds = []
    look = on("step_end", lambda **_: kinds.append({type(value) for value in plugin.last.values()}))
    learner = make_learner(plugin, look)
    learner.fit(batches(2), epochs=1)
    assert kinds == [{torch.Tensor}, {torch.Tensor}]
    check_plugin(GradNorm, checks=["no_device_sync"])


def test_grad_norm_leaves_skipped_updates_out():
    def skip(step, **_):
        if step.index == 1:
            step.params[0].grad.fill_(math.inf)
            step.skip_update("too large")

    learner = make_learner(GradNorm())
    learner.add(on("update_begin", skip, before=("grad_norm",)))
    seen = recorded_norms(learner, batches(3))
    assert len(seen) == 2
    # the plugin sums in float32
    assert learner.metrics["train/grad_norm"] == pytest.approx(float(sum(seen) / 2), rel=1e-6)


def test_grad_norm_of_a_pass_knows_nothing_of_one_that_failed():
    learner = make_learner(GradNorm(), raising("step_end", ValueError("broken"), at=1), lr=0.0)
    with pytest.raises(ValueError, match="broken"):
        learner.fit(batches(3), epochs=1)
    other = batches(2, seed=5)
    learner.fit(other, epochs=1)
    fresh = make_learner(GradNorm(), lr=0.0)
    fresh.fit(other, epochs=1)
    assert learner.metrics == fresh.metrics


def test_grad_norm_of_a_model_without_gradients_is_zero():
    learner = make_learner(GradNorm())

    def forget(step, **_):
        for p in step.params:
            p.grad = None

    learner.add(on("update_begin", forget, before=("grad_norm",)))
    learner.fit(batches(1), epochs=1)
    assert learner.metrics == {"train/grad_norm": 0.0}


def test_grad_norm_state_goes_on_in_mid_epoch():
    states = []
    data = batches(4)
    straight = make_learner(GradNorm(), lr=0.0)
    straight.add(on("step_end", lambda learner: states.append(copy.deepcopy(learner.state_dict()))))
    straight.fit(data, epochs=1)
    resumed = make_learner(GradNorm(), lr=0.0)
    resumed.load_state_dict(states[1])
    resumed.fit(data, epochs=1)
    assert resumed.metrics == straight.metrics


@pytest.mark.parametrize("value", [0, -2.0, math.nan, "2"])
def test_grad_norm_refuses_what_is_no_positive_number(value):
    with pytest.raises(PluginError, match=rf"GradNorm: norm_type is {value!r}: it is a number above 0"):
        GradNorm(value)


# Noise


def test_grad_noise_follows_the_paper():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    own = copy.deepcopy(model)
    data = [(x.double(), y.double()) for x, y in batches(4)]

    learner = make_learner(GradNoise(0.3, 0.55 / 2, seed=7), model=own)
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for updates, (inputs, targets) in enumerate(data * 2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        variance = 0.3**2 / (1 + updates) ** 0.55  # equation 1 of the paper: eta / (1 + t) ** gamma
        for p in model.parameters():
            p.grad += math.sqrt(variance) * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    learner.fit(data, epochs=2)
    # the square root of a power against a power: float64 rounding, 1e-16 an update
    torch.testing.assert_close(own.weight, model.weight, rtol=1e-13, atol=1e-13)


def noisy_weights(*plugins, **options):
    learner = make_learner(*plugins, **options)
    learner.fit(batches(4), epochs=2)
    return learner.model.weight.detach()


def test_grad_noise_has_a_seed():
    one, same, other = (noisy_weights(GradNoise(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_grad_noise_draws_anew_for_each_update():
    plugin = GradNoise(1.0, 0.0)
    one, other = (after_update(plugin, parameters("zero")) for _ in range(2))
    assert not torch.equal(one[0], other[0])


def test_grad_noise_leaves_the_global_generator_alone():
    after = []
    for plugins in ([], [GradNoise()]):
        learner = make_learner(*plugins)
        torch.manual_seed(5)
        learner.fit(batches(2), epochs=1)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


def test_grad_noise_without_deviation_changes_no_bit():
    assert torch.equal(noisy_weights(GradNoise(0.0)), noisy_weights())


def test_grad_noise_reaches_parameters_with_gradients_alone():
    got = after_update(GradNoise(), parameters("some"))
    assert [grad is None for grad in got] == [True, False, True, False]


def test_grad_noise_and_clipping_are_refused_without_an_order():
    with pytest.raises(OrderError) as refused:
        make_learner(GradNoise(), ClipGradNorm(1.0))
    assert str(refused.value) == (
        "update_begin: plugins 'clip_grad_norm' and 'grad_noise' both update 'grads', and nothing says which comes "
        'first. Give the learner order=["clip_grad_norm", "grad_noise"] (or the reverse)'
    )


class ThirdParty:
    """A plugin of somebody else, whose name sorts after those of loopkit or before them."""

    def __init__(self, name):
        self.name = name

    @hookimpl(updates=("grads",))
    def update_begin(self):
        pass


class OfAnotherPart(ThirdParty):
    """A plugin of one of the project's distributions."""

    __module__ = "loopkit_whole_step.plugin"

    def __init__(self):
        super().__init__("of_another_part")


@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("shipped", [lambda: ClipGradNorm(1.0), lambda: ClipGradValue(1.0), GradNoise, OfAnotherPart])
def test_third_party_is_told_to_declare_in_its_own_plugin(name, shipped):
    with pytest.raises(OrderError) as refused:
        make_learner(shipped(), ThirdParty(name))
    other = shipped().name if hasattr(shipped(), "name") else ""
    assert str(refused.value).endswith(f"in {name!r}")
    assert f'declare before=("{other}' in str(refused.value)


def test_grad_noise_after_clipping_is_not_clipped():
    norms = []
    for order in (["grad_noise", "clip"], ["clip", "grad_noise"]):
        learner = make_learner(GradNoise(10.0, 0.0), ClipGradNorm(0.5), order=order)
        norms.append(float(recorded_norms(learner, batches(1))[0]))
    assert norms[0] == pytest.approx(0.5, rel=1e-4)  # 1e-6 in the norm, float32
    assert norms[1] > 5


def test_grad_noise_state_goes_on_in_mid_epoch():
    data = batches(6)
    straight = make_learner(GradNoise())
    states = []

    def save(step, **_):
        states.append(copy.deepcopy((straight.model.state_dict(), straight.plugins["grad_noise"].state_dict())))

    straight.add(on("step_end", save))
    straight.fit(data, epochs=1)
    for done in (0, 1, 3):
        resumed = make_learner(GradNoise(seed=99))
        resumed.model.load_state_dict(states[done][0])
        resumed.plugins["grad_noise"].load_state_dict(states[done][1])
        resumed.progress.updates = done + 1
        resumed.fit(data[done + 1 :], epochs=1)
        assert torch.equal(resumed.model.weight, straight.model.weight)


def test_grad_noise_keeps_states_of_devices_that_are_not_here():
    state = torch.Generator().manual_seed(1).get_state()
    plugin = GradNoise()
    plugin.load_state_dict({"generators": {"elsewhere:0": state}})
    after_update(plugin, parameters())
    saved = plugin.state_dict()["generators"]
    assert set(saved) == {"elsewhere:0", "cpu"}
    assert torch.equal(saved["elsewhere:0"], state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": -0.1}, r"GradNoise: std is -0.1: it is a number, from 0"),
        ({"std": math.nan}, "GradNoise: std is nan"),
        ({"std": math.inf}, "GradNoise: std is inf"),
        ({"decay": -1}, "GradNoise: decay is -1"),
        ({"decay": "1"}, "GradNoise: decay is '1'"),
        ({"seed": 1.5}, r"GradNoise\(seed=1.5\): it must be a whole number"),
    ],
)
def test_grad_noise_refuses_wrong_options(options, message):
    with pytest.raises(PluginError, match=message):
        GradNoise(**options)


# All of them


PLUGINS = {
    "clip_grad_norm": lambda: ClipGradNorm(0.1),
    "clip_grad_norm_inf": lambda: ClipGradNorm(0.1, math.inf),
    "clip_grad_value": lambda: ClipGradValue(0.01),
    "grad_norm": GradNorm,
    "grad_norm_clipped": lambda: GradNorm(clipped=True),
    "grad_noise": GradNoise,
}
OFTEN = {"clip_grad_norm", "grad_noise"}
"""The others are alike."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in PLUGINS]
)
def test_plugin_keeps_the_contract(name):
    check_plugin(PLUGINS[name])


@pytest.mark.parametrize("factory", PLUGINS.values(), ids=PLUGINS)
def test_cancelled_step_changes_nothing(factory):
    """A step that is cancelled at its update leaves parameters as they were."""
    learner = make_learner(factory())
    learner.add(raising("update_begin", CancelStep("not this one")))
    before = copy.deepcopy(learner.model.state_dict())
    learner.run("train", batches(1))
    for name, value in learner.model.state_dict().items():
        assert torch.equal(value, before[name])
