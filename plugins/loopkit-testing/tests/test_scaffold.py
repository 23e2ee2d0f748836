"""``loopkit new-plugin``, ``new-backend`` and ``new-phase``: what they write works untouched."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import loopkit
from loopkit.commands.cli import main
from loopkit.errors import LoopkitError
from loopkit_testing import check_backend, check_plugin
from loopkit_testing.scaffold import LONGEST, write_phase, write_plugin

ROOT = Path(loopkit.__file__).parent.parent
NAMES = ["q", "grad-peak", "a2-" + "b" * (LONGEST - 3)]


def command(*words, cwd, **env):
    """Run a command; its output, if it succeeds."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*words, cwd, **env):
    return command(sys.executable, *words, cwd=cwd, PYTHONPATH=str(ROOT), **env)


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """What is imported from here is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


# new-plugin


def test_new_plugin_says_what_it_has_made_and_what_comes_next(tmp_path, capsys):
    assert main(["new-plugin", "grad-peak", "--directory", str(tmp_path)]) == 0
    made = tmp_path / "loopkit-grad-peak"
    assert capsys.readouterr().out.splitlines() == [
        f"made {made}",
        f"next: cd {made} && pip install -e '.[test]' && ruff check . && mypy && pytest",
    ]
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()) == [
        ".gitignore",
        "README.md",
        "loopkit_grad_peak/__init__.py",
        "loopkit_grad_peak/grad_peak.py",
        "loopkit_grad_peak/py.typed",
        "pyproject.toml",
        "tests/test_plugin.py",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_new_plugin_is_clean_for_names_of_any_length(tmp_path, name):
    made = write_plugin(name, tmp_path)
    command("ruff", "check", "--no-cache", ".", cwd=made)
    command("ruff", "format", "--no-cache", "--check", ".", cwd=made)
    assert not any("my_name" in path.read_text() or "MyName" in path.read_text() for path in made.rglob("*.*"))


def test_new_plugin_keeps_the_contract_and_declares_what_it_is(importable):
    made = write_plugin("kit-peak", importable)
    sys.path.insert(0, str(made))
    try:
        from loopkit_kit_peak import KitPeak
    finally:
        sys.path.remove(str(made))
    check_plugin(KitPeak)
    assert "MYPYPATH=" in (made / "pyproject.toml").read_text().partition("[tool.mypy]")[0].splitlines()[-1]
    points = tomllib.loads((made / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {"loopkit.plugins": {"kit_peak": "loopkit_kit_peak:KitPeak"}}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_new_plugin_installs_and_passes_its_own_tests_in_a_new_environment(tmp_path):
    passes_in_a_new_environment(write_plugin("kit-peak", tmp_path), tmp_path, "kit_peak")


def passes_in_a_new_environment(made, tmp_path, name):
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    own = [ROOT, ROOT / "plugins/loopkit-testing", ROOT / "plugins/loopkit-insight"]  # no .pth is read in purelib
    (site / "shared.pth").write_text("\n".join([sysconfig.get_path("purelib"), *map(str, own)]))
    new = tmp_path / "venv" / "bin" / "python"
    command(new, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", ".", cwd=made)
    assert name in command(new, "-m", "loopkit", "plugins", cwd=made)
    command(new, "-m", "ruff", "check", "--no-cache", ".", cwd=made)
    command(new, "-m", "mypy", "--cache-dir", os.devnull, cwd=made, MYPYPATH=str(ROOT))
    said = command(new, "-m", "pytest", "-p", "no:cacheprovider", cwd=made)
    assert "failed" not in said
    assert "skipped" not in said
    assert " passed" in said


# new-backend


def test_new_backend_keeps_the_contract_untouched(tmp_path, importable, capsys):
    assert main(["new-backend", "kit-log", "--directory", str(importable)]) == 0
    made = importable / "loopkit-kit-log"
    assert f"made {made}" in capsys.readouterr().out
    command("ruff", "check", "--no-cache", ".", cwd=made)
    command("ruff", "format", "--no-cache", "--check", ".", cwd=made)
    sys.path.insert(0, str(made))
    try:
        from loopkit_kit_log import KitLog, kit_log, read
    finally:
        sys.path.remove(str(made))
    check_backend(lambda folder: KitLog(folder / "log.tsv"), lambda folder: read(folder / "log.tsv"))
    assert kit_log(str(tmp_path / "log.tsv")).name == "kit_log"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_new_backend_installs_and_passes_its_own_tests_in_a_new_environment(tmp_path):
    passes_in_a_new_environment(write_plugin("kit-rows", tmp_path, "backend"), tmp_path, "kit_rows")


# new-phase


def test_new_phase_writes_three_files_that_work(tmp_path, capsys):
    assert main(["new-phase", "contrast-phase", "--directory", str(tmp_path)]) == 0
    files = [tmp_path / name for name in ("contrast.py", "test_contrast.py", "example_contrast.py")]
    assert capsys.readouterr().out.splitlines() == [
        *(f"made {file}" for file in files),
        f"next: cd {tmp_path} && python example_contrast.py && pytest test_contrast.py",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    command("ruff", "check", "--isolated", "--no-cache", "--select", "E,F,W,I,B,UP,N", "contrast.py", cwd=tmp_path)
    command("ruff", "format", "--isolated", "--no-cache", "--check", ".", cwd=tmp_path)
    said = python("example_contrast.py", cwd=tmp_path)
    assert "contrast_begin\n  1. last_penalty  " in said
    assert "penalty of the last step: 0.0" in said
    assert "3 passed" in python("-m", "pytest", "-p", "no:cacheprovider", "-W", "error", cwd=tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_new_phase_is_python_for_names_of_any_length(tmp_path, name):
    for file in write_phase(name, tmp_path):
        compile(file.read_text(), file.name, "exec")
        assert "my_name" not in file.read_text()
        assert max(map(len, file.read_text().splitlines())) <= 120


# Names


@pytest.mark.parametrize("write", [write_plugin, write_phase])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "'' is no name: it has lower-case letters and digits"),
        ("GradPeak", "such as 'grad-peak'"),
        ("grad peak", "such as 'grad-peak'"),
        ("2fast", "begins with a letter"),
        ("grad--peak", "such as 'grad-peak'"),
        ("../peak", "such as 'peak'"),
        ("p" * (LONGEST + 1), f"has at most {LONGEST} characters"),
        ("é", "'é' is no name"),
        ("class", "'class' is a word of Python's own"),
        ("match", "'match' is a word of Python's own"),
    ],
)
def test_bad_names_are_refused(tmp_path, write, name, text):
    with pytest.raises(LoopkitError) as caught:
        write(name, tmp_path)
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("clip-grad-norm", "'clip-grad-norm' is a plugin already, 'clip_grad_norm' of loopkit"),
        ("history", "is the name of what a plugin can provide (a record of the metrics)"),
        ("grads", "is the name of a state (the gradients of an update"),
    ],
)
def test_new_plugin_refuses_names_that_mean_something(tmp_path, name, text):
    with pytest.raises(LoopkitError) as caught:
        write_plugin(name, tmp_path)
    assert text in str(caught.value)


def test_new_plugin_refuses_a_package_that_is_there(importable):
    (importable / "loopkit_taken").mkdir()
    (importable / "loopkit_taken" / "__init__.py").touch()
    with pytest.raises(LoopkitError, match="a module 'loopkit_taken' can be imported already"):
        write_plugin("taken", importable)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("update", "would make an event with the hook 'update_begin', which is there"),
        ("json", "Python has a module 'json', which it would hide"),
        ("torch", "a module 'torch' can be imported already"),
    ],
)
def test_new_phase_refuses_names_that_mean_something(tmp_path, name, text):
    with pytest.raises(LoopkitError) as caught:
        write_phase(name, tmp_path)
    assert text in str(caught.value)


# What is there


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_new_plugin_leaves_what_is_there(tmp_path, kind, capsys):
    there = tmp_path / "loopkit-kit-peak"
    if kind == "folder":
        there.mkdir()
    elif kind == "file":
        there.write_text("mine")
    else:
        there.symlink_to(tmp_path / "nowhere")
    assert main(["new-plugin", "kit-peak", "--directory", str(tmp_path)]) == 2
    assert f"{there} is there already, and is left as it is" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [there]


@pytest.mark.parametrize("file", ["kit_peak.py", "test_kit_peak.py", "example_kit_peak.py"])
def test_new_phase_leaves_what_is_there(tmp_path, file):
    (tmp_path / file).write_text("mine")
    with pytest.raises(LoopkitError, match="is there already, and is left as it is"):
        write_phase("kit-peak", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "mine"


@pytest.mark.parametrize("words", [["new-plugin", "kit-peak"], ["new-phase", "kit-peak"]])
def test_a_directory_that_is_not_there_is_an_error(tmp_path, words, capsys):
    assert main([*words, "--directory", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
