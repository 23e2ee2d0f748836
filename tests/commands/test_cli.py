"""The command ``loopkit``, in process where that shows it."""

from __future__ import annotations

import gc
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import batches, install, make_learner

import loopkit
from loopkit import checkpoint
from loopkit.commands import cli
from loopkit.errors import LoopkitError
from loopkit.found.discovery import SUBCOMMANDS
from loopkit.plugins import Checkpoint


def run(capsys, *words):
    """The exit code, and the lines of standard output and of standard error."""
    code = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


@pytest.fixture
def saved(tmp_path):
    """A directory with three checkpoints of a run."""
    learner = make_learner(Checkpoint(tmp_path / "run", keep=9))
    learner.metrics["val/loss"] = 0.25
    learner.fit(batches(4), epochs=3)
    return tmp_path / "run"


def newest(directory):
    return checkpoint.listing(directory)[0].path


def damage(path):
    """Change one byte of a file, and not its size."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_list_shows_the_checkpoints_newest_first(saved, capsys):
    code, lines, _ = run(capsys, "checkpoint", "list", saved)
    assert code == 0
    assert lines[0].split() == ["number", "name", "epoch", "step", "reason", "time", "size", "metrics"]
    cells = [line.split() for line in lines[1:]]
    assert [row[:5] for row in cells] == [
        ["3", "000003-step-12", "3", "12", "epoch"],
        ["2", "000002-step-8", "2", "8", "epoch"],
        ["1", "000001-step-4", "1", "4", "epoch"],
    ]
    assert all(row[5].endswith("Z") and row[7] == "KiB" for row in cells)


def test_list_shows_few_metrics_and_nothing_unprintable(tmp_path, capsys):
    learner = make_learner()
    learner.metrics.update({"val/loss": 0.123456, "a\nb": 1.0, "c": float("nan"), "d": 2.0})
    checkpoint.save(learner, tmp_path)
    _, lines, _ = run(capsys, "checkpoint", "list", tmp_path)
    assert len(lines) == 2
    assert lines[1].endswith("val/loss 0.1235 a\\nb 1 c nan ...")


def test_list_says_what_is_wrong_with_damaged_ones(saved, capsys):
    damage(saved / "000002-step-8" / "manifest.json")
    code, lines, _ = run(capsys, "checkpoint", "list", saved)
    assert code == 0
    assert [line.split()[1] for line in lines[1:3]] == ["000003-step-12", "000001-step-4"]
    assert lines[3].startswith("damaged: 000002-step-8: ")


def test_list_exits_with_1_if_there_is_none(tmp_path, saved, capsys):
    (tmp_path / "empty").mkdir()
    assert run(capsys, "checkpoint", "list", tmp_path / "empty")[:2] == (
        1,
        [f"{tmp_path / 'empty'} holds no checkpoint"],
    )
    for manifest in checkpoint.listing(saved):
        damage(manifest.path / "manifest.json")
    code, lines, _ = run(capsys, "checkpoint", "list", saved)
    assert (code, len(lines), lines[-1]) == (1, 4, f"{saved} holds no whole checkpoint")


def test_inspect_prints_what_inspect_finds(saved, capsys):
    code, lines, _ = run(capsys, "checkpoint", "inspect", saved)
    assert (code, lines) == (0, str(checkpoint.inspect(saved)).splitlines())


def test_verify_reads_one_checkpoint_or_all(saved, capsys):
    code, lines, _ = run(capsys, "checkpoint", "verify", newest(saved))
    assert code == 0
    assert [line.split(":")[1].split(",")[0] for line in lines] == [" whole"]
    assert lines[0].startswith(str(newest(saved)))
    assert len(run(capsys, "checkpoint", "verify", saved)[1]) == 3


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_verify_finds_a_changed_byte(file, saved, capsys):
    damage(saved / "000002-step-8" / file)
    code, lines, _ = run(capsys, "checkpoint", "verify", saved)
    assert code == 1
    assert [": DAMAGED: " in line for line in lines] == [False, True, False]
    assert file in lines[1]
    assert run(capsys, "checkpoint", "verify", saved / "000002-step-8")[0] == 1
    assert run(capsys, "checkpoint", "verify", newest(saved))[0] == 0


def test_verify_of_nothing_exits_with_1(tmp_path, capsys):
    assert run(capsys, "checkpoint", "verify", tmp_path)[:2] == (1, [f"{tmp_path} is no checkpoint, and holds none"])


@pytest.mark.parametrize("words", [("list",), ("inspect",), ("verify",)])
def test_a_path_that_is_not_there_is_one_line_and_exit_2(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "checkpoint", *words, "missing")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("loopkit: error: ")


def test_usage_errors_and_help(capsys):
    assert run(capsys, "checkpoint")[0] == 2
    for word, hint in (("chekpoint", "checkpoint"), ("plguins", "plugins"), ("monitr", "monitor"), ("x" * 999, "")):
        near = f" (did you mean {hint!r}?)" if hint else ""
        line = f"loopkit: error: there is no command {repr(word)[:80]}{near}: `loopkit --help` lists them"
        assert run(capsys, word) == (2, [], [line])
    assert "there is no 'lst' (did you mean 'list'?)" in run(capsys, "checkpoint", "lst")[2][-1]
    assert "there is no option '--vrsion' (did you mean '--version'?)" in run(capsys, "--vrsion")[2][-1]
    assert run(capsys, "--version")[:2] == (0, [f"loopkit {loopkit.__version__}"])
    for command in cli.COMMANDS:
        code, out, _ = run(capsys, *command.words, "--help")
        assert code == 0
        assert "\n".join(out).count(command.function.__doc__.splitlines()[0]) == 1
        assert "Exit code: " in "\n".join(out)


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_has_a_line_for_each_command(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, [])
    named = [line.split()[0] for line in out if re.match(r"  [a-z]", line)]
    assert {command.words[0] for command in cli.COMMANDS} <= set(named)
    assert len(named) == len(set(named))
    assert all(len(line) <= 100 for line in out)
    own = {command.words[0] for command in cli.COMMANDS}
    assert all(len(line.split()) > 2 for line in out if line.split()[:1] and line.split()[0] in own)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_fits_a_terminal_and_describes_each_command(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = run(capsys, "--help")[1]
    assert all(len(line) <= int(columns) for line in out)
    added = [line for line in out if line.endswith(")") and "(loopkit-" in line]
    assert all(len(line.partition("(loopkit-")[0].split()) > 1 for line in added)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_every_command_and_those_of_groups(capsys, shell):
    code, out, err = run(capsys, "completion", shell)
    assert (code, err) == (0, [])
    text = "\n".join(out)
    assert all(word in text for command in cli.COMMANDS for word in command.words)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "found"), [("plu", "plugins"), ("checkpoint ver", "verify"), ("comple", "completion")]
)
def test_bash_completes_words(capsys, tmp_path, words, found):
    script = tmp_path / "complete.bash"
    script.write_text("\n".join(run(capsys, "completion", "bash")[1]) + "\n")
    count = len(words.split())
    code = f"source {script}; COMP_WORDS=(loopkit {words}); COMP_CWORD={count}; _loopkit; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split() == [found]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
@pytest.mark.parametrize(
    ("words", "found"), [("plu", "_describe"), ("checkpoint ver", "list inspect verify"), ("run a", "_files")]
)
def test_zsh_completes_words_at_the_first_time(capsys, tmp_path, words, found):
    (tmp_path / "_loopkit").write_text("\n".join(run(capsys, "completion", "zsh")[1]) + "\n")
    code = f"fpath=({tmp_path}); autoload -Uz _loopkit; words=(loopkit {words}); CURRENT=$#words; "
    code += "_describe() { echo $0 }; _files() { echo $0 }; compadd() { echo $@ }; _loopkit"
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (found, "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.parametrize(
    ("words", "found"),
    [("plu", ["plugins"]), ("checkpoint ", ["inspect", "list", "verify"]), ("comple", ["completion"])],
)
def test_fish_completes_words(capsys, tmp_path, monkeypatch, words, found):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "loopkit.fish").write_text("\n".join(run(capsys, "completion", "fish")[1]) + "\n")
    code = f"source {tmp_path}/loopkit.fish; complete -C 'loopkit {words}'"
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert sorted(line.partition("\t")[0] for line in done.stdout.splitlines()) == found


def test_errors_keep_to_one_line_and_notes_follow(capsys, monkeypatch, tmp_path):
    def fail(path):
        error = LoopkitError("one\n  two")
        error.add_note("the note")
        raise error

    monkeypatch.setattr("loopkit.checkpoint.inspection.inspect", fail)
    code, out, err = run(capsys, "checkpoint", "inspect", tmp_path)
    assert (code, out, err) == (2, [], ["loopkit: error: one two", "the note"])


@pytest.fixture
def added(tmp_path, monkeypatch):
    """An installed distribution with subcommands, which leave a trace when their module is imported."""
    source = (
        "import sys\n\n"
        "def main(words):\n    print('main', *words)\n    return 3 if words else None\n\n"
        "def leave(words):\n    sys.exit(*words)\n\n"
        "def fail(words):\n    raise FileNotFoundError('no such run')\n\n"
        "number = 3\n"
    )
    lines = "".join(f"{name} = added_commands:{name}\n" for name in ("main", "leave", "fail", "number", "plugins"))
    install(tmp_path, "loopkit-added", f"[loopkit.commands]\n{lines}", added_commands=source)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("added_commands", None)


def test_subcommand_of_another_distribution_is_imported_when_it_is_named(added, capsys):
    assert "from other distributions: " in (text := " ".join(run(capsys, "--help")[1]))
    assert re.search(r" main +\(loopkit-added\)", text)
    assert not re.search(r" plugins +\(loopkit-added\)", text)  # the own one counts
    assert run(capsys, "plugins", "--help")[1][0].startswith("usage: loopkit plugins")
    assert "added_commands" not in sys.modules
    assert run(capsys, "main")[:2] == (0, ["main"])
    assert run(capsys, "main", "--epochs", 3)[:2] == (3, ["main --epochs 3"])
    assert run(capsys, "loopkit-added:main", "x")[:2] == (3, ["main x"])


def test_subcommand_of_another_distribution_may_exit_or_fail(added, capsys):
    assert run(capsys, "leave") == (0, [], [])
    assert run(capsys, "leave", "a text") == (1, [], ["a text"])
    assert run(capsys, "fail") == (2, [], ["loopkit: error: no such run"])
    line = "loopkit: error: command 'number' of loopkit-added 1.0: added_commands:number is 3, which cannot be called"
    assert run(capsys, "number") == (2, [], [line])


def test_subcommand_that_two_distributions_have_is_refused(added, capsys):
    install(added, "other", "[loopkit.commands]\nmain = never_imported:main\n", version="2.0")
    code, out, (line,) = run(capsys, "main")
    assert (code, out) == (2, [])
    assert "loopkit-added 1.0 and other 2.0 both have a command called 'main'" in line


def test_subcommand_that_is_not_installed_says_where_it_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    for name, distribution in SUBCOMMANDS.items():
        line = (
            f"loopkit: error: loopkit {name} is in the distribution {distribution}: pip install {distribution} "
            f"(in a clone: pip install -e plugins/{distribution})"
        )
        assert run(capsys, name) == (2, [], [line])


def test_plugins_lists_names_versions_and_first_lines(tmp_path, monkeypatch, capsys):
    def listed():
        """The exit code, and the lines but for those of loopkit's own plugins."""
        code, lines, _ = run(capsys, "plugins")
        lines.remove("`loopkit plugins NAME` describes one, with its options")
        own = lines.index(f"loopkit-engine {loopkit.__version__}")
        last = next((i for i, line in enumerate(lines) if i > own and line[:2] != "  "), len(lines))
        return code, [re.sub("(?<=[^ ])  +", "  ", line) for line in lines[:own] + lines[last:]]

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delenv("LOOPKIT_PLUGINS", raising=False)
    assert listed() == (0, [])
    code = f"class A:\n    'Adds to ``b``.'\nclass L:\n    'Takes {{0: 1}}; {'long ' * 20}'\n1 / 0\n"
    install(tmp_path, "one", "[loopkit.plugins]\na = m:A\nlonger = m:L\n", m=code)
    install(tmp_path, "other", "[loopkit.plugins]\na = n:A\n[loopkit.commands]\nshow = n:show\n", version="2.0.post1")
    assert listed() == (
        0,
        [
            "one 1.0",
            "  a *  Adds to b.",
            "  longer  Takes {0: 1}; " + "long " * 11 + "...",
            "other 2.0.post1",
            "  a *",
            "* a is not one plugin: write one:a or other:a",
            "commands: show (other)",
        ],
    )
    install(tmp_path, "broken", "[loopkit.plugins]\n\x1b[2J\n")
    monkeypatch.setenv("LOOPKIT_PLUGINS", "")
    code, lines = listed()
    assert (code, lines[-2]) == (1, "LOOPKIT_PLUGINS allows by name: none")
    assert lines[-1].startswith(f"broken: {tmp_path}")
    assert "\x1b" not in lines[-1]


def test_help_needs_no_torch():
    """The module itself: the package's own imports come before it."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('loopkit')\n"
        f"package.__path__ = {list(loopkit.__path__)!r}\n"
        "sys.modules['loopkit'] = package\n"
        "from loopkit.commands.cli import main\n"
        "assert main(['plugins', '--help']) == 0\n"
        "assert not {'torch', 'numpy', 'pluggy'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "List the installed plugins" in done.stdout


def test_program_alone_freezes_what_it_imported_and_a_caller_is_left_alone(monkeypatch, capsys):
    before = gc.get_freeze_count()
    assert (run(capsys, "plugins")[0], gc.get_freeze_count()) == (0, before)
    monkeypatch.setattr(sys, "argv", ["loopkit", "plugins"])
    imported = [[] for _ in range(20_000)]
    try:
        assert cli.main() == 0
        assert gc.get_freeze_count() > before + len(imported)
    finally:
        if not before:
            gc.unfreeze()


def test_say_escapes_what_the_stream_cannot_encode(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    cli.say("naïve ✓")
    assert raw.getvalue() == b"na\\xefve \\u2713\n"


def test_say_survives_a_missing_or_closed_stream(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    cli.say("lost")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    cli.say("lost")


def test_a_closed_pipe_changes_neither_the_exit_code_nor_stderr(saved):
    damage(saved / "000002-step-8" / "model.safetensors")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "loopkit", "checkpoint", "verify", str(saved)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert run(capsys, "plugins") == (130, [], ["loopkit: interrupted"])


@pytest.mark.parametrize("words", [["-m", "loopkit"], ["loopkit"], ["other"]])
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path, words):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    if len(words) == 1:
        (tmp_path / words[0]).write_text("from loopkit.commands.cli import main\nmain()\n")
    path = os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    if words == ["other"]:  # a program that imports loopkit keeps Python's way
        assert "Traceback" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (130, "loopkit: interrupted\n")


def test_checkpoint_list_fits_a_terminal(saved, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, lines, _ = run(capsys, "checkpoint", "list", saved)
    assert max(map(len, lines)) == 60
    assert lines[1].endswith("...")
