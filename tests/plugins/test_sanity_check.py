"""SanityCheck: what it refuses before anything is trained, and what it lets pass."""

import warnings
from functools import partial

import pytest
import torch
from helpers import batches, make_learner, raising
from torch import nn
from torch.optim.lr_scheduler import StepLR

from loopkit import Learner, TrainingPhase
from loopkit.errors import PhaseError, PhaseInputError, PluginError
from loopkit.plugins import Metrics, Plateau, SanityCheck, Schedule, TorchSchedule
from loopkit.schedules import constant, linear, warmup


class ItemsAlone:
    """An iterable of which nobody knows whether it begins anew."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


# Coverage


def test_optimizer_of_frozen_parameters_is_refused_before_the_first_step():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    other = sgd([{"params": [p]} for p in model[0].parameters()])
    learner = Learner(model, nn.MSELoss(), other, plugins=[SanityCheck()], standard=False)
    model[0].requires_grad_(False)
    with pytest.raises(PhaseError, match=r"the optimizer covers 0 of 2 trainable parameters \(1.weight, 1.bias\)"):
        learner.fit(batches(3), epochs=1)
    assert learner.progress.steps == 0


def test_optimizer_that_misses_parameters_gives_one_warning():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    learner = Learner(model, nn.MSELoss(), sgd(model[1].parameters()), plugins=[SanityCheck()], standard=False)
    with pytest.warns(
        UserWarning, match=r"covers 2 of 4 trainable parameters; not covered: 0.weight, 0.bias"
    ) as caught:
        learner.fit(batches(3), epochs=3)
    assert len(caught) == 1


def test_long_lists_of_parameters_are_cut():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)), nn.Linear(3, 1))
    learner = Learner(model, nn.MSELoss(), sgd(model[6].parameters()), plugins=[SanityCheck()], standard=False)
    with pytest.warns(UserWarning, match=r"2.weight and 7 more"):
        learner.fit(batches(1), epochs=1)


def test_frozen_parameters_need_no_optimizer():
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
    learner = Learner(model, nn.MSELoss(), sgd(model[1].parameters()), plugins=[SanityCheck()], standard=False)
    assert learner.fit(batches(3), epochs=1).updates == 3


def test_model_without_trainable_parameters_is_refused_before_the_first_step():
    model = nn.Linear(3, 1).requires_grad_(False)
    learner = make_learner(SanityCheck(), model=model)
    with pytest.raises(PhaseError, match="none of the 2 parameters requires grad, so training has no effect"):
        learner.fit(batches(3), epochs=1)
    assert learner.progress.steps == 0


def test_parameter_in_two_optimizers_is_refused_before_the_first_step():
    models = {"critic": nn.Linear(3, 1), "generator": nn.Linear(3, 1)}
    both = [*models["critic"].parameters(), *models["generator"].parameters()]
    optimizers = {"critic": sgd, "generator": sgd(both)}
    learner = Learner(models, nn.MSELoss(), optimizers, plugins=[SanityCheck()], standard=False)
    with pytest.raises(PhaseError, match=r"'critic.weight' is in the optimizers 'critic' and 'generator'"):
        learner.run("train", batches(1))
    assert learner.progress.steps == 0


def test_learner_without_an_optimizer_can_be_evaluated():
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), plugins=[SanityCheck()], standard=False)
    assert learner.evaluate(batches(1)) == {}


# Shapes


class Flat(nn.Linear):
    """Outputs ``(batch,)``."""

    def forward(self, inputs):
        return super().forward(inputs).squeeze(1)


SHAPES = r"phase 'train': outputs have shape \(4,\), targets \(4, 1\): an elementwise loss would broadcast them"


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.functional.l1_loss], ids=["module", "function"])
def test_shapes_that_would_be_broadcast_are_refused_before_the_backward(loss_fn):
    learner = make_learner(SanityCheck(), model=Flat(3, 1))
    learner.loss_fn = loss_fn
    with pytest.raises(PhaseInputError, match=SHAPES):
        learner.fit(batches(3), epochs=1)
    assert learner.progress.updates == 0


def test_shapes_in_validation_are_checked_too():
    learner = make_learner(SanityCheck(), model=Flat(3, 1))
    with pytest.raises(PhaseInputError, match="phase 'val'"):
        learner.evaluate(batches(1))


def test_shapes_give_a_warning_where_the_loss_is_ones_own():
    learner = make_learner(SanityCheck(), model=Flat(3, 1))
    learner.loss_fn = lambda outputs, targets: (outputs - targets.squeeze(1)).square().mean()
    with pytest.warns(UserWarning, match=SHAPES) as caught:
        learner.fit(batches(3), epochs=2)
    assert len(caught) == 1
    assert learner.progress.updates == 6


def test_shapes_give_a_warning_where_the_phase_is_ones_own():
    class Squeezes(TrainingPhase):
        def loss(self, learner, outputs, targets):
            return learner.loss_fn(outputs, targets.squeeze(1))

    learner = make_learner(SanityCheck(), model=Flat(3, 1), phases=[Squeezes()])
    with pytest.warns(UserWarning, match=SHAPES):
        learner.fit(batches(3), epochs=1)
    assert learner.progress.updates == 3


def test_shapes_of_class_indices_pass():
    data = [(inputs, targets.squeeze(1).gt(0).long()) for inputs, targets in batches(2)]
    learner = make_learner(SanityCheck(), model=nn.Linear(3, 2))
    learner.loss_fn = nn.CrossEntropyLoss()
    assert learner.fit(data, data, epochs=1).updates == 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_shapes_are_checked_in_the_first_step_alone(accumulate):
    learner = make_learner(SanityCheck(), accumulate=accumulate)
    learner.loss_fn = lambda outputs, targets: outputs.mean()
    data = batches(3)
    data[1] = (data[1][0], data[1][1].squeeze(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.fit(data, epochs=1)
    assert learner.progress.steps == 3


# Nothing else


def test_sanity_check_runs_no_forward_and_takes_no_batch_of_its_own():
    forwards, taken = [], []

    class Counting(nn.Linear):
        def forward(self, inputs):
            forwards.append(1)
            return super().forward(inputs)

    def data():
        for batch in batches(3):
            taken.append(1)
            yield batch

    learner = make_learner(SanityCheck(), model=Counting(3, 1))
    learner.fit(data, data, epochs=2)
    assert len(forwards) == len(taken) == 12


def test_sanity_check_leaves_training_bitwise_alone():
    one, other = make_learner(SanityCheck()), make_learner()
    for learner in (one, other):
        learner.fit(batches(3), batches(1), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)


# Classes


def classifier(loss_fn, *more, outputs=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, outputs), *more)
    return Learner(model, loss_fn, sgd, plugins=[SanityCheck()], standard=False, **options)


def labelled(*labels, dtype=torch.long):
    return [(torch.ones(len(labels), 3), torch.tensor(labels, dtype=dtype))]


LOSSES = [
    nn.CrossEntropyLoss(),
    nn.functional.cross_entropy,
    nn.NLLLoss(),
    partial(nn.functional.nll_loss, weight=None),
]


@pytest.mark.parametrize("loss_fn", LOSSES, ids=["cross entropy", "its function", "likelihood", "partial"])
@pytest.mark.parametrize("label", [3, -1])
def test_target_that_is_no_class_is_refused_before_the_loss(loss_fn, label):
    learner = classifier(loss_fn)
    message = rf"phase 'train': a target is {label}, and outputs of shape \(4, 3\) have the classes 0 to 2: number"
    with pytest.raises(PhaseInputError, match=message):
        learner.fit(labelled(0, 1, label, 2), epochs=1)
    assert learner.progress.steps == 0


def test_target_that_is_no_class_is_refused_in_validation():
    with pytest.raises(PhaseInputError, match="phase 'val': a target is 5"):
        classifier(nn.CrossEntropyLoss()).fit(labelled(0, 1), labelled(0, 5), epochs=1)


def test_target_that_is_no_class_of_a_picture_is_refused():
    learner = classifier(nn.CrossEntropyLoss(), nn.Unflatten(1, (3, 1, 1)))
    with pytest.raises(PhaseInputError, match=r"a target is 9, and outputs of shape \(2, 3, 1, 1\)"):
        learner.fit([(torch.ones(2, 3), torch.tensor([0, 9]).reshape(2, 1, 1))], epochs=1)


@pytest.mark.parametrize(
    ("loss_fn", "labels"),
    [
        (nn.CrossEntropyLoss(), (0, -100)),
        (nn.CrossEntropyLoss(ignore_index=7), (0, 7)),
        (partial(nn.functional.cross_entropy, ignore_index=-1), (0, -1)),
        (lambda outputs, targets: outputs.sum(), (0, 99)),
    ],
)
def test_target_that_is_ignored_is_none_of_the_classes_rightly(loss_fn, labels):
    classifier(loss_fn).fit(labelled(*labels), epochs=1)


def test_targets_that_are_probabilities_are_no_classes():
    classifier(nn.CrossEntropyLoss()).fit([(torch.ones(2, 3), torch.eye(3)[:2])], epochs=1)


def test_target_that_is_no_class_in_a_phase_of_ones_own_is_warned_of():
    class Shifted(TrainingPhase):
        def loss(self, learner, outputs, targets):
            return super().loss(learner, outputs, targets - 1)

    with pytest.warns(UserWarning, match="a target is 3"):
        classifier(nn.CrossEntropyLoss(), phases=[Shifted()]).fit(labelled(1, 2, 3), epochs=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_before_the_cross_entropy_is_warned_of_once(dtype):
    learner = classifier(nn.CrossEntropyLoss(), nn.Softmax(1))
    learner.model.to(dtype)
    data = [(inputs.to(dtype), targets) for inputs, targets in labelled(0, 1, 2) * 3]
    with pytest.warns(
        UserWarning, match="outputs of all 3 samples sum to 1, as after a Softmax, .*: leave it out"
    ) as said:
        learner.fit(data, data, epochs=2)
    assert len(said) == 1


class SumsToOne(nn.Module):
    def forward(self, inputs):
        inputs = 9 * inputs
        return inputs - inputs.mean(1, keepdim=True) + 1 / inputs.shape[1]


@pytest.mark.parametrize(
    ("loss_fn", "layers"),
    [
        (nn.CrossEntropyLoss(), ()),
        (nn.CrossEntropyLoss(), (nn.LogSoftmax(1),)),
        (nn.CrossEntropyLoss(), (SumsToOne(),)),
        (nn.NLLLoss(), ()),
    ],
)
def test_outputs_that_are_no_probabilities_are_right(loss_fn, layers):
    classifier(loss_fn, *layers).fit(labelled(0, 1, 2), epochs=1)


# Checks of one's own


def test_checks_of_ones_own_are_called_once_a_phase_before_its_first_step():
    seen = []
    learner = make_learner(SanityCheck(checks=[lambda learner: seen.append(learner.progress.steps)]))
    learner.fit(batches(2), batches(1), epochs=2)
    assert seen == [0]


def test_what_a_check_says_or_raises_is_refused():
    def too_small(learner):
        return "the model has 4 parameters"

    def broken(learner):
        raise ZeroDivisionError

    with pytest.raises(PhaseError, match="too_small: the model has 4 parameters"):
        make_learner(SanityCheck(checks=[too_small])).fit(batches(2), epochs=1)
    with pytest.raises(ZeroDivisionError):
        make_learner(SanityCheck(checks=[broken])).fit(batches(2), epochs=1)
    with pytest.raises(PluginError, match="SanityCheck: 5 is no function"):
        SanityCheck(checks=[5])


def test_look_at_the_validation_is_a_plugin_elsewhere():
    with pytest.raises(TypeError, match=r"no argument 'val_batches': TryValidation\(batches\) of loopkit-insight"):
        SanityCheck(val_batches=2)


def rated(*plugins, lr=0.0, make=torch.optim.SGD):
    return Learner(
        nn.Linear(3, 1), nn.MSELoss(), lambda p: make(p, lr=lr), plugins=[SanityCheck(), *plugins], standard=False
    )


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_optimizer_whose_rates_are_0_is_named_when_the_fit_begins(lr):
    learner = rated(raising("step_begin", KeyError("the first step")), lr=lr, make=torch.optim.Adam)
    named = r"every rate of optimizer 'optimizer' \(Adam\) is 0 in the whole fit"
    with pytest.warns(UserWarning, match=named), pytest.raises(KeyError):
        learner.fit(batches(2), epochs=1)


@pytest.mark.parametrize(
    "plugin",
    [
        lambda: Schedule(constant(1.0)),
        lambda: TorchSchedule(lambda optimizer: StepLR(optimizer, 1)),
        lambda: Plateau("train/loss"),
    ],
)
def test_optimizer_whose_rates_stay_0_under_a_schedule_is_named_at_the_end(plugin):
    with pytest.warns(UserWarning, match="is 0 in the whole fit"):
        rated(plugin(), Metrics()).fit(batches(2), epochs=1)


@pytest.mark.parametrize(
    "schedule", [warmup(2, then=linear(2)), linear(4, start=0.0, end=1.0)], ids=["there and back", "from 0"]
)
def test_schedule_that_begins_at_0_is_not_named(schedule):
    rated(Schedule(schedule), lr=0.1).fit(batches(5), epochs=1)


def test_optimizer_of_which_one_group_has_a_rate_is_not_named():
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight], "lr": 0.0}, {"params": [model.bias], "lr": 0.1}]
    learner = Learner(model, nn.MSELoss(), torch.optim.SGD(groups), plugins=[SanityCheck()], standard=False)
    learner.fit(batches(2), epochs=1)


def test_each_fit_is_looked_at():
    learner = rated(lr=0.1)
    learner.fit(batches(2), epochs=1)
    learner.optimizer.param_groups[0]["lr"] = 0.0
    with pytest.warns(UserWarning, match="is 0 in the whole fit"):
        learner.fit(batches(2), epochs=1)
