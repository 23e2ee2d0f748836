"""Every plugin that ships keeps the contract in the phases of the examples, too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from test_contract import PLUGINS, SKIPPED
from torch import nn

from loopkit_testing import Problem, check_plugin
from loopkit_testing.contract import ContractError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[3] / "examples"


def defined(example, *names):
    """Some of an example's classes and functions, without its program."""
    tree = ast.parse((EXAMPLES / example).read_text())
    of_others = [each for each in tree.body if isinstance(each, ast.ImportFrom) and each.module == "both"]
    wanted = (ast.Import, ast.ImportFrom)
    tree.body = [
        each
        for each in tree.body
        if (isinstance(each, wanted) and each not in of_others) or getattr(each, "name", "") in names
    ]
    namespace = {"NOISE": 4, "TEMPERATURE": 0.3, "SHARE": 0.5}
    exec(compile(tree, example, "exec"), namespace)
    return [namespace[name] for name in names]


def problem(model, loss_fn, train, val=None, optimizer=torch.optim.SGD):
    """Made anew at each call, from the same numbers."""

    def make():
        torch.manual_seed(0)
        return Problem(
            model(), loss_fn, lambda params: optimizer(params, lr=0.05), train(), None if val is None else val()
        )

    return make


def pairs():
    return [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(4)]


def closure():
    (phase,) = defined("lbfgs.py", "WithClosure")
    return [phase()], problem(lambda: nn.Linear(4, 3), nn.functional.cross_entropy, pairs, optimizer=torch.optim.LBFGS)


def distillation():
    (phase,) = defined("ported/distillation.py", "Distillation")
    return [phase(nn.Linear(4, 3))], problem(lambda: nn.Linear(4, 3), nn.functional.cross_entropy, pairs, pairs)


def contrastive():
    phase, _ = defined("contrastive.py", "SimCLR", "view")

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))

    return [phase()], problem(model, nn.functional.cross_entropy, lambda: [torch.randn(6, 1, 8, 8) for _ in range(4)])


def gan():
    phase, _ = defined("ported/dcgan.py", "DCGAN", "noise")

    def make():
        torch.manual_seed(0)
        models = {"generator": nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), "critic": nn.Linear(4, 1)}
        optimizers = dict.fromkeys(models, lambda params: torch.optim.SGD(params, lr=0.05))
        return Problem(models, None, optimizers, [torch.randn(6, 4) for _ in range(4)])

    return [phase()], make


PHASES = {each.__name__: each for each in (closure, distillation, contrastive, gan)}


@pytest.mark.parametrize("kind", PHASES)
@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_keeps_the_contract_in_the_phases_of_the_examples(name, kind):
    phases, make = PHASES[kind]()
    try:
        check_plugin(PLUGINS[name], phases=phases, problem=make, skip=SKIPPED.get(name, ()))
    except ContractError as error:
        if "all others: the fit raised PluginError" not in str(error):  # it may refuse the phase or the model in words
            raise
        pytest.skip(str(error).splitlines()[1])
