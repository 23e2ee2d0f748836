"""Frozen parameters and modules in eval mode, against loops by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from loopkit_testing import check_plugin
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

from loopkit import Learner, TrainingPhase, every, hookimpl
from loopkit.errors import PluginConflict, PluginError
from loopkit.plugins.freeze import EvalMode, Freeze

EPOCHS, LENGTH = 4, 3


class Encoder(nn.Module):
    def __init__(self, affine=True):
        super().__init__()
        self.layer1, self.norm, self.dropout = nn.Linear(4, 6), nn.BatchNorm1d(6, affine=affine), nn.Dropout(0.3)
        self.layer2 = nn.Linear(6, 6)

    def forward(self, inputs):
        return self.layer2(self.dropout(self.norm(self.layer1(inputs))))


class Model(nn.Module):
    def __init__(self, affine=True):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.head = Encoder(affine), nn.Linear(6, 1)

    def forward(self, inputs):
        return self.head(self.encoder(inputs).tanh())


def make_batches(count=LENGTH):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(5, 4, generator=generator), torch.randn(5, 1, generator=generator)) for _ in range(count)]


def sgd(params):
    return SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(params):
    return AdamW(params, lr=0.1)


optimizers = pytest.mark.parametrize("make_optimizer", [sgd, adamw])


def by_hand(make_optimizer, prepare, epochs=EPOCHS, epoch_begin=lambda model, epoch: None, affine=True):
    """``prepare(model)`` comes before the optimizer is made, ``epoch_begin`` after the model is in train mode."""
    model = Model(affine)
    prepare(model)
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(3)
    for epoch in range(epochs):
        model.train()
        epoch_begin(model, epoch)
        for inputs, targets in make_batches():
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return model


def learner_of(*plugins, make_optimizer=sgd, affine=True):
    return Learner(Model(affine), mse_loss, make_optimizer, plugins=plugins, standard=False)


def learned(make_optimizer, *plugins, epochs=EPOCHS, affine=True):
    learner = learner_of(*plugins, make_optimizer=make_optimizer, affine=affine)
    torch.manual_seed(3)
    learner.fit(make_batches(), make_batches(1), epochs=epochs)
    return learner


def assert_same(one, other):
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


# Freeze, against loops by hand


@optimizers
def test_freeze_equals_a_hand_loop_with_batch_norm_in_eval_mode(make_optimizer):
    hand = by_hand(
        make_optimizer,
        lambda model: model.encoder.requires_grad_(False),
        epoch_begin=lambda model, epoch: model.encoder.norm.eval(),
    )
    assert_same(learned(make_optimizer, Freeze("encoder.*")).model, hand)


def test_freeze_without_norms_lets_the_running_statistics_go_on():
    hand = by_hand(sgd, lambda model: model.encoder.requires_grad_(False))
    assert_same(learned(sgd, Freeze("encoder", norms=False)).model, hand)


def test_freeze_of_a_norms_bias_alone_leaves_the_norm_in_train_mode():
    hand = by_hand(sgd, lambda model: model.encoder.norm.bias.requires_grad_(False))
    assert_same(learned(sgd, Freeze("*.norm.bias")).model, hand)


def test_freeze_keeps_a_covered_norm_without_parameters_in_eval_mode():
    hand = by_hand(
        sgd,
        lambda model: model.encoder.requires_grad_(False),
        epoch_begin=lambda model, epoch: model.encoder.norm.eval(),
        affine=False,
    )
    assert_same(learned(sgd, Freeze("encoder"), affine=False).model, hand)


@optimizers
def test_freeze_with_epochs_thaws_at_their_begin_as_by_hand(make_optimizer):
    def epoch_begin(model, epoch):
        if epoch == 1:
            model.encoder.layer2.requires_grad_(True)
        if epoch == 3:
            model.encoder.requires_grad_(True)
        model.encoder.norm.train(epoch >= 3)

    hand = by_hand(make_optimizer, lambda model: model.encoder.requires_grad_(False), epoch_begin=epoch_begin)
    plugin = Freeze({"encoder.layer2": 1, "encoder": 3})
    assert_same(learned(make_optimizer, plugin).model, hand)


def test_thaw_in_the_middle_of_an_epoch_equals_a_hand_loop():
    class ThawAt:
        @hookimpl
        def step_end(self, learner, step):
            if learner.progress.steps == 4:
                learner.plugins["freeze"].thaw("encoder")

    model = Model()
    model.encoder.requires_grad_(False)
    optimizer = sgd(model.parameters())
    torch.manual_seed(3)
    model.train()
    model.encoder.norm.eval()
    for step, (inputs, targets) in enumerate(make_batches() * 2):
        if step == 4:
            model.encoder.requires_grad_(True)
            model.encoder.norm.train()
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    learner = learner_of(Freeze("encoder"), ThawAt())
    torch.manual_seed(3)
    learner.fit(make_batches(), epochs=2)
    assert_same(learner.model, model)


def test_freeze_does_not_move_parameters_that_had_a_gradient():
    model = Model()
    mse_loss(model(make_batches()[0][0]), make_batches()[0][1]).backward()
    before = copy.deepcopy(model.encoder.layer1.state_dict())
    learner = Learner(model, mse_loss, sgd(model.parameters()), plugins=[Freeze("encoder")], standard=False)
    learner.fit(make_batches(), epochs=1)
    for name, value in model.encoder.layer1.state_dict().items():
        assert torch.equal(value, before[name])


def test_freeze_drops_the_gradients_that_there_were():
    model = Model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    Learner(model, plugins=[Freeze("encoder")], standard=False)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight", "head.bias"]


def test_thaw_lets_a_norm_without_parameters_go_on():
    def epoch_begin(model, epoch):
        model.encoder.requires_grad_(epoch >= 2)
        model.encoder.norm.train(epoch >= 2)

    hand = by_hand(sgd, lambda model: model.encoder.requires_grad_(False), epoch_begin=epoch_begin, affine=False)
    assert_same(learned(sgd, Freeze({"encoder": 2}), affine=False).model, hand)


# Freeze: what it covers


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["encoder"], ["head.weight", "head.bias"]),
        (["encoder.layer?", "encoder.norm"], ["head.weight", "head.bias"]),
        (["*.weight"], ["encoder.layer1.bias", "encoder.norm.bias", "encoder.layer2.bias", "head.bias"]),
        (["encoder|head.bias"], ["head.weight"]),
    ],
)
def test_freeze_covers_what_its_patterns_match(patterns, expected):
    assert trainable(learner_of(Freeze(*patterns)).model) == expected


def test_freeze_of_one_of_several_models_leaves_the_other_alone():
    models = {"generator": Model(), "critic": Model()}
    Learner(models, plugins=[Freeze("generator.encoder.*")], standard=False)
    assert trainable(models["generator"]) == ["head.weight", "head.bias"]
    assert len(trainable(models["critic"])) == 8


def test_freeze_of_one_name_of_a_shared_parameter_freezes_it():
    model = nn.ModuleDict({"embed": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
    model["head"].weight = model["embed"].weight
    Learner(model, plugins=[Freeze("head.weight")], standard=False)
    assert trainable(model) == ["embed.bias", "head.bias"]


def test_thaw_leaves_what_was_not_trainable_before():
    model = Model()
    model.encoder.layer1.requires_grad_(False)
    freeze = Freeze("encoder")
    Learner(model, plugins=[freeze], standard=False)
    freeze.thaw("*")
    assert [name for name, _ in model.named_parameters() if name not in trainable(model)] == [
        "encoder.layer1.weight",
        "encoder.layer1.bias",
    ]


def test_is_frozen_tells_of_modules_parameters_and_patterns():
    freeze = Freeze("encoder.layer1")
    learner_of(freeze)
    paths = ["encoder.layer1", "encoder.layer1.bias", "encoder", "head", "*.layer1"]
    assert [freeze.is_frozen(path) for path in paths] == [True, True, False, False, True]


def test_thaw_ends_what_is_frozen():
    freeze = Freeze("encoder")
    learner_of(freeze)
    freeze.thaw("encoder.layer1")
    assert (freeze.is_frozen("encoder.layer1"), freeze.is_frozen("encoder.layer2")) == (False, True)


def test_freeze_with_an_epoch_for_all_thaws_at_its_begin():
    one, other = learner_of(Freeze("encoder", thaw_at=1)), learner_of(Freeze({"encoder": 1}))
    for learner in (one, other):
        torch.manual_seed(1)
        learner.fit(make_batches(), epochs=2)
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))
    assert not one.plugins["freeze"].is_frozen("encoder.layer1")


def test_what_was_thawed_is_frozen_again_and_stays_so_over_a_state():
    def learner():
        return learner_of(Freeze("encoder", {"encoder.layer1": 1}))

    first = learner()
    freeze = first.plugins["freeze"]
    first.fit(make_batches(), epochs=2)
    freeze.freeze("encoder.layer1.bias")
    assert [freeze.is_frozen(f"encoder.layer1.{name}") for name in ("bias", "weight")] == [True, False]
    before = first.model.encoder.layer1.bias.clone()
    again = learner()
    again.load_state_dict(first.state_dict())
    for each in (first, again):
        each.fit(make_batches(), epochs=1)
        assert torch.equal(each.model.encoder.layer1.bias, before)
    assert torch.equal(first.model.encoder.layer1.weight, again.model.encoder.layer1.weight)
    freeze.thaw("encoder")
    assert not freeze.is_frozen("encoder.layer1.bias")


def test_freeze_of_what_its_patterns_do_not_cover_is_refused():
    freeze = Freeze("encoder")
    learner_of(freeze)
    with pytest.raises(PluginError, match="'head' covers none of encoder"):
        freeze.freeze("head")


def test_freeze_leaves_the_modes_as_they_were_after_a_fit():
    learner = learner_of(Freeze("encoder"))
    learner.model.train()
    learner.fit(make_batches(), make_batches(1), epochs=1)
    assert all(module.training for module in learner.model.modules())


def test_freeze_keeps_the_norm_in_eval_mode_after_a_validation_in_mid_epoch():
    class Modes:
        def __init__(self):
            self.seen = []

        @hookimpl(phase=TrainingPhase)
        def step_begin(self, learner):
            self.seen.append((learner.model.encoder.norm.training, learner.model.head.training))

    modes = Modes()
    learner_of(Freeze("encoder"), modes).fit(make_batches(), make_batches(1), epochs=1, validate=every(updates=1))
    assert modes.seen == [(False, True)] * LENGTH


# Freeze: state


def test_freeze_goes_on_from_its_state():
    def plugin():
        return Freeze("encoder", {"encoder.layer2": 3})

    first = learner_of(plugin())
    first.plugins["freeze"].thaw("encoder.norm")
    second = learner_of(plugin())
    second.plugins["freeze"].load_state_dict(copy.deepcopy(first.plugins["freeze"].state_dict()))
    assert trainable(second.model) == trainable(first.model)
    assert second.plugins["freeze"].state_dict() == first.plugins["freeze"].state_dict()


def test_freeze_freezes_again_what_its_state_says():
    learner = learner_of(Freeze("encoder"))
    freeze = learner.plugins["freeze"]
    state = copy.deepcopy(freeze.state_dict())
    freeze.thaw("*")
    freeze.load_state_dict(state)
    assert freeze.is_frozen("encoder")


def test_freeze_takes_a_state_before_it_has_a_model():
    first = learner_of(Freeze("encoder"))
    first.plugins["freeze"].thaw("encoder.norm")
    freeze = Freeze("encoder")
    freeze.load_state_dict(first.plugins["freeze"].state_dict())
    assert trainable(learner_of(freeze).model) == trainable(first.model)


def test_freeze_refuses_a_state_of_other_parameters():
    learner = learner_of(Freeze("encoder"))
    with pytest.raises(PluginError, match=r"frozen parameters head\.weight are not frozen"):
        learner.plugins["freeze"].load_state_dict({"frozen": ["head.weight"], "thawed": []})


# What is refused


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["encodre"], r"'encodre' has no match \(did you mean 'encoder'\?\); there are: encoder.layer1.weight"),
        (["encodre.*"], r"did you mean 'encoder.\*'"),
        ([{"encoder.layer3": 2}], r"did you mean 'encoder.layer[12]'"),
        (["*.wieght"], r"did you mean '\*.weight'"),
        (["encoder", "xyz"], r"'xyz' has no match; there are"),
    ],
)
def test_freeze_of_nothing_is_refused_when_the_learner_is_built(patterns, message):
    with pytest.raises(PluginError, match=message):
        learner_of(Freeze(*patterns))


@pytest.mark.parametrize("verb", ["thaw", "is_frozen"])
def test_unknown_paths_are_refused(verb):
    learner = learner_of(Freeze("encoder"))
    with pytest.raises(PluginError, match=r"did you mean 'encoder.layer[12]'"):
        getattr(learner.plugins["freeze"], verb)("encoder.layer3")


@pytest.mark.parametrize("patterns", [[], [{"encoder": -1}], [{"encoder": 1.5}], [{}]])
def test_freeze_refuses_arguments_out_of_range(patterns):
    with pytest.raises(PluginError, match=r"give patterns|it is a whole number, from 0"):
        Freeze(*patterns)


# EvalMode


def test_eval_mode_equals_a_hand_loop():
    hand = by_hand(sgd, lambda model: None, epoch_begin=lambda model, epoch: model.encoder.eval())
    assert_same(learned(sgd, EvalMode("encoder")).model, hand)


def test_eval_mode_of_dropout_alone_equals_a_hand_loop():
    hand = by_hand(sgd, lambda model: None, epoch_begin=lambda model, epoch: model.encoder.dropout.eval())
    assert_same(learned(sgd, EvalMode("*.dropout")).model, hand)


def test_eval_mode_goes_together_with_freeze():
    def epoch_begin(model, epoch):
        model.encoder.eval()

    hand = by_hand(sgd, lambda model: model.encoder.requires_grad_(False), epoch_begin=epoch_begin)
    assert_same(learned(sgd, EvalMode("encoder"), Freeze("encoder")).model, hand)


def test_eval_mode_leaves_the_modes_as_they_were_after_a_fit():
    learner = learned(sgd, EvalMode("encoder"), epochs=1)
    assert all(module.training for module in learner.model.modules())


@pytest.mark.parametrize(
    ("patterns", "message"), [(["*.dropuot"], r"did you mean '\*.dropout'"), ([], "give patterns")]
)
def test_eval_mode_of_nothing_is_refused(patterns, message):
    with pytest.raises(PluginError, match=message):
        learner_of(EvalMode(*patterns))


# The contract


@pytest.mark.parametrize(
    ("factory", "skip"),
    [
        (lambda: Freeze("0|1"), ["unknown_phases"]),  # models with other names
        (lambda: EvalMode("1|3"), ["unknown_phases"]),
    ],
    ids=["freeze", "eval_mode"],
)
def test_plugin_keeps_the_contract(factory, skip):
    check_plugin(factory, skip=skip)


# Who decides what is trained


class Unfreezes:
    """Says what it does, or not; and does it when an event comes."""

    def __init__(self, pattern=None, hook="epoch_begin"):
        self.owns = () if pattern is None else (f"trainable.{pattern}",)
        self.hook = hook

    def _thaw(self, learner, hook):
        if hook == self.hook:
            learner.model.encoder.layer1.weight.requires_grad_(True)

    @hookimpl
    def fit_begin(self, learner):
        self._thaw(learner, "fit_begin")

    @hookimpl(phase=TrainingPhase)
    def step_begin(self, learner):
        self._thaw(learner, "step_begin")


@pytest.mark.parametrize("pattern", ["encoder", "*.layer1", "encoder.layer1.weight", "head|encoder.layer1"])
def test_two_owners_of_a_parameter_are_refused(pattern):
    message = r"'freeze' and 'unfreezes' both own \"trainable\" of parameter 'encoder.layer1.weight'"
    with pytest.raises(PluginConflict, match=message):
        learner_of(Freeze("encoder.layer?"), Unfreezes(pattern))
    learner = learner_of(Freeze("encoder.layer?"))
    with pytest.raises(PluginConflict, match=message):
        learner.add(Unfreezes(pattern))
    assert list(learner.plugins) == ["freeze"]


def test_owners_of_different_parameters_go_together():
    learner = learner_of(Freeze("encoder"), Unfreezes("head"))
    assert trainable(learner.model) == ["head.weight", "head.bias"]


def test_owner_of_all_parameters_is_refused_beside_a_pattern():
    everything = Unfreezes()
    everything.owns = ("trainable",)
    with pytest.raises(PluginConflict, match="'freeze' and 'unfreezes' both own"):
        learner_of(Freeze("encoder"), everything)


@pytest.mark.parametrize(("hook", "steps"), [("fit_begin", 0), ("step_begin", len(make_batches()))])
def test_what_something_else_thaws_is_refused(hook, steps):
    learner = learner_of(Freeze("encoder"), Unfreezes(hook=hook))
    with pytest.raises(PluginError, match=r"plugin 'freeze' keeps parameter 'encoder.layer1.weight' frozen, and"):
        learner.fit(make_batches(), epochs=2)
    assert (learner.progress.epochs, learner.progress.steps) == (0, steps)


def test_what_the_plugin_itself_thaws_is_not_refused():
    freeze = Freeze("encoder")
    learner = learner_of(freeze)
    freeze.thaw("encoder.layer1")
    learner.fit(make_batches(), epochs=1)
    assert learner.progress.epochs == 1


# Removed


def flags(model):
    return {name: p.requires_grad for name, p in model.named_parameters()}


def frozen_learner(*plugins):
    model = Model()
    model.head.bias.requires_grad = False
    return Learner(model, mse_loss, sgd, plugins=plugins, standard=False)


def test_removed_freeze_thaws_what_it_froze_and_nothing_else():
    learner = frozen_learner(Freeze("encoder", "head"))
    assert not any(flags(learner.model).values())
    learner.remove("freeze")
    assert [name for name, trained in flags(learner.model).items() if not trained] == ["head.bias"]
    learner.add(Freeze("encoder.layer1"))
    assert [name for name, trained in flags(learner.model).items() if not trained] == [
        "encoder.layer1.weight",
        "encoder.layer1.bias",
        "head.bias",
    ]


def test_replaced_freeze_gives_way_to_the_new_one():
    learner = frozen_learner(Freeze("encoder"))
    learner.replace("freeze", Freeze("encoder.layer1"))
    assert not learner.model.encoder.layer1.weight.requires_grad
    assert learner.model.encoder.layer2.weight.requires_grad


def test_freeze_that_could_not_be_replaced_freezes_as_before():
    freeze = Freeze("encoder.layer1", "encoder.layer2")
    learner = frozen_learner(freeze)
    freeze.thaw("encoder.layer2")
    before = flags(learner.model)
    with pytest.raises(PluginError, match="has no match"):
        learner.replace("freeze", Freeze("head", "nothing"))
    assert flags(learner.model) == before
    assert not freeze.is_frozen("encoder.layer2")


def test_freeze_that_is_added_beside_what_fails_freezes_nothing():
    learner = frozen_learner()
    before = flags(learner.model)
    with pytest.raises(PluginError, match="has no match"):
        learner.add(Freeze("head"), EvalMode("nothing"))
    assert flags(learner.model) == before


def test_norm_that_a_freeze_kept_in_eval_mode_trains_after_its_removal():
    class Removes:
        optional = ("epoch_begin",)

        @hookimpl(phase="training")
        def epoch_begin(self, learner):
            learner.remove("freeze")

        @hookimpl(phase="training")
        def step_end(self, learner):
            assert learner.model.encoder.norm.training

    learner = frozen_learner(Freeze("encoder"), Removes())
    learner.fit([(torch.randn(4, 4), torch.randn(4, 1))], epochs=1)
