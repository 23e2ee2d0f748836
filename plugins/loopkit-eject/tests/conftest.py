"""What runs a page apart from others."""

from project.test_docs import isolated

__all__ = ["isolated"]
