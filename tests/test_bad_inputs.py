"""What a user can do wrong, and what they are told. After each mistake the learner must be as usable as before."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
import torch
from helpers import make_learner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from loopkit import CancelFit, Event, Learner, Phase, TrainingPhase, ValidationPhase, hookimpl
from loopkit.data import ResumableSampler, TensorLoader
from loopkit.errors import (
    EmptyDataError,
    ExhaustedIteratorError,
    LoopkitError,
    LossError,
    OrderError,
    PhaseError,
    PhaseInputError,
    PluginConflict,
    PluginError,
    ReentrancyError,
    StepResultError,
)
from loopkit.plugins import Checkpoint, EarlyStopping, Freeze, Plateau
from loopkit.plugins.metrics import Metrics


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def batches(count=2, size=5):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 4, generator=rng), torch.arange(size) % 3) for _ in range(count)]


class FitLog:
    """Counts the fits that began and ended, and the passes that ended normally."""

    def __init__(self):
        self.begun = self.ended = self.passes = 0

    @hookimpl
    def fit_begin(self):
        self.begun += 1

    @hookimpl
    def fit_end(self):
        self.ended += 1

    @hookimpl
    def phase_end(self):
        self.passes += 1


class Listens:
    """Makes every event be heard, so that no step takes the short way."""

    @hookimpl
    def backward_begin(self):
        pass

    @hookimpl
    def update_begin(self):
        pass


def make(*plugins, loss_fn=None, phases=(), **options):
    torch.manual_seed(0)
    learner = Learner(
        nn.Linear(4, 3),
        loss_fn or nn.CrossEntropyLoss(),
        sgd,
        standard=False,
        plugins=[FitLog(), *plugins],
        phases=phases,
        **options,
    )
    learner.model.eval()  # the other mode than that of training
    return learner


def fails(learner, error, act, *parts):
    """``act`` raises ``error``, whose message and notes hold ``parts``, and the learner works as before."""
    with pytest.raises(error) as caught:
        act()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in:\n{text}"
    assert not learner._engine.running.epochs
    assert not learner.model.training
    assert torch.is_grad_enabled()
    log = learner.plugins["fit_log"]
    assert log.ended == log.begun
    for name in [name for name in learner.plugins if name != "fit_log"]:
        learner.remove(name)
    good = Learner(nn.Linear(4, 3), nn.CrossEntropyLoss(), sgd, standard=False)
    good.model.load_state_dict(learner.model.state_dict())
    learner.loss_fn, learner.accumulate = nn.CrossEntropyLoss(), 1
    rounds = learner.rounds(epochs=1)
    for _ in rounds:
        learner.run(TrainingPhase("plain"), batches())
    assert rounds.result.updates == 2
    good.fit(batches(), epochs=1)
    assert learner.model.weight.equal(good.model.weight)
    return caught.value


@pytest.fixture(params=[False, True], ids=["short", "long"])
def ways(request):
    """No plugin in the step, or one that makes it take the long way: errors must be the same."""
    return [Listens()] if request.param else []


# Data


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_training_data_is_an_empty_list():
    learner = make()
    fails(
        learner, EmptyDataError, lambda: learner.fit([], epochs=1), r"phase 'train' holds no batch: len\(\) is 0 .list"
    )


def test_validation_data_is_an_empty_list():
    learner = make()
    fails(learner, EmptyDataError, lambda: learner.fit(batches(), [], epochs=1), "phase 'val' holds no batch")


def test_validation_data_is_empty_is_said_before_the_first_step():
    learner = make()
    with pytest.raises(EmptyDataError):
        learner.fit(batches(), [], epochs=1)
    assert learner.progress.steps == 0
    assert learner.plugins["fit_log"].begun == 0


def test_training_data_without_length_is_empty():
    learner = make()
    fails(learner, EmptyDataError, lambda: learner.fit(Stream([]), epochs=2), r"phase 'train' gave no batch .Stream")


def test_validation_data_without_length_is_empty():
    learner = make()
    act = lambda: learner.fit(batches(), Stream([]), epochs=2)  # noqa: E731
    fails(learner, EmptyDataError, act, r"phase 'val' gave no batch .Stream")


def test_function_that_makes_the_data_returns_none_of_it():
    learner = make()
    fails(learner, EmptyDataError, lambda: learner.fit(lambda: [], epochs=1), "phase 'train' holds no batch")


def test_data_to_predict_is_empty():
    learner = make()
    fails(learner, EmptyDataError, lambda: learner.predict(Stream([])), "phase 'predict' gave no batch")


def test_data_has_no_length():
    learner = make()
    result = learner.fit(Stream(batches(3)), Stream(batches(2)), epochs=2)
    assert (result.steps, result.epochs, result.samples) == (6, 2, 30)


def test_data_loader_has_no_length():
    learner = make()
    assert learner.fit(DataLoader(Stream(batches(3)), batch_size=None), epochs=2).steps == 6


@pytest.mark.parametrize("accumulate", ["2", 2.5, True, 0, -1, None])
def test_accumulate_is_no_count(accumulate):
    with pytest.raises(PhaseError, match=f"accumulate is {accumulate!r}: it counts the steps of an update, from 1"):
        make(accumulate=accumulate)
    learner = make(accumulate=3)
    with pytest.raises(PhaseError, match=f"accumulate is {accumulate!r}: it counts the steps of an update, from 1"):
        learner.accumulate = accumulate
    assert learner.accumulate == 3


class Lying:
    def __init__(self, items, length):
        self.items, self.length = items, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_length_of_the_data_is_wrong(length, accumulate):
    learner = make(accumulate=accumulate)
    with pytest.warns(
        UserWarning, match=rf"len\(\) of the data of phase 'train' is {length}, but it gave 3 batches; 3"
    ):
        result = learner.fit(Lying(batches(3), length), epochs=1)
    assert (result.steps, result.samples) == (3, 15)
    assert result.updates == math.ceil(3 / accumulate)


def test_length_of_the_data_is_right():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make().fit(Lying(batches(3), 3), epochs=1).steps == 3


def test_generator_is_given_for_two_epochs():
    learner = make()
    data = (batch for batch in batches())
    message = (
        "phase 'train' is a generator that an earlier epoch used up: give .* or a function that returns a new iterator"
    )
    fails(learner, ExhaustedIteratorError, lambda: learner.fit(data, epochs=2), message)


def test_generator_is_given_for_two_validations():
    learner = make()
    data = (batch for batch in batches())
    act = lambda: learner.fit(batches(), data, epochs=2)  # noqa: E731
    fails(learner, ExhaustedIteratorError, act, "phase 'val' is a generator that an earlier epoch used up")


def test_generator_is_given_for_one_epoch():
    assert make().fit((batch for batch in batches()), epochs=1).steps == 2


def test_function_that_makes_a_generator_is_given_for_two_epochs():
    assert make().fit(lambda: (batch for batch in batches()), epochs=2).steps == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loader_raises_in_mid_epoch(accumulate):
    broken = OSError("disk is gone")

    def data():
        yield from batches(3)
        raise broken

    learner = make(accumulate=accumulate)
    parts = "disk is gone", "the loader raised this while making batch 3, phase 'train', epoch 1"
    assert fails(learner, OSError, lambda: learner.fit(data, epochs=1), *parts) is broken


@pytest.mark.parametrize("index", [0, 1])
def test_loader_gives_none(index):
    data = batches(2)
    data[index] = None
    learner = make()
    fails(
        learner,
        PhaseInputError,
        lambda: learner.fit(data, epochs=1),
        f"batch {index} is NoneType: drop such batches in the loader, or let the phase pass over them with skip_none=T",
        f"phase 'train', epoch 1, step {index}",
    )


def test_loader_gives_none_to_a_phase_that_passes_over_it():
    class Moves:
        @hookimpl
        def move_batch(self, batch):
            inputs, targets = batch
            return inputs, targets

    one, two = batches(2)
    learner = make(Moves(), phases=[TrainingPhase(skip_none=True)])
    result = learner.fit([None, one, None, two, None], epochs=1)
    assert (result.steps, result.updates, result.samples) == (2, 2, 10)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_loader_gives_none_last_in_an_open_window(accumulate):
    one, two = batches(2)
    data = [one, None, two, None] if accumulate == 3 else [one, None]
    learner = make(accumulate=accumulate, phases=[TrainingPhase(skip_none=True)])
    assert learner.fit(data, epochs=1).updates == 1


def test_loader_gives_an_empty_batch():
    learner = make()
    data = [*batches(1), (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))]
    message = r"batch 1 is tuple\(Tensor\[0, 4\] float32 cpu, .*\): it has no samples; drop empty batches in the loader"
    fails(learner, PhaseInputError, lambda: learner.fit(data, epochs=1), message)


@pytest.mark.parametrize(
    ("batch", "described"),
    [
        (3, "int"),
        ("text", "str"),
        ({"x": torch.zeros(2, 4)}, r"dict\(x: Tensor\[2, 4\] float32 cpu\)"),
        ((torch.zeros(2, 4),), r"tuple\(Tensor\[2, 4\] float32 cpu\)"),
        (torch.zeros(3, 4), r"Tensor\[3, 4\] float32 cpu"),
    ],
)
def test_loader_gives_a_batch_of_the_wrong_type(batch, described):
    learner = make()
    fails(
        learner,
        PhaseInputError,
        lambda: learner.fit([*batches(1), batch], epochs=1),
        rf"TrainingPhase takes \(inputs, targets\), .*; this batch is {described}\. Override TrainingPhase\.unpack",
        "phase 'train', epoch 1, step 1",
    )


def test_loader_gives_an_object_that_the_users_step_cannot_take():
    class Own(TrainingPhase):
        def unpack(self, batch):
            return batch.x, batch.y

    learner = make(phases=[Own()])
    with pytest.raises(AttributeError, match="'object' object has no attribute 'x'") as caught:
        learner.fit([object()], epochs=1)
    assert caught.value.__notes__ == [
        "loopkit: in Own.step, phase 'train', epoch 1, step 0; batch: object; model on cpu"
    ]


@pytest.mark.parametrize("data", [torch.zeros(8, 4), "text", {"train": {"x": []}}, 3, None])
def test_data_is_no_iterable_of_batches(data):
    learner = make()
    message = "data is .*: it must be an iterable of batches, or a function returning one"
    fails(learner, PhaseInputError, lambda: learner.fit(data, epochs=1), message)


def test_last_batch_is_smaller():
    learner = make(Metrics(), loss_fn=lambda outputs, targets: targets.float().mean() + 0 * outputs.sum())
    data = [(torch.zeros(3, 4), torch.zeros(3)), (torch.zeros(1, 4), torch.ones(1))]
    assert learner.evaluate(data) == {"val/loss": 0.25}
    assert learner.fit(data, epochs=1).samples == 4


def test_inputs_have_the_wrong_shape():
    learner = make()
    data = [*batches(1), (torch.zeros(5, 7), torch.zeros(5, dtype=torch.long))]
    error = fails(
        learner,
        RuntimeError,
        lambda: learner.fit(data, epochs=1),
        "mat1 and mat2 shapes cannot be multiplied",
        r"in TrainingPhase\.step, phase 'train', epoch 1, step 1; "
        r"batch: tuple\(Tensor\[5, 7\] float32 cpu, Tensor\[5\] int64 cpu\); model on cpu",
    )
    assert type(error) is RuntimeError
    assert len(error.__notes__) == 1


def test_inputs_have_the_wrong_shape_in_validation():
    learner = make()
    act = lambda: learner.evaluate([(torch.zeros(5, 7), torch.zeros(5))])  # noqa: E731
    fails(
        learner,
        RuntimeError,
        act,
        r"in ValidationPhase\.step, phase 'val', epoch 0, step 0; batch: tuple\(Tensor\[5, 7",
    )


def test_inputs_have_the_wrong_dtype():
    learner = make()
    data = [(torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.long))]
    parts = "same dtype", r"batch: tuple\(Tensor\[5, 4\] float64 cpu, Tensor\[5\] int64 cpu\); model on cpu"
    fails(learner, RuntimeError, lambda: learner.fit(data, epochs=1), *parts)


def test_inputs_are_on_another_device():
    learner = make()
    data = [(torch.zeros(5, 4, device="meta"), torch.zeros(5, dtype=torch.long))]
    parts = "device", r"batch: tuple\(Tensor\[5, 4\] float32 meta, Tensor\[5\] int64 cpu\); model on cpu"
    fails(learner, RuntimeError, lambda: learner.fit(data, epochs=1), *parts)


@pytest.mark.parametrize("function", ["collate", "dataset"])
def test_loader_has_spawned_workers_and_a_function_that_cannot_be_pickled(function):
    items = [(x, y) for x, y in zip(*batches(1)[0], strict=True)]
    options = {"collate_fn": lambda items: items} if function == "collate" else {}
    data = items if function == "collate" else Stream([lambda: None])
    loader = DataLoader(data, batch_size=5, num_workers=1, multiprocessing_context="spawn", **options)
    learner = make()
    parts = "ickle", "making batch 0, phase 'train', epoch 1; workers that are spawned need functions .* no lambda"
    fails(learner, Exception, lambda: learner.fit(loader, epochs=1), *parts)


# The step and the loss


class Returns(TrainingPhase):
    def step(self, learner, step):
        super().step(learner, step)
        return {"loss": step.loss}


@pytest.mark.parametrize("name", ["train", "val"])
def test_step_returns_something(name):
    class Evaluates(ValidationPhase):
        def step(self, learner, step):
            super().step(learner, step)
            return step.loss

    learner = make(phases=[Returns(), Evaluates()])
    fails(
        learner,
        StepResultError,
        lambda: learner.run(name, batches()),
        r"\.step returned .*: a step returns nothing\. Put results on the step \(step\.loss = loss\) and call "
        r"step\.backward\(loss\) and step\.update\(\)",
        f"phase '{name}', epoch {int(name == 'train')}, step 0",
    )


def test_step_returns_something_inside_a_context():
    class Context:
        @hookimpl
        def step_context(self):
            return torch.autograd.set_detect_anomaly(False)

    learner = make(Context(), phases=[Returns()])
    fails(
        learner, StepResultError, lambda: learner.fit(batches(), epochs=1), r"Returns\.step returned dict\(loss: Tensor"
    )


def test_step_calls_update_before_backward(ways):
    class Forgets(TrainingPhase):
        def step(self, learner, step):
            step.update()

    learner = make(*ways, phases=[Forgets()])
    message = r"step\.update before step\.backward in phase 'train', step 0: call step\.backward\(loss\)"
    fails(learner, PhaseError, lambda: learner.fit(batches(), epochs=1), message)


@pytest.mark.parametrize("verb", ["backward", "update"])
def test_validation_step_calls_a_verb_of_training(verb):
    class Trains(ValidationPhase):
        def step(self, learner, step):
            super().step(learner, step)
            if verb == "backward":
                step.backward(step.loss)
            else:
                step.update()

    learner = make(phases=[Trains()])
    message = rf"step\.{verb} in phase 'val'.*only a phase with training = True has it"
    fails(learner, PhaseError, lambda: learner.evaluate(batches()), message)


def test_loss_is_not_reduced(ways):
    learner = make(*ways, loss_fn=nn.CrossEntropyLoss(reduction="none"))
    message = r"the loss has shape \(5,\) \(phase 'train', step 0\): reduce it, with \.mean\(\) or \.sum\(\)"
    fails(learner, LossError, lambda: learner.fit(batches(), epochs=1), message)


def test_loss_has_one_element(ways):
    learner = make(*ways, loss_fn=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets).reshape(1))
    plain = make()
    for each in (learner, plain):
        each.fit(batches(), epochs=1)
    assert learner.model.weight.equal(plain.model.weight)


@pytest.mark.parametrize(
    ("loss", "described"),
    [(0.5, "float 0.5"), (3, "int 3"), (np.array(0.5), r"ndarray\[\] float64 0.5"), (None, "NoneType None")],
)
def test_loss_is_no_tensor(ways, loss, described):
    learner = make(*ways, loss_fn=lambda outputs, targets: loss)
    message = rf"the loss is {described} \(phase 'train', step 0\); it must be a scalar tensor"
    fails(learner, LossError, lambda: learner.fit(batches(), epochs=1), message)


HINTS = r"does not require grad \(phase 'train', step 0\): .*no_grad, or detached, .*frozen \(requires_grad=False\)"


def test_loss_is_detached(ways):
    learner = make(*ways, loss_fn=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets).detach())
    fails(learner, LossError, lambda: learner.fit(batches(), epochs=1), HINTS)


def test_loss_is_made_under_no_grad(ways):
    learner = make(*ways, loss_fn=torch.no_grad()(nn.functional.cross_entropy))
    fails(learner, LossError, lambda: learner.fit(batches(), epochs=1), HINTS)


def test_all_parameters_are_frozen(ways):
    learner = make(*ways)
    learner.model.requires_grad_(False)
    with pytest.raises(LossError, match=HINTS):
        learner.fit(batches(), epochs=1)
    learner.model.requires_grad_(True)
    assert learner.fit(batches(), epochs=1).updates == 2


def test_fit_is_called_under_no_grad():
    learner = make()
    with torch.no_grad():
        assert learner.fit(batches(), epochs=1).updates == 2
        assert not torch.is_grad_enabled()


def test_loss_is_differentiated_twice(ways):
    class Twice(TrainingPhase):
        def step(self, learner, step):
            super().step(learner, step)
            step.backward(step.loss)

    learner = make(*ways, phases=[Twice()])
    parts = (
        "backward through the graph a second time",
        r"in Twice\.step, phase 'train', epoch 1, step 0; .*; this step has called step.backward.*add the losses",
    )
    error = fails(learner, RuntimeError, lambda: learner.fit(batches(), epochs=1), *parts)
    assert type(error) is RuntimeError


def test_learner_has_no_loss_function():
    learner = Learner(nn.Linear(4, 3), None, sgd, standard=False)
    with pytest.raises(PhaseError, match=r"uses learner\.loss_fn, but the learner has none: give Learner\(loss_fn="):
        learner.fit(batches(), epochs=1)


def test_learner_has_no_optimizer():
    learner = Learner(nn.Linear(4, 3), nn.CrossEntropyLoss(), standard=False)
    with pytest.raises(PhaseError, match=r"the learner has no optimizer; give Learner\(optimizer=\.\.\.\)"):
        learner.fit(batches(), epochs=1)
    assert not learner._engine.running.epochs


def test_optimizer_gets_no_parameters():
    with pytest.raises(ValueError, match="optimizer got an empty parameter list") as caught:
        Learner(nn.ReLU(), nn.MSELoss(), sgd, standard=False)
    assert caught.value.__notes__ == ["loopkit: the factory of optimizer 'optimizer' raised this"]


def test_optimizer_factory_returns_no_optimizer():
    with pytest.raises(PhaseError, match="the factory of optimizer 'optimizer' returned None: it must return a torch"):
        Learner(nn.Linear(4, 3), nn.MSELoss(), lambda params: None, standard=False)


# Seeds


def test_seed_is_not_given_and_is_recorded():
    learner = make()
    torch.manual_seed(1234)
    assert learner.fit(batches(), epochs=1).seed == 1234


def test_seed_is_given_and_is_recorded():
    learner = Learner(nn.Linear(4, 3), nn.CrossEntropyLoss(), sgd, standard=False, seed=7)
    assert learner.fit(batches(), epochs=1).seed == 7


# Plugins that raise

EVENTS = (
    "fit_begin",
    "epoch_begin",
    "step_begin",
    "forward_begin",
    "loss_begin",
    "backward_begin",
    "backward_end",
    "update_begin",
    "update_end",
    "step_end",
    "epoch_end",
    "phase_end",
    "fit_end",
    "epoch_context",
    "step_context",
    "optimizer_step",
    "take_step",
    "move_batch",
)


class Ends:
    def __init__(self, name):
        self.name = name
        self.ends = 0

    @hookimpl
    def fit_end(self):
        self.ends += 1


class Broken(Exception):
    pass


def breaks(hook):
    def method(self):
        raise Broken("broken")

    return type("Breaks", (), {hook: hookimpl(method)})()


@pytest.mark.parametrize("hook", EVENTS)
def test_plugin_raises_in_a_hook(hook):
    before, after = Ends("a"), Ends("z")
    learner = make(before, breaks(hook), after)
    parts = f"in {hook} of plugin 'breaks'", "" if hook.startswith("fit") else "phase 'train', epoch 1"
    error = fails(learner, Broken, lambda: learner.fit(batches(), epochs=1), *parts)
    assert (before.ends, after.ends) == (1, 1)
    assert len(error.__notes__) == 1


@pytest.mark.parametrize("hook", ["step_begin", "update_end", "optimizer_step", "take_step", "step_context"])
def test_plugin_raises_in_a_hook_of_a_step_and_the_step_is_named(hook):
    def method(self, step, **others):
        if step.index == 1:
            raise Broken("broken")

    def verb(self, step, default):
        method(self, step)
        default()

    function = verb if hook in ("optimizer_step", "take_step") else lambda self, step: method(self, step)
    plugin = type("Later", (), {hook: hookimpl(function)})()
    learner = make(plugin)
    part = f"in {hook} of plugin 'later', phase 'train', epoch 1, step 1$"
    fails(learner, Broken, lambda: learner.fit(batches(), epochs=1), part)


def test_plugin_raises_in_move_batch_and_the_batch_is_described():
    learner = make(breaks("move_batch"))
    part = r"phase 'train', epoch 1, batch 0: tuple\(Tensor\[5, 4\] float32 cpu, Tensor\[5\] int64 cpu\)"
    fails(learner, Broken, lambda: learner.fit(batches(), epochs=1), part)


def test_plugin_raises_in_setup_model():
    class Sets:
        @hookimpl
        def setup_model(self):
            raise Broken("broken")

    with pytest.raises(Broken) as caught:
        make(Sets())
    assert caught.value.__notes__ == ["loopkit: in setup_model of plugin 'sets'"]
    learner = make()
    fails(learner, Broken, lambda: learner.add(Sets()), "in setup_model of plugin 'sets'")


class Sets:
    def __init__(self, name, log, fails=()):
        self.name, self.log, self.fails = name, log, fails

    @hookimpl
    def fit_begin(self):
        self.log.append(f"begin {self.name}")
        if "begin" in self.fails:
            raise Broken(f"begin {self.name}")

    @hookimpl
    def fit_end(self):
        self.log.append(f"end {self.name}")
        if "end" in self.fails:
            raise Broken(f"end {self.name}")


def test_plugin_raises_in_fit_begin_and_those_before_it_are_torn_down_in_reverse():
    log = []
    learner = make(Sets("a", log), Sets("b", log), Sets("c", log, fails=["begin"]), Sets("d", log))
    fails(learner, Broken, lambda: learner.fit(batches(), epochs=1), "in fit_begin of plugin 'c'")
    assert log == ["begin a", "begin b", "begin c", "end c", "end b", "end a"]


def test_plugin_raises_in_fit_end_after_a_good_fit():
    log = []
    learner = make(Sets("a", log), Sets("b", log, fails=["end"]), Sets("c", log))
    fails(learner, Broken, lambda: learner.fit(batches(), epochs=1), "end b", "in fit_end of plugin 'b'")
    assert log[3:] == ["end c", "end b", "end a"]


def test_plugins_raise_in_fit_end_after_a_good_fit():
    log = []
    learner = make(Sets("a", log, fails=["end"]), Sets("b", log, fails=["end"]))
    group = fails(learner, ExceptionGroup, lambda: learner.fit(batches(), epochs=1), "fit_end failed")
    assert [str(error) for error in group.exceptions] == ["end b", "end a"]


def test_plugin_raises_in_fit_end_after_the_fit_failed():
    log = []
    learner = make(breaks("step_begin"), Sets("a", log, fails=["end"]))
    group = fails(learner, ExceptionGroup, lambda: learner.fit(batches(), epochs=1), "the fit failed, then fit_end")
    assert [str(error) for error in group.exceptions] == ["broken", "end a"]
    assert group.exceptions[0].__notes__ == [
        "loopkit: in step_begin of plugin 'breaks', phase 'train', epoch 1, step 0"
    ]
    assert group.exceptions[1].__notes__ == ["loopkit: in fit_end of plugin 'a'"]


def test_plugin_raises_in_fit_end_after_an_interrupt_which_stays_one():
    class Interrupts:
        @hookimpl
        def step_begin(self):
            raise KeyboardInterrupt

    learner = make(Interrupts(), Sets("a", [], fails=["end"]))
    fails(
        learner, KeyboardInterrupt, lambda: learner.fit(batches(), epochs=1), r"fit_end failed too: Broken\('end a'\)"
    )


# Plugins that cannot be added


def adding(learner, error, plugins, *parts):
    fails(learner, error, lambda: learner.add(*plugins), *parts)
    assert list(learner.plugins) == ["fit_log"]


def test_hook_name_is_misspelt():
    class Typo:
        @hookimpl
        def step_beginn(self):
            pass

    adding(make(), PluginError, [Typo()], r"plugin 'typo' .*no hook 'step_beginn' \(did you mean 'step_begin'\?\)")


def test_hook_argument_is_misspelt():
    class Typo:
        @hookimpl
        def step_begin(self, stpe):
            pass

    adding(make(), PluginError, [Typo()], r"'stpe' \(did you mean 'step'\?\); it can take learner, phase, epoch, step")


def test_plugin_is_a_class():
    adding(make(), PluginError, [Listens], r"Listens is a class; a plugin is an instance: Listens\(\.\.\.\)")


def test_plugin_is_added_twice():
    plugin = Listens()
    message = r"two plugins are called 'listens': the same object; give it name="
    adding(make(), PluginError, [plugin, plugin], message)


def owner(label, **declared):
    def update_begin(self):
        pass

    return type(label, (), {"update_begin": hookimpl(**declared)(update_begin)})()


def test_plugins_own_one_thing():
    one, other = owner("One"), owner("Other")
    type(one).owns = type(other).owns = ("grads.scale",)
    adding(make(), PluginConflict, [one, other], "'one' and 'other' both own \"grads.scale\": keep one of them")


def test_two_clippers_have_no_order():
    plugins = [owner("ClipNorm", updates=("grads",)), owner("ClipValue", updates=("grads",))]
    parts = (
        "update_begin: plugins 'clip_norm' and 'clip_value' both update 'grads', and nothing says which comes first",
        r'Give the learner order=\["clip_norm", "clip_value"\] \(or the reverse\), or declare before=\("clip_value",\)',
    )
    adding(make(), OrderError, plugins, *parts)


def test_plugins_implement_one_verb():
    def verb(self, default):
        default()

    plugins = [type(label, (), {"optimizer_step": hookimpl(verb)})() for label in ("One", "Other")]
    adding(make(), PluginConflict, plugins, "'one' and 'other' both implement optimizer_step in phase 'train'")


def test_plugins_stand_in_a_cycle():
    plugins = [owner("One", before=("other",)), owner("Other", before=("one",))]
    adding(
        make(), OrderError, plugins, "cycle, 'one' -> 'other' -> 'one': 'one' says before 'other'; 'other' says befo"
    )


def test_plugin_waits_for_an_event_that_never_comes():
    class FogBegin(Event):
        pass

    try:

        class Waits:
            @hookimpl
            def fog_begin(self):
                pass

        learner = make(Waits())
        message = r"plugin 'waits', fog_begin: no known phase emits this event; .*Learner\(phases=\[\.\.\.\]\)"
        fails(learner, PluginError, lambda: learner.fit(batches(), epochs=1), message)
    finally:
        del Event.by_hook["fog_begin"]


# Limits, phases, nesting


@pytest.mark.parametrize("limit", ["epochs", "max_steps", "max_updates"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_limit_is_no_positive_count(limit, value):
    learner = make()
    act = lambda: learner.fit(batches(), **{"epochs": 1, limit: value})  # noqa: E731
    fails(learner, ValueError, act, f"{limit} is {value!r}: it counts from 1")


def test_fit_is_given_no_limit():
    learner = make()
    message = r"fit has no end: give epochs=, max_steps= or max_updates= \(epochs=math\.inf if you mean it\)"
    fails(learner, ValueError, lambda: learner.fit(batches()), message)


def test_fit_without_end_must_be_asked_for():
    learner = make()

    class Ends:
        @hookimpl
        def phase_end(self, learner):
            if learner.progress.epochs == 5:
                learner.stop("enough")

    learner.add(Ends())
    assert learner.fit(batches(), epochs=math.inf).epochs == 5


@pytest.mark.parametrize("hook", ["fit_begin", "epoch_begin", "step_begin", "update_end", "phase_end", "fit_end"])
def test_fit_is_called_from_a_hook(hook):
    def method(self, learner):
        learner.fit(batches(), epochs=1)

    learner = make(type("Again", (), {hook: hookimpl(method)})())
    parts = "a fit is running: call run, evaluate or predict from a hook, not fit", f"in {hook} of plugin 'again'"
    fails(learner, ReentrancyError, lambda: learner.fit(batches(), epochs=1), *parts)


def test_fit_is_called_inside_fitting():
    learner = make()

    def act():
        with learner.rounds():
            learner.fit(batches(), epochs=1)

    fails(learner, ReentrancyError, act, "a fit is running")


def test_fit_is_cancelled_at_its_begin_and_the_learner_goes_on():
    class Refuses:
        @hookimpl
        def fit_begin(self):
            raise CancelFit("not today")

    learner = make(Refuses())
    result = learner.fit(batches(), epochs=1)
    assert (result.reason, result.message, result.by, result.steps) == ("cancel", "not today", "refuses", 0)
    learner.run("train", batches())
    assert learner.progress.steps == 2


def test_training_is_run_inside_an_open_window():
    class Nested:
        @hookimpl
        def backward_end(self, learner):
            learner.run("train", batches())

    learner = make(Nested())
    message = "phase 'train' trains inside an open accumulation window"
    fails(learner, ReentrancyError, lambda: learner.fit(batches(), epochs=1), message)


def test_phase_name_is_misspelt():
    learner = make()
    message = r"no phase is called 'trian' \(did you mean 'train'\?\); there are: train, val, predict\."
    fails(learner, PhaseError, lambda: learner.run("trian", batches()), message)


def test_validation_set_that_only_an_earlier_fit_knew():
    learner = make()
    message = (
        r"no phase is called 'ood'; .*ValidationPhase\('ood'\) for another validation set, as fit\(train, \{'ood': "
    )
    fails(learner, PhaseError, lambda: learner.evaluate(batches(), "ood"), message)


def test_phase_has_no_step():
    learner = make()
    act = lambda: learner.run(Phase("bare"), batches())  # noqa: E731
    fails(learner, NotImplementedError, act, r"Phase has no step\(self, learner, step\)")


# Options that are checked in one way


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EarlyStopping("loss"),
            "EarlyStopping: monitor is 'loss': it is '<phase>/<metric>', such as 'val/loss'",
        ),
        (lambda: Plateau("val"), "Plateau: monitor is 'val': it is '<phase>/<metric>', such as 'val/loss'"),
        (lambda: Checkpoint("runs/a", best=3), "Checkpoint: best is 3: it is '<phase>/<metric>', such as 'val/loss'"),
        (lambda: Plateau(factor="0.1"), "Plateau: factor is '0.1': it is a number, from 0"),
        (lambda: Plateau(patience=1.5), "Plateau: patience is 1.5: it is a whole number, from 0"),
        (lambda: Plateau(threshold_mode="relative"), "Plateau: threshold_mode is 'relative': it is 'rel' or 'abs'"),
        (lambda: Freeze({"encoder": 1.5}), "Freeze: the epoch of 'encoder' is 1.5: it is a whole number, from 0"),
    ],
)
def test_option_that_is_none_is_named_in_one_form(make, message):
    with pytest.raises(PluginError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResumableSampler(8, shuffle="False"), "ResumableSampler: shuffle is 'False': it is True or False"),
        (
            lambda: TensorLoader(torch.ones(8), batch_size=4, shuffle="no"),
            "TensorLoader: shuffle is 'no': it is True or False",
        ),
        (lambda: Freeze("encoder", norms="yes"), "Freeze: norms is 'yes': it is True or False"),
        (lambda: EarlyStopping("val/loss", 3, None, 0.0, "True"), "EarlyStopping: restore_best is 'True': it is"),
        (lambda: make_learner(standard="False"), "Learner: standard is 'False': it is True or False"),
    ],
)
def test_word_in_the_place_of_true_or_false_raises(make, message):
    with pytest.raises(LoopkitError, match=re.escape(message)):
        make()


class WithoutSelf:
    @hookimpl
    def epoch_end():  # type: ignore[misc]
        pass


class WithoutSelfAndArguments:
    @hookimpl
    def step_end(step, learner):  # noqa: N805 - the mistake
        pass


class WithoutSelfInFit:
    @hookimpl
    def fit_begin(learner):  # noqa: N805 - the mistake
        pass


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (WithoutSelf, "epoch_end() is a method without self: write epoch_end(self)"),
        (
            WithoutSelfAndArguments,
            "step_end(step, learner) is a method without self: write step_end(self, step, learner)",
        ),
        (WithoutSelfInFit, "fit_begin(learner) is a method without self: write fit_begin(self, learner)"),
    ],
)
def test_hook_without_self_raises(plugin, message):
    with pytest.raises(PluginError, match=re.escape(message)):
        make_learner(plugin())
