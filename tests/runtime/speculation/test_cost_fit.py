"""Factors of a cost's parts are found, as far as observations tell them apart."""

import numpy as np
import pytest

from wingbeat.runtime.speculation.cost_fit import CostFit


def test_nothing_seen_is_as_expected():
    assert CostFit((1.0, 1.0, 0.0)).factors == [1.0, 1.0, 0.0]


def test_parts_that_vary_get_factors_of_their_own():
    chance = np.random.default_rng(0)
    fit = CostFit((1.0, 1.0, 0.0))
    for _ in range(400):
        second, third = chance.uniform(0.0, 4.0), float(chance.random() < 0.3)
        seconds = 1.8 * 2.0 + 1.2 * second + 0.5 * third
        fit.observe(seconds * chance.normal(1.0, 0.02), (2.0, second, third))
    assert fit.factors == pytest.approx([1.8, 1.2, 0.5], abs=0.2)


def test_parts_that_cannot_be_told_apart_are_off_alike():
    """Rounds of one size at half speed: the machine is slow, and so all of them are thought to be."""
    fit = CostFit((1.0, 1.0))
    for _ in range(100):
        fit.observe(2.0 * (1.0 + 0.5), (1.0, 0.5))
    assert fit.factors == pytest.approx([2.0, 2.0], rel=0.1)
    assert fit.factors[0] + 0.5 * fit.factors[1] == pytest.approx(3.0, rel=0.02)


def test_an_interruption_is_no_cost():
    fit = CostFit((1.0, 1.0))
    for _ in range(100):
        fit.observe(1.5, (1.0, 0.5))
    fit.observe(1000.0, (1.0, 0.5))
    assert fit.factors[0] < 1.2


def test_factors_stay_within_reason():
    low, high = CostFit((1.0, 0.0)), CostFit((1.0, 0.0))
    for _ in range(200):
        low.observe(0.0, (1.0, 1.0))
        high.observe(1e9, (1.0, 1.0))
    assert low.factors[0] >= 0.1
    assert low.factors[1] >= 0.0
    assert max(high.factors) <= 10.0


def test_it_makes_no_difference_when_factors_are_looked_at():
    chance = np.random.default_rng(1)
    asked, left = CostFit((1.0, 1.0, 1.0)), CostFit((1.0, 1.0, 1.0))
    for number in range(150):
        parts = (1.0, *chance.uniform(0.0, 2.0, size=2).tolist())
        seconds = 1.3 * sum(parts)
        asked.observe(seconds, parts)
        left.observe(seconds, parts)
        if number % 7 == 0:
            assert asked.factors[0] > 0
    assert asked.factors == pytest.approx(left.factors, rel=0.02)
