"""Every plugin that ships keeps the contract in every phase of the examples, too."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from test_contract import LOGS, Terminal, fresh_log
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import loopkit.plugins
from loopkit import hookimpl
from loopkit.events import EpochEnd
from loopkit.losses import summed
from loopkit.plugins import (
    DDP,
    ChannelsLast,
    Checkpoint,
    ClipGradNorm,
    ClipGradValue,
    Compile,
    EarlyStopping,
    EvalMode,
    Freeze,
    GradNoise,
    GradNorm,
    History,
    LogHyperparameters,
    LogMetrics,
    Metrics,
    MixedPrecision,
    Plateau,
    Progress,
    SanityCheck,
    Schedule,
    SkipSpikes,
    StopOnNonFinite,
    ToDevice,
    TorchSchedule,
    WeightAverage,
    call_on,
    throttle,
)
from loopkit.schedules import cosine, warmup
from loopkit_testing import Problem, check_plugin
from loopkit_testing.bits import difference, weights
from loopkit_testing.contract import ContractError

EXAMPLES = Path(__file__).parents[3] / "examples"


def note(learner, phase):
    """Does nothing."""


PLUGINS = {
    "DDP": lambda: DDP(overlap=False, weighted=True),
    "ChannelsLast": ChannelsLast,
    "Checkpoint": lambda: Checkpoint(tempfile.mkdtemp(dir=LOGS.name)),
    "Compile": lambda: Compile(backend="eager"),
    "EarlyStopping": lambda: (EarlyStopping("train/loss", patience=5), Metrics()),
    "EvalMode": lambda: EvalMode("*"),
    "Freeze": lambda: Freeze("*.bias"),
    "ClipGradNorm": lambda: ClipGradNorm(0.1),
    "ClipGradValue": lambda: ClipGradValue(0.01),
    "GradNoise": GradNoise,
    "GradNorm": GradNorm,
    "History": History,
    "LogHyperparameters": lambda: (LogHyperparameters(), Metrics()),
    "LogMetrics": lambda: (LogMetrics(every=1), Metrics(), fresh_log()),
    "LogTo": lambda: (fresh_log(".csv", every=1), LogMetrics(every=1), Metrics()),
    "Metrics": Metrics,
    "MixedPrecision": lambda: MixedPrecision("bfloat16"),
    "MixedPrecision('float16')": lambda: MixedPrecision("float16", init_scale=16.0),
    "Plateau": lambda: (Plateau("train/loss"), Metrics()),
    "Progress": lambda: (Progress(bar=True, file=Terminal()), Metrics()),
    "SanityCheck": SanityCheck,
    "Schedule": lambda: Schedule(warmup(2, then=cosine(6))),
    "SkipSpikes": lambda: SkipSpikes(0.1, warmup=2),
    "StopOnNonFinite": StopOnNonFinite,
    "StopOnNonFinite('rollback')": lambda: StopOnNonFinite("rollback", snapshot_every=2),
    "ToDevice": lambda: ToDevice("cpu"),
    "TorchSchedule": lambda: TorchSchedule(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)),
    "WeightAverage": WeightAverage,
    "call_on": lambda: call_on(EpochEnd, note),
    "throttle": lambda: throttle(Metrics(), every=2),
}
SKIPPED = {
    "Compile": ["no_graph_kept", "exact_resume", "unknown_phases"],  # the first would compile the check's hook too
    "Freeze": ["unknown_phases"],  # models with other names
    "EvalMode": ["unknown_phases"],
    "MixedPrecision('float16')": ["metrics_reset"],  # the scale goes on from epoch to epoch
    "TorchSchedule": ["unknown_phases", "options_kept"],  # several optimizers; scheduler is made
}
"""What some cannot promise."""
SPARSE = "torch has no backward of sparse products under autocast"
MEANINGLESS = {
    ("MixedPrecision", "gcn"): SPARSE,
    ("MixedPrecision('float16')", "gcn"): SPARSE,
    ("MixedPrecision('float16')", "word_language_model"): "torch has no LSTM in float16 on the CPU",
    ("MixedPrecision", "time_series"): "its model is float64, which the plugin warns of",
    ("MixedPrecision('float16')", "time_series"): "its model is float64, which the plugin warns of",
    ("Freeze", "maml"): "its phase differentiates by every parameter",
}
"""What torch, or the phase itself, cannot do with the plugin's purpose."""


def scripted(example, *names):
    """Some of a script's classes and functions, without its program."""
    tree = ast.parse((EXAMPLES / example).read_text())
    tree.body = [
        each
        for each in tree.body
        if getattr(each, "name", "") in names
        or isinstance(each, ast.Import)
        or (isinstance(each, ast.ImportFrom) and not str(each.module).startswith("sklearn"))  # for its program alone
    ]
    namespace = {"TEMPERATURE": 0.3}
    exec(compile(tree, example, "exec"), namespace)
    return [namespace[name] for name in names]


def ported(name):
    """A module of the folder ported, which is imported from there, as a program imports what lies beside it."""
    folder = str(EXAMPLES / "ported")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def problem(model, loss_fn, train, val=None, optimizer=torch.optim.SGD):
    """Made anew at each call, from the same numbers."""

    def make():
        torch.manual_seed(0)
        models = model()
        factory = lambda params: optimizer(params, lr=0.02)  # noqa: E731
        return Problem(models, loss_fn, factory, train(), None if val is None else val())

    return make


def each_its_own(models, train):
    """Each of the models has an optimizer."""

    def make():
        torch.manual_seed(0)
        made = models()
        optimizers = dict.fromkeys(made, lambda params: torch.optim.SGD(params, lr=0.02))
        return Problem(made, None, optimizers, train())

    return make


few_evaluations = partial(torch.optim.LBFGS, max_iter=2)


def pairs():
    return [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(4)]


def images():
    return [torch.rand(6, 1, 8, 8) for _ in range(4)]


def nothing():
    """The batches of phases that make their own data."""
    return [None] * 4


def lbfgs():
    (phase,) = scripted("lbfgs.py", "WithClosure")
    return [phase()], problem(lambda: nn.Linear(4, 3), cross_entropy, pairs, optimizer=few_evaluations)


def contrastive():
    phase, features, _ = scripted("contrastive.py", "SimCLR", "Features", "view")

    def model():
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        return nn.Sequential(encoder, nn.Linear(8, 4))

    return [phase(), features()], problem(model, cross_entropy, images)


def actor_critic():
    module = ported("actor_critic")
    return [module.ActorCritic()], problem(module.make, None, nothing)


def byol():
    module = ported("byol")

    def models():
        online = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        target = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).requires_grad_(False)
        return {"online": online, "predictor": nn.Linear(8, 8), "target": target}

    return [module.BYOL()], problem(models, None, images)


def dcgan():
    module = ported("dcgan")

    def models():
        generator = nn.Sequential(nn.Flatten(), nn.Linear(module.NOISE, 4))
        return {"generator": generator, "critic": nn.Linear(4, 1)}

    return [module.DCGAN()], each_its_own(models, lambda: [torch.randn(6, 4) for _ in range(4)])


def distillation():
    module = ported("distillation")
    return [module.Distillation(nn.Linear(4, 3))], problem(lambda: nn.Linear(4, 3), cross_entropy, pairs, pairs)


def forward_forward():
    module = ported("forward_forward")

    def layers():
        return {"first": nn.Linear(14, 6), "second": nn.Linear(6, 6)}

    def train():
        return [(torch.randn(6, 4), torch.randint(10, (6,))) for _ in range(4)]

    return [module.ForwardForward()], each_its_own(layers, train)


def gcn():
    module = ported("gcn")
    generator = torch.Generator().manual_seed(0)
    near = torch.rand(6, 6, generator=generator).round().to_sparse()
    graph = torch.randn(6, 64, generator=generator), torch.arange(6), near, torch.tensor([0, 3])
    return [module.WholeGraph(*graph)], problem(module.make, None, nothing)


def maml():
    module = ported("maml")

    def tasks():
        return [tuple((torch.randn(2, 3, 1), torch.randn(2, 3, 1)) for _ in range(2)) for _ in range(4)]

    def model():
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    return [module.MAML()], problem(model, None, tasks)


def reinforce():
    module = ported("reinforce")
    return [module.Reinforce()], problem(module.make, None, nothing)


def time_series():
    module = ported("time_series")

    def waves():
        return [tuple(torch.randn(2, 2, 3, dtype=torch.float64)) for _ in range(4)]

    return [module.WithClosure()], problem(module.make, mse_loss, waves, optimizer=few_evaluations)


def vae():
    module = ported("vae")

    def flat():
        return [torch.rand(6, 64) for _ in range(4)]

    return [module.Train(), module.Validate()], problem(module.VAE, summed(module.bound), flat, flat)


def wgan_gp():
    module = ported("wgan_gp")

    def models():
        return {"generator": nn.Linear(module.NOISE, 2), "critic": nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))}

    return [module.WGAN()], each_its_own(models, lambda: [torch.randn(6, 2) for _ in range(6)])


def word_language_model():
    module = ported("word_language_model")

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)

        def forward(self, words, state):
            hidden, state = self.lstm(self.embedding(words), state)
            return self.head(hidden), state

    def words():
        return [(torch.randint(9, (3, 5)), torch.randint(9, (3, 5))) for _ in range(4)]

    return [module.Train(), module.Validate()], problem(Network, module.loss_fn, words, words)


PHASES = {
    each.__name__: each
    for each in (
        *(actor_critic, byol, contrastive, dcgan, distillation, forward_forward, gcn, lbfgs, maml, reinforce),
        *(time_series, vae, wgan_gp, word_language_model),
    )
}


def test_every_phase_of_the_examples_is_checked():
    kind = re.compile(r"class \w+\((?:\w+, )*\w*Phase\)")
    files = (file for file in EXAMPLES.rglob("*.py") if kind.search(file.read_text()))
    assert sorted(file.stem for file in files) == sorted(PHASES)


def test_every_plugin_that_ships_is_checked():
    assert {name.split("(")[0] for name in PLUGINS} == set(loopkit.plugins.__all__) - {"SaveOptions"}


class Doubled:
    """Backward starts from twice the loss; an optimizer with half the rate then does the same, to the bit."""

    @hookimpl(updates=("loss",))
    def backward_begin(self, step):
        step.loss = step.loss * 2


@pytest.mark.parametrize(
    ("plugins", "options"),
    [([], {}), ([lambda: MixedPrecision("bfloat16")], {}), ([], {"accumulate": 2})],
    ids=["plain", "bfloat16", "accumulate"],
)
@pytest.mark.parametrize("kind", [each for each in PHASES if each not in ("lbfgs", "time_series")])
def test_loss_that_a_plugin_replaces_is_what_backward_starts_from_in_every_phase(kind, plugins, options):
    if kind == "gcn" and plugins:
        pytest.skip(SPARSE)
    trained = []
    for rate, doubled in ((0.02, []), (0.01, [Doubled()])):
        torch.manual_seed(0)
        phases, make = PHASES[kind]()
        made = make()
        learner = made.learner(
            phases=phases, plugins=[*(each() for each in plugins), *doubled], standard=False, **options
        )
        for optimizer in learner.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
        torch.manual_seed(1)
        learner.fit(made.train, epochs=1)
        trained.append(weights(learner))
    assert difference(*trained, "weights", ()) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, as it compiles for inputs that require grad
@pytest.mark.parametrize("kind", PHASES)
@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_keeps_the_contract_in_the_phases_of_the_examples(name, kind):
    if (name, kind) in MEANINGLESS:
        pytest.skip(MEANINGLESS[name, kind])
    phases, make = PHASES[kind]()
    try:
        check_plugin(PLUGINS[name], phases=phases, problem=make, skip=SKIPPED.get(name, ()))
    except ContractError as error:
        if not re.search("all others: the fit raised (Plugin|Phase)Error", str(error)):  # it may refuse in words
            raise
        pytest.skip(str(error).splitlines()[1])
