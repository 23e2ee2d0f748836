"""What a training phase must do, and what it must leave to the engine."""

from __future__ import annotations

import pytest
import torch
from helpers import on
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import CancelStep, Learner, Phase, TrainingPhase, ValidationPhase
from loopkit.errors import PhaseError, StepResultError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def make_batches(count=6):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def make_learner(phase, accumulate=1, **options):
    torch.manual_seed(0)
    options = {"standard": False, "optimizer": sgd, **options}
    return Learner(nn.Linear(3, 2), mse_loss, phases=[phase], accumulate=accumulate, **options)


# A zero_grad that was left in a phase


class Clearing(TrainingPhase):
    """As a loop by hand, which clears the gradients itself."""

    def __init__(self, first, to_none):
        super().__init__()
        self.first, self.to_none = first, to_none

    def step(self, learner, step):
        if self.first:
            learner.optimizer.zero_grad(set_to_none=self.to_none)
        super().step(learner, step)
        if not self.first:
            learner.optimizer.zero_grad(set_to_none=self.to_none)


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "in place"])
@pytest.mark.parametrize("first", [True, False], ids=["first in the step", "last in the step"])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_zero_grad_that_throws_gradients_of_a_window_away_is_refused(first, to_none, accumulate):
    learner = make_learner(Clearing(first, to_none), accumulate)
    with pytest.raises(PhaseError) as raised:
        learner.fit(make_batches(), epochs=1)
    message = str(raised.value)
    assert message.startswith("phase 'train', step 1: the gradients of the 1 step before it are gone")
    assert f"an update that takes {accumulate}" in message
    assert "delete line " in message
    assert "'learner.optimizer.zero_grad(set_to_none=self.to_none)'; the engine clears" in message


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_where_each_step_is_an_update_does_no_harm(to_none):
    learners = [make_learner(phase) for phase in (Clearing(True, to_none), TrainingPhase())]
    for learner in learners:
        learner.fit(make_batches(), epochs=2)
    assert torch.equal(*(learner.model.weight for learner in learners))


class Twice(TrainingPhase):
    """Clears the gradients between the two backwards of a step."""

    steps = range(99)

    def step(self, learner, step):
        inputs, targets = step.batch
        for _ in range(2):
            if step.index in self.steps:
                learner.optimizer.zero_grad()
            step.backward(learner.loss_fn(learner.model(inputs), targets))
        step.update()


def test_zero_grad_between_two_backwards_of_a_step_is_refused_within_a_window_alone():
    make_learner(Twice()).fit(make_batches(), epochs=1)
    phase = Twice()
    phase.steps = (0,)
    make_learner(phase, 2).fit(make_batches(), epochs=1)  # there was no step before it
    with pytest.raises(PhaseError, match="gradients of the 1 step before it are gone"):
        make_learner(Twice(), 2).fit(make_batches(), epochs=1)


class Silent(TrainingPhase):
    """A loss whose gradients are 0."""

    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * 0.0


def test_gradients_that_are_zero_are_none_that_were_thrown_away():
    learner = make_learner(Silent(), 3)
    learner.fit(make_batches(), epochs=2)
    assert learner.progress.updates == 4


def test_gradients_that_a_plugin_changes_in_place_between_two_steps_are_none_that_were_thrown_away():
    learner = make_learner(TrainingPhase(), 3)
    learner.add(
        on("step_end", lambda learner: [p.grad.mul_(0.5) for p in learner.model.parameters() if p.grad is not None])
    )
    learner.fit(make_batches(), epochs=2)
    assert learner.progress.updates == 4


# step.backward and step.update


class Forgetful(TrainingPhase):
    """Calls some of the two."""

    def __init__(self, backward=False, update=False):
        super().__init__()
        self.backward, self.update = backward, update

    def step(self, learner, step):
        inputs, targets = step.batch
        step.loss = learner.loss_fn(learner.model(inputs), targets)
        if self.backward:
            step.backward(step.loss)
        if self.update:
            step.update()


@pytest.mark.parametrize("standard", [False, True])
def test_step_without_backward_is_refused_after_the_first(standard):
    learner = make_learner(Forgetful(), standard=standard)
    with pytest.raises(StepResultError, match=r"Forgetful.step called no step.backward\(loss\), so nothing is learned"):
        learner.fit(make_batches(3), epochs=1)
    assert learner.progress.steps == 0


@pytest.mark.parametrize("standard", [False, True])
def test_step_without_update_is_refused_after_the_first(standard):
    learner = make_learner(Forgetful(backward=True), standard=standard)
    with pytest.raises(StepResultError, match=r"Forgetful.step called step.backward\(loss\) but not step.update\(\)"):
        learner.fit(make_batches(3), epochs=1)
    assert learner.progress.updates == 0


def test_step_without_update_is_refused_after_the_first_full_window():
    learner = make_learner(Forgetful(backward=True), accumulate=3)
    with pytest.raises(StepResultError, match=r"but not step.update"):
        learner.fit(make_batches(), epochs=1)
    assert learner.progress.steps == 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_step_with_both_passes(accumulate):
    learner = make_learner(Forgetful(True, True), accumulate)
    assert learner.fit(make_batches(7), epochs=2).reason == "epochs"


def test_loop_of_ones_own_is_looked_at_too():
    with pytest.raises(StepResultError, match=r"no step.backward"), make_learner(Forgetful()).epoch("train") as epoch:
        epoch.step(make_batches(1)[0])


def test_step_is_looked_at_after_a_cancelled_one():
    def cancel(step, **_):
        if step.index == 0:
            raise CancelStep("not this one")

    learner = make_learner(Forgetful(), plugins=[on("step_begin", cancel)])
    with pytest.raises(StepResultError, match=r"no step.backward"):
        learner.fit(make_batches(3), epochs=1)


class Leaves(TrainingPhase):
    """Returns from its step early."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def step(self, learner, step):
        if self.before == "the forward":
            return
        step.outputs = self.forward(learner, step.batch[0])
        if self.before == "the loss":
            return
        step.loss = self.loss(learner, step.outputs, step.batch[1])


@pytest.mark.parametrize("before", ["the forward", "the loss", "the backward"])
def test_early_return_at_the_first_batch_names_both_ways_out(before):
    with pytest.raises(StepResultError, match=r"calls step.skip\(\), or raises CancelStep, which leaves it out"):
        make_learner(Leaves(before)).fit(make_batches(), epochs=1)


class Bare(Phase):
    """Neither differentiates nor updates, and lists no events of that."""

    name = "bare"
    training = True

    def step(self, learner, step):
        step.outputs = learner.model(step.batch[0])


class Skipping(Bare):
    def step(self, learner, step):
        super().step(learner, step)
        step.skip()


class BareInItsOwnWay(Bare):
    own_updates = True


def test_phase_that_lists_no_events_of_updates_is_looked_at_too():
    with pytest.raises(StepResultError, match=r"Bare.step called no step.backward.*step.skip\(\), or raises Cancel"):
        make_learner(Bare()).run("bare", make_batches(2))


@pytest.mark.parametrize(
    ("phase", "options"),
    [(Skipping(), {}), (BareInItsOwnWay(), {}), (Bare(), {"optimizer": None})],
    ids=["step.skip", "own_updates", "no optimizer"],
)
def test_phase_that_trains_nothing_by_intent_passes(phase, options):
    learner = make_learner(phase, **options)
    learner.run("bare", make_batches(2))
    assert (learner.progress.steps, learner.progress.updates) == (2, 0)


class Critic(Phase):
    """Two optimizers, of which one is not used in each step."""

    name = "critic"
    training = True
    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd)

    def step(self, learner, step):
        inputs, _ = step.batch
        critic, generator = learner.models["critic"], learner.models["generator"]
        step.backward(critic(inputs).mean(), "critic")
        step.update("critic")
        if step.index % 2:
            step.backward(critic(generator(inputs)).mean(), "generator")
            step.update("generator")


def test_phase_with_an_optimizer_used_now_and_then_passes():
    models = {"critic": nn.Linear(3, 1), "generator": nn.Linear(3, 3)}
    learner = Learner(models, None, dict.fromkeys(models, sgd), standard=False)
    learner.run(Critic(), make_batches(4))
    assert learner.progress.updates == 6


def test_skipped_update_passes():
    skip = on("update_begin", lambda step, **_: step.skip_update("not this one"))
    assert make_learner(TrainingPhase(), plugins=[skip]).fit(make_batches(3), epochs=1).updates == 0


# Calls of torch that were kept


class Kept(TrainingPhase):
    """As it was in the loop by hand."""

    def step(self, learner, step):
        inputs, targets = step.batch
        loss = learner.loss_fn(learner.model(inputs), targets)
        loss.backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()


def test_kept_optimizer_step_is_refused_before_it_updates():
    learner = make_learner(Kept())
    before = learner.model.weight.clone()
    with pytest.raises(
        PhaseError, match=r"Kept.step calls optimizer.step\(\), past the plugins.*write step.update\(\)"
    ) as e:
        learner.fit(make_batches(), epochs=1)
    assert torch.equal(learner.model.weight, before)
    assert "learner.optimizer.step()" in str(e.traceback[-2].statement) + str(e.traceback[-3].statement)


class KeptBackward(Kept):
    def step(self, learner, step):
        inputs, targets = step.batch
        loss = learner.loss_fn(learner.model(inputs), targets)
        loss.backward()


def test_kept_backward_is_named_with_its_line():
    line = r"write step.backward\(loss\) in the place of line \d+ of .*test_training_phases.py, 'loss.backward\(\)'"
    with pytest.raises(StepResultError, match=line):
        make_learner(KeptBackward()).fit(make_batches(), epochs=1)


class Both(TrainingPhase):
    """Updates twice."""

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        learner.optimizer.step()
        step.update()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_optimizer_step_beside_an_update_is_refused(accumulate):
    with pytest.raises(PhaseError, match=r"Both.step calls optimizer.step\(\)"):
        make_learner(Both(), accumulate).fit(make_batches(), epochs=1)


class Unlisted(Both):
    emits = (BackwardBegin, BackwardEnd)

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        learner.optimizer.step()


class Inherited(Unlisted):
    pass


class Helped(Unlisted):
    """Steps in a function that knows nothing of the phase."""

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        advance(learner.optimizer)


def advance(optimizer):
    optimizer.step()


def instance_phase():
    phase = Both()
    phase.step = lambda learner, step: Unlisted.step(phase, learner, step)
    return phase


class Scaled(Unlisted):
    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        torch.amp.GradScaler("cpu", enabled=False).step(learner.optimizer)


class InAHook(TrainingPhase):
    """Updates while a backward runs."""

    def step(self, learner, step):
        handle = learner.model.weight.register_post_accumulate_grad_hook(lambda p: learner.optimizer.step())
        try:
            super().step(learner, step)
        finally:
            handle.remove()


KEPT_STEPS = [Unlisted, Inherited, Helped, instance_phase, Scaled, InAHook]


@pytest.mark.parametrize("make", KEPT_STEPS)
def test_kept_optimizer_step_is_refused_wherever_it_stands(make):
    learner = make_learner(make())
    before = learner.model.weight.clone()
    with pytest.raises(PhaseError, match=r"calls optimizer.step\(\), past the plugins.*declares own_updates = True"):
        learner.fit(make_batches(), epochs=1)
    assert torch.equal(learner.model.weight, before)


def test_optimizer_step_between_two_steps_of_ones_own_loop_is_refused():
    learner = make_learner(TrainingPhase(), accumulate=2)
    with learner.epoch("train") as epoch:
        epoch.step(make_batches(1)[0])
        with pytest.raises(PhaseError, match=r"between two steps of phase 'train', calls optimizer.step\(\)"):
            learner.optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """Takes no hooks, as wrappers do that leave out ``Optimizer.__init__``."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def step(self, closure=None):
        self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def wrapped(params):
    return Wrapper(sgd(params))


def test_optimizer_that_takes_no_hooks_is_watched_inside():
    assert make_learner(TrainingPhase(), optimizer=wrapped).fit(make_batches(), epochs=1).updates == 6
    with pytest.raises(PhaseError, match=r"Unlisted.step calls optimizer.step\(\)"):
        make_learner(Unlisted(), optimizer=wrapped).fit(make_batches(), epochs=1)


class Pair(Phase):
    """Two models with an optimizer each; ``kept`` says what of the second is as in the loop by hand."""

    name, training, every = "train", True, 1

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def step(self, learner, step):
        inputs, targets = step.batch
        one, two = learner.models["one"], learner.models["two"]
        step.backward(mse_loss(one(inputs), targets), "one")
        step.update("one")
        if step.index % self.every == self.every - 1:
            if self.kept == "backward":
                mse_loss(two(inputs), targets).backward()
                step.update()
            else:
                step.backward(mse_loss(two(inputs), targets), "two")
                learner.optimizers["two"].step()


def make_pair(phase):
    models = {"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)}
    return Learner(models, None, dict.fromkeys(models, sgd), phases=[phase], standard=False)


def test_kept_call_of_one_of_several_optimizers_is_refused():
    with pytest.raises(PhaseError, match=r"Pair.step calls optimizer.step\(\)"):
        make_pair(Pair("step")).fit(make_batches(), epochs=1)
    rare = Pair("step")
    rare.every = 4
    with pytest.raises(PhaseError, match=r"Pair.step calls optimizer.step\(\)"):
        make_pair(rare).fit(make_batches(), epochs=1)


class Auxiliary(TrainingPhase):
    """Has a second loss whose backward was kept."""

    first = True

    def step(self, learner, step):
        if self.first:
            self.kept_backward(learner, step)
        step.inputs, step.targets = step.batch
        step.backward(learner.loss_fn(learner.model(step.inputs), step.targets))
        if not self.first:
            self.kept_backward(learner, step)
        step.update()

    def kept_backward(self, learner, step):
        learner.model(step.batch[0]).square().mean().backward()


class Late(Auxiliary):
    first = False


class OfAutograd(Late):
    def kept_backward(self, learner, step):
        torch.autograd.backward([learner.model(step.batch[0]).square().mean()])


class WhileSkipping(Auxiliary):
    def step(self, learner, step):
        step.skip()
        self.kept_backward(learner, step)


@pytest.mark.parametrize("phase", [Auxiliary, Late, OfAutograd, WhileSkipping])
def test_backward_beside_that_of_the_engine_is_named_with_its_line(phase):
    line = r"runs a backward that the engine does not know of, line \d+ of .*test_training_phases.py, '.*backward\("
    with pytest.raises(PhaseError, match=line):
        make_learner(phase()).fit(make_batches(), epochs=1)


class Meta(TrainingPhase):
    """Has a loop over another model, and gradients of the learner's own that are added to no parameter."""

    def step(self, learner, step):
        inner = nn.Linear(3, 2)
        optimizer = sgd(inner.parameters())
        for _ in range(2):
            mse_loss(inner(step.batch[0]), step.batch[1]).backward()
            optimizer.step()
        inputs = step.batch[0].clone().requires_grad_()
        torch.autograd.grad(learner.model(inputs).sum(), inputs)
        super().step(learner, step)


def test_loops_over_other_models_and_gradients_of_inputs_pass():
    assert make_learner(Meta()).fit(make_batches(), epochs=1).updates == 6


class ByGrad(TrainingPhase):
    """Sets the gradients by hand."""

    def step(self, learner, step):
        params = list(learner.model.parameters())
        loss = learner.loss_fn(learner.model(step.batch[0]), step.batch[1])
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = grad
        self.finish(learner, step)

    def finish(self, learner, step):
        step.update()


class ByHand(ByGrad):
    def finish(self, learner, step):
        with torch.no_grad():
            for p in learner.model.parameters():
                p -= 0.1 * p.grad


def test_gradients_set_by_hand_are_refused():
    with pytest.raises(PhaseError, match=r"step.update before step.backward"):
        make_learner(ByGrad()).fit(make_batches(), epochs=1)
    with pytest.raises(StepResultError, match=r"ByHand.step called no step.backward.*own_updates = True"):
        make_learner(ByHand()).fit(make_batches(), epochs=1)


def test_nothing_is_watched_after_the_first_steps():
    seen = []

    def look(learner, **_):
        hooks = learner.model.weight._post_accumulate_grad_hooks
        seen.append((len(hooks or ()), len(learner.optimizer._optimizer_step_pre_hooks)))

    make_learner(TrainingPhase(), 2, plugins=[on("step_end", look)]).fit(make_batches(4), epochs=1)
    assert seen == [(1, 1), (0, 0), (0, 0), (0, 0)]


# Windows that are open when an epoch ends


@pytest.mark.parametrize("accumulate", [4, 7])
def test_window_that_no_update_was_asked_for_is_refused_at_the_end_of_the_epoch(accumulate):
    learner = make_learner(Forgetful(backward=True), accumulate)
    before = learner.model.weight.clone()
    with pytest.raises(StepResultError, match=r"but not step.update"):
        learner.fit(make_batches(3), epochs=1)
    assert torch.equal(learner.model.weight, before)


class Sometimes(TrainingPhase):
    """Asks for an update in these steps alone."""

    asks = (0, 1, 2)

    def step(self, learner, step):
        step.backward(learner.loss_fn(learner.model(step.batch[0]), step.batch[1]))
        if step.index in self.asks:
            step.update()


def test_window_that_was_asked_for_gets_its_update_at_the_end_and_another_is_named(capsys):
    assert make_learner(Sometimes(), 3).fit(iter(make_batches(4)), epochs=1).updates == 1
    said = "an epoch ended with gradients of 1 step for which step.update was not called; they are dropped"
    assert said in capsys.readouterr().err
    phase = Sometimes()
    phase.asks = (0, 1, 2, 3)
    assert make_learner(phase, 3).fit(iter(make_batches(5)), epochs=1).updates == 2


# Several updates in a step


class Chunks(TrainingPhase):
    """Updates after each half of the batch."""

    def step(self, learner, step):
        for inputs, targets in zip(step.batch[0].split(2), step.batch[1].split(2), strict=True):
            step.backward(learner.loss_fn(learner.model(inputs), targets))
            step.update()


class NamedChunks(Chunks):
    def step(self, learner, step):
        for inputs, targets in zip(step.batch[0].split(2), step.batch[1].split(2), strict=True):
            step.backward(learner.loss_fn(learner.model(inputs), targets), "optimizer")
            step.update("optimizer")


@pytest.mark.parametrize("phase", [Chunks, NamedChunks])
def test_updates_of_parts_of_a_step_are_right_or_refused(phase):
    learner, by_hand = make_learner(phase()), make_learner(TrainingPhase())
    parts = [(x, y) for batch in make_batches() for x, y in zip(batch[0].split(2), batch[1].split(2), strict=True)]
    assert learner.fit(make_batches(), epochs=1).updates == 12
    by_hand.fit(parts, epochs=1)
    assert torch.equal(learner.model.weight, by_hand.model.weight)
    for accumulate in (2, 3):
        with pytest.raises(PhaseError, match=rf"step.backward after step.update in one.*accumulate is {accumulate}"):
            make_learner(phase(), accumulate).fit(make_batches(), epochs=1)


# Steps that train nothing by intent


class Fills(TrainingPhase):
    """Fills a buffer before it trains."""

    volatile = ("buffer",)

    def __init__(self, forgets=False):
        super().__init__()
        self.buffer, self.forgets = [], forgets

    def step(self, learner, step):
        self.buffer.append(step.batch)
        if len(self.buffer) < 3:
            step.skip()
        elif not self.forgets:
            super().step(learner, step)


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_that_are_skipped_count_as_steps(standard, accumulate):
    learner = make_learner(Fills(), accumulate, standard=standard)
    result = learner.fit(make_batches(), epochs=2)
    assert (result.steps, result.updates) == (12, 10 // accumulate)


def test_first_step_that_is_not_skipped_is_looked_at():
    with pytest.raises(StepResultError, match=r"no step.backward"):
        make_learner(Fills(forgets=True)).fit(make_batches(), epochs=1)


class SkipsLate(TrainingPhase):
    def step(self, learner, step):
        super().step(learner, step)
        step.skip()


def test_skip_where_it_means_nothing_is_refused():
    with pytest.raises(PhaseError, match=r"step.skip after step.backward in phase 'train', step 0"):
        make_learner(SkipsLate()).fit(make_batches(), epochs=1)

    class Validate(ValidationPhase):
        def step(self, learner, step):
            step.skip()

    with pytest.raises(PhaseError, match=r"step.skip in phase 'val': only a phase with training = True"):
        make_learner(Validate()).evaluate(make_batches())


def test_optimizer_has_no_hook_after_the_first_steps():
    seen = []
    look = on("step_end", lambda learner, **_: seen.append(len(learner.optimizer._optimizer_step_pre_hooks)))
    learner = make_learner(TrainingPhase(), 2, plugins=[look])
    learner.fit(make_batches(4), epochs=1)
    assert seen == [1, 0, 0, 0]
    again = Learner(learner.model, mse_loss, learner.optimizer, phases=[Failing()], standard=False)
    with pytest.raises(ZeroDivisionError):
        again.fit(make_batches(), epochs=1)
    assert not learner.optimizer._optimizer_step_pre_hooks


class Failing(TrainingPhase):
    def step(self, learner, step):
        step.loss = 1 / 0


def test_lbfgs_and_a_plugin_that_steps_the_optimizer_pass():
    class ByClosure(TrainingPhase):
        def step(self, learner, step):
            def closure():
                inputs, targets = step.batch
                loss = learner.loss_fn(learner.model(inputs), targets)
                step.backward(loss)
                return loss

            step.update(closure=closure)

    def twice(default, **_):
        default()
        default()

    for phase, optimizer, plugins in (
        (ByClosure(), lambda params: torch.optim.LBFGS(params, max_iter=3), []),
        (TrainingPhase(), sgd, [on("optimizer_step", twice)]),
    ):
        learner = make_learner(phase, optimizer=optimizer, plugins=plugins)
        assert learner.fit(make_batches(3), epochs=1).updates == 3


# Parameters that are replaced


class Replacing(TrainingPhase):
    def __init__(self, replace):
        super().__init__()
        self.replace = replace

    def step(self, learner, step):
        if not learner.progress.steps:
            self.replace(learner)
        super().step(learner, step)


def replace_weight(learner):
    learner.model.weight = nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize("standard", [False, True])
def test_parameter_that_is_replaced_after_the_first_batch_is_refused_when_an_epoch_begins(standard):
    learner = make_learner(Replacing(replace_weight), standard=standard)
    message = r"parameter 'weight' was replaced after the optimizer had taken it.*p.copy_\(new\)"
    with pytest.raises(PhaseError, match=message):
        learner.fit(make_batches(), epochs=2)
    assert learner.progress.epochs == 1
    with pytest.raises(PhaseError, match=message):
        learner.fit(make_batches(), epochs=2)


def test_module_that_is_replaced_before_the_first_batch_is_refused():
    models = {"one": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "two": nn.Linear(2, 2)}
    learner = Learner(models, mse_loss, {"one": sgd, "two": sgd}, standard=False)
    models["one"][1] = nn.Linear(4, 2)
    with pytest.raises(PhaseError, match=r"parameter 'one.1.weight' was replaced"):
        learner.run("train", make_batches())


def swap(learner):
    replace_weight(learner)
    learner.optimizer.param_groups[0]["params"][0] = learner.model.weight


def parametrize(learner):
    nn.utils.parametrize.register_parametrization(learner.model, "weight", nn.Identity())


@pytest.mark.parametrize("replace", [swap, parametrize], ids=["in the optimizer, too", "by a parametrization"])
def test_parameter_that_the_optimizer_has_is_right(replace):
    learner = make_learner(Replacing(replace))
    assert learner.fit(make_batches(), epochs=3).epochs == 3


# Modules in eval mode


class Modes(TrainingPhase):
    def __init__(self):
        super().__init__()
        self.seen = []

    def step(self, learner, step):
        super().step(learner, step)
        self.seen.append([each.training for each in learner.model.modules()])


class OwnTrain(nn.Sequential):
    def train(self, mode=True):
        return super().train(mode)


def backbone(kind=nn.Sequential):
    return kind(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", [nn.Sequential, OwnTrain])
def test_module_that_was_put_into_eval_mode_stays_there_in_training(kind, capsys):
    model, phase = backbone(kind), Modes()
    model[0].eval()
    learner = Learner(model, mse_loss, sgd, phases=[phase], standard=False)
    statistics = model[0][1].running_mean.clone()
    learner.fit(make_batches(2), make_batches(1), epochs=2)
    assert phase.seen == [[True, False, False, False, True, True]] * 4
    assert torch.equal(model[0][1].running_mean, statistics)
    said = capsys.readouterr().err
    assert said.count("0.0, 0.1 had been put into eval mode when the learner was made, and stay so in training") == 1
    assert [each.training for each in model.modules()] == [True, False, False, False, True, True]


def test_model_that_is_in_eval_mode_as_a_whole_trains(capsys):
    phase = Modes()
    learner = Learner(backbone().eval(), mse_loss, sgd, phases=[phase], standard=False)
    learner.fit(make_batches(1), epochs=1)
    assert phase.seen == [[True] * 6]
    assert capsys.readouterr().err.count("was in eval mode when the learner was made, and is put into train mode") == 1


# Windows that no epoch fills


def test_window_that_no_epoch_fills_is_said_once(capsys):
    learner = make_learner(TrainingPhase(), 4)
    learner.fit(make_batches(1), epochs=3)
    said = "accumulate is 4, but an epoch of phase 'train' has 1 batch, and its end closes the window"
    assert capsys.readouterr().err.count(said) == 1
    learner.fit(make_batches(4), epochs=1)
    assert "accumulate" not in capsys.readouterr().err


def test_phase_may_update_several_optimizers_in_turn():
    class InTurn(TrainingPhase):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            step.loss = learner.loss_fn(learner.model(step.inputs), step.targets)
            step.backward(step.loss)
            step.update("a" if step.index % 2 else "b")

    class Forgets(InTurn):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            step.loss = learner.loss_fn(learner.model(step.inputs), step.targets)
            step.backward(step.loss)
            step.update("a")

    def made(phase):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in zip("ab", model, strict=True)}
        return Learner(model, nn.MSELoss(), optimizers, phases=[phase], standard=False)

    data = [(torch.ones(4, 3), torch.ones(4, 1))] * 6
    learner = made(InTurn())
    learner.fit(data, epochs=1)
    assert learner.progress.updates == 6  # the window that is open at the end was not asked for
    with pytest.raises(StepResultError, match=r"not step\.update\(\)"):
        made(Forgets()).fit(data, epochs=1)
