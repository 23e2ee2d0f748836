"""Learner: what holds between its parts, and no one part's tests would notice."""

import copy
import functools
import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Event, Learner, Phase, TrainingPhase, hookimpl
from loopkit.errors import PhaseError, PhaseInputError, PluginError, StateError
from loopkit.events import BackwardEnd, StepEnd
from loopkit.plugins import History, LogMetrics, call_on

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def batches(count=4, samples=4):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(samples, n, generator=generator) for n in (3, 2)) for _ in range(count)]


def make(model=None, optimizer=SGD, **options):
    torch.manual_seed(0)
    return Learner(nn.Linear(3, 2) if model is None else model, nn.MSELoss(), optimizer, standard=False, **options)


@pytest.mark.parametrize("heard", [False, True])
def test_parameters_of_a_group_added_in_mid_epoch_are_cleared_like_the_others(heard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    torch.manual_seed(0)
    by_hand = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer, raw = SGD(model[1].parameters()), SGD(by_hand[1].parameters())

    def widen(step):
        if step.index == 0:
            optimizer.add_param_group({"params": model[0].parameters()})

    plugins = [call_on(StepEnd, widen)] + [call_on(BackwardEnd, lambda: None, name="listener")] * heard
    make(model, optimizer, plugins=plugins).run("train", batches())
    for index, (inputs, targets) in enumerate(batches()):
        by_hand.zero_grad()
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        raw.step()
        if index == 0:
            raw.add_param_group({"params": by_hand[0].parameters()})
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), by_hand.parameters(), strict=True))


@pytest.mark.parametrize("k", [3, 6, 7])
def test_full_window_of_equal_fractional_weights_is_the_textbook_loop(k):
    class Weighted(TrainingPhase):
        def step(self, learner, step):
            step.weight = 0.1
            super().step(learner, step)

    learner = make(nn.Linear(3, 2).double(), phases=[Weighted()], accumulate=k)
    by_hand = nn.Linear(3, 2).double()
    by_hand.load_state_dict(learner.model.state_dict())
    data = [(x.double(), y.double()) for x, y in batches(k)]
    learner.run("train", data)
    for inputs, targets in data:
        (nn.functional.mse_loss(by_hand(inputs), targets) / k).backward()
    SGD(by_hand.parameters()).step()
    assert all(torch.equal(p, q) for p, q in zip(learner.model.parameters(), by_hand.parameters(), strict=True))


@pytest.mark.parametrize("weights", [[0, 3, 5], [3, 0, 5], [3, 5, 0], [0, 0, 3], [0, 0, 0]])
def test_step_whose_weight_on_the_device_is_zero_counts_for_nothing(weights):
    class Weighted(TrainingPhase):
        def step(self, learner, step):
            step.weight = torch.tensor(weights[step.index])
            super().step(learner, step)

    learner = make(nn.Linear(3, 2).double(), phases=[Weighted()], accumulate=3)
    by_hand = nn.Linear(3, 2).double()
    by_hand.load_state_dict(learner.model.state_dict())
    data = [(x.double(), y.double()) for x, y in batches(3)]
    learner.run("train", data)
    for weight, (inputs, targets) in zip(weights, data, strict=True):
        (nn.functional.mse_loss(by_hand(inputs), targets) * weight / max(sum(weights), 1)).backward()
    SGD(by_hand.parameters()).step()
    for p, q in zip(learner.model.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-12)  # float64 sums of the order of 1, multiplied in another order


def test_update_that_closes_the_last_window_runs_without_autocast():
    class Around:
        @hookimpl
        def epoch_context(self):
            return torch.autocast("cpu", torch.bfloat16)

        @hookimpl
        def optimizer_step(self, default):
            seen.append(torch.is_autocast_enabled("cpu"))
            default()

    seen = []
    make(plugins=[Around()], accumulate=2).run("train", iter(batches(3)))
    assert seen == [False, False]


def test_update_that_closes_the_last_window_belongs_to_the_last_step_that_entered_it():
    class Look:
        @hookimpl
        def update_begin(self, step):
            seen.append((step.index, "outputs" in vars(step)))

    seen = []
    phase = TrainingPhase(skip_none=True)
    make(plugins=[Look()], phases=[phase], accumulate=2).run("train", iter([*batches(3), None]))
    assert seen == [(1, True), (2, True)]


def test_event_class_defined_again_is_still_the_one_that_the_phase_emits():
    namespace = {"Event": Event}
    cell = "class AgainBegin(Event): '''Twice.'''"
    exec(cell, namespace)

    class Emits(Phase):
        name = "emits"
        emits = (namespace["AgainBegin"],)

        def step(self, learner, step):
            step.emit(namespace["AgainBegin"])

    class Hears:
        @hookimpl
        def again_begin(self, step):
            seen.append(step.index)

    seen = []
    learner = make(phases=[Emits()], plugins=[Hears()])
    exec(cell, namespace)
    learner.run("emits", batches(2))
    assert seen == [0, 1]


def test_plugin_with_the_name_of_a_state_does_not_write_that_state():
    class Progress:
        name = "progress"

        @hookimpl(reads=("metrics",))
        def step_end(self):
            """Shows something."""

    class Rate:
        @hookimpl(reads=("progress",), writes=("metrics.train/rate",))
        def step_end(self):
            """Counts something."""

    rows = make(plugins=[Progress(), Rate()]).explain("train").rows
    assert [row.plugin for row in rows if row.hook == "step_end"] == ["rate", "progress"]


def test_explain_shows_fit_begin_in_the_order_in_which_it_runs():
    class Named:
        def __init__(self, name):
            self.name = name

        @hookimpl
        def fit_begin(self):
            ran.append(self.name)

    class Between:
        name = "c"

        @hookimpl(before=("b",), after=("a",))
        def fit_end(self):
            """Makes b begin before a."""

    ran = []
    learner = make(plugins=[Named("a"), Named("b"), Between()])
    with learner.rounds():
        pass
    assert [row.plugin for row in learner.explain().rows if row.hook == "fit_begin"] == ran == ["b", "a"]


def test_result_holds_no_metric_of_an_earlier_fit():
    learner = make(plugins=[call_on(StepEnd, lambda learner: learner.metrics.update({"x/y": 1.0}), name="once")])
    learner.fit(batches(), epochs=1)
    learner.remove("once")
    assert learner.fit(batches(), epochs=1).metrics == {}


def test_plugin_that_has_wrapped_a_model_cannot_be_removed():
    class Wrap:
        @hookimpl
        def setup_model(self, model):
            return nn.Sequential(model)

    learner = make(plugins=[Wrap()])
    with pytest.raises(
        PluginError, match="'wrap' has changed a model or an optimizer for good: build a new learner without it"
    ):
        learner.remove("wrap")
    assert list(learner.plugins) == ["wrap"]


def test_dataset_of_samples_is_no_data():
    with pytest.raises(PhaseInputError, match="TensorDataset, which gives samples, not batches: DataLoader"):
        make().fit(TensorDataset(torch.zeros(8, 3), torch.zeros(8, 2)), epochs=1)


def test_tuple_of_tensors_is_no_data():
    with pytest.raises(PhaseInputError, match="one batch, or whole tensors"):
        make().predict((torch.zeros(8, 3), torch.zeros(8, 2)))


class Outputs(dict):
    """Outputs that note when and where they are moved."""

    moved: ClassVar[list] = []

    def to(self, device):
        self.moved.append((device.type, len(self["made"])))
        return self


def test_outputs_are_moved_to_the_host_batch_by_batch():
    made = []

    class Model(nn.Module):
        def forward(self, inputs):
            made.append(len(inputs))
            return Outputs(made=inputs)

    learner = make(model=Model(), optimizer=None)
    Outputs.moved.clear()
    learner.predict([(torch.zeros(size, 3), None) for size in (4, 3)])
    assert Outputs.moved == [("cpu", 4), ("cpu", 3)]
    learner.predict([(torch.zeros(2, 3), None)], device=None)
    assert len(Outputs.moved) == 2


def test_outputs_go_where_they_are_asked_for():
    learner = make(model=nn.Linear(3, 1, device="meta"), optimizer=None)
    data = [(torch.zeros(4, 3, device="meta"), None)] * 2
    for device in (None, "meta", torch.device("meta")):
        assert learner.predict(data, device=device).device.type == "meta"


@pytest.mark.gpu
def test_outputs_on_a_device_are_moved_to_the_host_by_default():
    learner = make(model=nn.Linear(3, 1_000_000, device="cuda"))
    data = [(torch.zeros(4, 3, device="cuda"), None)] * 20  # 16 MB of outputs each
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = learner.predict(data)
    assert (outputs.device.type, len(outputs)) == ("cpu", 80)
    assert torch.cuda.max_memory_allocated() - before < 4 * 16e6
    assert learner.predict(data, device=None).is_cuda


def test_one_plugin_is_no_list_of_plugins():
    with pytest.raises(PluginError, match="give a list, plugins="):
        make(plugins=object())


@pytest.mark.parametrize("phases", [TrainingPhase(), "train"])
def test_one_phase_is_no_list_of_phases(phases):
    with pytest.raises(PhaseError, match=r"phases is .*: give a list, phases=\[\.\.\.\]"):
        make(phases=phases)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            nn.CrossEntropyLoss,
            "loss_fn is the class CrossEntropyLoss, not a function: give an instance, loss_fn=CrossEntropyLoss()",
        ),
        (
            "ce",
            "loss_fn is 'ce', which cannot be called: give a function of outputs and targets, such as "
            "torch.nn.CrossEntropyLoss()",
        ),
    ],
)
def test_loss_fn_that_is_no_function_is_refused_when_the_learner_is_built(loss_fn, message):
    with pytest.raises(PhaseError) as caught:
        Learner(nn.Linear(3, 2), loss_fn, SGD)
    assert str(caught.value) == message


def test_order_and_the_standard_set_are_told():
    assert make(order=["noise", "clip"]).options.order == [["noise", "clip"]]
    assert make(order=[["a", "b"], ["b", "c"]]).options.order == [["a", "b"], ["b", "c"]]
    assert (make().options.order, make().options.standard) == ([], [])
    learner = Learner(nn.Linear(3, 2), nn.MSELoss(), SGD, plugins=[History()])
    learner.remove("metrics", "progress")
    names = ["metrics", "progress", "sanity_check", "stop_on_non_finite"]
    assert [plugin.name for plugin in learner.options.standard] == names


@pytest.mark.parametrize("kind", [list, tuple])
def test_list_of_loaders_is_refused_as_validation_before_anything_begins(kind):
    learner, batch = make(), (torch.zeros(8, 3), torch.zeros(8, 2))
    with pytest.raises(PhaseInputError, match=r'give several sets by name, \{"val": a, "ood": b\}'):
        learner.fit([batch], kind([DataLoader([0, 1]), DataLoader([0, 1])]), epochs=1)
    assert learner.progress.steps == 0


@pytest.mark.parametrize("groups", ["None", "without", "mixed"])
def test_optimizer_without_a_rate_is_shown_and_logged(groups):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            pass

    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    optimizer = Own([{"params": layer.parameters()} for layer in model], lr=0.1)
    for group in optimizer.param_groups[: 1 if groups == "mixed" else 2]:
        group.pop("lr") if groups == "without" else group.update(lr=None)
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[LogMetrics()])
    assert ("Own lr 0.1" if groups == "mixed" else "Own, ") in repr(learner)
    learner.fit([(torch.ones(2, 3), torch.ones(2, 1))], epochs=1)


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps, lambda learner: copy.deepcopy([learner])])
def test_learner_that_is_copied_or_pickled_raises_with_the_way_out(act):
    learner = make(plugins=[History()])
    learner.run("train", batches())
    with pytest.raises(StateError, match=r"cannot be copied or pickled.*other\.load_state_dict\(learner\.state_dict"):
        act(learner)


def test_learner_is_copied_by_its_state():
    learner = make(optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), plugins=[History()])
    learner.run("train", batches())
    other = make(optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), plugins=[History()])
    other.load_state_dict(learner.state_dict())
    for each in (learner, other):
        each.run("train", batches())
    assert all(map(torch.equal, learner.model.parameters(), other.model.parameters()))


def test_model_of_a_learner_is_copied_and_pickled():
    learner = make(plugins=[History()])
    learner.run("train", batches())
    for other in (copy.deepcopy(learner.model), pickle.loads(pickle.dumps(learner.model))):
        assert all(map(torch.equal, learner.model.parameters(), other.parameters()))
