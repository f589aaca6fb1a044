"""What the tests of rooms of the runtime share."""

import pytest

from wingbeat.runtime.engine.calibration import DrafterTimes, VerifierTimes
from wingbeat.runtime.speculation.costs import Scale, ScaleAndOffset


@pytest.fixture
def known_costs(monkeypatch):
    """Rounds cost what these tables say, whatever else the machine does: right drafts pay, wrong ones do not."""
    verifier = VerifierTimes((1, 8), (0, 8), ((1e-3, 1.2e-3), (1.2e-3, 2.4e-3)), (0.0, 0.0))
    drafter = DrafterTimes((2e-4, 2e-4), (1e-4, 1e-4))
    monkeypatch.setattr("wingbeat.runtime.engine.measured.verifier_times", lambda *args: verifier)
    monkeypatch.setattr("wingbeat.runtime.engine.measured.drafter_times", lambda *args: drafter)
    for seen in (Scale, ScaleAndOffset):
        monkeypatch.setattr(seen, "observe", lambda *args: None)
