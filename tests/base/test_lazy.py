"""Names that are imported when somebody asks for them."""

from __future__ import annotations

import pytest

import loopkit
from loopkit import checkpoint, logs, plugins
from loopkit.base.lazy import homes


@pytest.mark.parametrize("package", [checkpoint, logs, plugins])
def test_all_that_is_public_is_there(package):
    assert {name for name in package.__all__ if not hasattr(package, name)} == set()
    assert set(homes(package.__name__)) <= set(package.__all__)


def test_modules_are_there_after_import_of_loopkit_alone():
    assert loopkit.schedules.cosine(10) is not None
    assert loopkit.distributed.World is not None


def test_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'loopkit\.logs' has no attribute 'JsonLine'"):
        logs.JsonLine  # noqa: B018
