"""`FindSyncs` names the lines that make the host wait for the device."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from loopkit_testing import tiny_problem
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.logs import Backend, Table
from loopkit.plugins import ClipGradNorm, GradNorm, LogTo, Metrics, MixedPrecision, Schedule
from loopkit.schedules import cosine
from loopkit_insight import FindSyncs, Sync


def fit(*plugins, epochs=1, phases=(), **options):
    problem = tiny_problem()  # 4 training and 2 validation steps an epoch
    learner = problem.learner(plugins=plugins, phases=phases, standard=False, **options)
    learner.fit(problem.train, problem.val, epochs=epochs)
    return learner


def line_of(function, text):
    """``file:line`` of the line of a function that holds a text, as the plugin writes it."""
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{first + offset}"


def same_place(shown, expected):
    """Whether a path that may be relative to the working directory ends the absolute one."""
    return expected.endswith(shown)


class Reads:
    """Reads the loss in each step, once on purpose."""

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, step):
        if step.loss > 1000:
            raise AssertionError
        self.value = float(
            step.loss.detach()  # host sync: on purpose
        )


class ReadsElsewhere:
    """Reads through a function of the standard library's kind: another file's."""

    @hookimpl(phase=TrainingPhase, updates=("grads",))
    def update_begin(self, step):
        torch.nn.utils.clip_grad_norm_(step.params, 1.0, error_if_nonfinite=True)


def test_find_syncs_names_plugin_hook_and_line():
    find = FindSyncs(show=False)
    fit(find, Reads())
    first, second = find.found
    assert (first.phase, first.hook, first.plugin) == ("train", "step_end", "reads")
    assert same_place(first.line, line_of(Reads.step_end, "> 1000"))
    assert first.call == "bool() on a tensor"
    assert not first.deliberate
    assert second.call == "float() on a tensor"


def test_find_syncs_tells_deliberate_ones_also_in_statements_of_several_lines():
    find = FindSyncs(show=False)
    fit(find, Reads())
    assert [sync.deliberate for sync in find.found] == [False, True]


def test_find_syncs_counts_each_line():
    find = FindSyncs(show=False)
    fit(find, Reads(), epochs=2)
    assert [row[6] for row in find.table().rows] == [8, 8]


def test_find_syncs_looks_through_torch():
    find = FindSyncs(show=False)
    fit(find, ReadsElsewhere())
    assert {sync.plugin for sync in find.found} == {"reads_elsewhere"}
    assert all(same_place(s.line, line_of(ReadsElsewhere.update_begin, "clip_grad_norm_")) for s in find.found)


@pytest.mark.parametrize(
    "read",
    [
        lambda loss: loss.item(),
        lambda loss: loss.cpu(),
        lambda loss: loss.to("cpu"),
        lambda loss: loss.detach().numpy(),
        lambda loss: loss.tolist(),
        lambda loss: bool(loss),
        lambda loss: int(loss.detach()),
        lambda loss: torch.ones(3).nonzero(),
        lambda loss: torch.ones(3)[torch.ones(3) > 0],
        lambda loss: torch.where(torch.ones(3)),
        lambda loss: f"{loss:.2f}",
        lambda loss: str(loss),
        lambda loss: np.asarray(loss.detach()),
        lambda loss: loss in [torch.zeros(())],
        lambda loss: max(loss, loss),
        lambda loss: torch.tensor([loss.detach(), loss.detach()]),
        lambda loss: torch.ones(3)[torch.tensor(1)],
        lambda loss: torch.ones(3)[: torch.tensor(1)],
        lambda loss: torch.ones(3).__setitem__(torch.tensor(1), 0.0),
        lambda loss: torch.ones(3).__setitem__(torch.ones(3) > 0, torch.zeros(3)),
        lambda loss: [1, 2][torch.tensor(1)],
        lambda loss: torch.bincount(torch.ones(3, dtype=torch.int64)),
        lambda loss: torch.ones(2).repeat_interleave(torch.tensor([1, 2])),
        lambda loss: nn.functional.one_hot(torch.tensor([1, 2])),
    ],
)
def test_find_syncs_finds_reads_in_the_phase(read):
    class Phase(TrainingPhase):
        def loss(self, learner, outputs, targets):
            loss = super().loss(learner, outputs, targets)
            read(loss)
            return loss

    find = FindSyncs(show=False)
    fit(find, phases=[Phase()])
    (found,) = find.found
    assert (found.phase, found.hook, found.plugin) == ("train", "step", "")
    assert same_place(found.line.rpartition(":")[0], inspect.getsourcefile(line_of))


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.__setitem__(x > 1, 0.0),
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: x.repeat_interleave(2),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 1]), output_size=4),
        lambda x: nn.functional.one_hot(x.long(), 3),
        lambda x: x.to(torch.device("cpu")),
        lambda x: [*x],
    ],
)
def test_find_syncs_passes_over_what_the_device_does_alone(keep):
    class Keeps:
        @hookimpl
        def step_end(self):
            keep(torch.ones(3))

    find = FindSyncs(show=False)
    fit(find, Keeps())
    assert find.found == ()


def test_find_syncs_names_the_line_of_the_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LazyLinear(3)

        def forward(self, x):
            assert x.isfinite().all()
            return self.inner(x)

    model, find = Model(), FindSyncs(show=False)
    model(torch.ones(2, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[find], standard=False)
    learner.fit([(torch.ones(2, 4), torch.tensor([0, 1]))], epochs=1)
    (found,) = find.found  # and nothing of the optimizer, whose counters lie on the host
    assert same_place(found.line, line_of(Model.forward, "isfinite"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_find_syncs_leaves_compiled_code_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            outputs = self.inner(x)
            return outputs * 2 if outputs.sum() > 0 else outputs

    model, find = Model(), FindSyncs(show=False)
    model.compile(backend="eager")
    learner = Learner(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), plugins=[find, Reads()], standard=False
    )
    learner.fit([(torch.ones(2, 4), torch.tensor([0, 1]))], epochs=1)
    assert {sync.plugin for sync in find.found} == {"reads"}


def test_find_syncs_gives_the_default_of_a_verb_to_the_step():
    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].sum().item()
            return super().step(closure)

    class Takes:
        @hookimpl(updates=("params",))
        def optimizer_step(self, default):
            default()

    problem, find = tiny_problem(), FindSyncs(show=False)
    optimizer = Optimizer(problem.model.parameters(), lr=0.1)
    Learner(problem.model, problem.loss_fn, optimizer, plugins=[find, Takes()], standard=False).fit(
        problem.train, epochs=1
    )
    assert [(s.hook, s.plugin) for s in find.found] == [("step", "")]


def test_find_syncs_watches_contexts_of_steps():
    class Context:
        @hookimpl
        def step_context(self):
            return self

        def __enter__(self):
            self.tensor = torch.ones(())

        def __exit__(self, *error):
            self.tensor.item()

    find = FindSyncs(show=False)
    fit(find, Context())
    assert {(s.phase, s.hook, s.plugin) for s in find.found} == {
        ("train", "step_context", "context"),
        ("val", "step_context", "context"),
    }


def test_find_syncs_finds_nothing_in_the_standard_plugins_and_the_end_of_a_pass():
    find = FindSyncs(show=False)
    fit(find, Metrics(), ClipGradNorm(1.0), GradNorm(), Schedule(cosine(10)))
    assert find.found == ()
    assert str(find) == "no call inside a step was seen to wait for the device"


class LogsTensors:
    """Logs what lies on the host."""

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, learner, step):
        learner.log("loss", step.loss)
        learner.log({"scale": nn.Parameter(step.loss.detach()), "count": torch.tensor(3)})


def test_find_syncs_finds_nothing_in_what_is_logged():
    find, read, seen = FindSyncs(show=False), Backend(), []
    read.write = seen.extend
    fit(find, LogTo(read), LogsTensors())
    assert find.found == ()
    assert [record.value for record in seen[1:3]] == [seen[0].value, 3.0]


def test_explain_marks_the_hook():
    find = FindSyncs(show=False)
    learner = fit(find, Reads())
    (row,) = [row for row in learner.explain("train").rows if row.plugin == "reads"]
    assert row.note == f"waits for the device: {find.found[0].line}, {find.found[1].line} (deliberate)"


def test_find_syncs_prints_what_it_found(capsys):
    fit(FindSyncs(), Reads())
    printed = capsys.readouterr().out
    assert "train  reads   step_end  bool() on a tensor" in printed
    assert "(deliberate)" in printed


def test_find_syncs_logs_what_is_new():
    class Keeps(Backend):
        kinds = (Table,)

        def __init__(self):
            self.records = []

        def write(self, records):
            self.records += records

    kept = Keeps()
    fit(FindSyncs(show=False), Reads(), LogTo(kept), epochs=3)
    assert [(record.name, record.epoch) for record in kept.records] == [("run/syncs", 1)]


def test_find_syncs_leaves_no_mode_behind_after_an_error():
    class Fails:
        @hookimpl
        def step_end(self):
            raise ValueError("no")

    find = FindSyncs(show=False)
    with pytest.raises(ValueError, match="no"):
        fit(find, Fails())
    torch.ones(()).item()
    assert find.found == ()
    assert torch._C._len_torch_function_stack() == 0


def test_find_syncs_changes_no_bit():
    def weights(*plugins):
        torch.manual_seed(0)
        learner = fit(*plugins, Metrics(), ClipGradNorm(1.0), epochs=3, accumulate=2)
        return torch.cat([p.detach().flatten() for p in learner.model.parameters()])

    assert torch.equal(weights(), weights(FindSyncs(show=False), Reads()))


@pytest.mark.gpu
def test_find_syncs_uses_the_sync_debug_mode_on_a_gpu():
    model, find = nn.Linear(3, 2).cuda(), FindSyncs(show=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[find, Reads()], standard=False)
    learner.fit([(torch.ones(2, 3).cuda(), torch.tensor([0, 1]).cuda())], epochs=1)
    assert [s.plugin for s in find.found] == ["reads", "reads"]
    assert isinstance(find.found[0], Sync)
    assert torch.cuda.get_sync_debug_mode() == 0


CLASSES = [(torch.randn(8, 3), torch.arange(8) % 3)] * 3
NUMBERS = [(torch.randn(8, 3), torch.randn(8, 3))] * 3


class Twice(TrainingPhase):
    """Two forwards in a step, which autocast casts the weights for once."""

    def forward(self, learner, inputs):
        return learner.model(inputs) + learner.model(inputs)


@pytest.mark.parametrize(
    ("loss_fn", "data", "more"),
    [
        (nn.CrossEntropyLoss(), CLASSES, {}),
        (nn.CrossEntropyLoss(ignore_index=0), CLASSES, {}),
        (nn.NLLLoss(), CLASSES, {}),
        (nn.MSELoss(), NUMBERS, {}),
        (nn.CrossEntropyLoss(), CLASSES, {"plugins": [MixedPrecision("bfloat16")], "phases": [Twice()]}),
    ],
    ids=["cross-entropy", "ignored", "nll", "mse", "autocast"],
)
def test_find_syncs_calls_every_read_of_the_standard_plugins_deliberate(loss_fn, data, more):
    find = FindSyncs(show=False)
    plugins = [find, *more.get("plugins", ())]
    optimizer = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731
    learner = Learner(nn.Linear(3, 3), loss_fn, optimizer, plugins=plugins, phases=more.get("phases", ()))
    learner.remove("progress")
    learner.fit(data, data, epochs=1)
    assert [sync for sync in find.found if not sync.deliberate] == []
