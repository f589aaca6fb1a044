"""As many levels are drafted as the policy plans and its growth rule grants."""

from dataclasses import replace

import pytest

from tests.runtime.adaptive.losing_policy import POLICY
from tests.runtime.engine.test_told_to_drafter import COUNT, DRAFTED_BY, SHAPES, Pair
from tests.runtime.models import greedy_params
from wingbeat.runtime.adaptive.policy import GrowthLimits, SpeculationPolicy
from wingbeat.runtime.engine.speculation import DraftPlan, Reason


class FewLevels(SpeculationPolicy):
    """A policy that always drafts two levels."""

    growth: GrowthLimits | None = None

    def plan(self, *load, **more) -> DraftPlan:
        """Plan two levels in every round."""
        return DraftPlan(2, Reason.SPECULATE, growth=self.growth)


@pytest.mark.usefixtures("known_costs")
@DRAFTED_BY
@SHAPES
@pytest.mark.parametrize(
    ("growth", "has_rule", "deepest"),
    [(None, 0, 2), (GrowthLimits(0.0, 0.0), 1, 2), (GrowthLimits(1e9, 0.0), 1, 1)],
    ids=["levels", "pays", "does-not-pay"],
)
def test_as_many_levels_are_drafted_as_the_policy_plans_and_its_rule_grants(
    monkeypatch, shape, draft_by, growth, has_rule, deepest
):
    monkeypatch.setattr(POLICY, FewLevels)
    monkeypatch.setattr(FewLevels, "growth", growth)
    passes = draft_by(lambda: Pair(replace(shape, adaptive=True)).run([greedy_params(COUNT)] * 2))
    assert {(one.header.max_levels, one.header.has_rule) for one in passes} == {(2, has_rule)}
    assert {max(depths) for one in passes for depths in one.depths} == {deepest}
