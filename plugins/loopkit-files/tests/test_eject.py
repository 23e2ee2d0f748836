"""What is refused, what is left out, how schedules are written, and whole programs from configurations."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from running import compare, lint, loaders, network, run, same, sgd
from torch import nn

from loopkit import Learner, TrainingPhase, every, hookimpl, schedules
from loopkit.commands.cli import main
from loopkit.metrics import Accuracy
from loopkit.plugins import (
    Checkpoint,
    EarlyStopping,
    GradNorm,
    LogHyperparameters,
    LogMetrics,
    LogTo,
    Metrics,
    MixedPrecision,
    Schedule,
    SkipSpikes,
    StopOnNonFinite,
    TorchSchedule,
    WeightAverage,
    throttle,
)
from loopkit.schedules import (
    clip,
    constant,
    cosine,
    cosine_warmup,
    exponential,
    inverse,
    inverse_sqrt,
    join,
    linear,
    loop,
    multi_step,
    polynomial,
    scale,
    shift,
    step,
    warmup,
)
from loopkit_files import Config, EjectError, eject, eject_config, load
from loopkit_files.plain.code import expression, quoted, wrapped
from loopkit_files.plain.formulas import formula

EPOCHS = {"epochs": 2}


def learner(*plugins: Any, **options: Any) -> Learner:
    return Learner(network(), nn.CrossEntropyLoss(), sgd, plugins=plugins, **options)


class Decay:
    """A plugin that changes weights."""

    def __init__(self, name: str = "decay") -> None:
        self.name = name

    @hookimpl(updates=("params",))
    def update_end(self, step: Any) -> None:
        with torch.no_grad():
            for p in step.params:
                p.mul_(0.99)


class OwnPhase(TrainingPhase):
    def step(self, learner: Any, step: Any) -> None:
        super().step(learner, step)


# What has no written form


@pytest.mark.parametrize(
    ("made", "part", "reason"),
    [
        (lambda: Learner(nn.Linear(1, 1), None, sgd), "no loss_fn", "need one"),
        (lambda: learner(Decay()), "plugin 'decay' (Decay)", "its own code"),
        (lambda: learner(SkipSpikes()), "plugin 'skip_spikes'", "depends on the losses"),
        (lambda: learner(StopOnNonFinite("skip")), "plugin 'stop_on_non_finite'", "policy 'skip'"),
        (lambda: learner(WeightAverage(update_bn=[1])), "plugin 'weight_average'", "update_bn"),
        (lambda: learner(Schedule(lambda k: 0.5)), "plugin 'schedule'", "<lambda> has no name"),
        (lambda: learner(Schedule(warmup(3, then=lambda k: 0.5))), "plugin 'schedule'", "not of loopkit.schedules"),
        (lambda: learner(TorchSchedule(lambda o: None)), "plugin 'torch_schedule'", "<lambda> has no name"),
        (lambda: learner(Metrics(mae=lambda o, t: 0.0)), "metric 'mae'", "<lambda> has no name"),
        (lambda: learner(phases=[OwnPhase()]), "phase 'train' (OwnPhase)", "it has its own step"),
        (lambda: learner(EarlyStopping(), EarlyStopping(name="b")), "plugin 'early_stopping'", "room for one"),
        (
            lambda: learner(MixedPrecision("float16"), StopOnNonFinite(gradients=True)),
            "plugin 'stop_on_non_finite'",
            "together with loss scaling",
        ),
    ],
)
def test_part_without_a_written_form_is_named_with_the_reason(made: Any, part: str, reason: str) -> None:
    with pytest.raises(EjectError, match="no written form") as caught:
        eject(made(), EPOCHS)
    assert len(caught.value.problems) == 1
    found = next(iter(caught.value.problems))
    assert found.startswith(part)
    assert reason in caught.value.problems[found]


def test_all_such_parts_are_named_at_once() -> None:
    with pytest.raises(EjectError, match="2 parts have no written form") as caught:
        eject(learner(Decay(), SkipSpikes()), EPOCHS)
    assert len(caught.value.problems) == 2


def test_partial_lists_them_at_the_top_and_writes_the_rest() -> None:
    source = eject(learner(Decay(), WeightAverage(0.9)), EPOCHS, partial=True)
    assert "# - plugin 'decay' (Decay): its own code does the work" in source
    assert "get_ema_multi_avg_fn(0.9)" in source
    train, val = loaders()
    model = network()
    history = run(source)["train"](model, train, val, sgd(model.parameters()), nn.CrossEntropyLoss())
    assert len(history) == 2


def test_two_models_have_no_written_form_not_even_in_part() -> None:
    two = Learner({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}, nn.MSELoss(), {"a": sgd, "b": sgd})
    with pytest.raises(EjectError, match=r"the models a, b: .* the optimizers a, b: .*leave them out$"):
        eject(two, EPOCHS, partial=True)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ({}, "no end: give epochs"),
        ({"epoch": 3}, "no argument 'epoch' .did you mean 'epochs'"),
        ({"epochs": 1, "train": {"train": 1}}, "only the standard phases"),
        ({"epochs": 1, "validate": every(minutes=1)}, "so many epochs or updates"),
        ({"epochs": 1, "validate": 2}, r"validate is 2: write every\(epochs=1\)"),
    ],
)
def test_wrong_arguments_of_fit_are_refused(fit: dict[str, Any], message: str) -> None:
    with pytest.raises(EjectError, match=message):
        eject(learner(), fit)


def test_limits_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="epochs is 0: it counts from 1"):
        eject(learner(), {"epochs": 0})


def test_a_learner_that_has_trained_is_refused() -> None:
    trained = learner(standard=False)
    trained.fit(loaders()[0], max_steps=1)
    with pytest.raises(EjectError, match="trained 1 steps"):
        eject(trained, EPOCHS)


def test_what_changes_nothing_is_left_out_with_a_line(tmp_path: Path) -> None:
    source = eject(learner(Checkpoint(tmp_path / "run")), EPOCHS)
    assert "Left out, since they do not change the training: checkpoint, history," in source


class Looks:
    """A plugin that says that it only looks on."""

    provides = "observer"

    @hookimpl(reads=("loss",))
    def step_end(self, step: Any) -> None: ...


def test_what_only_logs_is_left_out_and_named(tmp_path: Path) -> None:
    stack = [
        LogTo(tmp_path / "run"),
        LogHyperparameters(),
        LogMetrics(),
        throttle(Looks(), every=2),
    ]
    source = eject(learner(*stack), EPOCHS)
    named = source.partition("Left out, since they do not change the training: ")[2].partition(".")[0]
    left_out = set(named.replace(",", " ").split())
    assert {"log_to", "log_hyperparameters", "log_metrics", "looks"} < left_out


class Scales(LogMetrics):
    """A plugin that does more than the class it is made from, and does not say that it only looks on."""

    @hookimpl(updates=("grads",))
    def update_begin(self, step: Any) -> None:
        for p in step.params:
            p.grad.mul_(0.1)


class ScalesAndDenies(Scales):
    provides = "observer"


class LooksAndScales(Looks):
    @hookimpl
    def update_begin(self, step: Any) -> None: ...


class MakesMetrics:
    provides = "log"
    writes = ("metrics.*/x",)

    @hookimpl
    def step_end(self, step: Any) -> None: ...


class LogsMore(LogTo):
    """Its hooks are those of ``LogTo``, whose ``"*"`` is for the order."""

    provides = "log"


class InheritsLog(LogTo): ...


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (Scales, "its own code"),
        (lambda: throttle(Scales(), every=2), "its own code"),
        (ScalesAndDenies, "its update_begin declares updates=('grads',)"),
        (LooksAndScales, "its own code"),
        (InheritsLog, "its own code"),
    ],
)
def test_a_plugin_made_from_one_that_only_logs_is_no_such_plugin(
    made: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EjectError) as caught:
        eject(learner(made()), EPOCHS)
    assert [reason in why for why in caught.value.problems.values()] == [True]


def test_a_plugin_that_only_makes_metrics_is_left_out_unless_one_decides_by_them() -> None:
    source = eject(learner(MakesMetrics()), EPOCHS)
    assert "makes_metrics" in source.partition("Left out, since")[2].partition(".")[0]
    with pytest.raises(EjectError) as caught:
        eject(learner(MakesMetrics(), EarlyStopping("train/x", mode="min")), EPOCHS)
    (why,) = caught.value.problems.values()
    assert why == "it provides 'observer', but its step_end declares writes=('metrics.*/x',)"


def test_a_subclass_of_one_that_only_logs_can_say_that_it_does_so_too(tmp_path: Path) -> None:
    source = eject(learner(LogsMore(tmp_path / "run", name="logs_more")), EPOCHS)
    assert "logs_more" in source.partition("Left out, since")[2].partition(".")[0]


def test_plugins_of_the_monitor_are_left_out(tmp_path: Path) -> None:
    monitor = pytest.importorskip("loopkit_monitor")
    source = eject(learner(monitor.Monitor(tmp_path / "run"), monitor.Report(tmp_path / "report.html")), EPOCHS)
    left_out = source.partition("Left out, since they do not change the training: ")[2].partition(".")[0]
    assert {"monitor", "report"} <= set(left_out.replace(",", " ").split())


def test_plugins_of_loopkit_insight_are_left_out(tmp_path: Path) -> None:
    insight = pytest.importorskip("loopkit_insight")
    stack = [
        insight.Cost(),
        throttle(insight.LogGradients(), every=2),
        insight.LogHistograms(),
        insight.LogPredictions(),
        insight.Profile(),
        insight.ReplayBundle(tmp_path / "bundles"),
    ]
    source = eject(learner(*stack), EPOCHS)
    left_out = source.partition("Left out, since they do not change the training: ")[2].partition(".")[0]
    assert {"cost", "log_gradients", "log_histograms", "log_predictions", "profile", "replay_bundle"} <= set(
        left_out.replace(",", " ").split()
    )


def test_a_bad_loss_ends_the_script_before_its_backward() -> None:
    model = network()
    before = [p.clone() for p in model.parameters()]
    train = [(torch.full((4, 5), math.nan), torch.zeros(4, dtype=torch.long))]
    source = eject(learner(), EPOCHS, val=False)
    with pytest.raises(FloatingPointError, match="epoch 1, step 0: loss nan"):
        run(source)["train"](model, train, sgd(model.parameters()), nn.CrossEntropyLoss())
    assert all(map(torch.equal, before, model.parameters()))


def test_a_bad_loss_that_is_looked_for_late_ends_the_epoch() -> None:
    train = [(torch.full((4, 5), math.nan), torch.zeros(4, dtype=torch.long))]
    source = eject(learner(StopOnNonFinite(late=True)), EPOCHS, val=False)
    model = network()
    with pytest.raises(FloatingPointError, match="epoch 1: a loss was infinite"):
        run(source)["train"](model, train, sgd(model.parameters()), nn.CrossEntropyLoss())


def test_the_learner_is_not_changed() -> None:
    given = learner(Schedule(cosine()), WeightAverage())
    before = {key: value.clone() for key, value in given.model.state_dict().items()}
    eject(given, EPOCHS)
    same(before, dict(given.model.state_dict()), "model")
    assert given.optimizer.param_groups[0]["lr"] == 0.1


def test_names_that_meet_are_told_apart() -> None:
    own = Metrics(Accuracy(), accuracy_count=Accuracy(axis=1), samples=Accuracy(), loader=Accuracy())
    norms = [GradNorm(name="loss_norm"), GradNorm(norm_type=1.0, name="params")]
    rates = [Schedule(cosine(), groups="0"), Schedule(linear(), groups="1", name="other")]

    def two_groups(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)

    compare(own, *norms, fit=EPOCHS)
    compare(own, *rates, fit=EPOCHS, optimizer=two_groups)


def test_strings_are_quoted_as_formatters_do_and_read_back(tmp_path: Path) -> None:
    texts = ["", "a", "'", '"', "\"'", '""\'', "\\'", "\\\"'", "q\"uo'te\n", "\\", "\\n\x1b\u2028", "''\""]
    assert [ast.literal_eval(quoted(text)) for text in texts] == texts
    lines = [f"text_{i} = {quoted(text)}" for i, text in enumerate(texts)]
    assert lint(["\n".join(lines) + "\n"], tmp_path) == ""


def test_text_of_others_cannot_leave_the_docstring(tmp_path: Path) -> None:
    odd = 'a\\"""b'
    source = eject(learner(Checkpoint(tmp_path / "run", name=odd), Decay(name=f"{odd}2")), EPOCHS, partial=True)
    nodes = ast.parse(source).body
    assert [type(node).__name__ for node in nodes] == ["Expr", "Import", "Import", "FunctionDef"]


# Schedules

SCHEDULES = [
    constant(0.5),
    step(3, 0.5, start=0.7),
    multi_step([2, 5], 0.3),
    multi_step([4], 0.3, start=0.2),
    exponential(0.9),
    exponential(0.25, every=3, start=0.3),
    polynomial(9, 2.0),
    polynomial(None, 0.9, start=0.3, end=0.1),
    inverse(0.3),
    inverse(0.3, 0.5, start=0.7),
    inverse_sqrt(4, peak=0.3),
    linear(),
    linear(7, start=0.1, end=0.7),
    cosine(),
    cosine(end=0.1),
    cosine(8, start=0.1, end=0.7),
    cosine_warmup(5),
    cosine_warmup(5, start=0.1, end=0.3),
    warmup(3),
    warmup(3, from_zero=True),
    warmup(3, then=scale(cosine(), 0.3), from_zero=True),
    warmup(0, then=linear()),
    warmup(3, then=cosine()),
    warmup(3, then=scale(cosine(start=0.7), 0.3)),
    scale(warmup(4, then=linear()), 0.3),
    clip(scale(linear(), 2.0), 0.1, 0.9),
    shift(linear(), 2),
    shift(cosine(), -2),
    shift(warmup(2, then=cosine()), 1),
    loop(cosine(), 5),
    loop(warmup(2, then=linear()), 6),
    join([(linear(start=0.0, end=1.0), 4), (constant(1.0), 2), (cosine(), None)]),
    join([(warmup(2, then=cosine()), 4), (linear(5), 3)]),
    warmup(2, then=join([(linear(), 4), (cosine(), None)])),
    warmup(2, then=warmup(3, then=shift(polynomial(power=2.0), -1))),
    schedules.one_cycle(),
    warmup(2, then=schedules.warmup_stable_decay(warmup=2, decay=3)),
    schedules.cosine_restarts(4),
    schedules.piecewise({0: 1.0, 3: 0.1}),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: getattr(each, "__name__", "") or str(each))
def test_formula_equals_the_schedule(schedule: Any) -> None:
    imports: set[str] = {"import math"}
    written = formula(schedule, imports)
    for total in (13, 20):
        names: dict[str, Any] = {"total_updates": total}
        exec("\n".join(imports), names)
        if written.lines:
            parameters = "update, total" if written.total else "update"
            exec("\n".join([f"def factor({parameters}):", *(f"    {line}" for line in written.lines)]), names)
            factor = partial(names["factor"], total=total) if written.total else names["factor"]
        else:
            factor = eval(written.expression, names)
        expected = schedules.resolve(schedule, total)
        for update in range(30):
            same(expected(update), factor(update), f"{update} of {total}")


def test_common_schedules_need_no_import_of_loopkit() -> None:
    for schedule in (constant(), cosine(), linear(), warmup(3, then=cosine()), step(2), warmup(2, then=step(2))):
        imports: set[str] = set()
        assert formula(schedule, imports).lines
        assert imports <= {"import math"}


# Code


def test_expressions_with_one_name_twice_are_told_apart() -> None:
    imports: set[str] = set()
    first = expression({"call": "torch.nn:Linear", "in_features": 1, "out_features": 2}, imports)
    other = expression({"use": "torch.nn.modules.linear:Linear"}, imports)
    assert first == "Linear(in_features=1, out_features=2)"
    assert other == "make_Linear"
    assert len(imports) == 2


def test_expression_spreads_an_option_that_is_named_as_the_arguments() -> None:
    table = {"call": "torch.nn:Sequential", "args": [{"call": "torch.nn:ReLU"}, {"call": "torch.nn:Tanh"}]}
    assert expression(table, set()) == "Sequential(ReLU(), Tanh())"


def test_long_lines_are_spread_out() -> None:
    line = "    x = f(" + ", ".join(f"word_{i}='a, b'" for i in range(8)) + ")"
    lines = wrapped(line)
    assert lines[0] == "    x = f("
    assert lines[1] == "        word_0='a, b',"
    assert lines[-1] == "    )"
    assert len(lines) == 10


# Whole programs

PARTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def model(hidden=8):
    return nn.Sequential(nn.Linear(5, hidden), nn.Dropout(0.2), nn.Linear(hidden, 3))


def train_loader(samples=31):
    data = TensorDataset(torch.randn(samples, 5), torch.randint(3, (samples,)))
    return DataLoader(data, batch_size=4, shuffle=True)


def val_loader():
    return DataLoader(TensorDataset(torch.randn(10, 5), torch.randint(3, (10,))), batch_size=5)
"""
CONFIG = """
[model]
call = "ejected_parts:model"
hidden = 6
[loss]
call = "torch.nn:CrossEntropyLoss"
[optimizer]
call = "torch.optim:AdamW"
lr = 0.01
betas = [0.8, 0.9]
[data.train]
call = "ejected_parts:train_loader"
[data.val]
call = "ejected_parts:val_loader"
[learner]
seed = 5
accumulate = 3
[fit]
epochs = 3
[plugins.clip_grad_norm]
max_norm = 0.5
[plugins.weight_average]
decay = 0.9
[plugins.schedule.schedule]
call = "loopkit.schedules:cosine"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration and what it names."""
    (tmp_path / "ejected_parts.py").write_text(PARTS)
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("ejected_parts", None)


def test_program_trains_the_bits_of_the_configuration(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eject", "config.toml", "-o", "train.py", "--save", "weights.pt"]) == 0
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    threads = torch.get_num_threads()
    built = load(place / "config.toml").build()
    result = built.run()
    assert torch.get_num_threads() == threads
    same(dict(built.learner.model.state_dict()), dict(torch.load(place / "weights.pt")), "model")
    rows = [row for row in result.history if row["phase"] == "val"]
    for line, row in zip(done.stdout.splitlines(), rows, strict=True):
        assert f"  val/loss {row['val/loss']:.6g}" in line


def test_program_without_save_and_validation(place: Path) -> None:
    values = load("config.toml").values
    del values["data"]["val"]
    source = eject_config(Config(values))
    assert "val_loader" not in source
    assert "torch.save" not in source
    assert "train_loader = make_train_loader()" in source
    assert source.startswith('"""The run of a configuration, written out.')


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("hidden = 6", "hidden = 6\nsince = 1979-05-27", "[model]: datetime.date(1979, 5, 27) is no plain value"),
        ('[loss]\ncall = "torch.nn:CrossEntropyLoss"\n', "", "no loss_fn: the standard phases need one"),
    ],
)
def test_program_without_a_model_or_loss_is_not_written_in_part_either(
    old: str, new: str, part: str, place: Path
) -> None:
    source = (place / "ejected_parts.py").read_text().replace("hidden=8", "hidden=8, since=None")
    (place / "ejected_parts.py").write_text(source)
    assert old in CONFIG
    (place / "config.toml").write_text(CONFIG.replace(old, new))
    with pytest.raises(EjectError, match="1 part has no written form") as caught:
        eject_config(load("config.toml"), partial=True)
    assert part in str(caught.value)
    assert str(caught.value).endswith("To write a script, leave it out")


def test_help_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eject", "--help"]) == 0
    assert "Exit code: 0 if a script was written, 2 if not." in capsys.readouterr().out


def test_command_writes_to_standard_output(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eject", "config.toml", "--set", "fit.epochs=7"]) == 0
    source = capsys.readouterr().out
    assert "for epoch in range(7):" in source
    compile(source, "train.py", "exec")


def test_command_refuses_to_write_over_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "train.py").write_text("mine")
    assert main(["eject", "config.toml", "-o", "train.py"]) == 2
    assert "train.py is there already" in capsys.readouterr().err
    assert (place / "train.py").read_text() == "mine"
    assert main(["eject", "config.toml", "-o", "train.py", "--force"]) == 0
    (place / "link.py").symlink_to("nowhere.py")
    assert main(["eject", "config.toml", "-o", "link.py"]) == 2


def test_command_says_in_a_line_that_it_cannot_write(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eject", "config.toml", "-o", "missing/train.py"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "loopkit: error: [Errno 2] No such file or directory: 'missing/train.py'"
    ]


def test_command_names_what_has_no_written_form(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (place / "config.toml").open("a") as file:
        file.write("[plugins.skip_spikes]\n")
    assert main(["eject", "config.toml", "-o", "train.py"]) == 2
    assert "plugin 'skip_spikes' (SkipSpikes): which steps it skips" in capsys.readouterr().err
    assert not (place / "train.py").exists()
    assert main(["eject", "config.toml", "-o", "train.py", "--partial"]) == 0
    assert "# - plugin 'skip_spikes'" in (place / "train.py").read_text()


def test_minutes_have_no_written_form():
    with pytest.raises(EjectError, match="minutes has no written form: a script ends by epochs, max_steps or max_upd"):
        eject(learner(), {"epochs": 3, "minutes": 1})
