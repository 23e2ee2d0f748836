from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers import on, raising
from loopkit_testing import check_plugin, tiny_problem
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from loopkit import CancelFit, Learner, Phase, TrainingPhase, every, hookimpl
from loopkit.errors import EmptyDataError, PluginError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.plugins import Metrics
from loopkit.plugins.early_stopping import EarlyStopping
from loopkit.plugins.weight_average import WeightAverage


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(dtype)


def make_batches(sizes=(4,) * 8, dtype=torch.float32, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(n, width, generator=generator, dtype=dtype) for width in (5, 2)) for n in sizes]


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def learner_of(*plugins, dtype=torch.float32, **options):
    return Learner(make_model(dtype), mse_loss, sgd, plugins=plugins, standard=False, **options)


def by_hand(average, *, epochs=2, k=1, dtype=torch.float32, skip=(), when=lambda update, epoch: True, at_end=None):
    """A loop with torch's ``AveragedModel``; the model and the average."""
    model = make_model(dtype)
    optimizer, averaged, update = sgd(model.parameters()), average(model), 0
    torch.manual_seed(0)
    model.train()
    batches = make_batches(dtype=dtype)
    for epoch in range(epochs):
        for i, (inputs, targets) in enumerate(batches):
            if i % k == 0:
                optimizer.zero_grad()
            (mse_loss(model(inputs), targets) / k).backward()
            if i % k == k - 1:
                update += 1
                if update not in skip:
                    optimizer.step()
                    if when(update, epoch):
                        averaged.update_parameters(model)
        if at_end is not None and at_end(epoch):
            averaged.update_parameters(model)
    return model, averaged


def ema(decay, **options):
    return lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), **options)


def swa(model):
    return AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())


def fit(learner, *args, epochs=2, dtype=torch.float32, batches=None):
    torch.manual_seed(0)
    return learner.fit(make_batches(dtype=dtype) if batches is None else batches, *args, epochs=epochs)


def assert_same(state, other):
    assert state.keys() == other.keys()
    assert [key for key in state if not torch.equal(state[key], other[key])] == []


def assert_equal(learner, plugin, model, averaged):
    """The parameters are those of the loop, and so is the average."""
    assert_same(learner.model.state_dict(), model.state_dict())
    moved = []
    for (name, p), q in zip(learner.model.named_parameters(), averaged.module.parameters(), strict=True):
        assert torch.equal(plugin.model_state(learner)[name], q), name
        moved += [name] * (not torch.equal(p, q))  # a bias before a batch norm may hardly move
    assert len(moved) > 2, "the average would be the parameters"


# The averages, bitwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("decay", [0.9, None], ids=["ema", "swa"])
def test_average_is_that_of_averaged_model(decay, k, dtype):
    plugin = WeightAverage(decay)
    learner = learner_of(plugin, dtype=dtype, accumulate=k)
    fit(learner, dtype=dtype)
    average = swa if decay is None else ema(decay)
    assert_equal(learner, plugin, *by_hand(average, k=k, dtype=dtype))


def test_average_of_an_averaged_model_without_a_function_differs_by_rounding():
    plugin = WeightAverage(None)
    learner = learner_of(plugin, dtype=torch.float64)
    fit(learner, dtype=torch.float64)
    _, averaged = by_hand(AveragedModel, dtype=torch.float64)
    state = plugin.model_state(learner)
    pairs = [(state[name], p) for name, p in averaged.module.named_parameters()]
    assert not all(torch.equal(ours, theirs) for ours, theirs in pairs)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)  # 1 / n is a float32 in the foreach form
    doc = WeightAverage.__doc__
    assert "get_swa_multi_avg_fn()" in doc
    assert "get_ema_multi_avg_fn(decay)" in doc


@pytest.mark.parametrize("k", [1, 2])
def test_skipped_updates_do_not_move_the_average(k):
    updates = []

    def vote(step, **given):
        updates.append(1)
        if len(updates) in (1, 3, 4):
            step.skip_update("a vote")

    plugin = WeightAverage(0.9)
    learner = learner_of(plugin, on("update_begin", vote), accumulate=k)
    fit(learner)
    assert_equal(learner, plugin, *by_hand(ema(0.9), k=k, skip=(1, 3, 4)))


def test_warmup_follows_the_formula_up_to_the_decay():
    plugin = WeightAverage(0.5, warmup=True)  # which is reached at n = 8
    learner = learner_of(plugin)
    fit(learner)

    def average(model):
        averaged = AveragedModel(model, multi_avg_fn=lambda ours, theirs, n: None)

        def move(ours, theirs, n):
            get_ema_multi_avg_fn(min(0.5, (1 + int(n)) / (10 + int(n))))(ours, theirs, n)

        averaged.multi_avg_fn = move
        return averaged

    assert_equal(learner, plugin, *by_hand(average))


def test_start_and_every_choose_the_updates():
    plugin = WeightAverage(None, start_update=3, every=2)
    learner = learner_of(plugin)
    fit(learner)
    model, averaged = by_hand(swa, when=lambda update, epoch: update > 3 and (update - 3) % 2 == 0)
    assert averaged.n_averaged == 6
    assert_equal(learner, plugin, model, averaged)


def test_start_epoch_chooses_the_epochs():
    plugin = WeightAverage(None, start_epoch=1)
    learner = learner_of(plugin)
    fit(learner, epochs=3)
    assert_equal(learner, plugin, *by_hand(swa, epochs=3, when=lambda update, epoch: epoch >= 1))


def test_every_epoch_averages_at_the_ends():
    plugin = WeightAverage(None, start_epoch=1, every="epoch")
    learner = learner_of(plugin)
    fit(learner, epochs=4)
    model, averaged = by_hand(swa, epochs=4, when=lambda *_: False, at_end=lambda epoch: epoch >= 1)
    assert averaged.n_averaged == 3
    assert_equal(learner, plugin, model, averaged)


def test_use_buffers_averages_the_running_statistics():
    plugin = WeightAverage(0.9, use_buffers=True)
    learner = learner_of(plugin)
    fit(learner)
    model, averaged = by_hand(ema(0.9, use_buffers=True))
    assert_equal(learner, plugin, model, averaged)
    state = plugin.model_state(learner)
    for key in ("1.running_mean", "1.running_var"):
        assert torch.equal(state[key], averaged.module.state_dict()[key])
    assert state["1.num_batches_tracked"] == 16  # a count is copied


def test_without_use_buffers_the_models_own_are_used():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin)
    fit(learner)
    assert torch.equal(plugin.model_state(learner)["1.running_mean"], learner.model[1].running_mean)


def test_integer_buffers_do_not_trouble_the_equal_average():
    plugin = WeightAverage(None, use_buffers=True)
    learner = learner_of(plugin)
    fit(learner)
    assert plugin.model_state(learner)["1.num_batches_tracked"] == 16


def test_tied_parameters_stay_tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.Linear(5, 2))
    model[2].weight = model[0].weight
    plugin = WeightAverage(0.5)
    learner = Learner(model, mse_loss, sgd, plugins=[plugin], standard=False)
    raw = []
    tied = on("epoch_end", lambda **given: raw.append(model[0].weight is model[2].weight))
    learner.add(tied)
    fit(learner, make_batches(), epochs=1)
    state = plugin.model_state(learner)
    assert raw == [True, True]
    assert torch.equal(state["0.weight"], state["2.weight"])
    assert not torch.equal(state["0.weight"], model[0].weight)


# Where it is used


class Weights:
    """Copies of the parameters at some hook, by phase."""

    name = "weights"

    def __init__(self):
        self.seen = []

    @hookimpl(reads=("params",))
    def step_end(self, learner, phase):
        self.seen.append((phase.name, copy.deepcopy(learner.model.state_dict())))


def test_validation_metrics_are_those_of_the_average():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin, Metrics())
    val = make_batches((4, 4), seed=3)
    fit(learner, val)
    model, averaged = by_hand(ema(0.9))
    averaged.module.load_state_dict({**model.state_dict(), **dict(averaged.module.named_parameters())})
    plain = Learner(averaged.module, mse_loss, plugins=[Metrics()], standard=False)
    assert learner.metrics["val/loss"] == plain.evaluate(val)["val/loss"]
    assert (
        learner.metrics["val/loss"]
        != Learner(model, mse_loss, plugins=[Metrics()], standard=False).evaluate(val)["val/loss"]
    )


def test_prediction_uses_the_average():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin)
    fit(learner)
    state, model = plugin.model_state(learner), make_model()
    model.load_state_dict(state)
    inputs = make_batches()[0][0]
    assert torch.equal(learner.predict([inputs]), model.eval()(inputs))


def test_training_is_bitwise_as_without_and_identities_stay():
    learner = learner_of(WeightAverage(0.9, update_bn=make_batches()))
    params = list(learner.model.parameters())
    addresses = [p.data_ptr() for p in params]
    fit(learner, make_batches((4, 4), seed=3))
    plain = learner_of()
    fit(plain)
    assert_same(learner.model.state_dict(), plain.model.state_dict())
    assert all(p is q for p, q in zip(params, learner.optimizer.param_groups[0]["params"], strict=True))
    assert [p.data_ptr() for p in learner.model.parameters()] == addresses


def test_before_the_first_average_the_parameters_are_used():
    learner = learner_of(WeightAverage(0.9))
    before = copy.deepcopy(learner.model.state_dict())
    log = Weights()
    learner.add(log)
    learner.evaluate(make_batches((4,)))
    assert_same(log.seen[0][1], before)


def test_validation_inside_an_epoch_uses_the_average():
    plugin, log = WeightAverage(0.5), Weights()
    learner = learner_of(plugin, log)
    torch.manual_seed(0)
    learner.fit(make_batches(), make_batches((4,)), epochs=2, validate=every(updates=3))
    for at, (phase, state) in enumerate(log.seen):
        if phase == "val":
            raw = log.seen[at - 1][1]
            assert not torch.equal(state["0.weight"], raw["0.weight"])
    plain = learner_of()
    fit(plain)
    assert_same(learner.model.state_dict(), plain.model.state_dict())


def test_validation_inside_a_step_leaves_the_step_as_it_was():
    def validate(learner, phase, **given):
        if phase.training:
            learner.evaluate(make_batches((4,)))

    learner = learner_of(WeightAverage(0.5), on("loss_begin", validate))
    fit(learner)
    plain = learner_of()
    fit(plain)
    assert_same(learner.model.state_dict(), plain.model.state_dict())


def test_validation_inside_an_autocast_step_does_not_use_its_casts():
    inside, outside = [], []

    def validate(learner, phase, step, **given):
        if phase.training and step.index == 5:
            inside.append(learner.evaluate(make_batches((4,)))["val/loss"])

    def again(learner, phase, step, **given):
        if phase.training and step.index == 4:
            outside.append(learner.evaluate(make_batches((4,)))["val/loss"])

    autocast = on("step_context", lambda **given: torch.autocast("cpu", torch.bfloat16), name="autocast")
    plugins = [autocast, Metrics(), WeightAverage(0.5)]
    learner = learner_of(*plugins, on("loss_begin", validate), on("step_end", again, name="again"))
    learner.model[1].momentum = 0.0  # the same running statistics in both
    fit(learner, epochs=1)
    assert inside == outside


def test_training_inside_a_validation_trains_the_parameters():
    plugin = WeightAverage(0.5)

    def train(learner, phase, step, **given):
        if phase.name == "val" and step.index == 0:
            learner.run("train", make_batches())

    learner = learner_of(plugin, on("step_begin", train))
    torch.manual_seed(0)
    learner.run("train", make_batches())
    learner.evaluate(make_batches((4, 4)))
    assert_equal(learner, plugin, *by_hand(ema(0.5)))


def test_validation_inside_a_prediction_keeps_the_average():
    plugin, log = WeightAverage(0.5), Weights()

    def validate(learner, phase, **given):
        if phase.name == "predict":
            learner.evaluate(make_batches((4,)))

    learner = learner_of(plugin, on("step_begin", validate))
    fit(learner)
    learner.add(log)
    learner.predict([torch.zeros(2, 5)])
    state = plugin.model_state(learner)
    assert [phase for phase, _ in log.seen] == ["val", "predict"]
    assert all(torch.equal(seen["0.weight"], state["0.weight"]) for _, seen in log.seen)


@pytest.mark.parametrize("error", [RuntimeError("deliberate"), KeyboardInterrupt(), CancelFit("enough")])
@pytest.mark.parametrize("hook", ["epoch_begin", "step_begin", "step_end", "epoch_end"])
def test_parameters_are_back_whatever_was_raised(hook, error):
    plugin = WeightAverage(0.5, update_bn=make_batches())
    learner = learner_of(plugin)
    fit(learner)
    before = copy.deepcopy(learner.model.state_dict())
    learner.add(raising(hook, error, phase="val"))
    with nullcontext() if isinstance(error, CancelFit) else pytest.raises(type(error)):
        learner.evaluate(make_batches((4,)))
    assert not plugin.in_place
    assert_same(learner.model.state_dict(), before)


# Batch norm


def test_update_bn_estimates_what_torch_does():
    data = make_batches((4, 4, 3), seed=5)
    plugin = WeightAverage(0.9, update_bn=data)
    learner = learner_of(plugin)
    fit(learner)
    model, averaged = by_hand(ema(0.9))
    torch.manual_seed(7)
    state = plugin.model_state(learner)
    torch.manual_seed(7)
    update_bn(data, averaged.module)
    assert_same(state, averaged.module.state_dict())
    assert_same(learner.model.state_dict(), model.state_dict())


class Counted(list):
    """A list that counts how often it is iterated over."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def test_update_bn_is_done_once_before_each_use():
    data = Counted(make_batches((4, 4)))
    learner = learner_of(WeightAverage(0.9, update_bn=data))
    val = make_batches((4,))
    fit(learner, epochs=2)
    assert data.passes == 0
    learner.evaluate(val)
    learner.evaluate(val)
    learner.predict(val)
    assert data.passes == 1
    learner.run("train", make_batches())
    learner.evaluate(val)
    assert data.passes == 2


def test_update_bn_without_batch_norm_costs_nothing():
    data = Counted(make_batches((4, 4)))
    plugin = WeightAverage(0.9, update_bn=data)
    learner = Learner(nn.Linear(5, 2), mse_loss, sgd, plugins=[plugin], standard=False)
    fit(learner, make_batches((4,)))
    assert data.passes == 0


def test_update_bn_leaves_modes_momentum_and_generators_alone():
    plugin = WeightAverage(0.9, update_bn=make_batches())
    learner = learner_of(plugin)
    fit(learner)
    learner.model[3].eval()
    modes, state = [m.training for m in learner.model.modules()], torch.get_rng_state()
    plugin.model_state(learner)
    assert [m.training for m in learner.model.modules()] == modes
    assert learner.model[1].momentum == 0.1
    assert torch.equal(torch.get_rng_state(), state)


def test_update_bn_takes_a_function_and_moves_batches():
    moved = []

    def move(batch, **given):
        moved.append(1)
        return batch

    plugin = WeightAverage(0.9, update_bn=lambda: iter(make_batches((4, 4))))
    learner = learner_of(plugin, on("move_batch", move))
    fit(learner, epochs=1)
    moved.clear()
    plugin.model_state(learner)
    assert len(moved) == 2


def test_update_bn_without_batches_is_refused_and_undone():
    plugin = WeightAverage(0.9, update_bn=iter(make_batches((4,))))
    learner = learner_of(plugin)
    fit(learner, make_batches((4,)), epochs=1)
    before = copy.deepcopy(learner.model.state_dict())
    learner.run("train", make_batches((4,)))
    after = copy.deepcopy(learner.model.state_dict())
    with pytest.raises(EmptyDataError, match="update_bn gave no batch for model 'model'"):
        learner.evaluate(make_batches((4,)))
    assert not torch.equal(before["0.weight"], after["0.weight"])
    assert_same(learner.model.state_dict(), after)


# Several models and optimizers


class TwoOptimizers(Phase):
    """Updates ``a`` in each step, ``b`` in every second one."""

    name = "two"
    training = True
    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)

    def step(self, learner, step):
        inputs, targets = step.batch
        for name in ("a", "b")[: 1 + step.index % 2]:
            step.backward(mse_loss(learner.models[name](inputs), targets), name)
            step.update(name)


def test_each_model_moves_with_its_own_optimizer():
    plugin = WeightAverage(0.9)
    torch.manual_seed(0)
    models = {"a": nn.Linear(5, 2), "b": nn.Linear(5, 2)}
    hand = copy.deepcopy(models)
    learner = Learner(
        models, None, dict.fromkeys(models, sgd), plugins=[plugin], phases=[TwoOptimizers()], standard=False
    )
    learner.fit(make_batches(), epochs=1)
    for name, model in hand.items():
        optimizer, averaged = sgd(model.parameters()), ema(0.9)(model)
        for i, (inputs, targets) in enumerate(make_batches()):
            if name == "a" or i % 2:
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
                averaged.update_parameters(model)
        assert_same(plugin.model_state(learner, name), averaged.module.state_dict())


def test_model_of_two_optimizers_moves_with_each():
    plugin = WeightAverage(0.9)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    hand = copy.deepcopy(model)
    optimizers = {"body": sgd(model[0].parameters()), "head": sgd(model[1].parameters())}
    learner = Learner(model, mse_loss, optimizers, plugins=[plugin], standard=False)
    learner.fit(make_batches(), epochs=1)
    body, head, averaged = sgd(hand[0].parameters()), sgd(hand[1].parameters()), ema(0.9)(hand)
    for inputs, targets in make_batches():
        hand.zero_grad()
        mse_loss(hand(inputs), targets).backward()
        for optimizer in (body, head):
            optimizer.step()
            averaged.update_parameters(hand)
    assert_same(plugin.model_state(learner), averaged.module.state_dict())


def test_model_shared_by_two_names_is_back_after_a_pass():
    plugin = WeightAverage(0.5)
    shared = nn.Linear(5, 2)
    learner = Learner(
        {"a": shared, "b": nn.Sequential(shared)},
        None,
        {"a": sgd},
        plugins=[plugin],
        phases=[TwoOptimizers()],
        standard=False,
    )
    learner.run("two", make_batches((4,)))
    learner.run("two", make_batches((4,), seed=8))
    before = copy.deepcopy(shared.state_dict())
    with plugin.averaged(learner):
        assert not torch.equal(shared.weight, before["weight"])
    assert_same(shared.state_dict(), before)


def test_update_bn_of_several_models_is_a_mapping():
    torch.manual_seed(0)
    models = {"a": nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)), "b": nn.Linear(5, 2)}
    data = Counted(make_batches((4, 4)))
    plugin = WeightAverage(0.9, update_bn={"a": data})
    learner = Learner(
        models, None, dict.fromkeys(models, sgd), plugins=[plugin], phases=[TwoOptimizers()], standard=False
    )
    learner.fit(make_batches(), epochs=1)
    state, model = plugin.model_state(learner, "a"), copy.deepcopy(models["a"])
    model.load_state_dict(state)
    update_bn(data, model)
    assert data.passes == 2
    assert_same(state, model.state_dict())


# Early stopping


class Script:
    """Scores of the validation passes."""

    name = "script"

    def __init__(self, *values):
        self.values = list(values)

    @hookimpl(writes=("metrics.val/score",))
    def epoch_end(self, learner, phase):
        if phase.name == "val":
            learner.metrics["val/score"] = self.values.pop(0) if len(self.values) > 1 else self.values[0]


@pytest.mark.parametrize(
    "options", [{}, {"use_buffers": True}, {"update_bn": make_batches()}], ids=["ema", "buffers", "batch norm"]
)
def test_early_stopping_restores_what_was_measured(options):
    log = Weights()
    val = make_batches((4, 4), seed=3)
    stopping = EarlyStopping("val/score", patience=2, restore_best=True, mode="min")
    plugin = WeightAverage(0.9, **options)
    learner = learner_of(plugin, stopping, Script(3, 1, 2, 2), Metrics(), log)
    losses = on("phase_end", lambda learner, phase, **given: measured.append(learner.metrics.get("val/loss")))
    measured = []
    learner.add(losses)
    result = fit(learner, val, epochs=10)
    assert result.reason == "stop"
    best = [state for phase, state in log.seen if phase == "val"][3]  # the second pass, of two steps
    assert_same(learner.model.state_dict(), best)
    assert learner.evaluate(val)["val/loss"] == measured[3]  # training and validation take turns


def test_average_starts_from_nothing_after_the_best_was_restored():
    plugin = WeightAverage(0.9)
    stopping = EarlyStopping("val/score", patience=1, restore_best=True, mode="min")
    learner = learner_of(plugin, stopping, Script(1, 2, *range(9)))
    fit(learner, make_batches((4,)), epochs=10)
    learner.run("train", make_batches((4,)))
    assert plugin.state_dict()["model"]["count"] == 1
    assert_same(plugin.model_state(learner), learner.model.state_dict())


def test_weights_loaded_after_a_fit_drop_the_average():
    plugin, log = WeightAverage(0.9), Weights()
    learner = learner_of(plugin, log)
    fit(learner)
    other = {key: torch.zeros_like(value) for key, value in learner.model.state_dict().items()}
    learner.model.load_state_dict(other)
    learner.evaluate(make_batches((4,)))
    assert_same(log.seen[-1][1], other)
    assert plugin.state_dict() == {}


def test_average_goes_on_in_the_next_fit():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin)
    torch.manual_seed(0)
    for _ in range(2):
        learner.fit(make_batches(), make_batches((4,)), epochs=1)
    assert_equal(learner, plugin, *by_hand(ema(0.9)))


# State and export


def test_state_is_the_average_under_the_names_of_the_parameters():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin)
    fit(learner)
    state = plugin.state_dict()["model"]
    assert (state["updates"], state["count"]) == (16, 16)
    assert state["tensors"].keys() == dict(learner.model.named_parameters()).keys()
    assert torch.equal(state["tensors"]["0.weight"], plugin.model_state(learner)["0.weight"])


def test_state_taken_in_a_validation_pass_is_the_average():
    plugin, states = WeightAverage(0.9), []
    learner = learner_of(plugin)
    fit(learner)
    expected = plugin.state_dict()["model"]["tensors"]
    learner.add(on("step_end", lambda **given: states.append(plugin.state_dict()["model"]["tensors"])))
    learner.evaluate(make_batches((4,)))
    assert_same(states[0], expected)


def test_parameters_can_be_read_in_a_validation_pass():
    plugin, states = WeightAverage(0.9), []
    learner = learner_of(plugin)
    fit(learner)
    expected = copy.deepcopy(learner.model.state_dict())

    def read(learner, **given):
        with learner.models.weights.own():
            states.append(copy.deepcopy(learner.model.state_dict()))

    learner.add(on("step_end", read))
    learner.evaluate(make_batches((4,)))
    assert_same(states[0], expected)


def test_average_that_is_left_while_the_own_weights_are_asked_for():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin)
    fit(learner)
    expected = copy.deepcopy(learner.model.state_dict())
    average = plugin.averaged(learner)
    average.__enter__()
    with learner.models.weights.own():
        average.__exit__(None, None, None)
        assert_same(learner.model.state_dict(), expected)
    assert_same(learner.model.state_dict(), expected)
    assert not learner.models.weights.by


def test_loaded_state_goes_on_bitwise():
    straight = WeightAverage(0.9, warmup=True)
    learner = learner_of(straight)
    fit(learner, epochs=1)
    state, weights = straight.state_dict(), copy.deepcopy(learner.model.state_dict())
    optimizer = copy.deepcopy(learner.optimizer.state_dict())
    torch.manual_seed(4)
    learner.run("train", make_batches())
    resumed = WeightAverage(0.9, warmup=True)
    other = learner_of(resumed)
    resumed.load_state_dict(state)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(optimizer)
    torch.manual_seed(4)
    other.run("train", make_batches())
    assert_same(resumed.model_state(other), straight.model_state(learner))


def test_state_of_another_model_is_refused():
    plugin = WeightAverage(0.9)
    fit(learner_of(plugin))
    other = WeightAverage(0.9)
    other.load_state_dict(plugin.state_dict())
    learner = Learner(nn.Linear(5, 2), mse_loss, sgd, plugins=[other], standard=False)
    with pytest.raises(PluginError, match=r"differ in '0.bias'.* the model was changed"):
        learner.evaluate(make_batches((4,)))


def test_state_of_another_shape_is_refused():
    plugin = WeightAverage(0.9)
    learner = Learner(nn.Linear(5, 2), mse_loss, sgd, plugins=[plugin], standard=False)
    learner.run("train", make_batches())
    other = WeightAverage(0.9)
    other.load_state_dict(plugin.state_dict())
    learner = Learner(nn.Linear(5, 3), mse_loss, sgd, plugins=[other], standard=False)
    with pytest.raises(PluginError, match=r"'weight' of model 'model' has shape \(2, 5\), the model's \(3, 5\)"):
        learner.predict([torch.zeros(2, 5)])


def test_model_state_is_a_copy():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin)
    fit(learner)
    plugin.model_state(learner)["0.weight"].zero_()
    assert plugin.model_state(learner)["0.weight"].count_nonzero() > 0


def test_model_state_without_an_average_is_that_of_the_model():
    plugin = WeightAverage(0.9)
    learner = learner_of(plugin)
    assert_same(plugin.model_state(learner), learner.model.state_dict())


def test_model_state_of_several_models_needs_a_name():
    learner = Learner({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, plugins=[WeightAverage()], standard=False)
    with pytest.raises(PluginError, match="a, b"):
        learner.plugins["weight_average"].model_state(learner)


def test_apply_makes_the_average_the_parameters():
    plugin = WeightAverage(0.9, update_bn=make_batches())
    learner = learner_of(plugin)
    fit(learner)
    params = list(learner.model.parameters())
    state = plugin.model_state(learner)
    plugin.apply(learner)
    assert_same(learner.model.state_dict(), state)
    assert all(p is q for p, q in zip(params, learner.model.parameters(), strict=True))


def test_apply_inside_a_validation_is_refused():
    plugin = WeightAverage(0.9)
    learner = learner_of(
        plugin, on("step_end", lambda learner, phase, **given: phase.training or plugin.apply(learner))
    )
    with pytest.raises(PluginError, match="apply in an epoch"):
        fit(learner, make_batches((4,)), epochs=1)


def test_custom_training_phase_is_averaged():
    class Mine(TrainingPhase):
        name = "mine"

    plugin = WeightAverage(0.9)
    learner = learner_of(plugin, phases=[Mine()])
    fit(learner)
    assert_equal(learner, plugin, *by_hand(ema(0.9)))


@pytest.mark.parametrize(
    "options",
    [
        {"decay": 1.0},
        {"decay": -0.1},
        {"decay": "0.9"},
        {"decay": False},
        {"decay": None, "warmup": True},
        {"start_update": -1},
        {"start_epoch": 0.5},
        {"every": 0},
        {"every": "step"},
        {"update_bn": True},
    ],
    ids=str,
)
def test_option_out_of_range_is_refused(options):
    with pytest.raises(PluginError, match=list(options)[-1]):
        WeightAverage(**options)


@pytest.mark.parametrize(  # with its defaults, and by epochs, it is in test_contract.py
    "options",
    [
        pytest.param({"use_buffers": True}, marks=pytest.mark.slow),
        pytest.param({"decay": None, "every": 2}, marks=pytest.mark.slow),
        {"update_bn": tiny_problem().train},
    ],
    ids=["buffers", "swa", "batch norm"],
)
def test_weight_average_keeps_the_contract(options):
    check_plugin(lambda: WeightAverage(**{"decay": 0.9, **options}))
