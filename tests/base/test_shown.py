"""What people see in a REPL or a notebook."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from loopkit import Learner, criteria, data, metrics, plugins
from loopkit.base.tabular import html
from loopkit.base.world import World
from loopkit.checkpoint import listing
from loopkit.engine.life.signals import interruption
from loopkit.errors import PluginError
from loopkit.logs import JsonLines, read_log
from loopkit.plugins import (
    Checkpoint,
    ClipGradNorm,
    Freeze,
    LogMetrics,
    LogTo,
    MixedPrecision,
    Schedule,
    WeightAverage,
    call_on,
)
from loopkit.result import FitResult
from loopkit.schedules import cosine


def made(*plugins, **options) -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    return Learner(model, nn.MSELoss(), torch.optim.Adam, plugins=plugins, **options)


@pytest.fixture(scope="module")
def batches():
    return [(torch.ones(4, 3), torch.zeros(4, 1))] * 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (ClipGradNorm(1.0), "ClipGradNorm(max_norm=1.0)"),
        (MixedPrecision(torch.bfloat16), "MixedPrecision(dtype=torch.bfloat16)"),
        (Freeze("0", {"1": 3}, norms=False), "Freeze('0', {'1': 3}, norms=False)"),
        (Checkpoint("/runs/a", best="val/loss"), "Checkpoint(directory='/runs/a', best='val/loss')"),
        (LogTo(JsonLines("/runs/a"), every=7), "LogTo(JsonLines(path='/runs/a'), every=7)"),
        (metrics.Mean("critic_loss"), "Mean(attribute='critic_loss')"),
        (metrics.FunctionMetric(nn.functional.mse_loss), "FunctionMetric(function=mse_loss, name='mse_loss')"),
        (criteria.Patience(3) | criteria.TimeLimit(60), "(Patience(n=3) | TimeLimit(seconds=60.0))"),
        (criteria.warmup(criteria.Threshold(0.1), 2), "warmup(Threshold(value=0.1), 2)"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_repr_of_a_part_shows_what_it_was_made_with(value, shown):
    assert repr(value) == shown


@pytest.mark.parametrize("module", [criteria, metrics, plugins], ids=lambda module: module.__name__)
def test_every_part_is_shown_in_a_line(module):
    classes = [each for each in map(vars(module).get, module.__all__) if inspect.isclass(each)]
    assert [each for each in classes if each.__repr__ is object.__repr__] == []


def test_repr_of_a_plugin_stays_short():
    weights = {"a": torch.zeros(2, 3), "b": nn.Linear(9, 9), "c": "x" * 500}
    shown = repr(type("Own", (type(ClipGradNorm(1.0)).__base__,), {"__init__": keep})(weights))
    assert shown.startswith("Own(weights={'a': Tensor(2, 3), 'b': Linear(")
    assert len(shown) < 200


def keep(self, weights):
    self.weights = weights


def test_repr_of_a_learner(batches):
    learner = made(ClipGradNorm(1.0), standard=False)
    assert repr(learner) == "Learner(Sequential, 26 parameters, Adam lr 0.001, 1 plugin, 0 epochs done)"
    learner.fit(batches, epochs=1)
    assert repr(learner) == "Learner(Sequential, 26 parameters, Adam lr 0.001, 1 plugin, 1 epoch done)"


def test_repr_of_a_learner_of_several_models_and_rates():
    models = {"a": nn.Linear(2, 1), "b": nn.LazyLinear(2)}
    groups = [{"params": models["a"].weight, "lr": 0.1}, {"params": models["a"].bias, "lr": 0.01}]
    learner = Learner(models, None, torch.optim.SGD(groups), standard=False)
    assert (
        repr(learner) == "Learner(a Linear, b LazyLinear, 3 parameters, SGD lr 0.01 to 0.1, 0 plugins, 0 epochs done)"
    )


def test_repr_of_a_fit_an_epoch_a_window_a_step_and_a_loader():
    loader, said = data.TensorLoader(torch.zeros(4, 3), torch.zeros(4, 2), batch_size=2), []

    def shown(learner, epoch, step):
        said.extend(map(repr, (step, epoch, learner.current, *epoch.windows)))

    look = call_on("step_end", shown, name="look")
    sgd = torch.optim.SGD
    Learner(nn.Linear(3, 2), nn.MSELoss(), sgd, plugins=[look], standard=False, accumulate=3).fit(loader, epochs=1)
    assert said[4:] == [
        "Step('train', epoch 1, index 1, 2 samples; inputs, targets, outputs, loss)",
        "Epoch('train', epoch 1, 2 of 2 steps)",
        "Fit(epochs=1, progress=Progress(epochs=0, steps=2, updates=1, samples=4))",
        "Window('optimizer', 0 of 3 steps)",
    ]
    loaders = (data.Prefetch(loader, "cpu"), loader.map(len), data.from_function(3, len), data.same(loader, batches=1))
    short = [repr(each).replace(repr(loader), "TensorLoader(...)") for each in loaders]
    assert short == [
        "Prefetch(TensorLoader(...), 'cpu')",
        "TensorLoader(...).map(len)",
        "from_function(3, len)",
        "same(1 batches)",
    ]
    assert repr(World()) == "World(rank=0, size=1)"


def test_html_of_a_table_is_escaped():
    assert "<b>" not in html(["<b>"], [["<b>"], [None]])
    assert "&lt;b&gt;" in html(["<b>"], [["<b>"]])


def test_result_is_shown_short_with_its_metrics_as_a_table():
    result = FitResult("epochs", epochs=2, metrics={"train/loss": 0.5, "val/loss": 0.25, "val/<b>": 1.0})
    assert repr(result).startswith("FitResult(finished: 2 epochs, ")
    shown = result._repr_html_()
    assert "<p>finished: 2 epochs" in shown
    row = ["loss", "0.5", "0.25"]
    assert "<tr>" + "".join(f'<td style="text-align: {s}">{c}</td>' for s, c in zip(SIDES, row, strict=True)) in shown
    assert "<b>" not in shown


SIDES = ("left", "right", "right")


@pytest.mark.parametrize("full", [False, True])
def test_explanation_is_a_table(full):
    plan = made(ClipGradNorm(1.0)).explain(full=full)
    assert repr(plan) == str(plan)
    shown = plan._repr_html_()
    assert shown.count("<table>") == shown.count("</table>") >= 1
    assert "clip_grad_norm" in shown
    assert ("look on: " in shown) is not full


def test_explanation_of_the_standard_stack_fits_a_screen():
    stack = [MixedPrecision("bfloat16"), ClipGradNorm(1.0), Schedule(cosine(100)), WeightAverage(decay=0.9)]
    stack += [
        plugins.EarlyStopping("val/loss"),
        Checkpoint("/runs/a"),
        LogTo("/runs/a"),
        LogMetrics(),
        plugins.Metrics(),
    ]
    lines = str(made(*stack, accumulate=2).explain()).splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) < 100


def test_log_shows_each_name_once(tmp_path, batches):
    made(LogTo(tmp_path), LogMetrics()).fit(batches, epochs=2)
    log = read_log(tmp_path)
    assert repr(log).startswith(f"Log({str(tmp_path / 'log.jsonl')!r}, ")
    assert len(repr(log)) < 200 + len(str(tmp_path))
    names = log.names()
    assert [line.split()[0] for line in str(log).splitlines()[3:]] == names
    assert log._repr_html_().count("<tr>") == 1 + len(names)


def test_listing_is_a_table(tmp_path, batches):
    assert repr(listing(tmp_path)) == "no checkpoints"
    made(Checkpoint(tmp_path)).fit(batches, epochs=2)
    (tmp_path / "000009-step-9").mkdir()
    found = listing(tmp_path)
    lines = repr(found).splitlines()
    assert lines[0].split()[:4] == ["number", "name", "epoch", "step"]
    assert "step-4" in lines[1]
    assert lines[-1].startswith("damaged: 000009-step-9")
    assert "<table>" in found._repr_html_()


def test_help_of_evaluate_says_all_that_it_takes():
    said = inspect.getdoc(Learner.evaluate)
    assert all(f"\n    {name}: " in said for name in inspect.signature(Learner.evaluate).parameters if name != "self")
    assert "Raises" in said
    assert "Example" in said


# A cell that is run again


def test_checkpoint_overwrite_removes_and_says_it(tmp_path, batches, capfd):
    for _ in range(2):
        made(Checkpoint(tmp_path, overwrite=True), LogTo(tmp_path)).fit(batches, epochs=1)
    [only] = listing(tmp_path)
    assert only.about["progress"]["steps"] == 2
    assert f"removed a checkpoint of an earlier run in {tmp_path}: 0" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["notes.txt", "202401", ".git"])
def test_checkpoint_overwrite_refuses_what_is_not_its_own(tmp_path, batches, name):
    made(Checkpoint(tmp_path)).fit(batches, epochs=1)
    (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Exception, match=rf"holds more than checkpoints and logs: '{name}'. It removed no files"):
        made(Checkpoint(tmp_path, overwrite=True)).fit(batches, epochs=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoint_overwrite_with_resume_is_refused(tmp_path):
    with pytest.raises(Exception, match="overwrite=True removes what resume='auto' needs"):
        Checkpoint(tmp_path, overwrite=True, resume="auto")


@pytest.mark.slow  # a kernel
def test_kernel_shows_tables_and_runs_a_cell_again(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="the extra `docs` has it")
    client = pytest.importorskip("nbclient", reason="the extra `docs` has it")
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix, "share", "jupyter")))
    setup = (
        "import torch\nfrom loopkit import Learner\nfrom loopkit.checkpoint import listing\n"
        "from loopkit.plugins import Checkpoint\nmodel = torch.nn.Linear(3, 1)\n"
        "batches = [(torch.ones(4, 3), torch.zeros(4, 1))] * 2"
    )
    fit = (
        "learner = Learner(model, torch.nn.MSELoss(), torch.optim.Adam, "
        "plugins=[Checkpoint('run', overwrite=True)])\nlearner.fit(batches, epochs=1)"
    )
    grows = "from loopkit.plugins import Progress\n" + fit.replace(
        "overwrite=True)", "overwrite=True), Progress(chart=True)"
    )
    cells = [setup, fit, fit, "learner", "learner.explain()", "listing('run')", grows, "learner.history"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client.NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [next((o["data"] for o in cell.outputs if "data" in o), {}) for cell in book.cells]
    assert shown[3]["text/plain"].startswith("Learner(Linear, 4 parameters, Adam lr 0.001, ")
    assert all("<table>" in each["text/html"] for each in (*shown[1:3], *shown[4:6]))
    assert all("<svg" in each["text/html"] for each in shown[6:])
    said = "".join(o.get("text", "") for o in book.cells[2].outputs)
    assert "removed a checkpoint of an earlier run" in said


CELLS = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell()
shell.run_cell('''
import os, signal, torch
from loopkit import Learner, hookimpl

class Interrupts:
    def __init__(self, times):
        self.times = times

    @hookimpl
    def step_begin(self, learner):
        for _ in range(self.times if learner.progress.steps == 1 else 0):
            os.kill(os.getpid(), signal.SIGINT)

def made(times):
    model, plugins = torch.nn.Linear(3, 1), [Interrupts(times)]
    return Learner(model, torch.nn.MSELoss(), torch.optim.SGD, plugins=plugins, standard=False)

batches = [(torch.ones(4, 3), torch.zeros(4, 1))] * 3
''')
for cell in ("made(1).fit(batches, epochs=2)", "made(2).fit(batches, epochs=2)"):
    print("cell", flush=True)
    assert isinstance(shell.run_cell(cell).error_in_exec, KeyboardInterrupt)
"""


def test_interrupt_is_one_line_in_ipython(tmp_path):
    """A process of its own: a shell changes hooks of the interpreter."""
    pytest.importorskip("IPython", reason="the extra `docs` has it")
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-c", CELLS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == ["cell", "KeyboardInterrupt: the fit was interrupted; call fit again to resume it"] * 2
    assert "Traceback" not in done.stderr


def test_interrupt_looks_as_always_elsewhere():
    error = interruption()
    assert repr(error) == "KeyboardInterrupt()"
    assert traceback.format_exception_only(error) == ["KeyboardInterrupt\n"]
    assert type(pickle.loads(pickle.dumps(error))) is KeyboardInterrupt


def test_learner_hands_out_its_history(batches):
    learner = made()
    learner.fit(batches, epochs=2)
    assert learner.history is learner.plugins["history"]
    shown = learner.history._repr_html_()
    assert shown.count("<svg") == 1
    assert shown.count("<polyline") == 1
    assert "train" in shown
    learner.remove("history")
    with pytest.raises(PluginError, match=r"no plugin keeps a history; add one: plugins=\[History\(\)\]"):
        _ = learner.history


def test_history_without_an_epoch_is_a_sentence():
    assert made().history._repr_html_() == "<p>History: no epoch has run</p>"
