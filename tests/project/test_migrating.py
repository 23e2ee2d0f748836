"""docs/migrating-*.md: the programs of each page leave the same parameters behind, bitwise."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks
from torch import Tensor

import loopkit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTIONS = {path.stem.removeprefix("migrating-"): path.read_text() for path in sorted(DOCS.glob("migrating-*.md"))}
"""The pages by the library that one comes from."""
BEGIN = blocks(SECTIONS["loop"])[0].text
"""The data and the model of every page."""
MODULES = {
    "loop": "torch",
    "lightning": "lightning",
    "ignite": "ignite",
    "fastai": "fastai",
    "accelerate": "accelerate",
    "hf-trainer": "transformers",
    "keras": "keras",
    "composer": "composer",
    "skorch": "skorch",
}
SCRIPT = """
import contextlib, io, pickle, traceback
import torch

begin, sections = pickle.load(open("sections", "rb"))
found = {}
for section, programs in sections.items():
    names, ends, printed, said = {}, [], [], ""
    try:
        exec(begin, names)
        for program in programs:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(program, names)
            ends.append([parameter.detach() for parameter in names["model"].parameters()])
            printed.append(out.getvalue())
    except Exception:
        said = traceback.format_exc()
    found[section] = ends, printed, said
torch.save(found, "found")
"""
"""All pages in one process, as its start takes longest: each in a namespace of its own."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[list[Tensor]], list[str], str]]:
    """For each section: the parameters that its programs end with, what each prints, and a traceback."""
    directory = tmp_path_factory.mktemp("migrating")
    sections = {section: programs(section) for section, module in MODULES.items() if find_spec(module) is not None}
    (directory / "sections").write_bytes(pickle.dumps((BEGIN, sections)))
    (directory / "programs.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "programs.py"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, tuple[list[list[Tensor]], list[str], str]] = torch.load(directory / "found", weights_only=True)
    return loaded


def programs(section: str) -> list[str]:
    """The programs of a section: loopkit's last, after those that load what the first one has saved."""
    _, there, here, *more = [block.text for block in blocks(SECTIONS[section]) if block.language == "python"]
    return [there, *more, here]


ROWS = {
    name: [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("|")]
    for name, text in {**SECTIONS, "all": (DOCS / "migrating.md").read_text()}.items()
}
"""The rows of the tables of each page."""


def named(section: str) -> set[str]:
    """The words in the left columns of a page."""
    return {word for row in ROWS[section] for word in re.findall(r"\w+", row[0])}


def lightning() -> Iterator[Iterable[str]]:
    import lightning.pytorch as library
    from lightning.pytorch import callbacks

    yield from (inspect.signature(each).parameters for each in (library.Trainer, library.Trainer.fit))
    yield set(callbacks.__all__) - {"Callback"}
    yield (name for name in dir(callbacks.Callback) if name[0] != "_")


def ignite() -> Iterator[Iterable[str]]:
    from ignite import engine, handlers

    functions = (engine.Engine.run, engine.create_supervised_trainer, engine.create_supervised_evaluator)
    yield from (inspect.signature(each).parameters for each in functions)
    yield (event.name for event in engine.Events)
    yield handlers.__all__


def accelerate() -> Iterator[Iterable[str]]:
    from accelerate import Accelerator

    yield inspect.signature(Accelerator).parameters


def transformers() -> Iterator[Iterable[str]]:
    import transformers as library

    fields = dataclasses.fields(library.TrainingArguments)
    yield (field.name for field in fields if field.init and field.name[0] != "_")
    yield from (inspect.signature(each).parameters for each in (library.Trainer, library.Trainer.train))
    yield (name for name in dir(library.TrainerCallback) if name[0] != "_")
    yield (name for name in dir(library) if name.endswith("Callback") and name != "TrainerCallback")


def parameters(owner: type, *names: str) -> Iterator[Iterable[str]]:
    """The arguments of an object, and of some of its methods."""
    yield from (inspect.signature(each).parameters for each in (owner, *(getattr(owner, name) for name in names)))


def fastai() -> Iterator[Iterable[str]]:
    from fastai.basics import Callback, Learner
    from fastai.callback import all as callbacks
    from fastai.callback.core import event

    fits = ("fit", "fit_one_cycle", "fit_flat_cos", "fit_sgdr", "fine_tune", "lr_find")
    yield from parameters(Learner, *fits, "get_preds", "predict", "validate", "save", "load", "export")
    yield (name for name in dir(event) if name.startswith(("before_", "after_")))
    found = {name for name, each in vars(callbacks).items() if isinstance(each, type) and issubclass(each, Callback)}
    yield found - {"Callback"}


def keras() -> Iterator[Iterable[str]]:
    import keras as library

    model = library.Model
    yield from (
        inspect.signature(each).parameters for each in (model.compile, model.fit, model.evaluate, model.predict)
    )
    yield (name for name in dir(library.callbacks) if name[0].isupper() and name != "Callback")
    yield (name for name in dir(library.callbacks.Callback) if name.startswith("on_"))


def composer() -> Iterator[Iterable[str]]:
    from composer import Event, Trainer, algorithms, callbacks, loggers

    yield from parameters(Trainer, "fit", "eval", "predict")
    yield (event.name for event in Event)
    yield from (callbacks.__all__, loggers.__all__)
    yield (name for name in algorithms.__all__ if name[0].isupper())


def skorch() -> Iterator[Iterable[str]]:
    import skorch as library
    from skorch import callbacks

    yield from parameters(library.NeuralNet, "fit", "partial_fit")
    yield from parameters(library.NeuralNetClassifier)
    yield set(callbacks.__all__) - {"Callback"}
    yield (name for name in dir(callbacks.Callback) if name.startswith("on_"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("section", "library"),
    [
        ("lightning", lightning),
        ("ignite", ignite),
        ("fastai", fastai),
        ("accelerate", accelerate),
        ("hf-trainer", transformers),
        ("keras", keras),
        ("composer", composer),
        ("skorch", skorch),
    ],
)
def test_each_argument_and_callback_of_a_library_has_its_row(
    section: str, library: Callable[[], Iterator[Iterable[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # for another one it would import TensorFlow
    pytest.importorskip(MODULES[section])
    names = {name for group in library() for name in group} - {"self", "args", "kwargs"}
    assert len(names) > 20
    assert names - named(section) == set()


SOURCES = [
    "loopkit.plugins",
    "loopkit",
    "loopkit.schedules",
    "loopkit.criteria",
    "loopkit.data",
    "loopkit.groups",
    *(f"loopkit_{name}" for name in ("augment", "control", "data", "export", "insight", "metrics", "remote", "sam")),
]
"""Where the names of the right columns are looked for."""


def test_options_that_the_tables_name_are_there() -> None:
    known: dict[str, Any] = {"fit": loopkit.Learner.fit, "predict": loopkit.Learner.predict}
    for source in SOURCES:
        if find_spec(source) is not None:
            module = importlib.import_module(source)
            known = {**{name: getattr(module, name) for name in getattr(module, "__all__", ())}, **known}
    used = 0
    for row in (row for rows in ROWS.values() for row in rows):
        for name, given in re.findall(r"(?<![\w.])(\w+)\(([^()`]*)\)", row[-1]):
            if name in known:
                parameters = inspect.signature(known[name]).parameters
                for option in re.findall(r"(?:^|, )(\w+)=", given):
                    any_other = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
                    assert option in parameters or any_other, f"{name}({given}) in {row}"
                    used += 1
    assert used > 60


def test_classes_that_the_tables_name_are_there() -> None:
    made = {"CriticBegin", *dir(builtins), *dir(torch.nn), *dir(torch.optim), *dir(torch.utils.data)}
    for file in (*ROOT.glob("loopkit/**/*.py"), *ROOT.glob("plugins/*/loopkit_*/**/*.py")):
        made.update(re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE))
    named = [
        (name, row)
        for rows in ROWS.values()
        for row in rows
        for code in re.findall(r"`([^`]+)`", row[-1])
        for name in re.findall(r"\b[A-Z][a-z]+\w*|\b[A-Z]{2,}[a-z]\w*", re.sub(r'"[^"]*"', "", code))
    ]
    assert len(named) > 300
    assert [each for each in named if each[0] not in made] == []


def test_each_section_is_compared() -> None:
    assert set(SECTIONS) == set(MODULES)


def test_each_page_begins_with_the_same_data_and_model() -> None:
    assert {blocks(page)[0].text for page in SECTIONS.values()} == {BEGIN}


@pytest.mark.slow
@pytest.mark.parametrize("section", MODULES)
def test_programs_of_a_section_train_the_same_bits(
    section: str, found: dict[str, tuple[list[list[Tensor]], list[str], str]]
) -> None:
    if section not in found:
        pytest.skip(f"{MODULES[section]} is not installed")
    ends, printed, said = found[section]
    assert said == ""
    expected, *others = ends
    assert len(expected) == 4
    assert len(others) == len(programs(section)) - 1
    for parameters in others:
        for parameter, other in zip(parameters, expected, strict=True):
            assert torch.equal(parameter, other)
    assert printed[0].splitlines()[-1] == printed[-1].splitlines()[-1]
