"""The states of optimizers: of torch, of other packages, and of classes that do unusual things with them."""

import copy
import random
from collections import defaultdict, deque
from enum import IntEnum, IntFlag, StrEnum

import numpy as np
import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner
from loopkit.checkpoint.encoding import decode, encode
from loopkit.engine.kept.optimizers import OptimizerPart
from loopkit.errors import StateError
from loopkit.plugins import Checkpoint


class Counting(torch.optim.SGD):
    """The base of optimizers that keep more than torch's own do."""

    def make(self, param):
        """What it keeps for a parameter."""
        return {}

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if "made" not in self.state[p]:
                    self.state[p].update(self.make(p), made=True)


class Ints(Counting):
    def make(self, param):
        return {"count": 3, "ints": torch.arange(3), "listed": [torch.arange(2), torch.ones(2, dtype=torch.float64)]}


class Texts(Counting):
    def make(self, param):
        return {"kind": "std", "pair": ("a", 1), "nested": {"deep": [torch.tensor(7), "b"]}}


class Deques(Counting):
    def make(self, param):
        return {"last": deque([torch.ones(2), 1], maxlen=3), "seen": {3, 1}, "by": {(0, 1): 2.0, 0.5: "half"}}


class OfAll(Counting):
    """Keeps something for all parameters together."""

    def step(self, closure=None):
        super().step(closure)
        self.state["total"] = torch.tensor([5])
        self.state["steps"] = 4


class Extra(Counting):
    """Returns more than a state and groups, and takes it back."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale = 1.0

    def step(self, closure=None):
        super().step(closure)
        self.scale *= 0.5

    def state_dict(self):
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state):
        state = dict(state)
        self.scale = state.pop("scale")
        super().load_state_dict(state)


def hooked(params, **options):
    """The same by torch's own hooks."""
    optimizer = torch.optim.SGD(params, **options)
    optimizer.scale = 0.25
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "scale": own.scale})

    def take(own, state):
        own.scale = state["scale"]

    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


def trained(make):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
    Learner(model, nn.MSELoss(), optimizer, standard=False).fit(batches(3), epochs=1)
    return optimizer


def alike(one, other):
    """Equal in types and bits, at any depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


@pytest.mark.parametrize("make", [Ints, Texts, Deques, OfAll, Extra, hooked, torch.optim.SGD])
def test_state_of_an_optimizer_comes_back_with_its_types_and_extra_keys(make):
    before = trained(make)
    saved = copy.deepcopy(OptimizerPart("optimizer", before).saved())
    saved = decode(*encode(saved))
    model = nn.Linear(3, 1)
    after = make(model.parameters(), lr=0.1, momentum=0.9)
    after.scale = None
    part = OptimizerPart("optimizer", after)
    assert part.problems(saved) == []
    part.load(saved)
    now = part.saved()
    assert alike({**now, "state": dict(now["state"])}, saved)
    assert getattr(after, "scale", None) == getattr(before, "scale", None)


class Losing(Counting):
    """Loads another value than it has saved, as a cast or a slip may do."""

    def make(self, param):
        return {"phase": 3}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.param_groups[0]["momentum"] = 0.5


def test_optimizer_that_does_not_load_its_own_state_is_named():
    saved = OptimizerPart("optimizer", trained(Losing)).saved()
    part = OptimizerPart("optimizer", Losing(nn.Linear(3, 1).parameters(), lr=0.1, momentum=0.9))
    with pytest.warns(UserWarning, match=r"Losing\) does not load its own state .*momentum'\] was 0.9, and is 0.5"):
        part.load(saved)


def test_failing_load_leaves_the_optimizer_as_it_was():
    optimizer = trained(Extra)
    before = copy.deepcopy(optimizer.state_dict())
    part = OptimizerPart("optimizer", optimizer)
    broken = {key: value for key, value in part.saved().items() if key != "scale"}
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(KeyError, match="scale"):
        part.load(broken)
    assert alike(before["param_groups"], optimizer.state_dict()["param_groups"])


def test_undo_of_a_load_puts_options_and_states_back():
    optimizer, other = trained(torch.optim.SGD), trained(torch.optim.SGD)
    other.param_groups[0]["lr"] = 7.0
    before = copy.deepcopy(optimizer.state_dict())
    undo = OptimizerPart("optimizer", optimizer).load(OptimizerPart("optimizer", other).saved())
    assert optimizer.param_groups[0]["lr"] == 7.0
    undo()
    assert alike(before["param_groups"], optimizer.state_dict()["param_groups"])


class ByAddress(Counting):
    def make(self, param):
        return {"by": {id(param): 1}}


class ByMemory(Counting):
    def make(self, param):
        return {"pairs": [{param.data_ptr(): 1}]}


class InASet(Counting):
    def make(self, param):
        return {"known": {id(param)}}


@pytest.mark.parametrize("make", [ByAddress, ByMemory, InASet])
def test_key_that_no_other_process_has_is_refused_at_the_first_save(make, tmp_path):
    model = nn.Linear(3, 1)
    optimizer = make(model.parameters(), lr=0.1)
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[Checkpoint(tmp_path)], standard=False)
    with pytest.raises(StateError, match=r"the id or address of a parameter .*weights_only=True"):
        learner.fit(batches(3), epochs=1)
    assert learner.progress.updates <= 1


@pytest.mark.parametrize("make", [Ints, Texts, Deques, OfAll, Extra])
def test_run_with_an_unusual_optimizer_resumes_bitwise(make, tmp_path):
    def fit(epochs, directory=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
        plugins = [] if directory is None else [Checkpoint(directory, resume="auto")]
        Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False).fit(batches(3), epochs=epochs)
        return model.state_dict(), optimizer.state_dict()

    fit(1, tmp_path)
    whole, parts = fit(2), fit(2, tmp_path)
    assert alike(dict(whole[0]), dict(parts[0]))
    assert alike(whole[1], parts[1])


class Hiding(Counting):
    """Has options that its ``state_dict`` leaves out, since they cannot be saved."""

    hidden = type

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.param_groups[0]["hidden"] = self.hidden

    def state_dict(self):
        state = super().state_dict()
        del state["param_groups"][0]["hidden"]
        return state

    def load_state_dict(self, state):
        state["param_groups"] = [{**group, "hidden": self.hidden} for group in state["param_groups"]]
        super().load_state_dict(state)


class HidingText(Hiding):
    hidden = "text"


class HidingModule(Hiding):
    hidden = nn.Identity()


class NoisyOfTorch(Counting):
    """Adds noise from a generator of its own, as private training does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.generator = self.generator_of(5)

    def generator_of(self, seed):
        return torch.Generator().manual_seed(seed)

    def noise(self):
        return torch.randn((), generator=self.generator).item()

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(self.noise())


class NoisyOfNumpy(NoisyOfTorch):
    def generator_of(self, seed):
        return np.random.default_rng(seed)

    def noise(self):
        return self.generator.normal()


class NoisyOfPython(NoisyOfTorch):
    def generator_of(self, seed):
        return random.Random(seed)

    def noise(self):
        return self.generator.random()


class Around(Counting):
    """Wraps an optimizer that draws."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.inner = NoisyOfTorch(*args, **options)

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("make", [Hiding, HidingText, HidingModule, NoisyOfTorch, NoisyOfNumpy, NoisyOfPython, Around])
def test_run_resumes_bitwise_with_hidden_options_and_own_generators(make, tmp_path):
    def fit(epochs, directory=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = make(list(model.parameters()), lr=0.1)
        plugins = [] if directory is None else [Checkpoint(directory, resume="auto")]
        Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False).fit(batches(3), epochs=epochs)
        return model.state_dict()

    fit(1, tmp_path)
    assert alike(dict(fit(2)), dict(fit(2, tmp_path)))


class Kind(IntEnum):
    ROUND = 1
    SQUARE = 2


class Name(StrEnum):
    ROUND = "round"


class Flags(IntFlag):
    ONE = 1
    TWO = 2


@pytest.mark.parametrize("option", [Kind.SQUARE, Name.ROUND, Flags.ONE | Flags.TWO])
def test_option_that_is_a_member_of_an_enum_comes_back_as_one(option):
    before, after = trained(torch.optim.SGD), trained(torch.optim.SGD)
    before.param_groups[0]["kind"] = option
    after.param_groups[0]["kind"] = type(option)(1) if isinstance(option, int) else option
    saved = decode(*encode(copy.deepcopy(OptimizerPart("optimizer", before).saved())))
    OptimizerPart("optimizer", after).load(saved)
    assert type(after.param_groups[0]["kind"]) is type(option)
    assert after.param_groups[0]["kind"] == option


def test_failing_load_and_undo_leave_the_generator_where_it_was():
    optimizer, other = trained(NoisyOfTorch), trained(NoisyOfTorch)
    other.noise()
    before = optimizer.generator.get_state()
    undo = OptimizerPart("optimizer", optimizer).load(OptimizerPart("optimizer", other).saved())
    assert torch.equal(optimizer.generator.get_state(), other.generator.get_state())
    undo()
    assert torch.equal(optimizer.generator.get_state(), before)


def test_state_of_a_defaultdict_stays_one():
    optimizer = trained(Ints)
    OptimizerPart("optimizer", optimizer).load(OptimizerPart("optimizer", trained(Ints)).saved())
    assert type(optimizer.state) is defaultdict


class Wrapper:
    """An optimizer in all but the base class; what it returns as its state has a form of its own."""

    def __init__(self, params, lr, momentum):
        self.base = torch.optim.SGD(params, lr=lr, momentum=momentum)
        self.calls = 0

    @property
    def param_groups(self):
        return self.base.param_groups

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def step(self, closure=None):
        self.calls += 1
        self.base.step(closure)

    def state_dict(self):
        return {"base": self.base.state_dict(), "calls": self.calls}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])
        self.calls = state["calls"]


class Forwarding(Wrapper):
    """The same, with the attributes of the optimizer within."""

    def __getattr__(self, name):
        return getattr(vars(self)["base"], name)


@pytest.mark.parametrize("make", [Wrapper, Forwarding])
@pytest.mark.parametrize("as_factory", [False, True])
def test_wrapper_without_the_base_class_trains_and_resumes_bitwise(make, as_factory, tmp_path):
    def fit(epochs, directory=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)

        def factory(params):
            return make(params, lr=0.1, momentum=0.9)

        optimizer = factory if as_factory else factory(model.parameters())
        plugins = [] if directory is None else [Checkpoint(directory, resume="auto")]
        learner = Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False)
        learner.fit(batches(3), epochs=epochs)
        assert learner.progress.updates == learner.optimizer.calls == 3 * epochs
        return model.state_dict()

    fit(1, tmp_path)
    whole, parts = fit(2), fit(2, tmp_path)
    assert alike(dict(whole), dict(parts))
    by_hand = nn.Linear(3, 1)
    torch.manual_seed(0)
    by_hand.reset_parameters()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in [*batches(3), *batches(3)]:
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        optimizer.step()
    assert alike(dict(by_hand.state_dict()), dict(whole))


class InGroups(torch.optim.SGD):
    """Keeps a state of its own in the groups, by parameters."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.param_groups[0].setdefault("state", {})[p] = {"count": 1}


@pytest.mark.parametrize("shape", [(3, 1), (2, 2)])
def test_states_by_parameters_are_refused_at_the_first_save_with_the_way_out(tmp_path, shape):
    learner = Learner(
        nn.Linear(*shape), nn.MSELoss(), lambda p: InGroups(p, lr=0.1), plugins=[Checkpoint(tmp_path)], standard=False
    )
    data = [(torch.ones(4, shape[0]), torch.ones(4, shape[1]))]
    size = rf"\({shape[1]}, {shape[0]}\)"
    with pytest.raises(StateError, match=rf"a tensor of shape {size} of type Parameter.*Checkpoint\(weights_only=True"):
        learner.fit(data, epochs=1)
