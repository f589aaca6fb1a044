"""Fixtures shared by tests of adaptive speculation."""

import pytest

from tests.runtime.adaptive.losing_policy import know_costs
from tests.runtime.engine.conftest import ref, rigs
from wingbeat.runtime.adaptive.curves import PassCurve

__all__ = ["known_costs", "ref", "rigs"]


@pytest.fixture
def known_costs(monkeypatch):
    """Fix the costs of rounds, whatever else the machine does: right drafts pay, and wrong drafts do not."""
    know_costs(monkeypatch, PassCurve((1, 64), (1e-3, 2.4e-3)))
