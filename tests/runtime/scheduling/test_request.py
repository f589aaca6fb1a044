"""Parameters that no kernel can take are refused where they are made."""

import pytest

from wingbeat.runtime.scheduling.request import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**31),
        ("top_k", 2**63),
        ("top_k", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 0),
        ("seed", 2**63),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", float("nan")),
        ("min_p", float("nan")),
    ],
)
def test_what_is_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("temperature", [1e-45, 3e-38, 9.9e-6])
def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).temperature == 0.0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
