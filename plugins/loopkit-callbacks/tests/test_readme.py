"""The README's code runs, and prints what it says; its tables name what runs."""

import re
import tomllib
from pathlib import Path

import trainers  # noqa: F401  # imports Lightning, whose warnings it silences
from problems import make_learner

from loopkit_callbacks import callback, handler

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()


def test_the_code_prints_what_the_readme_says(tmp_path, monkeypatch, capsys):
    def kept(text):
        return [line for line in text.splitlines() if not line.startswith(("epoch ", "..."))]

    number = re.compile(r"\d+\.\d+|\d+(?= epochs)")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    codes, outputs = ([body for kind, body in blocks if kind == which] for which in ("python", "text"))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, said in zip(codes, outputs, strict=True):
        exec(compile(code, str(README), "exec"), namespace)
        printed = capsys.readouterr().out
        assert [number.sub("N", line) for line in kept(printed)] == [number.sub("N", line) for line in kept(said)]
    result, rates = namespace["result"], namespace["rates"]
    assert result.by == "lightning_early_stopping"
    assert result.metrics["val/loss"] < 0.3
    assert rates[:4] == sorted(rates[:4])


def test_the_tables_list_what_is_supported():
    rows = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named - {"Callback", "ParamScheduler", "param_name"} >= {*callback.SUPPORTED, *handler.SUPPORTED}


def test_the_file_makes_the_plugin():
    (block,) = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    learner = make_learner(tomllib.loads(block)["plugins"])
    assert learner.plugins["lightning_early_stopping"].callback.monitor == "val/loss"
