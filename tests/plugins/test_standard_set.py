"""The standard plugins of a learner, and the border between the engine and its plugins."""

import ast
import io
import sys
from pathlib import Path

import pytest
import torch
from helpers import batches
from torch import nn

import loopkit
from loopkit import Learner, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import History, Metrics, Progress, SanityCheck, StopOnNonFinite, throttle

STANDARD = {
    "history": History,
    "metrics": Metrics,
    "progress": Progress,
    "sanity_check": SanityCheck,
    "stop_on_non_finite": StopOnNonFinite,
}
HOOK = {"fit_end": hookimpl(lambda self: None)}
ROOT = Path(loopkit.__file__).parent
PLUGINS = sorted((ROOT / "plugins").glob("*.py"))


def kinds(*plugins, **options):
    return {name: type(plugin) for name, plugin in Learner(nn.Linear(3, 1), plugins=plugins, **options).plugins.items()}


def test_standard_plugins_are_added():
    assert kinds() == STANDARD


def test_standard_false_adds_none():
    assert kinds(standard=False) == {}


@pytest.mark.parametrize("name", STANDARD)
def test_standard_plugin_of_a_name_in_the_list_is_left_out(name):
    mine = type("Mine", (), {**HOOK, "name": name})()
    assert kinds(mine) == {**STANDARD, name: type(mine)}


@pytest.mark.parametrize("name", STANDARD)
def test_standard_plugin_of_a_class_name_in_the_list_is_left_out(name):
    mine = type(STANDARD[name].__name__, (), HOOK)()
    assert kinds(mine) == {**STANDARD, name: type(mine)}


@pytest.mark.parametrize("name", STANDARD)
def test_standard_plugin_that_the_list_provides_is_left_out(name):
    mine = type("Mine", (), {**HOOK, "provides": STANDARD[name].provides})()
    others = {other: kind for other, kind in STANDARD.items() if other != name}
    assert kinds(mine) == {**others, "mine": type(mine)}


def test_standard_plugin_with_options_replaces_the_plain_one():
    metrics = throttle(Metrics(), every=2)
    learner = Learner(nn.Linear(3, 1), plugins=[metrics])
    assert learner.plugins["metrics"] is metrics
    assert learner.plugins.keys() == STANDARD.keys()


def test_standard_plugins_with_a_class_in_the_list_refuse_it():
    with pytest.raises(PluginError, match="Metrics is a class; a plugin is an instance"):
        Learner(nn.Linear(3, 1), plugins=[Metrics])


def learner_of(**options):
    torch.manual_seed(0)
    return Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_standard_plugins_leave_training_bitwise_alone(accumulate):
    one = learner_of(accumulate=accumulate, plugins=[Progress(bar=True, file=io.StringIO())])
    other = learner_of(accumulate=accumulate, standard=False)
    for learner in (one, other):
        learner.fit(batches(5), batches(2), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)
    assert torch.equal(one.model.bias, other.model.bias)


def test_standard_plugins_make_result_metrics_and_history():
    result = learner_of(plugins=[Progress(file=io.StringIO())]).fit(batches(3), batches(1), epochs=2)
    assert result.metrics.keys() == {"train/loss", "val/loss"}
    assert [row["phase"] for row in result.history] == ["train", "val", "train", "val"]
    assert result.history[-1]["val/loss"] == result.metrics["val/loss"]


class Remembers:
    """Reads a metric at the end of each pass."""

    def __init__(self):
        self.seen = []

    @hookimpl(reads=("metrics.val/loss",))
    def phase_end(self, learner, phase):
        if phase.name == "val":
            self.seen.append(learner.metrics["val/loss"])


def test_standard_metrics_are_there_for_their_readers():
    remembers = Remembers()
    result = learner_of(plugins=[Progress(file=io.StringIO()), remembers]).fit(batches(3), batches(1), epochs=1)
    assert remembers.seen == [result.metrics["val/loss"]]


# The border


def imports(path):
    """The modules that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_package_itself_imports_plugins_and_in_one_place():
    programs = [ROOT / name for name in ("author.py", "__main__.py")]  # which stand on all of it
    folders = ("commands",)
    programs += [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    engine = [path for path in ROOT.rglob("*.py") if path not in (*PLUGINS, *programs)]
    assert len(engine) > 10
    found = [
        (path.relative_to(ROOT).as_posix(), module)
        for path in engine
        for module in imports(path)
        if module.startswith("loopkit.plugins.")
    ]
    assert found == [("__init__.py", "loopkit.plugins.standard_set")]


def test_plugins_import_nothing_but_torch_and_tqdm():
    allowed = {"loopkit", "torch", "tqdm", "safetensors", "numpy", "matplotlib", *sys.stdlib_module_names}
    found = {module.split(".")[0] for path in PLUGINS for module in imports(path)}
    assert {"loopkit", "torch", "tqdm"} <= found <= allowed


def root_of(node):
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(source):
    """Private attributes of anything but the object itself; torch has some that have no public name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and root_of(node) not in ("torch", "sys"):
                yield f"{ast.unparse(node)} in line {node.lineno}"


def test_private_uses_are_found():
    source = "self._own\nlearner._epochs\nself.learner._stop\ntorch._foreach_mul_\nstep.loss.__class__\nf(x)._y"
    assert list(private_uses(source)) == [
        "learner._epochs in line 2",
        "self.learner._stop in line 3",
        "f(x)._y in line 6",
    ]


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.stem)
def test_plugins_use_the_public_api_alone(path):
    objects = ("learner.", "epoch.", "step.", "phase.", "running.", "plugin.", "registry.")
    used = list(private_uses(path.read_text(encoding="utf-8")))
    assert [use for use in used if any(f".{name}" in f".{use}" for name in objects)] == []
