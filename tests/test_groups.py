"""Patterns of names, parameter groups made with them, and fused optimizers where they exist."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RAdam

from loopkit import Learner
from loopkit.errors import ArgumentError
from loopkit.groups import auto_fused, covers, matches, named_modules, nothing_matches, param_groups


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm1, self.head = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)


def named(model, groups):
    """The groups' parameters by name."""
    names = {p: name for name, p in model.named_parameters()}
    return {group["name"]: [names[p] for p in group["params"]] for group in groups}


# Patterns


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("encoder", "encoder", True),
        ("encoder", "encoder.layer1.weight", True),
        ("encoder.*", "encoder.layer1.weight", True),
        ("encoder.*", "encoder", False),
        ("encoder", "encoder2.weight", False),
        ("layer?", "layer1.weight", True),
        ("layer[12]", "layer3.weight", False),
        ("*.bias", "bias", True),
        ("*.bias", "head.bias", True),
        ("*.bias|*norm*", "norm1.weight", True),
        ("*.bias|*norm*", "head.weight", False),
        ("Head", "head", False),
        ("*", "", True),
    ],
)
def test_covers(pattern, path, expected):
    assert covers(pattern, path) is expected


def test_matches_does_not_reach_below():
    assert [matches("encoder", path) for path in ("encoder", "encoder.weight")] == [True, False]


def test_paths_begin_with_the_models_name_only_if_there_are_several():
    single, several = {"model": nn.Dropout()}, {"a": nn.Dropout(), "b": nn.Sequential(nn.Dropout())}
    assert [path for path, _ in named_modules(single)] == [""]
    assert [path for path, _ in named_modules(several)] == ["a", "b", "b.0"]


def test_nothing_matches_names_the_nearest_spelling_of_any_alternative():
    message = nothing_matches("*.xyz|*.wieght", ["head.weight", "head.bias"])
    assert message == "'*.xyz|*.wieght' has no match (did you mean '*.weight'?); there are: head.weight, head.bias"


def test_nothing_matches_shows_the_first_names_only():
    message = nothing_matches("encoder", [f"layer.{i}" for i in range(10)])
    assert message.endswith("layer.6, layer.7 and 2 more")


# param_groups


def test_param_groups_merges_the_options_of_every_pattern_that_covers():
    model = Model()
    groups = param_groups(model, {"head.*": {"lr": 0.1}, "*.bias|*norm*": {"weight_decay": 0.0}})
    assert named(model, groups) == {
        "default": ["body.weight"],
        "head.*": ["head.weight"],
        "*.bias|*norm*": ["body.bias", "norm1.weight", "norm1.bias"],
        "head.*+*.bias|*norm*": ["head.bias"],
    }
    options = [{key: value for key, value in group.items() if key not in ("params", "name")} for group in groups]
    assert options == [{}, {"lr": 0.1}, {"weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.0}]


def test_param_groups_lets_the_later_pattern_win():
    groups = param_groups(Model(), {"*": {"lr": 1.0}, "head": {"lr": 0.5}})
    assert [(group["name"], group["lr"]) for group in groups] == [("*", 1.0), ("*+head", 0.5)]


def test_param_groups_takes_names_from_the_options():
    groups = param_groups(Model(), {"*": {"name": "all"}, "head": {"name": "top"}})
    assert [group["name"] for group in groups] == ["all", "all+top"]


def test_param_groups_without_options_is_one_default_group():
    model = Model()
    assert named(model, param_groups(model, {})) == {"default": [name for name, _ in model.named_parameters()]}


def test_param_groups_takes_a_shared_parameter_once_by_any_of_its_names():
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3)})
    model["head"].weight = model["embed"].weight
    assert named(model, param_groups(model, {"head": {"lr": 0.1}})) == {"head": ["embed.weight", "head.bias"]}


def test_param_groups_of_several_models():
    models = {"critic": nn.Linear(1, 1), "generator": nn.Linear(1, 1)}
    groups = param_groups(models, {"critic.*": {"lr": 0.1}})
    assert [group["params"] for group in groups] == [
        list(models[name].parameters()) for name in ("generator", "critic")
    ]


def test_param_groups_are_what_an_optimizer_takes():
    model = Model()
    optimizer = AdamW(param_groups(model, {"*.bias|*norm*": {"weight_decay": 0.0}}), lr=0.1, weight_decay=0.5)
    assert [(g["name"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("default", 0.5),
        ("*.bias|*norm*", 0.0),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"haed": {}}, r"pattern 'haed' has no match \(did you mean 'head'\?\); there are: body.weight, body.bias"),
        ({"haed.*": {}}, r"did you mean 'head.\*'"),
        ({"*.bais": {}}, r"did you mean '\*.bias'"),
        ({"head": {"params": []}}, "the options of 'head' hold params"),
    ],
)
def test_param_groups_refuses_what_matches_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Model(), options)


# auto_fused


def fused(cls, dtype=torch.float32, **options):
    return auto_fused(cls, lr=0.1, **options)([nn.Parameter(torch.zeros(2, dtype=dtype))]).defaults.get("fused")


@pytest.mark.parametrize("cls", [SGD, AdamW, Adagrad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_fused_passes_fused_where_torch_has_it(cls, dtype):
    assert fused(cls, dtype) is True


@pytest.mark.parametrize(
    ("cls", "options"),
    [(RAdam, {}), (AdamW, {"dtype": torch.complex64}), (SGD, {"foreach": True}), (SGD, {"differentiable": True})],
    ids=["no_fused_form", "complex", "foreach", "differentiable"],
)
def test_auto_fused_leaves_it_out_elsewhere(cls, options):
    assert not fused(cls, **options)


def test_auto_fused_looks_at_every_group():
    groups = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": iter([nn.Parameter(torch.zeros(1) * 1j)])}]
    optimizer = auto_fused(SGD, lr=0.1)(groups)
    assert optimizer.defaults["fused"] is None
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_auto_fused_takes_pairs_of_name_and_parameter():
    assert auto_fused(SGD, lr=0.1)(nn.Linear(1, 1).named_parameters()).defaults["fused"] is True


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params, fused=None):
        super().__init__(params, {"fused": fused})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)


def test_bitwise_trial_takes_an_optimizer_without_a_rate():
    optimizer = auto_fused(WithoutRate, bitwise=True)([nn.Parameter(torch.ones(2))])
    assert type(optimizer) is WithoutRate


def test_auto_fused_is_the_class_with_fused():
    def trained(make):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        batches = [(torch.ones(2, 3), torch.zeros(2, 1))] * 4
        Learner(model, nn.functional.mse_loss, make, standard=False).fit(batches, epochs=1)
        return model.state_dict()

    one, other = trained(auto_fused(AdamW, lr=0.1)), trained(lambda params: AdamW(params, lr=0.1, fused=True))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_auto_fused_leaves_wrong_options_to_torch():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        auto_fused(SGD, lr=-1.0)([nn.Parameter(torch.zeros(1))])


def test_auto_fused_refuses_fused():
    with pytest.raises(ValueError, match=r"auto_fused\(fused=True\)"):
        auto_fused(SGD, fused=True)


def test_auto_fused_takes_a_class_with_options():
    optimizer = auto_fused(partial(SGD, momentum=0.9), lr=0.1)([nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["fused"]
    assert optimizer.defaults["momentum"] == 0.9


@pytest.mark.parametrize("cls", ["SGD", SGD([nn.Parameter(torch.zeros(1))]), None])
def test_auto_fused_of_no_class_shows_the_call(cls):
    with pytest.raises(ArgumentError, match=r"is no class: .*auto_fused\(torch.optim.AdamW, lr=1e-3\)"):
        auto_fused(cls, lr=0.1)


def test_auto_fused_on_no_parameters_raises_as_torch_does():
    with pytest.raises(ValueError, match="empty parameter list"):
        auto_fused(SGD, lr=0.1)([])


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.Adam, {"lr": 1e-7}),
        (torch.optim.Adagrad, {"lr": 1e-7}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_optimizer_that_is_fused_where_the_bits_allow_has_the_bits_of_the_default(cls, options, scale):
    generator = torch.Generator().manual_seed(3)
    values = [scale * torch.randn(size, generator=generator) for size in (5, 64, 4097)]
    grads = [[torch.randn(each.shape, generator=generator) for each in values] for _ in range(10)]
    ends = []
    for make in (cls, None):
        params = [nn.Parameter(each.clone()) for each in values]
        optimizer = auto_fused(cls, bitwise=True, **options)(params) if make is None else cls(params, **options)
        for each in grads:
            for parameter, grad in zip(params, each, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
        states = [optimizer.state[each] for each in params]
        ends.append([*params, *(each[name] for each in states for name in sorted(each) if each[name] is not None)])
    assert all(map(torch.equal, *ends))
    if cls is torch.optim.SGD and "momentum" not in options and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert optimizer.defaults["fused"]
