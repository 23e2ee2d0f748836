"""Steady and fast tests, as loopkit's own."""

from steady import pytest_collection_modifyitems, pytest_runtest_setup  # noqa: F401
