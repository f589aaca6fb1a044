"""Every served family where its layers are replaced as on a GPU: the trial at load passes, and the text is the same."""

import pytest

from tests.runtime.verifier.test_architectures import architectures, measured
from wingbeat.runtime.fused import layers

__all__ = ["architectures"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", measured())
def test_every_family_of_the_results_is_served_by_fused_steps(architectures, monkeypatch, model_type):
    monkeypatch.setattr(layers, "OPS", {"cpu": layers.LayerOps()})
    outcome = architectures.try_architecture(model_type)
    assert outcome.outcome == "equal", outcome.reason
