"""What runs a page apart from others."""

from test_docs import isolated

__all__ = ["isolated"]
