import pytest

from loopkit_mlflow.names import artifact_name, clean, name_for

GOOD = ["loss", "val/loss", "a.b-c_d e:f", "größe", "x" * 250]
BAD = ["recall@5", "", ".", "..", "../x", "/abs", "a//b", "a/", "a/./b", "x" * 251, "a\nb", "a\n", "\ud800", "50%"]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_name_stays(name):
    assert name_for(name) == name


@pytest.mark.parametrize("name", BAD)
def test_a_bad_name_becomes_a_good_one(name):
    mapped = name_for(name)
    assert mapped != name
    assert name_for(mapped) == mapped
    mapped = artifact_name(name)
    assert artifact_name(mapped) == mapped
    assert mapped.isascii()


def test_different_names_stay_different():
    names = [*GOOD, *BAD, "a*b", "a?b", "a_b"]
    assert len({name_for(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_mlflow_takes_the_names(name):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(name_for(name))


def test_texts_hold_what_a_database_can_hold():
    assert clean("a\0b\ud800ü") == "a\ufffdb?ü"
