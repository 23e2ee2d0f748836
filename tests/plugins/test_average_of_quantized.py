"""WeightAverage over weights of a class of tensors without arithmetic, as quantized ones: the rest is averaged."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, mse_loss
from torch.utils._pytree import tree_map

from loopkit import Learner, checkpoint
from loopkit.errors import StateError
from loopkit.plugins import Freeze, Metrics, WeightAverage

DATA = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]


class Int8(torch.Tensor):
    """A weight of integers and a scale, which can be multiplied, copied and detached, and no more."""

    ALLOWED = ("detach", "clone", "_to_copy", "alias")

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Int8(inner["values_"], inner["scale"])

    def __repr__(self):
        return "Int8()"

    def whole(self):
        return self.values_.float() * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is linear:
            return linear(args[0], args[1].whole(), *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        if name not in cls.ALLOWED:
            raise NotImplementedError(f"{name} of Int8")
        inner = [
            tree_map(lambda a, n=n: getattr(a, n) if isinstance(a, Int8) else a, args) for n in ("values_", "scale")
        ]
        return cls(*(part[0].clone() if name == "clone" else part[0] for part in inner))


class Model(nn.Module):
    def __init__(self, quantized=True):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        if quantized:
            weight = self.base.weight.detach()
            scale = weight.abs().max() / 127
            self.base.weight = nn.Parameter(Int8((weight / scale).round().to(torch.int8), scale), requires_grad=False)

    def forward(self, inputs):
        return self.head(self.base(inputs).tanh())


def trained(**options):
    model = Model()
    learner = Learner(
        model,
        mse_loss,
        lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1),
        plugins=[WeightAverage(**options), Metrics()],
        standard=False,
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        learner.fit(DATA, DATA[:1], epochs=2)
    return learner, [str(each.message) for each in seen]


@pytest.mark.parametrize("options", [{"decay": 0.5}, {"decay": None}, {"decay": 0.9, "every": "epoch"}])
def test_rest_is_averaged_and_the_quantized_is_named_once(options):
    learner, seen = trained(**options)
    named = [text for text in seen if "WeightAverage leaves" in text]
    assert len(named) == 1
    assert "base.weight" in named[0]
    assert "Int8" in named[0]
    state = learner.plugins["weight_average"].state_dict()["model"]
    assert state["tensors"].keys() == {"base.bias", "head.weight", "head.bias"}
    assert state["left"] == ["base.weight"]


def test_average_of_the_rest_is_bitwise_that_of_the_hand_loop():
    learner, _ = trained(decay=0.5)
    hand = Model()
    params = [p for p in hand.parameters() if p.requires_grad]
    optimizer, average = torch.optim.SGD(params, lr=0.1), None
    for inputs, targets in DATA * 2:
        optimizer.zero_grad()
        mse_loss(hand(inputs), targets).backward()
        optimizer.step()
        if average is None:
            average = [p.detach().clone() for p in params]
        else:
            torch._foreach_lerp_(average, [p.detach() for p in params], 0.5)
    found = learner.plugins["weight_average"].state_dict()["model"]["tensors"]
    assert all(map(torch.equal, found.values(), average))


def test_state_goes_into_another_plugin():
    state = trained(decay=0.5)[0].plugins["weight_average"].state_dict()
    again = WeightAverage(0.5)
    again.load_state_dict(state)
    assert again.state_dict()["model"]["left"] == ["base.weight"]


def test_weights_without_such_a_class_have_no_entry_for_it(tmp_path):
    model = Model(quantized=False)
    learner = Learner(
        model, mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), plugins=[WeightAverage(0.5)], standard=False
    )
    learner.fit(DATA, epochs=1)
    assert "left" not in learner.plugins["weight_average"].state_dict()["model"]
    checkpoint.save(learner, tmp_path)


def test_quantized_weights_that_are_left_out_are_resumed_bit_for_bit(tmp_path):
    def make():
        model = Model()
        freeze = Freeze("base", saved=False)
        optimizer = lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)  # noqa: E731
        return Learner(model, mse_loss, optimizer, plugins=[freeze], standard=False)

    whole, first = make(), make()
    whole.fit(DATA, epochs=2)
    first.fit(DATA, epochs=1)
    saved = checkpoint.save(first, tmp_path)
    assert "base.weight" in saved.about["left_out"]["model"]
    second = make()
    checkpoint.load(second, tmp_path)
    second.fit(DATA, epochs=1)
    assert torch.equal(whole.model.head.weight, second.model.head.weight)
    other = make()
    other.model.base.weight.values_.add_(1)
    with pytest.raises(StateError, match="frozen weights of base"):
        checkpoint.load(other, tmp_path)
