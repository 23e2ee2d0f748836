"""What keeps tests from going by how busy the machine is, and what runs a page apart from others."""

from hypothesis import HealthCheck, settings
from project.test_docs import isolated

__all__ = ["isolated"]

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
