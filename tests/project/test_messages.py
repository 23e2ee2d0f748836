"""Frequent mistakes, and the cure that the message names."""

from __future__ import annotations

import functools
import re
import signal

import numpy as np
import pytest
import torch
from helpers import on
from loopkit_testing import check_plugin
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from loopkit import Learner, Phase, TrainingPhase, ValidationPhase, every, hookimpl, seed_everything
from loopkit.checkpoint import best, load, load_weights, save, save_weights
from loopkit.criteria import Patience
from loopkit.data import Loader, LoaderError, Prefetch, TensorLoader
from loopkit.errors import (
    ArgumentError,
    CallError,
    LoopkitError,
    PhaseError,
    PhaseInputError,
    PluginConflict,
    PluginError,
    StateError,
    UnknownNameError,
)
from loopkit.groups import param_groups
from loopkit.logs import read_log
from loopkit.metrics import F1, FBeta, Precision, Recall
from loopkit.plugins import (
    Checkpoint,
    ClipGradNorm,
    ClipGradValue,
    EarlyStopping,
    LogMetrics,
    LogTo,
    ToDevice,
    TorchSchedule,
    WeightAverage,
)
from loopkit.schedules import cosine, linear, multi_step, one_cycle, warmup


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def make_batches(count=3, size=4):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 3, generator=generator), torch.randn(size, 2, generator=generator)) for _ in range(count)
    ]


def make_learner(*phases, model=None, **options):
    torch.manual_seed(0)
    options = {"standard": False, **options}
    return Learner(model or nn.Linear(3, 2), mse_loss, sgd, phases=phases, **options)


def notes(raised):
    return " ".join(raised.value.__notes__)


class BySteps(TrainingPhase):
    """Does what a function says."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def step(self, learner, step):
        self.function(learner, step)


# The data


def test_float64_batch_is_named_with_its_cure():
    inputs, targets = make_batches(1)[0]
    with pytest.raises(RuntimeError) as raised:
        make_learner().fit([(inputs.double(), targets)], epochs=1)
    assert "; the batch is float64, as NumPy makes it, and the model float32: convert" in notes(raised)
    assert "with .float()" in notes(raised)


def test_float64_batch_of_a_float64_model_is_not_blamed():
    inputs, targets = make_batches(1)[0]
    with pytest.raises(RuntimeError) as raised:
        make_learner(model=nn.Linear(3, 2).double()).fit([(inputs, targets.double())], epochs=1)
    assert "float64, as NumPy" not in notes(raised)


@pytest.mark.parametrize(
    ("loss", "width", "targets", "cure"),
    [
        (nn.BCEWithLogitsLoss(), 1, torch.ones(4, dtype=torch.int64), "targets.view_as(outputs).float()"),
        (nn.BCEWithLogitsLoss(), 1, torch.ones(4, 1, dtype=torch.int64), "the loss takes floats: targets.float()"),
        (nn.BCEWithLogitsLoss(), 2, torch.ones(4), "for classes give nn.CrossEntropyLoss()"),
        (nn.CrossEntropyLoss(), 2, torch.ones(4, 1, dtype=torch.int64), "targets.flatten().long()"),
        (nn.CrossEntropyLoss(), 2, torch.ones(4), "targets.flatten().long()"),
    ],
    ids=["shape", "dtype", "classes", "column", "floats"],
)
def test_targets_that_the_loss_does_not_take_are_named_with_their_cure(loss, width, targets, cure):
    learner = Learner(nn.Linear(3, width), loss, torch.optim.AdamW)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        learner.fit([(torch.randn(4, 3), targets)], epochs=1)
    assert cure in notes(raised)


def test_batch_of_numpy_arrays_is_named_with_its_cure():
    batch = tuple(part.numpy() for part in make_batches(1)[0])
    with pytest.raises(TypeError) as raised:
        make_learner().fit([batch], epochs=1)
    assert "; the batch holds NumPy arrays: make them tensors, torch.from_numpy(array).float()" in notes(raised)


@pytest.mark.parametrize("number", [3, 2.0])
def test_number_in_the_place_of_the_validation_data_may_be_the_epochs(number):
    with pytest.raises(PhaseInputError, match=rf"fit\(train, {number}\).*did you mean epochs={number}\?"):
        make_learner().fit(make_batches(), number)


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy()], ids=["tensors", "arrays"])
@pytest.mark.parametrize("options", [{}, {"epochs": 1}])
def test_inputs_and_targets_in_the_place_of_batches(convert, options):
    inputs, targets = (convert(part) for part in make_batches(1)[0])
    with pytest.raises(PhaseInputError, match=r"fit\(X, y\) with .*\[4, 3\].*TensorLoader\(X, y, batch_size=32\)"):
        make_learner().fit(inputs, targets, **options)


def test_array_is_no_data():
    with pytest.raises(PhaseInputError, match=r"data is ndarray\[4, 3\] float64: it must be an iterable of batches"):
        make_learner().fit(np.zeros((4, 3)), epochs=1)


def test_dataset_of_hugging_face_is_named_with_its_loader():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [[1.0, 2.0]], "y": [0]})
    with pytest.raises(
        PhaseInputError, match=r"of Hugging Face, which gives samples.*DatasetLoader\(data, batch_size=32\)"
    ):
        make_learner().fit(data, epochs=1)


def test_batch_of_hugging_face_is_named_with_its_phase():
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": torch.zeros(2, 3, dtype=torch.long)}
    with pytest.raises(PhaseInputError, match=r"phases=\[loopkit_huggingface\.TrainingPhase\(\)\]"):
        make_learner().fit([batch], epochs=1)


# The model and the step


class Pair(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs), inputs


def test_model_that_returns_a_tuple_is_named_with_the_phase_to_write():
    with pytest.raises(AttributeError) as raised:
        make_learner(model=Pair(3, 2)).fit(make_batches(), epochs=1)
    assert "; the model returned tuple(Tensor[4, 2] float32 cpu, Tensor[4, 3] float32 cpu)" in notes(raised)
    assert "def forward(self, learner, inputs): return learner.model(inputs)[0]" in notes(raised)


def test_batch_norm_over_one_sample_is_named_with_its_cure():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="Expected more than 1 value") as raised:
        make_learner(model=model).fit([*make_batches(), *make_batches(1, 1)], epochs=1)
    assert "; BatchNorm cannot train on a batch of one sample: leave it out, DataLoader(..., drop_last=True)" in notes(
        raised
    )


def two_losses(learner, step, **options):
    outputs = learner.model(step.batch[0]).tanh()
    step.backward(outputs.mean(), **options)
    step.backward((outputs - step.batch[1]).square().mean())
    step.update()


def test_second_backward_over_one_graph_says_to_add_the_losses():
    with pytest.raises(RuntimeError, match="backward through the graph a second time") as raised:
        make_learner(BySteps(two_losses)).fit(make_batches(), epochs=1)
    assert "add the losses and call it once, step.backward(first + second)" in notes(raised)


def test_kept_backward_is_said_where_the_graph_is_gone():
    def kept(learner, step):
        loss = learner.loss_fn(learner.model(step.batch[0]).tanh(), step.batch[1])
        loss.backward()
        step.backward(loss)

    with pytest.raises(RuntimeError, match="backward through the graph a second time") as raised:
        make_learner(BySteps(kept)).fit(make_batches(), epochs=1)
    assert "delete a loss.backward() that was kept" in notes(raised)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # once in a process
@pytest.mark.parametrize("plugins", [[], [on("backward_end", lambda **_: None)]], ids=["plain", "with a listener"])
@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
def test_graph_can_be_kept_for_a_second_backward(option, plugins):
    learner = make_learner(BySteps(lambda *given: two_losses(*given, **{option: True})), plugins=plugins)
    learner.fit(make_batches(), epochs=2)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = sgd(model.parameters())
    for inputs, targets in make_batches() * 2:
        outputs = model(inputs).tanh()
        optimizer.zero_grad()
        outputs.mean().backward(retain_graph=True)
        (outputs - targets).square().mean().backward()
        optimizer.step()
    assert torch.equal(learner.model.weight, model.weight)


# What a learner is made of


def test_loss_function_and_optimizer_in_the_wrong_order():
    model = nn.Linear(3, 2)
    with pytest.raises(PhaseError, match=r"loss_fn is an optimizer \(SGD\): the order is Learner\(model, loss_fn, opt"):
        Learner(model, sgd(model.parameters()), nn.MSELoss())
    with pytest.raises(PhaseError, match=r"is the module MSELoss: the order is Learner\(model, loss_fn, optimizer\)"):
        Learner(model, sgd, nn.MSELoss())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_learner(metrics=[F1()]), r"Learner has no argument 'metrics': give plugins=\[Metrics"),
        (lambda: make_learner(lr=0.1), r"Learner has no argument 'lr': give optimizer=lambda params: .*lr="),
        (lambda: make_learner(acumulate=2), r"Learner has no argument 'acumulate' \(did you mean 'accumulate'\?\)"),
        (
            lambda: Checkpoint("runs/a", save_weights_only=True),
            r"Checkpoint has no argument 'save_weights_only': give weights_only=True",
        ),
        (lambda: F1(classes=3), r"F1 has no argument 'classes': the outputs give the number of classes"),
        (lambda: F1(averaged="macro"), r"did you mean 'average'"),
        (lambda: make_learner().fit([], updates=2), r"Learner.fit has no argument 'updates': give max_updates="),
        (lambda: make_learner().fit([], max_epochs=2), r"Learner.fit has no argument 'max_epochs': give epochs="),
        (
            lambda: make_learner().fit([], None, 3),
            r"fit takes only train, val by position, not 3: .* \(epochs",
        ),
        (lambda: make_learner().fit(epochs=3), r"Learner.fit lacks 'train': write Learner.fit\(train=...\)"),
        (
            lambda: make_learner().evaluate(loader=[]),
            r"evaluate has no argument 'loader': give evaluate\(data\)",
        ),
        (lambda: make_learner().rounds(rounds=2), r"Learner.rounds has no argument 'rounds': give epochs="),
        (lambda: make_learner().run("train"), r"Learner.run lacks 'data'"),
        (lambda: make_learner().fit([], train=[], epochs=1), r"Learner.fit gets 'train' twice"),
        (lambda: ClipGradNorm(maxnorm=1.0), r"ClipGradNorm has no argument 'maxnorm' \(did you mean 'max_norm'\?\)"),
        (lambda: ClipGradNorm(), r"ClipGradNorm lacks 'max_norm': write ClipGradNorm\(max_norm=...\)"),
        (lambda: WeightAverage(beta=0.9), r"WeightAverage has no argument 'beta'; it takes decay, "),
        (lambda: Patience(), r"Patience lacks 'n'"),
        (lambda: every(5), r"Every takes no argument by position, not 1: .* \(epochs, updates, minutes, first\)"),
        (lambda: TensorLoader(torch.ones(4), 2), r"TensorLoader lacks 'batch_size'"),
        (lambda: cosine(T_max=10), r"cosine has no argument 'T_max': give updates="),
        (lambda: linear(1.0, 0.1), r"linear takes only updates by position, not 2: .* \(start, end\)"),
        (lambda: warmup(), r"warmup lacks 'n'"),
    ],
)
def test_argument_that_does_not_exist_is_named_with_what_to_write(make, said):
    with pytest.raises(CallError, match=said) as caught:
        make()
    assert isinstance(caught.value, TypeError)


def test_type_error_within_a_call_is_raised_as_it_is():
    def mistaken(outputs, targets):
        return outputs + None

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        Learner(nn.Linear(3, 2), mistaken, sgd, standard=False).fit([(torch.ones(2, 3), torch.ones(2, 2))], epochs=1)
    assert not isinstance(caught.value, LoopkitError)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: one_cycle(1e-2), r"updates is 0.01: .*give a rate to the optimizer, and a factor by its name"),
        (lambda: cosine(0.1), r"updates is 0.1: .*give a rate to the optimizer"),
        (lambda: warmup(0.1), r"n is 0.1: .*For a part of the fit, multiply it by the number of updates"),
        (lambda: warmup(10, cosine), r"then is the function that makes a schedule: call it, cosine\(\.\.\.\)"),
        (lambda: warmup(10, 0.1), r"then is 0.1: .*for a number, constant\(\)"),
        (lambda: multi_step(30), r"milestones is 30: give a list, multi_step\(\[30\]\)"),
    ],
)
def test_wrong_value_of_a_schedule_is_an_error_with_what_to_write(make, said):
    with pytest.raises(ArgumentError, match=said):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_learner().fit([], epochs=-1),
        lambda: make_learner().fit([], epochs=1, minutes=0),
        lambda: make_learner().fit([]),
        lambda: every(epochs=0),
        lambda: every(epochs=1, updates=1),
    ],
)
def test_wrong_value_of_an_argument_is_an_error_of_loopkit_and_of_python(make):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert isinstance(caught.value, LoopkitError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda learner: learner.fit(nn.Linear(3, 2), epochs=1),
            r"data is the module Linear: give a loader of batches",
        ),
        (lambda learner: learner.fit(nn.Sequential(nn.Linear(3, 2)), epochs=1), r"data is the module Sequential"),
        (lambda learner: learner.fit(make_batches(), nn.Linear(3, 2), epochs=1), r"data is the module Linear"),
        (lambda learner: learner.evaluate(nn.Linear(3, 2)), r"data is the module Linear"),
        (lambda learner: learner.predict(nn.Linear(3, 2)), r"data is the module Linear"),
        (lambda learner: learner.fit(TensorLoader, epochs=1), r"data is the class TensorLoader: give a loader"),
    ],
)
def test_model_or_a_class_in_the_place_of_data_raises(call, said):
    with pytest.raises(PhaseInputError, match=said):
        call(make_learner())


class ForwardWithoutLearner(TrainingPhase):
    def forward(self, inputs):
        return inputs


class LossWithoutLearner(TrainingPhase):
    def loss(self, outputs, targets):
        return outputs


class StepWithoutLearner(Phase):
    name = "train"
    training = True

    def step(self, step):
        pass


class UnpackWithTwo(ValidationPhase):
    def unpack(self, learner, batch):
        return batch


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (
            ForwardWithoutLearner,
            r"takes \(inputs\), and is called with \(learner, inputs\): write def forward\(self, le",
        ),
        (LossWithoutLearner, r"LossWithoutLearner.loss takes .*: write def loss\(self, learner, outputs, targets\)"),
        (StepWithoutLearner, r"StepWithoutLearner.step takes .*: write def step\(self, learner, step\)"),
        (UnpackWithTwo, r"UnpackWithTwo.unpack takes .*: write def unpack\(self, batch\)"),
    ],
)
def test_method_of_a_phase_with_other_arguments_raises_when_the_learner_is_made(phase, said):
    with pytest.raises(PhaseError, match=said):
        make_learner(phase())


def test_method_of_a_phase_with_its_own_step_takes_what_it_likes():
    class Own(TrainingPhase):
        def loss(self, outputs):
            return outputs.mean()

        def step(self, learner, step):
            step.loss = self.loss(learner.model(step.batch[0]))
            step.backward(step.loss)
            step.update()

    make_learner(Own()).fit(make_batches(), epochs=1)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: hookimpl("train"), PluginError, r"hookimpl\('train'\): give options by name"),
        (lambda: seed_everything("0"), ArgumentError, r"seed is '0': it must be a whole number from 0"),
        (lambda: seed_everything(-1), ArgumentError, r"seed is -1"),
        (lambda: save("runs/a", make_learner()), ArgumentError, r"the order is checkpoint.save\(learner, directory\)"),
        (lambda: load("runs/a", make_learner()), ArgumentError, r"the order is checkpoint.load\(learner, path\)"),
        (
            lambda: Learner(nn.Linear(3, 2), mse_loss, lambda: 1),
            PhaseError,
            r"is called with the parameters, and cannot",
        ),
        (lambda: param_groups(nn.Linear(3, 2).parameters(), {}), ArgumentError, r"give the module, not its parameters"),
    ],
)
def test_value_in_the_wrong_place_raises_with_what_to_write(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_number_at_the_end_of_a_directory_of_a_log_is_no_ending(tmp_path):
    for name in ("lr-0.01", "v1.2b"):
        learner = make_learner(plugins=[LogTo(tmp_path / name), LogMetrics()])
        learner.fit(make_batches(), epochs=1)
        assert read_log(tmp_path / name).names() == ["lr"]


def test_two_plugins_of_one_class_are_named_by_it():
    with pytest.raises(
        PluginError,
        match=r"called 'clip_grad_norm': ClipGradNorm\(max_norm=1.0\) and ClipGradNorm\(max_norm=2.0\); give",
    ) as e:
        make_learner(plugins=[ClipGradNorm(1.0), ClipGradNorm(2.0)])
    assert " object at " not in str(e.value)


class Steps:
    @hookimpl(updates=("params",))
    def optimizer_step(self, default):
        default()


class StepsToo(Steps):
    pass


def test_two_optimizer_steps_are_refused_at_once_whatever_they_change():
    for order in ([], ["steps", "steps_too"]):
        with pytest.raises(PluginConflict, match=r"'steps' and 'steps_too' both implement optimizer_step.*keep one"):
            make_learner(plugins=[Steps(), StepsToo()], order=order)


def test_callback_of_lightning_is_named_with_what_wraps_it():
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    with pytest.raises(PluginError, match=r"wrap it, loopkit_callbacks\.LightningCallback\(Timer\(\.\.\.\)\)"):
        make_learner(plugins=[callbacks.Timer()])


# Weights and the contract


def test_weights_of_the_best_checkpoint_are_loaded(tmp_path):
    checkpoint = Checkpoint(tmp_path, best="val/loss")
    learner = make_learner(plugins=[checkpoint], standard=True)
    learner.fit(make_batches(), make_batches(1), epochs=2)
    model = nn.Linear(3, 2)
    load_weights(model, best(tmp_path))
    other = nn.Linear(3, 2)
    load_weights(other, best(tmp_path).path)
    assert torch.equal(model.weight, other.weight)


class OneModel:
    """Suits learners of one model alone."""

    @hookimpl(reads=("model",))
    def setup_model(self, learner, name, model):
        if len(learner.models) > 1:
            raise PluginError(f"OneModel takes a single model, and there are {len(learner.models)}: take it out")
        return model


class Breaks(OneModel):
    @hookimpl(reads=("model",))
    def setup_model(self, learner, model):
        if len(learner.models) > 1:
            raise KeyError("model")
        return model


def test_plugin_may_refuse_a_model_that_does_not_suit_it():
    check_plugin(OneModel, checks=["unknown_phases"])
    with pytest.raises(AssertionError, match="two models and optimizers"):
        check_plugin(Breaks, checks=["unknown_phases"])


def test_inputs_that_are_a_mapping_are_said_to_go_by_name():
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b

    learner = make_learner(model=nn.Sequential(nn.Linear(3, 2), Two()))
    learner = Learner(learner.model, nn.MSELoss(), learner.optimizer)
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError) as raised:
        learner.fit([({"a": x, "b": x}, torch.zeros(2, 2))], epochs=1)
    assert "forward may call learner.model(**inputs)" in notes(raised)


def test_a_learner_in_the_place_of_its_model_is_named(tmp_path):
    with pytest.raises(StateError, match=r"save_weights takes a module, not a Learner: of a learner, learner\.model"):
        save_weights(make_learner(), tmp_path / "a.safetensors")


# Names


@pytest.mark.parametrize(
    ("find", "said"),
    [
        (lambda learner: learner.models["genrator"], "no model is called 'genrator' (did you mean 'generator'?)"),
        (lambda learner: learner.models["gen"], "no model is called 'gen' (did you mean 'generator'?)"),
        (lambda learner: learner.optimizers["critc"], "no optimizer is called 'critc' (did you mean 'critic'?)"),
        (lambda learner: learner.phases["vall"], "no phase is called 'vall' (did you mean 'val'?); there are: train,"),
        (
            lambda learner: learner.plugins["clip_norm"],
            "no plugin is called 'clip_norm' (did you mean 'clip_grad",
        ),
        (lambda learner: learner.metrics["val/loss"], "no metric is called 'val/loss'; there is none yet"),
    ],
    ids=["model", "beginning", "optimizer", "phase", "plugin", "metric"],
)
def test_unknown_name_raises_with_the_nearest_one(find, said):
    models = {"generator": nn.Linear(3, 2), "critic": nn.Linear(2, 1)}
    learner = Learner(models, optimizer={"generator": sgd, "critic": sgd}, plugins=[ClipGradNorm(1.0)], standard=False)
    with pytest.raises(KeyError, match=re.escape(said)) as raised:
        find(learner)
    assert isinstance(raised.value, LoopkitError)
    assert str(raised.value).startswith("no ")  # not in quotes, as a KeyError shows it


def test_unknown_metric_raises_with_the_nearest_one():
    learner = make_learner(standard=True)
    learner.fit(make_batches(), make_batches(), epochs=1)
    with pytest.raises(UnknownNameError, match=r"no metric is called 'val/los' \(did you mean 'val/loss'\?\)"):
        learner.metrics["val/los"]
    assert learner.metrics.get("val/los") is None


def test_metrics_are_stored_as_plain_values(tmp_path):
    learner = make_learner(standard=True)
    result = learner.fit(make_batches(), make_batches(), epochs=1)
    assert type(result.metrics) is dict
    torch.save({"live": learner.metrics, "result": result.metrics}, tmp_path / "metrics.pt")
    found = torch.load(tmp_path / "metrics.pt", weights_only=True)
    assert dict(found["live"]) == found["result"] == learner.metrics


def test_users_class_step_gets_no_advice_on_the_step_of_the_engine():
    class Step:
        def backward(self, factor):
            """Not the engine's."""

    class Trains(TrainingPhase):
        def step(self, learner, step):
            Step.__qualname__ = "Step"
            Step.backward.__qualname__ = "Step.backward"
            Step().backward()

    with pytest.raises(TypeError, match="missing 1 required") as raised:
        make_learner(Trains()).fit(make_batches(), epochs=1)
    assert "step.loss" not in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda step: step.backward(), "; write step.backward(step.loss)"),
        (lambda step: step.backward(step.loss, graph=True), "; it takes loss, name, retain_graph, create_graph"),
        (lambda step: step.backward(step.loss, retain_graf=True), "; did you mean 'retain_graph'?"),
        (lambda step: step.emit(), "; write step.emit(event)"),
        (lambda step: step.update(closur=None), "; did you mean 'closure'?"),
    ],
    ids=["no loss", "unknown", "spelling", "no event", "update"],
)
def test_call_of_the_step_that_does_not_fit_is_named_with_its_cure(call, cure):
    def wrong(learner, step):
        step.loss = learner.loss_fn(learner.model(step.batch[0]), step.batch[1])
        call(step)

    with pytest.raises(TypeError) as raised:
        make_learner(BySteps(wrong)).fit(make_batches(), epochs=1)
    assert notes(raised).endswith(cure)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: TorchSchedule(lr_scheduler.StepLR),
            PluginError,
            "TorchSchedule: StepLR needs step_size, too: give a function that sets it, "
            "TorchSchedule(lambda optimizer: StepLR(optimizer, step_size=...))",
        ),
        (lambda: TorchSchedule(lr_scheduler.OneCycleLR), PluginError, "OneCycleLR needs max_lr, too"),
        (lambda: TorchSchedule(lambda optimizer, factor: None), PluginError, "<lambda> needs factor, too"),
        (lambda: TorchSchedule(lambda: None), PluginError, "<lambda> takes no optimizer: give a function"),
        (lambda: TorchSchedule(lr_scheduler.ReduceLROnPlateau), PluginError, "use Plateau(monitor=...)"),
        (
            lambda: TorchSchedule(lr_scheduler.StepLR, step_size=3),
            CallError,
            "give a function, TorchSchedule(lambda",
        ),
    ],
    ids=["StepLR", "OneCycleLR", "function", "no argument", "Plateau", "size"],
)
def test_torch_schedule_that_cannot_be_made_from_the_optimizer_raises_at_once(make, error, said):
    with pytest.raises(error, match=re.escape(said)):
        make()


@pytest.mark.parametrize(
    "made", [lr_scheduler.CosineAnnealingWarmRestarts, lambda o, last=-1: lr_scheduler.ConstantLR(o, last_epoch=last)]
)
def test_torch_schedule_that_needs_only_the_optimizer_is_accepted(made):
    if made is lr_scheduler.CosineAnnealingWarmRestarts:
        made = functools.partial(made, T_0=3)
    make_learner(plugins=[TorchSchedule(made)]).fit(make_batches(), epochs=1)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: make_learner().predict([], device="gpu"), ArgumentError, "predict: device is"),
        (
            lambda: Prefetch(TensorLoader(torch.ones(4, 1), batch_size=2), "gpu"),
            LoaderError,
            "Prefetch: device is",
        ),
        (
            lambda: EarlyStopping(restore_best=True, best_device="gpu"),
            PluginError,
            "EarlyStopping: best_device is",
        ),
        (lambda: ToDevice("gpu"), PluginError, "ToDevice: device is"),
    ],
    ids=["predict", "Prefetch", "EarlyStopping", "ToDevice"],
)
def test_name_of_no_device_raises_with_the_nearest_one(make, error, said):
    with pytest.raises(error, match=re.escape(said) + r".*'gpu'.*\(did you mean 'cuda'\?\)$"):
        make()


def test_base_of_loaders_raises_with_the_loader_to_write():
    with pytest.raises(LoaderError, match=r"^Loader is the base of loaders: write TensorLoader\(inputs, targets"):
        Loader(torch.ones(4, 3), batch_size=2)


def test_loader_without_batches_raises_with_the_method_to_write():
    class Mine(Loader):
        pass

    with pytest.raises(LoaderError, match=r"^Mine does not define batches: write def batches\(self, epoch, start"):
        Mine(steps=3)


class Complex(nn.Module):
    def __init__(self, trained=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64), requires_grad=trained)
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, inputs):
        return (inputs.to(torch.complex64) @ self.weight).real + self.bias


def test_clip_grad_value_raises_for_complex_weights_when_the_fit_begins():
    learner = make_learner(model=Complex(), plugins=[ClipGradValue(1.0)])
    with pytest.raises(PluginError, match=r"'clip_grad_value': parameter 'weight' is complex64.*use ClipGradNorm"):
        learner.fit(make_batches(), epochs=1)


@pytest.mark.parametrize(("plugin", "trained"), [(ClipGradValue(1.0), False), (ClipGradNorm(1.0), True)])
def test_complex_weights_that_can_be_clipped_are(plugin, trained):
    make_learner(model=Complex(trained), plugins=[plugin]).fit(make_batches(), epochs=1)


@pytest.mark.parametrize("make", [Precision, Recall, F1, functools.partial(FBeta, 2.0)])
def test_number_of_classes_of_a_metric_is_named_as_known(make):
    with pytest.raises(PluginError, match=r"\(3\): it finds the number of classes itself; leave it out"):
        make(3)


def test_shuffled_data_whose_indices_are_asked_for_is_named_with_the_loaders_that_know_them():
    loader = torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=4, shuffle=True)
    with pytest.raises(LoopkitError, match=r"a DataLoader without shuffle=True, or one with a ResumableSampler"):
        list(make_learner().predict_batches(loader, indices=True))


def test_line_of_a_resumed_run_has_its_step_among_all_steps(tmp_path, capsys):
    def train(**limits):
        saving = Checkpoint(tmp_path, save=every(updates=1), resume="auto")
        make_learner(plugins=[saving]).fit(make_batches(), **limits)

    train(max_updates=4)
    train(epochs=3)
    assert "-step-4 at step 4, after 2 epochs\n" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Ctrl-C again to"), (signal.SIGTERM, "Ctrl-C to")])
def test_line_of_a_signal_names_the_key_that_stops_at_once(number, word, capfd):
    stop = on("step_end", lambda **_: signal.raise_signal(number))
    make_learner(plugins=[stop]).fit(make_batches(), epochs=1, on_interrupt="return")
    assert f"{number.name}: stopping after this step (press {word} stop at once)" in capfd.readouterr().err
