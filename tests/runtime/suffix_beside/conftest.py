"""Fixtures of adaptive speculation."""

from tests.runtime.adaptive.conftest import known_costs

__all__ = ["known_costs"]
