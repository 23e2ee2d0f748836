"""Options with an old name: taken with a warning, and shown by their new name."""

import pytest
from helpers import batches, make_learner, on

from loopkit import hookimpl
from loopkit.author import Shown, deprecated, options_of
from loopkit.errors import CallError, PluginError
from loopkit.plugins import LogHyperparameters


class Clip(Shown):
    name = "clip"

    @deprecated("value", since="0.2", use="max_value")
    @deprecated("norm", since="0.3", use="kind")
    def __init__(self, max_value: float = 1.0, kind: float = 2.0) -> None:
        self.max_value = max_value
        self.kind = kind

    @hookimpl(updates=("grads",))
    def update_begin(self, learner):
        pass


def clip(**options):
    with pytest.warns(
        DeprecationWarning, match=r"^Clip: value is max_value since version 0\.2: write max_value=0\.5$"
    ) as told:
        made = Clip(**options)
    assert told[0].filename == __file__
    return made


def test_old_name_is_taken_with_a_warning_at_the_line_of_the_caller():
    assert clip(value=0.5).max_value == 0.5


def test_two_old_names_are_taken():
    with pytest.warns(DeprecationWarning, match="Clip: norm is kind since"):
        made = clip(value=0.5, norm=1.0)
    assert (made.max_value, made.kind) == (0.5, 1.0)


def test_options_and_repr_show_the_new_name():
    made = clip(value=0.5)
    assert options_of(made) == {"max_value": 0.5, "kind": 2.0}
    assert repr(made) == "Clip(max_value=0.5)"


def test_log_of_the_run_shows_the_new_name():
    found = {}

    def listen(record):
        found.update({record.name: record.value})

    learner = make_learner(clip(value=0.5), LogHyperparameters(), on("log_value", listen, "listen"))
    learner.fit(batches(1), epochs=1)
    values = found["hyperparameters"].values
    assert values["plugins.clip.max_value"] == 0.5
    assert "plugins.clip.value" not in values


def test_new_name_gives_no_warning(recwarn):
    assert Clip(max_value=0.5).max_value == 0.5
    assert not recwarn.list


def test_both_names_raise():
    with pytest.raises(PluginError, match="Clip: value is the old name of max_value: give max_value only"):
        Clip(value=0.5, max_value=1.0)


class Plain:
    @deprecated("value", since="0.2", use="max_value")
    def __init__(self, max_value: float = 1.0) -> None:
        self.max_value = max_value


@pytest.mark.parametrize("cls", [Clip, Plain])
def test_unknown_argument_beside_an_old_name_is_named(cls):
    with pytest.raises(CallError, match=rf"^{cls.__name__} has no argument 'maxvalue' \(did you mean 'max_value'\?\)$"):
        cls(maxvalue=1.0)
