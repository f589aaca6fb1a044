"""Fixtures shared by the tests of the runtime's folders."""

import pytest

from tests.runtime.losing_policy import know_costs
from wingbeat.runtime.speculation.curves import PassCurve


@pytest.fixture
def known_costs(monkeypatch):
    """Fix the costs of rounds, whatever else the machine does: right drafts pay, and wrong drafts do not."""
    know_costs(monkeypatch, PassCurve((1, 64), (1e-3, 2.4e-3)))
