"""Runs in files: lines, overrides, what is checked, what is made, and files made from learners."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
import tomllib
from itertools import combinations
from pathlib import Path

import pytest
import tomli_w
import torch
from helpers import batches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from loopkit import Learner, every, hookimpl, metrics, plugins, schedules
from loopkit.data import TensorLoader
from loopkit.plugins import SaveOptions
from loopkit_files import Config, ConfigError, dump, load, make
from loopkit_files.calls import Caller
from loopkit_files.lines import line_numbers
from loopkit_files.overrides import OverrideError, parse
from loopkit_files.record import SaveConfig, differences
from loopkit_files.schema import FIT, LEARNER, TABLES

PARTS = """
import torch
from torch import nn
from loopkit import hookimpl
from loopkit.author import Shown, deprecated
from loopkit.data import TensorLoader

CALLS = []


def net(hidden: int = 4, bias: bool = True):
    CALLS.append("net")
    return nn.Sequential(nn.Linear(3, hidden, bias=bias), nn.Dropout(0.5), nn.Linear(hidden, 1))


def train(batch_size: int = 4, *, shuffle=True):
    CALLS.append("train")
    x = torch.arange(60.0).reshape(20, 3) / 60
    return TensorLoader(x, x.sum(1, keepdim=True), batch_size=batch_size, shuffle=shuffle)


def val():
    CALLS.append("val")
    return train(shuffle=False)


def fails(**options):
    raise ZeroDivisionError("in the user's code")


def several():
    return {"a": nn.Linear(1, 1)}


def takes(first, *rest, last=0):
    return (first, rest, last)


NUMBER = 3


class Clip(Shown):
    @deprecated("value", since="0.2", use="max_value")
    def __init__(self, max_value: float = 1.0):
        self.max_value = max_value

    @hookimpl(updates=("grads",))
    def update_begin(self, learner):
        pass
"""
RUN = """\
[model]
call = "parts:net"

[loss]
call = "torch.nn:MSELoss"

[optimizer]
call = "torch.optim:SGD"
lr = 0.1

[data.train]
call = "parts:train"

[fit]
epochs = 2
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A folder with the module ``parts``, which is the working directory; returns a function that writes run.toml."""
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("parts", None)
    torch.manual_seed(0)

    def write(text=RUN, **replaced):
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        Path("run.toml").write_text(text)
        return Path("run.toml")

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in ("parts", "broken", "helpless", "leaving")]:
        del sys.modules[name]


def problems(path="run.toml", *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return list(caught.value.problems)


# ---------------------------------------------------------------------------------------------------------------- lines

HARD = '''# a = 1
a.b = 1
[x."y.z"] # [no]
k = """
k2 = 1
\\""" """""
m = ['a', # ]
  {q = 1, 'r s' = [
 2]},
]
d = 1979-05-27 07:32:00
[[t.u]]
v = 1
[t.u.w]
z = ""
[[t.u]]
v = ''
  [[t.u.n]]
  o = \'\'\'[p]
p = 1\'\'\'\'
'''


def test_lines_of_a_hard_document():
    assert {key: line for key, line in line_numbers(HARD).items() if not isinstance(key[-1], int)} == {
        ("a",): 2,
        ("a", "b"): 2,
        ("x",): 3,
        ("x", "y.z"): 3,
        ("x", "y.z", "k"): 4,
        ("x", "y.z", "m"): 7,
        ("x", "y.z", "m", 1, "q"): 8,
        ("x", "y.z", "m", 1, "r s"): 8,
        ("x", "y.z", "d"): 11,
        ("t",): 12,
        ("t", "u"): 12,
        ("t", "u", 0, "v"): 13,
        ("t", "u", 0, "w"): 14,
        ("t", "u", 0, "w", "z"): 15,
        ("t", "u", 1, "v"): 17,
        ("t", "u", 1, "n"): 18,
        ("t", "u", 1, "n", 0, "o"): 19,
    }


def test_lines_with_windows_line_ends():
    assert line_numbers(HARD.replace("\n", "\r\n")) == line_numbers(HARD)


def places(value, place=()):
    """All places of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.sampled_from(
        ['a = 1\n[b]\n"""', "'''\n[[x]]\n", "# no\n", "\\", '\\"', '"', "]", "}", "k1 = [", "\r\n", "=", ""]
    ),
)
SCALARS = st.one_of(
    TEXTS, st.integers(-5, 5), st.booleans(), st.floats(allow_nan=False), st.dates(), st.times(), st.datetimes()
)
KEYS = st.one_of(st.sampled_from(["k1", "k-2", "k_3", "4"]), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=5)


class Writer:
    """Writes a document in one of the many ways that TOML allows, and notes the line of each key itself."""

    def __init__(self, draw):
        self.draw = draw
        self.text = ""
        self.lines = {}

    def choose(self, *options):
        return self.draw(st.sampled_from(options))

    def note(self, place):
        self.lines.setdefault(place, 1 + self.text.count("\n"))

    def key(self, key):
        bare = key.isascii() and key.replace("-", "_").isidentifier()
        literal = key.isprintable() and "'" not in key
        quoted = tomli_w.dumps({key + " ": 0}).rpartition(" = ")[0][:-2] + '"'
        return self.choose(*([key] if bare else []), *([f"'{key}'"] if literal else []), quoted)

    def blank(self, lines):
        self.text += self.choose("", " ", "\t", *(("\n", ' # ] } = """ \'\n', "\n\n") if lines else ()))

    def string(self, value):
        printable = all(character.isprintable() or character == "\n" for character in value)
        if printable and "'''" not in value and not value.endswith("'") and self.choose(True, False):
            return f"'''\n{value}'''"
        if self.choose(True, False):
            return '"""\n' + "".join(map(self.character, value)) + '"""'
        return tomli_w.dumps({"k": value})[4:-1]

    def character(self, character):
        """One of a text over several lines."""
        if character in '"\\':
            return f"\\{character}"
        return character if character.isprintable() or character == "\n" else f"\\U{ord(character):08x}"

    def value(self, place, value):
        if isinstance(value, list):
            self.text += "["
            for i, item in enumerate(value):
                self.blank(True)
                self.note((*place, i))
                self.value((*place, i), item)
                self.blank(True)
                self.text += "," if i < len(value) - 1 else self.choose("", ",")
            self.blank(True)
            self.text += "]"
        elif isinstance(value, dict):
            self.text += "{"
            for i, (key, item) in enumerate(value.items()):
                self.text += "," * bool(i)
                self.blank(False)
                self.pair(place, (key,), item)
                self.blank(False)
            self.text += "}"
        elif isinstance(value, str):
            self.text += self.string(value)
        else:
            self.text += tomli_w.dumps({"k": value})[4:-1]

    def pair(self, table, keys, value):
        while isinstance(value, dict) and len(value) == 1 and self.choose(True, False):
            ((key, value),) = value.items()
            keys = (*keys, key)
        for i in range(1, len(keys) + 1):
            self.note((*table, *keys[:i]))
        self.text += self.choose(".", " . ", "\t.").join(map(self.key, keys)) + self.choose("=", " = ")
        self.value((*table, *keys), value)

    def header(self, place, double=False):
        for i in range(1, len(place) + 1):
            self.note(place[:i])
        names = [self.key(key) for key in place if isinstance(key, str)]
        self.text += f"{'[' * (1 + double)}{self.choose('.', ' . ').join(names)}{']' * (1 + double)}"
        self.blank(False)
        self.text += self.choose("\n", " # [x]\n")

    def table(self, place, table):
        later = []
        for key, value in table.items():
            tables = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
            if (isinstance(value, dict) or tables) and self.choose(True, False):
                later.append((key, value))
            else:
                self.blank(True)
                self.pair(place, (key,), value)
                self.text += self.choose("\n", " # k1 = 1\n", "\n\n")
        for key, value in later:
            here = (*place, key)
            for i, item in enumerate(value) if isinstance(value, list) else ():
                self.header((*here, i), double=True)
                self.table((*here, i), item)
            if isinstance(value, dict):
                self.header(here)
                self.table(here, value)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), DOCUMENTS)
def test_line_of_any_document_is_where_the_key_was_written(data, document):
    writer = Writer(data.draw)
    writer.table((), document)
    assert tomllib.loads(writer.text) == document
    assert line_numbers(writer.text) == writer.lines
    assert set(writer.lines) == set(places(document))


# ------------------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("fit.epochs=3", ("fit", "epochs"), 3),
        ("a = 1e-3", ("a",), 0.001),
        ("a=inf", ("a",), math.inf),
        ("a=true", ("a",), True),
        ("a=True story", ("a",), "True story"),
        ("a=runs/a", ("a",), "runs/a"),
        ("a=val/loss", ("a",), "val/loss"),
        ('a="x # y"', ("a",), "x # y"),
        ("a=1#2", ("a",), "1#2"),
        ("a=1, b = 2", ("a",), "1, b = 2"),
        ("a=x=y", ("a",), "x=y"),
        ('a=""', ("a",), ""),
        ("a=[1, 'b']", ("a",), [1, "b"]),
        ("a={call = 'b:c', d = 1}", ("a",), {"call": "b:c", "d": 1}),
        ('"a=b".c=1', ("a=b", "c"), 1),
        ("a . 'b.c'=1", ("a", "b.c"), 1),
    ],
)
def test_override_is_a_key_and_a_value_of_toml_or_a_text(text, keys, value):
    assert parse(text) == (keys, value)
    assert type(parse(text)[1]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fit.epochs", "there is no '=' in it: write --set table.key=value"),
        ("=1", "'' is no key: write --set table.key=value"),
        ("a b=1", "'a b' is no key: write --set table.key=value"),
        ("a\nb=1", "'a\\nb' is no key: write --set table.key=value"),
        ("a=", 'there is no value: write "" for an empty text'),
        ("a=True", "'True' is no TOML: write true, or '\"True\"' for the text"),
        ("a=None", "TOML has no 'None': leave the key out to have the default"),
        ("a=[1", "the value is no TOML: "),
        ("a='b", "the value is no TOML: "),
        ("a=.5", "'.5' is no number of TOML"),
        ("a=007", "'007' is no number of TOML"),
        ("a=" + "9" * 5000, "'999"),
    ],
)
def test_override_that_says_nothing_clear_is_refused(text, message):
    with pytest.raises(OverrideError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)


@settings(max_examples=60, deadline=None)
@given(KEYS, KEYS, VALUES)
def test_override_takes_every_key_and_value_of_toml(one, other, value):
    quoted = ".".join(tomli_w.dumps({key: 0}).rpartition(" = ")[0] for key in (one, other))
    assert parse(f"{quoted}={inline(value)}") == ((one, other), value)


def inline(value):
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{tomli_w.dumps({k: 0}).rpartition(' = ')[0]} = {inline(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return tomli_w.dumps({"k": value})[4:-1]


def test_overrides_reach_any_depth_and_the_last_one_counts(parts):
    text = RUN + "[plugins.metrics]\nmetrics = [{ call = 'loopkit.metrics:Accuracy' }]\n"
    given = [
        "plugins.metrics.metrics.0.call=loopkit.metrics:Loss",
        "fit.epochs=7",
        "plugins.grad_norm={}",
        "fit.epochs=8",
    ]
    found = load(parts(text), given)
    assert found.values["plugins"] == {
        "metrics": {"metrics": [{"call": "loopkit.metrics:Loss"}]},
        "grad_norm": {},
    }
    assert found.values["fit"] == {"epochs": 8}
    assert found.where(("fit", "epochs")) == "--set fit.epochs=8"
    assert found.where(("data", "train", "call")) == "run.toml:12"


def test_overrides_are_checked_as_the_file_is(parts):
    parts()
    found = problems(
        "run.toml", "fit.epohs=3", "foo", "fit.epochs.x=2", "optimizer.lr=a", "modle.a=1", "model.call=parts:nett"
    )
    assert [problem.partition(": ")[::2] for problem in found] == [
        ("--set foo", "there is no '=' in it: write --set table.key=value"),
        ("--set fit.epochs.x=2", "fit.epochs is 2, not a table"),
        ("--set modle.a=1", f"there is no table 'modle' (did you mean 'model'?); there are {', '.join(TABLES)}"),
        ("--set model.call=parts:nett", "module parts has no 'nett' (did you mean 'net'?)"),
        ("--set optimizer.lr=a", "'lr' of torch.optim:SGD is 'a': it takes float | a tensor"),
        (
            "--set fit.epohs=3",
            f"[fit] has no key 'epohs' (did you mean 'epochs'?); there are {', '.join(FIT)}",
        ),
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.width=1.5"], "run.toml:1: [model], parts:sized raised this, with --set model.width=1.5"),
        (["data.train.size=a"], "run.toml:11: [data.train], parts:fed raised this, with --set data.train.size=a"),
        (
            ["model.width=a", "model.depth=2"],
            "run.toml:1: [model], parts:sized raised this, with --set model.width=a, with --set model.depth=2",
        ),
        (["fit.epochs=1"], "run.toml:1: [model], parts:sized raised this"),
    ],
    ids=["number", "data", "two", "another table"],
)
def test_error_of_a_callable_names_the_overrides_that_it_was_given(parts, overrides, said):
    with Path("parts.py").open("a") as file:
        file.write("\n\ndef sized(width=None, depth=1):\n    return nn.Linear(3, width)\n")
        file.write("\n\ndef fed(size=4):\n    return range(0, 4, size)\n")
    parts().write_text(RUN.replace("parts:net", "parts:sized").replace("parts:train", "parts:fed"))
    with pytest.raises(TypeError) as caught:
        load("run.toml", overrides).build()
    assert caught.value.__notes__ == [f"loopkit: {said}"]


# ------------------------------------------------------------------------------------------------------ what is checked


def test_all_problems_are_reported_together_by_line(parts):
    parts(
        """\
[modle]
[model]
call = "part:net"
[loss]
call = "torch.nn:MSELos"
[optimizer]
call = "torch.optim.SGD"
[data]
train = { call = "parts:train", batch_siz = 3, shuffle = "no" }
tests = {}
val = 3
[fit]
epochs = 0
on_interrupt = "rise"
[learner]
deterministic = true
order = [1]
[plugins]
clip_grad_norm.max_norm = "1.0"
clip_grad_nrm = { max_norm = 1.0 }
checkpoint = {}
"""
    )
    assert problems() == [
        f"run.toml:1: there is no table 'modle' (did you mean 'model'?); there are {', '.join(TABLES)}",
        f"run.toml:3: there is no module 'part' (did you mean 'parts'?); modules are found in {Path.cwd()} and among "
        f"what is installed",
        "run.toml:5: module torch.nn has no 'MSELos' (did you mean 'MSELoss'?)",
        "run.toml:7: 'torch.optim.SGD' is not the name of an importable object: write \"package.module:name\" (did "
        "you mean "
        "'torch.optim:SGD'?)",
        "run.toml:9: parts:train has no option 'batch_siz' (did you mean 'batch_size'?); it takes batch_size, shuffle",
        "run.toml:10: [data] has no table 'tests'; there are train, val",
        "run.toml:11: data.val is a number, 3: it is a table, [data.val]",
        "run.toml:13: epochs is 0: it counts from 1, or is inf",
        "run.toml:14: on_interrupt is 'rise': it is 'raise' or 'return'",
        "run.toml:16: deterministic = true needs a seed",
        'run.toml:17: order is [1]: it is an array of names of plugins, ["a", "b"], or of several such arrays',
        "run.toml:19: 'max_norm' of ClipGradNorm is '1.0': it takes float",
        "run.toml:20: no plugin called 'clip_grad_nrm' is installed (did you mean 'clip_grad_norm'?): "
        "`loopkit plugins` lists the installed ones; pip install the distribution that has it",
        "run.toml:21: Checkpoint needs the option 'directory'",
    ]
    assert sys.modules["parts"].CALLS == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ": it is empty: it needs the tables [model], [optimizer], [data.train] and [fit]"),
        ("\n \n", ": it is empty: it needs the tables [model], [optimizer], [data.train] and [fit]"),
        ("a = 1\nb = \n", ":2: it is no TOML: invalid value, at column 5"),
        ("[a]\nb = 1\n\n[a]\n", ":4: it is no TOML: cannot declare ('a',) twice, at column 3"),
        ('a = 1\nb = """\n', ":2: it is no TOML: unterminated string at the end"),
        ("a = " + "[" * 3000, ": it is nested too deeply"),
        ("a = 1\nb = " + "9" * 5000, ":2: an integer of more than 4,300 digits, where TOML has 64 bits"),
        ("a = " + "9_" * 5000 + "9", ":1: an integer of more than 4,300 digits, where TOML has 64 bits"),
        (b"a = 1\nb = '\xff'\n", ":2: it is not UTF-8, as TOML is: invalid start byte"),
    ],
)
def test_file_that_cannot_be_read_as_toml(text, problem, parts):
    Path("run.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert problems() == ["run.toml" + problem]


def test_file_that_is_not_there(parts):
    parts()
    assert problems("rum.toml") == ["rum.toml: there is no such file (did you mean 'run.toml'?)"]
    assert problems("no/run.toml") == ["no/run.toml: there is no such file"]
    assert problems(".") == [".: it is a directory: give the file of a configuration"]


def test_file_with_a_byte_order_mark_is_read(parts):
    Path("run.toml").write_bytes(b"\xef\xbb\xbf" + RUN.encode())
    assert load("run.toml").where(("model", "call")) == "run.toml:2"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("epochs = 2", "", ":14: fit has no end: give epochs, max_steps or max_updates (epochs = inf if you mean it)"),
        ("epochs = 2", "epochs = true", ":15: epochs is True: it counts from 1, or is inf"),
        ("epochs = 2", "max_steps = 1.5", ":15: max_steps is 1.5: it counts from 1"),
        ("epochs = 2", "epochs = 2\nloader_timeout = 0", ":16: loader_timeout is 0: it is a number of seconds"),
        ("[fit]\nepochs = 2\n", "", ": there is no table [fit]: add it, for example with epochs = 3"),
        ("[fit]", "[train]\n[fit]", ":14: there is no table 'train' (did you mean [data.train]?); there are"),
        ("[fit]", "[lr]\n[fit]", ":14: there is no table 'lr' (did you mean optimizer.lr?); there are"),
        ("lr = 0.1", "learning_rate = 1", ":9: torch.optim:SGD has no option 'learning_rate' (did you mean 'lr'?)"),
        ("[fit]", "[val]\n[fit]", ":14: there is no table 'val' (did you mean [data.val]?); there are model, loss"),
        ("[model]", "learner = 3\n[model]", ":1: learner is a number, 3: it is a table, [learner]"),
        ('call = "parts:net"', "", ':1: [model] names no callable: add call = "package.module:name"'),
        ('call = "parts:net"', 'cal = "parts:net"', ":1: [model] names no callable: add call = "
         '"package.module:name" (did you mean \'cal\'?)'),
        ('"parts:net"', "3", ":2: 3 is a number: write \"package.module:name\""),
        ('"parts:net"', '"net"', ":2: 'net' is not the name of an importable object: write \"package.module:name\""),
        ('"parts:net"', '"parts:NUMBER"', ":2: parts:NUMBER is a number, which cannot be called"),
        ('"parts:net"', '"parts:net.a"', ":2: class parts.net has no 'a'"),
        ('"parts:net"', '"parts.net:a"', ":2: there is no module 'parts.net'; modules are found in {cwd} and"),
        ('"parts:net"', '"torch.nnn:Linear"', ":2: there is no module 'torch.nnn' (did you mean 'torch.nn'?); modules"),
        ('"parts:net"', '"torch.nn:Linear"\nin_features = 3', ":1: torch.nn:Linear needs the option 'out_features'"),
        ('"parts:net"', '"math:sqrt"', ":1: math:sqrt takes 'x' only by position: write a function"),
        ('"parts:net"', '"parts:net"\nhidden = "4"', ":3: 'hidden' of parts:net is '4': it takes int"),
        ('"parts:net"', '"parts:net"\nhidden = true', ":3: 'hidden' of parts:net is True: it takes int"),
        ("lr = 0.1", "params = []", ":9: torch.optim:SGD has no option 'params'; it takes "),
        ('call = "torch.nn:MSELoss"', 'use = "torch.nn:MSELos"', ":5: module torch.nn has no 'MSELos' (did"),
        ('call = "torch.nn:MSELoss"', 'use = "torch.nn.functional:mse_loss"\na = 1', ":4: a table with 'use' has no"),
        ('call = "torch.nn:MSELoss"', 'call = "torch.nn.functional:mse_loss"', ":4: torch.nn.functional:mse_loss needs "
         "the options 'input' and 'target'; if it is the loss function itself, write use = "
         '"torch.nn.functional:mse_loss"'),
        ('call = "torch.nn:MSELoss"', 'use = "torch.nn:MSELoss"', ":5: torch.nn:MSELoss is a class: write call = "),
        ("[fit]", '[plugins.a]\nuse = "loopkit.plugins:GradNorm"\n[fit]', ":15: loopkit.plugins:GradNorm is a class"),
        ("[fit]", '[learner]\nwithout = ["histroy"]\n[fit]', ":15: without: no standard plugin is called 'histroy'"),
        ("[fit]", "[fit]\nvalidate = 2", ":15: validate is 2: it is a table, such as {epochs = 1}"),
        ("[fit]", "[fit]\nvalidate = {updates = 0}", ":15: validate is {'updates': 0}: every(updates=0): updates are"),
        ("[fit]", "[fit]\nvalidate = {epoch = 1}", ":15: validate is {'epoch': 1}: "),
        ("lr = 0.1", f"a = {'[' * 200}{']' * 200}", ":9: optimizer.a.0.0.0.0."),
        ('"parts:net"', '"leaving:net"', ":2: importing leaving ends Python (SystemExit(0)): put what a script does"),
    ],
)  # fmt: skip
def test_one_problem_is_said_with_its_line(old, new, problem, parts):
    assert RUN.count(old)
    Path("leaving.py").write_text("raise SystemExit(0)\n")
    parts(RUN.replace(old, new, 1))
    (found,) = problems()
    assert found.startswith("run.toml" + problem.replace("{cwd}", str(Path.cwd()))), found


def test_model_of_several_is_refused(parts):
    parts(RUN.replace('[model]\ncall = "parts:net"', "[model.generator]\ncall = 'parts:net'\n[model.critic]"))
    assert problems() == [
        "run.toml:1: [model] has subtables, generator, critic: a configuration trains one supervised model "
        "with one optimizer. For several, write a script with your own phase"
    ]


def test_standard_plugins_can_be_left_out_and_validations_have_their_interval(parts):
    text = RUN.replace("[fit]", "[fit]\nvalidate = {updates = 2}") + '[learner]\nwithout = ["progress"]\n'
    built = load(parts(text))
    assert "progress" not in built.build().learner.plugins
    assert built.build().fit["validate"] == every(updates=2)


def test_plugin_that_is_not_allowed_is_not_imported(parts, monkeypatch):
    parts(RUN + "[plugins.grad_norm]\n[plugins.clip_grad_norm]\nmax_norm = 1.0\n")
    monkeypatch.setenv("LOOPKIT_PLUGINS", "grad_norm")
    (refused,) = problems()
    assert refused.startswith(
        "run.toml:17: plugin 'clip_grad_norm' may not be loaded: LOOPKIT_PLUGINS allows grad_norm."
    )


def test_module_that_fails_keeps_its_traceback(parts):
    Path("broken.py").write_text("x = 1\n1 / 0\n")
    parts(RUN.replace("parts:net", "broken:net"))
    with pytest.raises(ZeroDivisionError) as caught:
        load("run.toml")
    assert caught.traceback[-1].path.name == "broken.py"
    assert caught.value.__notes__ == ["loopkit: run.toml:1: importing 'broken:net' raised this"]
    assert problems("run.toml", "fit.epochs=0") == [
        "run.toml: and what it names cannot be imported, ZeroDivisionError: division by zero",
        "--set fit.epochs=0: epochs is 0: it counts from 1, or is inf",
    ]


def test_module_that_imports_what_is_not_there_keeps_its_traceback(parts):
    Path("helpless.py").write_text("import nowhere_to_be_found\n")
    parts(RUN.replace("parts:net", "helpless:net"))
    with pytest.raises(ModuleNotFoundError) as caught:
        load("run.toml")
    assert caught.traceback[-1].path.name == "helpless.py"


def test_callable_that_fails_keeps_its_traceback(parts):
    found = load(parts(RUN.replace("parts:train", "parts:fails")), ["data.train.anything=1"])
    with pytest.raises(ZeroDivisionError, match="in the user's code") as caught:
        found.build()
    assert caught.traceback[-1].path.name == "parts.py"
    assert caught.value.__notes__ == [
        "loopkit: run.toml:11: [data.train], parts:fails raised this, with --set data.train.anything=1"
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "parts:net",
            "parts:several",
            "run.toml:2: parts:several returned a table: it must return one torch.nn.Module",
        ),
        ("torch.nn:MSELoss", "parts:several", "run.toml:4: the loss is a table, which cannot be called"),
    ],
)
def test_callable_that_returns_something_else(old, new, message, parts):
    with pytest.raises(ConfigError) as caught:
        load(parts(RUN.replace(old, new))).build()
    assert str(caught.value).startswith(message)


def test_optimizer_that_fails_is_located(parts):
    found = load(parts(), ["optimizer.momentum=-1"])
    with pytest.raises(ValueError, match="Invalid momentum") as caught:
        found.build()
    assert caught.value.__notes__ == [
        "loopkit: run.toml:7: [optimizer], torch.optim:SGD raised this, with --set optimizer.momentum=-1"
    ]


def test_keys_of_learner_and_fit_are_the_arguments():
    fit = inspect.signature(Learner.fit).parameters
    assert list(FIT) == [name for name in fit if name not in ("self", "train", "val")]
    learner = set(inspect.signature(Learner).parameters)
    own = {"deterministic", "without"}
    assert set(LEARNER) - own == learner - {"model", "loss_fn", "optimizer", "plugins", "phases"}


# --------------------------------------------------------------------------------------------------------- what is made


def state(learner):
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


def test_run_is_bitwise_the_loop_by_hand(parts):
    built = load(parts(RUN + "[learner]\nseed = 3\naccumulate = 2\n[plugins.clip_grad_norm]\nmax_norm = 0.1\n")).build()
    result = built.run()
    assert (result.reason, result.updates) == ("epochs", 6)

    module = sys.modules["parts"]
    torch.manual_seed(3)
    data, model = module.train(), module.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for i, (x, y) in enumerate(data):
            size = 1 if i == 4 else 2
            (nn.functional.mse_loss(model(x), y) / size).backward()
            if i % 2 or i == 4:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state(built.learner).items())


def test_things_are_made_in_the_order_that_the_page_says(parts):
    load(parts(RUN + "[data.val]\ncall = 'parts:val'\n")).build()
    assert sys.modules["parts"].CALLS == ["train", "val", "train", "net"]


def test_learner_alone_makes_no_data(parts):
    learner = load(parts()).learner()
    assert learner.options.config == RUN
    assert sys.modules["parts"].CALLS == ["net"]
    assert "update_begin" not in str(learner.explain("train"))


def test_options_are_tables_arrays_and_objects_by_name(parts):
    caller = Caller(lambda place: "")
    table = {
        "call": "parts:takes",
        "first": {"use": "parts:NUMBER"},
        "rest": [{"call": "parts:takes", "first": {"a": [1]}}, {"use": "torch:relu"}],
        "last": {"b": {"call": "torch.nn:ReLU"}},
    }
    first, rest, last = caller.made((), table)
    assert (first, rest) == (3, (({"a": [1]}, (), 0), torch.relu))
    assert isinstance(last["b"], nn.ReLU)


def test_plugin_by_call_needs_no_entry_point_and_can_come_twice(parts):
    text = (
        RUN + "[plugins.grad_norm]\n[plugins.clipped]\n"
        "call = 'loopkit.plugins:GradNorm'\nname = 'clipped'\nclipped = true\n"
    )
    learner = load(parts(text)).build().learner
    assert {"grad_norm", "clipped"} <= set(learner.plugins)


def test_file_with_the_old_name_of_an_option_is_taken_and_written_with_the_new_one(parts):
    found = load(parts(RUN + "[plugins.clip]\ncall = 'parts:Clip'\nvalue = 0.5\n"))
    with pytest.warns(DeprecationWarning, match=r"Clip: value is max_value since version 0\.2"):
        learner = found.learner()
    data = {"train": {"call": "parts:train"}}
    written = Config.of(learner, fit={"epochs": 2}, given={"data": data, "model": {"call": "parts:net"}})
    assert written.values["plugins"]["clip"]["max_value"] == 0.5


def test_file_with_a_wrong_type_for_the_old_name_of_an_option_is_named(parts):
    assert problems(parts(RUN + "[plugins.clip]\ncall = 'parts:Clip'\nvalue = 'much'\n")) == [
        "run.toml:18: 'max_value' of parts:Clip is 'much': it takes float"
    ]


def test_config_by_hand_holds_a_copy_and_names_places(parts):
    values = tomllib.loads(RUN)
    found = Config(values)
    values["fit"]["epochs"] = 0
    found.check()
    assert found.where(("fit", "epochs")) == "fit.epochs"
    with pytest.raises(ConfigError, match=r"^fit\.epochs: epochs is 0: it counts from 1, or is inf$"):
        Config(values).check()


def test_config_by_hand_refuses_what_toml_has_not():
    circle = {}
    circle["again"] = [circle]
    with pytest.raises(ConfigError) as caught:
        Config({"model": {"a": None, "b": nn.ReLU(), 3: 1, "c": "\ud800"}, "fit": circle})
    assert list(caught.value.problems) == [
        "model: model has the key 3: keys are texts",
        "model.a: model.a is None, which TOML does not have: leave it out to have the default",
        "model.b: model.b is of type ReLU, which TOML does not have: name what makes it, {call = ...}",
        "model.c: model.c is '\\ud800', which is no valid Unicode",
        "fit.again.0: fit.again.0 holds itself: TOML has no such values",
    ]


def test_values_and_overrides_of_another_type_are_refused(parts):
    with pytest.raises(ConfigError, match=r"the values of a configuration are 3: give its tables, by name"):
        Config(3)
    with pytest.raises(ConfigError, match=r"overrides is 'fit\.epochs=3': give a list of such texts"):
        load(parts(), "fit.epochs=3")


def test_values_that_are_nested_too_deeply_are_refused(parts):
    (problem,) = problems(parts(), f"{'a.' * 5000}b=1")
    assert problem.startswith("--set a.a.a.")
    assert problem.endswith(" is nested too deeply")
    assert len(problem) < 400


def test_make_says_what_is_wrong():
    with pytest.raises(
        ConfigError, match=r"^torch\.nn:Linear has no option 'in_feature' \(did you mean 'in_features'\?\)"
    ):
        make("torch.nn:Linear", in_feature=3, out_features=1)
    with pytest.raises(ConfigError, match=r"^module torch\.nn has no 'Liner'"):
        make("torch.nn:Liner")


# -------------------------------------------------------------------------------------------------------------- written


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS)
def test_dump_is_read_as_the_same_values(document):
    found = Config(document)
    assert found.values == document
    assert tomllib.loads(dump(found)) == document


def test_dump_has_the_tables_in_a_fixed_order(parts):
    tables = tomllib.loads(RUN)
    found = dump(Config(dict(reversed(tables.items()))))
    assert found == RUN


def test_config_of_a_learner_from_a_file_is_that_file(parts):
    text = (
        RUN
        + """
[data.val]
call = "parts:val"
[learner]
seed = 0
accumulate = 2
standard = false
order = ["a", "b"]
[plugins.metrics]
metrics = [{ call = "loopkit.metrics:Accuracy" }]
top = { call = "loopkit.metrics:Accuracy" }
[plugins.schedule.schedule]
call = "loopkit.schedules:warmup"
n = 3
then = { call = "loopkit.schedules:cosine" }
[plugins.checkpoint]
directory = "runs/a"
"""
    )
    found = load(parts(text))
    built = found.build()
    again = Config.of(built.learner, built.train, built.val, fit=built.fit, seed=0)
    assert again.values == found.values


def test_config_of_a_learner_by_hand_tells_what_it_can(parts):
    torch.manual_seed(0)
    model = make("torch.nn:Linear", in_features=3, out_features=1)
    stack = [
        plugins.ClipGradNorm(1.0),
        plugins.GradNorm(name="second"),
        plugins.Checkpoint("runs/a", best="val/loss", options=SaveOptions(keep_best=2)),
        plugins.Schedule(make("loopkit.schedules:cosine", end=0.1)),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    learner = Learner(model, nn.functional.mse_loss, optimizer, plugins=stack, order=["a", "b"])
    learner.remove("sanity_check")
    found = Config.of(learner, fit={"epochs": 1}, given={"data": {"train": {"call": "parts:train"}}})
    assert found.values == {
        "model": {"call": "torch.nn:Linear", "in_features": 3, "out_features": 1},
        "loss": {"use": "torch.nn.functional:mse_loss"},
        "optimizer": {"call": "torch.optim:SGD", "lr": 0.1, "momentum": 0.9},
        "data": {"train": {"call": "parts:train"}},
        "learner": {"without": ["sanity_check"], "order": ["a", "b"]},
        "fit": {"epochs": 1},
        "plugins": {
            "clip_grad_norm": {"max_norm": 1.0},
            "second": {"call": "loopkit.plugins:GradNorm", "name": "second"},
            "checkpoint": {
                "directory": str(Path("runs/a").absolute()),
                "best": "val/loss",
                "options": {"call": "loopkit.checkpoint.save_options:SaveOptions", "keep_best": 2},
            },
            "schedule": {"schedule": {"call": "loopkit.schedules:cosine", "end": 0.1}},
        },
    }
    assert set(found.learner().plugins) == {*learner.plugins, "save_config"}


def config_of(change=lambda model, optimizer: None, *stack, fit=None, given=None):
    """The values of the configuration of a learner, whose model and optimizer were changed after they were made."""
    model = make("torch.nn:Linear", in_features=3, out_features=1)
    optimizer = make_optimizer(model)
    change(model, optimizer)
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=stack)
    data = {"data": {"train": {"call": "parts:train"}}}
    return Config.of(learner, fit=fit or {"epochs": 1}, given=data if given is None else data | given).values


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_config_of_an_optimizer_whose_groups_were_changed_has_what_they_are():
    def slower(model, optimizer):
        optimizer.param_groups[0].update(lr=0.05, weight_decay=0.1)

    assert config_of(slower)["optimizer"] == {"call": "torch.optim:SGD", "lr": 0.05, "weight_decay": 0.1}


def test_config_of_an_optimizer_that_a_scheduler_has_changed_has_its_first_values():
    cycle = plugins.TorchSchedule(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=9))
    given = {"plugins": {"torch_schedule": {"call": "parts:schedule"}}}
    assert config_of(lambda *_: None, cycle, given=given)["optimizer"] == {"call": "torch.optim:SGD", "lr": 0.1}


def test_config_of_an_optimizer_of_a_file_that_was_changed_is_refused(parts):
    built = load(parts()).build()
    built.learner.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ConfigError, match=r"optimizer: SGD was given another lr since it was made"):
        Config.of(built.learner, built.train, fit=built.fit)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model.double(),
        lambda model, _: model.bias.requires_grad_(False),
        lambda model, _: model.load_state_dict({"weight": torch.ones(1, 3), "bias": torch.ones(1)}),
    ],
    ids=["dtype", "frozen", "loaded"],
)
def test_config_of_a_model_that_was_changed_is_refused(change):
    with pytest.raises(ConfigError, match=r"model: Linear was changed since it was made: make it by"):
        config_of(change)


def test_config_of_a_model_that_plugins_set_up_is_that_of_the_model(parts):
    stack = [plugins.Freeze("bias"), plugins.ToDevice("cpu"), plugins.ChannelsLast()]
    found = config_of(lambda *_: None, *stack, given={"plugins": {"freeze": {"patterns": ["bias"]}}})
    assert found["model"] == {"call": "torch.nn:Linear", "in_features": 3, "out_features": 1}
    assert found["plugins"]["to_device"] == {"device": "cpu"}  # also where the default is another one


def test_config_of_a_lazy_model_or_one_for_inference_can_be_told():
    lazy = make("torch.nn:LazyLinear", out_features=1)
    with torch.inference_mode():
        fixed = make("torch.nn:Linear", in_features=3, out_features=1)
    lazy(torch.ones(2, 3))
    for model, name in ((lazy, "LazyLinear"), (fixed, "Linear")):
        learner = Learner(model, nn.MSELoss(), make_optimizer(model))
        data = {"train": {"call": "parts:train"}}
        found = Config.of(learner, fit={"epochs": 1}, given={"data": data})
        assert found.values["model"]["call"] == f"torch.nn:{name}"


def test_config_of_leaves_out_limits_that_are_none():
    assert config_of(fit={"epochs": 2, "max_steps": None})["fit"] == {"epochs": 2}


@pytest.mark.parametrize(
    ("fit", "given", "problem"),
    [
        ({"epohs": 1}, {}, r"\[fit\] has no key 'epohs' \(did you mean 'epochs'\?\)"),
        ({}, {"modle": {}}, r"given: there is no table 'modle' \(did you mean 'model'\?\)"),
        ({}, {"plugins": {"histroy": {}}}, r"given: \[plugins\] has no 'histroy' here \(did you mean 'history'\?\)"),
        ({}, {"data": {"trian": {}}}, r"given: \[data\] has no 'trian' here \(did you mean 'train'\?\)"),
        ({}, {"data": {}}, r"there is no table \[data\.train\]: add it"),
    ],
)
def test_config_of_is_one_that_can_be_loaded(fit, given, problem):
    with pytest.raises(ConfigError, match=problem):
        config_of(fit=fit, given=given)


def test_config_of_a_learner_that_has_trained_is_refused():
    model = nn.Linear(3, 2)
    learner = Learner(model, nn.MSELoss(), make_optimizer(model), standard=False)
    learner.fit([(torch.ones(2, 3), torch.ones(2, 2))], epochs=1)
    with pytest.raises(ConfigError, match=r"the learner has trained 1 steps: a run from a file begins at the first"):
        Config.of(learner, fit={"epochs": 1})


class Mine:
    @hookimpl
    def step_end(self):
        pass


def test_config_of_names_what_cannot_be_written(tmp_path):
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    timed = plugins.Checkpoint(tmp_path, save=every(minutes=3))
    stack = [Mine(), timed, plugins.Schedule(schedules.cosine()), plugins.Metrics(metrics.Accuracy())]
    learner = Learner(model, lambda a, b: (a - b).sum(), optimizer, plugins=stack)
    with pytest.raises(ConfigError) as caught:
        Config.of(learner, batches(2), fit={"epochs": 1})
    found = dict(problem.split(": ", 1) for problem in caught.value.problems)
    assert list(found) == [
        "model", "loss", "optimizer", "data.train.0.0", "data.train.0.1", "data.train.1.0", "data.train.1.1",
        "plugins.metrics", "plugins.mine", "plugins.schedule",
    ]  # fmt: skip
    assert found["model"] == (
        'Linear was made by hand, and its options are unknown: make it by loopkit_files.make("torch.nn:Linear", '
        '...), or give Config.of(..., given={"model": {"call": ...}})'
    )
    assert found["loss"] == "a lambda, which no module has by name: define it by def in a module that can be imported"
    assert "its groups are not simply all parameters of the model" in found["optimizer"]
    assert 'given={"plugins": {"mine": {"call": ...}}}' in found["plugins.mine"]


def test_config_of_what_a_file_has_no_place_for():
    model = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=r"model: a configuration has no place for several models: keep the script"):
        Config.of(Learner({"a": model}), fit={"epochs": 1})


# ------------------------------------------------------------------------------------------------- beside checkpoints

SAVED = RUN + "\n[plugins.checkpoint]\ndirectory = 'runs/a'\nresume = 'auto'\n"


def test_config_is_saved_with_the_first_step_and_no_earlier(parts):
    built = load(parts(SAVED), ["optimizer.lr=0.05"]).build()
    assert "save_config" in built.learner.plugins
    assert not Path("runs").exists()
    seen = []

    class Look:
        @hookimpl(phase=type(built.learner.phases["train"]))
        def step_begin(self):
            seen.append(Path("runs/a/config.toml").exists())

    built.learner.add(Look())
    built.run()
    assert seen == [False] + [True] * 9
    assert sorted(path.name for path in Path("runs/a").iterdir())[-1] == "config.toml"
    assert len(list(Path("runs/a").iterdir())) == 3
    assert load("runs/a/config.toml").values == {
        **tomllib.loads(SAVED),
        "optimizer": {"call": "torch.optim:SGD", "lr": 0.05},
    }
    assert "save_config" not in built.learner.plugins


def test_config_of_a_run_that_fails_at_once_is_not_saved(parts):
    built = load(parts(SAVED), ["loss.call=torch.nn:NLLLoss"]).build()
    with pytest.raises((RuntimeError, ValueError)):
        built.run()
    assert list(Path("runs/a").iterdir()) == []


def test_another_configuration_at_resume_is_said(parts):
    load(parts(SAVED)).build().run()
    load("run.toml").build().run()
    with pytest.warns(UserWarning, match="the run resumes with another configuration than") as caught:
        load("run.toml", ["fit.epochs=3", "optimizer.lr=0.05", "learner.seed=1"]).build().run()
    (warning,) = caught
    assert str(warning.message).partition(".toml: ")[2] == (
        "fit.epochs was 2, is 3; learner is new; optimizer.lr was 0.1, is 0.05"
    )
    assert load("runs/a/config.toml").values["fit"] == {"epochs": 3}


def test_config_that_cannot_be_read_at_resume_is_said(parts):
    load(parts(SAVED)).build().run()
    Path("runs/a/config.toml").write_text("[")
    with pytest.warns(UserWarning, match="cannot be read|left as it is") as caught:
        load("run.toml", ["fit.epochs=3"]).build().run()
    assert ["cannot be read, nor compared with this run" in str(caught[0].message), len(caught)] == [True, 2]
    assert "was not written by loopkit, and is left as it is" in str(caught[1].message)
    assert Path("runs/a/config.toml").read_text() == "["


SAVERS = """
from loopkit import hookimpl


class Elsewhere:
    provides = "checkpoint"

    @hookimpl
    def phase_end(self):
        pass


class Late(Elsewhere):
    directory = "runs/late"
"""


@pytest.mark.parametrize(("saver", "saved"), [("Elsewhere", False), ("Late", True)])
def test_config_is_saved_beside_checkpoints_of_another_plugin_that_has_a_directory(saver, saved, parts):
    Path("helpless.py").write_text(SAVERS)
    load(parts(RUN + f'[plugins.saver]\ncall = "helpless:{saver}"\n')).build().run()
    assert Path("runs/late/config.toml").exists() == saved


def test_config_is_saved_beside_the_checkpoints_of_each_plugin(parts):
    Path("helpless.py").write_text(SAVERS)
    load(parts(SAVED + '[plugins.saver]\ncall = "helpless:Late"\n')).build().run()
    assert Path("runs/a/config.toml").read_text() == Path("runs/late/config.toml").read_text()


def test_config_that_cannot_be_written_ends_no_run(parts):
    Path("runs/a/config.toml").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"config\.toml cannot be written: .* The run continues without it") as caught:
        result = load(parts(SAVED)).build().run()
    assert (result.reason, len(caught)) == ("epochs", 1)


OFTEN = {
    "checkpoint": {"directory": "runs/a"},
    "clip_grad_norm": {"max_norm": 1.0},
    "early_stopping": {},
    "history": {"steps": True},
    "log_metrics": {"every": 1},
    "log_to": {"backends": ["runs/log"]},
    "metrics": {"metrics": [{"call": "loopkit.metrics:BinaryAccuracy", "from_logits": True}]},
    "mixed_precision": {"dtype": "bfloat16"},
    "monitor": {"directory": "runs/monitor"},
    "schedule": {"schedule": {"call": "loopkit.schedules:cosine"}},
    "weight_average": {"decay": 0.9},
}


@pytest.mark.parametrize("pair", list(combinations(OFTEN, 2)), ids="+".join)
def test_plugins_that_are_often_used_go_together(pair, parts):
    if "monitor" in pair:
        pytest.importorskip("loopkit_monitor")
    data = {"train": {"call": "parts:train"}, "val": {"call": "parts:val"}}
    values = {**tomllib.loads(RUN), "data": data, "plugins": {name: OFTEN[name] for name in pair}}
    built = load(parts(dump(Config(values)))).build()
    assert set(pair) <= set(built.learner.plugins)
    assert built.run().epochs == 2
    assert Path("runs/a/config.toml").exists() == ("checkpoint" in pair)


def test_differences_name_places():
    one = {"a": {"b": 1, "c": [1, 2]}, "d": math.nan, "e": 1}
    assert list(differences(one, one)) == []
    assert list(differences(one, {"a": {"b": 1.0, "c": [1, 3]}, "d": math.nan, "f": 2})) == [
        (("a", "b"), "was 1, is 1.0"),
        (("a", "c"), "was [1, 2], is [1, 3]"),
        (("e",), "is gone"),
        (("f",), "is new"),
    ]


def test_save_config_keeps_the_contract(tmp_path):
    from loopkit_testing import check_plugin

    check_plugin(lambda: SaveConfig(Config({"fit": {"epochs": 1}}), [tmp_path]))


def test_data_made_by_a_file_are_those_of_the_module(parts):
    built = load(parts(), ["data.train.batch_size=5"]).build()
    assert isinstance(built.train, TensorLoader)
    assert len(built.train) == 4
    assert built.val is None


def test_module_that_was_written_a_moment_ago_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("new_parts")  # now the folder's listing is known
    listed = tmp_path.stat()
    (tmp_path / "new_parts.py").write_text("def net(): return 3")
    os.utime(tmp_path, ns=(listed.st_atime_ns, listed.st_mtime_ns))  # as within one tick of the clock
    assert Caller(str).made(("model",), {"call": "new_parts:net"}) == 3
