"""``run``, the folder of a run, and ``${run}`` in other values."""

from __future__ import annotations

import pytest

from loopkit_files import Config, ConfigError, dump, load

FIT = {"fit": {"epochs": 1}}


def config(**values):
    return Config({**FIT, **values})


def test_folder_of_the_run_stands_in_every_value_that_names_it():
    found = config(
        run="runs/a",
        plugins={
            "checkpoint": {"directory": "${run}"},
            "log_to": {"backends": ["${run}", "${run}/b", {"a": "x${run}"}]},
        },
    )
    assert found.values == {
        **FIT,
        "plugins": {
            "checkpoint": {"directory": "runs/a"},
            "log_to": {"backends": ["runs/a", "runs/a/b", {"a": "xruns/a"}]},
        },
    }
    assert "run =" not in dump(found)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": "runs/a"}, "run is set, and no value names it"),
        ({"plugins": {"a": {"b": "${run}"}}}, r"plugins\.a\.b: \$\{run\} is not set: write run = "),
        (
            {"run": "a", "plugins": {"a": {"b": "${rum}/${run}"}}},
            r"there is no variable 'rum': \$\{run\} is the only one",
        ),
        ({"run": 3, "plugins": {"a": {"b": "${run}"}}}, "run is a number, 3: it is the folder of the run"),
        ({"run": ""}, "run is a string, '': it is the folder of the run"),
        ({"run": {"directory": "a"}}, "run is a table"),
    ],
)
def test_variable_that_means_nothing_is_a_problem(values, message):
    with pytest.raises(ConfigError) as raised:
        config(**values)
    assert raised.match(message) or pytest.fail(str(raised.value))


def test_values_without_a_variable_stay_as_they_are():
    values = {**FIT, "plugins": {"a": {"b": "$run {run} ${", "c": 3}}}
    assert Config(values).values == values


def test_folder_of_the_run_can_be_set_from_the_command_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'run = "runs/a"\n[model]\ncall = "torch.nn:Linear"\nin_features = 3\nout_features = 1\n'
        '[loss]\ncall = "torch.nn:MSELoss"\n[optimizer]\ncall = "torch.optim:SGD"\nlr = 0.1\n'
        '[data.train]\ncall = "torch.nn:Identity"\n[fit]\nminutes = 1\n'
        '[plugins.checkpoint]\ndirectory = "${run}/deep"\n'
    )
    assert load(file).values["plugins"]["checkpoint"]["directory"] == "runs/a/deep"
    assert load(file, ["run=runs/b"]).values["plugins"]["checkpoint"]["directory"] == "runs/b/deep"
    with pytest.raises(ConfigError, match=r"run\.toml:1: run is set, and no value names it"):
        load(file, ["plugins.checkpoint.directory=c"])


@pytest.mark.parametrize("minutes", ["0", "-1", "inf", "nan", "true", '"3"'])
def test_minutes_that_are_no_number_above_0_are_a_problem(minutes, tmp_path):
    with pytest.raises(ConfigError, match=r"minutes is .*: it is a number of minutes above 0"):
        load(_file(tmp_path, minutes))


def _file(tmp_path, minutes):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\ncall = "torch.nn:Identity"\n[optimizer]\ncall = "torch.optim:SGD"\n'
        f'[data.train]\ncall = "torch.nn:Identity"\n[fit]\nminutes = {minutes}\n'
    )
    return file
