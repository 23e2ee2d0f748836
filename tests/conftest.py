"""Steady and fast tests; hypothesis, too, does not go by how busy the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from steady import pytest_collection_modifyitems, pytest_runtest_setup  # noqa: F401

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
