"""`ModuleProfile`: time and memory of each module, at chosen steps."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from helpers import on, raising
from loopkit_testing import tiny_problem
from torch import nn
from torch.utils.checkpoint import checkpoint

from loopkit import CancelStep, Learner
from loopkit.errors import PluginError
from loopkit.logs import Backend, Table
from loopkit.plugins import ClipGradNorm, LogTo, Metrics
from loopkit_insight import ModuleProfile

TIMES = ("forward", "forward own", "backward", "backward own")


def data(steps=4):
    made = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 16, generator=made), torch.randint(0, 4, (8,), generator=made)) for _ in range(steps)]


def fit(model, *plugins, epochs=1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=plugins, standard=False, **options)
    learner.fit(data(), data(2), epochs=epochs)
    return learner


def rows(profile):
    columns = profile.table().columns
    return {row[0]: dict(zip(columns, row, strict=True)) for row in profile.table().rows}


class Clock:
    """Replaces ``time.perf_counter_ns``; only `Slow` takes time."""

    def __init__(self, monkeypatch):
        self.seconds = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.seconds * 10**9)


class Slow(torch.autograd.Function):
    """Takes a second, and two in backward."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.seconds += 1
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.seconds += 2
        return gradient, None


class Sleepy(nn.Linear):
    def __init__(self, clock):
        super().__init__(16, 4)
        self.clock = clock

    def forward(self, x):
        return Slow.apply(super().forward(x), self.clock)


class Residual(nn.Module):
    """A view, an in-place operation, a module that is called twice, and a sum."""

    def __init__(self, shared, repeats=False):
        super().__init__()
        self.first, self.relu, self.shared = nn.Linear(16, 16), nn.ReLU(inplace=True), shared
        self.repeats = repeats

    def body(self, x):
        y = self.first(x).view(-1, 16)
        y.mul_(2)
        return x + self.shared(self.shared(self.relu(y)))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.repeats else self.body(x)


def nested(repeats=True):
    torch.manual_seed(0)
    shared = nn.Linear(16, 16)
    return nn.Sequential(Residual(shared), nn.Dropout(0.1), Residual(shared, repeats), nn.Linear(16, 4))


def test_profile_gives_each_module_its_time(monkeypatch):
    profile = ModuleProfile(at=(1,), show=False)
    fit(nn.Sequential(nn.Linear(16, 16), Sleepy(Clock(monkeypatch))), profile)
    seconds = {name: [row[f"{what} seconds"] for what in TIMES] for name, row in rows(profile).items()}
    assert seconds == {"": [1, 0, 2, 0], "0": [0, 0, 0, 0], "1": [1, 1, 2, 2]}


def test_profile_goes_by_the_clock_of_the_host():
    profile = ModuleProfile(at=(1,), show=False)
    fit(nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1)), profile)
    assert all(row["forward seconds"] > 0 and row["backward seconds"] > 0 for row in rows(profile).values())


def own_and_whole(profile, what):
    found = rows(profile)
    return sum(row[f"{what} own seconds"] for row in found.values()), found[""][f"{what} seconds"]


def test_own_times_add_up_to_the_whole():
    profile = ModuleProfile(at=(0,), show=False)
    fit(nested(repeats=False), profile)
    for what in ("forward", "backward"):
        own, whole = own_and_whole(profile, what)
        assert own == pytest.approx(whole, rel=1e-9)


def test_own_times_of_a_repeated_forward_are_forward():
    profile = ModuleProfile(at=(0,), show=False)
    fit(nested(repeats=True), profile)
    own, whole = own_and_whole(profile, "forward")
    assert own > whole  # a backward repeats the forward of a block; the forward around it was over then
    own, whole = own_and_whole(profile, "backward")
    assert own == pytest.approx(whole, rel=1e-9)


def test_profile_counts_calls_parameters_and_bytes():
    profile = ModuleProfile(at=(1,), show=False)
    fit(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), profile)
    found = rows(profile)
    assert [found[name]["calls"] for name in ("", "0", "1", "2")] == [1, 1, 1, 1]
    assert [found[name]["parameters"] for name in ("", "0", "1", "2")] == [676, 544, 0, 132]
    assert [found[name]["activation bytes"] for name in ("", "0", "1", "2")] == [8 * 4 * 4, 8 * 32 * 4, 8 * 32 * 4, 128]
    kept = 8 * 32 * 4  # what ReLU returned: both it and the second linear layer need it
    assert [found[name]["memory bytes"] for name in ("", "0", "1", "2")] == [8 * 16 * 4 + kept, 8 * 16 * 4, kept, kept]


def test_profile_counts_modules_that_are_shared_and_repeated():
    profile = ModuleProfile(at=(1,), show=False)
    fit(nested(), profile)
    found = rows(profile)
    assert list(found) == ["", "0", "0.first", "0.relu", "0.shared", "1", "2", "2.first", "2.relu", "3"]
    assert found["0.shared"]["calls"] == 6  # twice in each block, and the second block runs again for backward
    assert found["2.first"]["calls"] == 2
    assert found["0.first"]["calls"] == 1


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}])
def test_profile_changes_no_bit(options):
    def weights(*plugins):
        model = nested()
        torch.manual_seed(1)
        fit(model, *plugins, Metrics(), ClipGradNorm(1.0), epochs=3, **options)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    profile = ModuleProfile(every=1, show=False)
    assert torch.equal(weights(), weights(profile))
    assert profile.measured == list(range(12))


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_on_the_modules_in_the_chosen_steps_alone():
    seen = []
    model = nested()

    class Phase(type(Learner(nn.Identity()).phases["train"])):
        def step(self, learner, step):
            super().step(learner, step)
            seen.append(hooks_on(model))

    fit(model, ModuleProfile(at=(1, 5), show=False), epochs=2, phases=[Phase()])
    assert [count > 0 for count in seen] == [i in (1, 5) for i in range(8)]
    assert hooks_on(model) == 0


@pytest.mark.parametrize("hook", ["loss_begin", "backward_end"])
def test_hooks_are_taken_off_after_an_error(hook):
    model, profile = nested(), ModuleProfile(at=(1,), show=False)
    with pytest.raises(ValueError, match="no"):
        fit(model, profile, raising(hook, ValueError("no"), at=1))
    assert hooks_on(model) == 0
    assert profile.measured == []


def test_step_that_is_cancelled_is_not_measured():
    profile = ModuleProfile(at=(1, 2), show=False)
    fit(nested(), profile, raising("loss_begin", CancelStep("no"), at=1))
    assert profile.measured == [1, 2]  # the cancelled one is not counted as a training step, so the next is step 1


def test_step_that_fails_when_its_contexts_are_left_is_not_measured():
    @contextmanager
    def fails(**given):
        yield
        raise ValueError("no")

    profile = ModuleProfile(at=(0,), show=False)
    with pytest.raises(ValueError, match="no"):
        fit(nested(), profile, on("step_context", fails))
    assert profile.measured == []
    assert str(profile) == "no step was measured"


def test_error_in_the_model_leaves_the_nesting_right():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(16, 4)

        def forward(self, x):
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    profile = ModuleProfile(at=(0,), show=False)
    fit(Tries(), profile)
    assert [row["calls"] for row in rows(profile).values()] == [1, 1, 1]
    assert rows(profile)[""]["backward seconds"] == rows(profile)["good"]["backward seconds"] > 0


def test_profile_of_a_phase_without_gradients():
    profile = ModuleProfile(at=(3,), phase="val", show=False)
    fit(nn.Sequential(nn.Linear(16, 4)), profile, epochs=2)
    assert profile.measured == [3]
    assert rows(profile)["0"]["forward seconds"] > 0
    assert rows(profile)["0"]["backward seconds"] == 0
    assert rows(profile)["0"]["memory bytes"] == 0


class Model(nn.Module):
    """Dynamo does not compile what is only torch's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(x).relu()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_profile_of_compiled_modules_says_so():
    whole = Model()
    whole.compile(backend="eager")
    part = nn.Sequential(nn.Linear(16, 16), torch.compile(nn.Linear(16, 4), backend="eager"))
    for model, expected in (
        (whole, {"": "Model (compiled)"}),
        (part, {"": "Sequential", "0": "Linear", "1": "Linear (compiled)"}),
    ):
        profile = ModuleProfile(at=(2,), show=False)
        fit(model, profile)
        assert {name: row["type"] for name, row in rows(profile).items()} == expected
        assert all(row["forward seconds"] > 0 and row["backward seconds"] > 0 for row in rows(profile).values())


def test_profile_does_not_compile_again():
    from torch._dynamo.testing import CompileCounter  # takes a second

    counter = CompileCounter()
    model = Model()
    model.compile(backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugins = [ModuleProfile(at=(2,), show=False)]
    Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=plugins, standard=False).fit(data(), epochs=1)
    assert counter.frame_count == 1


def test_profile_of_several_models():
    problem = tiny_problem()
    other = nn.Linear(2, 2)
    learner = Learner({"main": problem.model, "other": other}, problem.loss_fn, plugins=[])
    assert set(learner.models) == {"main", "other"}
    from loopkit import PredictionPhase

    class Phase(PredictionPhase):
        def forward(self, learner, inputs):
            return learner.models["main"](inputs)

    profile = ModuleProfile(at=(0,), phase="predict", show=False)
    learner = Learner(learner.models, problem.loss_fn, plugins=[profile], phases=[Phase()], standard=False)
    learner.run("predict", problem.train)
    found = rows(profile)
    assert found["main"]["calls"] == 1
    assert found["other"]["calls"] == 0


def test_profile_means_are_over_the_steps():
    profile = ModuleProfile(every=2, show=False)
    fit(nested(), profile, epochs=2)
    assert profile.measured == [0, 2, 4, 6]
    assert rows(profile)["0.first"]["calls"] == 1


def test_profile_logs_each_step():
    class Keeps(Backend):
        kinds = (Table,)

        def __init__(self):
            self.records = []

        def write(self, records):
            self.records += records

    kept = Keeps()
    fit(nested(), ModuleProfile(at=(1, 2), show=False), LogTo(kept))
    assert [record.name for record in kept.records] == ["run/module_profile"] * 2


def test_profile_prints_its_table(capsys):
    fit(nested(), ModuleProfile(at=(1,)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["module", "type", "calls", "params"]
    assert len(lines) == 11
    assert max(map(len, lines)) <= 100


def test_profile_without_a_step_says_so():
    assert str(ModuleProfile()) == "no step was measured"


@pytest.mark.parametrize(
    "options", [{"at": (-1,)}, {"at": ("one",)}, {"every": 0}, {"every": True}, {"at": (1,), "every": 2}]
)
def test_profile_refuses_other_steps(options):
    with pytest.raises(PluginError, match="ModuleProfile"):
        ModuleProfile(**options)


@pytest.mark.gpu
def test_profile_measures_the_device():
    profile = ModuleProfile(at=(1,), show=False)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[profile], standard=False)
    learner.fit([(x.cuda(), y.cuda()) for x, y in data()], epochs=1)
    assert all(row["forward seconds"] > 0 and row["backward seconds"] > 0 for row in rows(profile).values())


def test_a_forward_aside_is_not_profiled():
    def probe(learner):
        with learner.aside(), torch.no_grad():
            learner.model(torch.ones(3, 16))

    profile = ModuleProfile(at=(1,), show=False)
    fit(nn.Sequential(nn.Linear(16, 4)), profile, on("loss_begin", probe))
    assert rows(profile)["0"]["calls"] == 1
