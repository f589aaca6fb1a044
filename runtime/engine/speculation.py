"""Interface of an engine's decisions about speculation; the base class drafts and verifies fixed trees."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.flight import RoundObserver
from wingbeat.runtime.scheduling.sequence import Sequence

Trees = Any
"""Trees of a round's decodes in the representation of that kind of round; None if all are bare roots."""


class Reason(StrEnum):
    """Reason for which a round is or is not drafted."""

    IDLE = "idle"
    """No sequence can be drafted for."""
    PLAIN = "plain"
    """Plain decoding is faster."""
    TEXT = "text"
    """Trees built from earlier text gain more than a draft, so no draft is requested."""
    SPECULATE = "speculate"
    PROBE_PLAIN = "probe_plain"
    """Plain for some rounds to measure their cost, which every decision depends on."""
    PROBE_DRAFT = "probe_draft"
    """Drafted for some rounds, because otherwise nothing could show that drafts pay."""
    FORCED = "forced"
    """Plain decoding would be chosen, but some requests demand drafts; only these are drafted for."""


class DraftPlan(NamedTuple):
    """Limits of the next draft."""

    levels: int
    """Most levels to grow; 0 requests no trees."""
    reason: str
    num_nodes: int | None = None
    """Nodes of each tree to verify, its root included, where the number is decided before drafting; else None."""
    growth: tuple[float, float] | None = None
    """Limits that the drafter's growth rule reads; None grows every level."""


@dataclass
class PolicyStats:
    """Statistics of the policy's decisions."""

    decisions: dict[str, int] = field(default_factory=dict)
    """Rounds by reason."""
    levels: int = 0
    """Levels of the latest decision."""
    expected_speedup: float = 1.0
    """Predicted token rate of the latest decision relative to plain decoding."""
    expected_accepted: float = 0.0
    """Accepted nodes predicted by the calibrated probabilities; equals `num_accepted` if the calibration is right."""
    num_accepted: int = 0
    break_even: float | None = None
    """Tokens per draft, bonus token included, at which the best draft at the latest load would be as fast as plain
    decoding; None before the first decision."""
    costs_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """Predicted seconds of rounds with whole trees, by phase and number of requests."""


class Speculation(RoundObserver):
    """Decides how much is drafted and verified. An engine shares one instance with its drafter client.

    Calls for a round and the draft after it come in this order: `prune` and `num_nodes` before the launch; `launched`;
    `plan` and `write_rule` when the drafter is notified; `settled`, with the accepted tokens and the times
    (`RoundInFlight.times`). With overlap, a round is settled after the next one was launched. `plan` and `write_rule`
    are skipped if no drafter is asked; the other calls come in every round.

    Decisions change speed and never tokens. This class uses the same draft shape in every round and verifies all nodes;
    the part `adaptive` adapts both.

    Args:
        max_levels: levels of each draft.
    """

    num_nodes: int | None = None
    """Nodes of each tree that the device keeps; None keeps all."""
    plan_every = 1
    """Rounds without followed sequences from one plan to the next."""
    takes_texts = True
    """Whether trees may be built from earlier text instead of by the drafter."""

    def __init__(self, max_levels: int) -> None:
        self._plan = DraftPlan(max_levels, "fixed")

    def calibrate(self, end: VerifierEnd, patience_s: float) -> None:
        """Measures missing costs before a drafter is attached; no round is in flight.

        Args:
            patience_s: silence after which the drafter counts as stuck.
        """

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Context manager within which every draft has the configured shape and comes from the drafter.

        No round may be in flight at its begin or end.
        """
        self.takes_texts = False
        try:
            yield
        finally:
            self.takes_texts = True

    def plan(
        self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0, num_rounds: int = 1
    ) -> DraftPlan:
        """Decides the next draft.

        Args:
            running: sequences that decode in the next round.
            proposals: sequences that may be drafted for.
            num_unfollowed: further sequences that could be drafted for if the drafter had their context.
            num_rounds: rounds since the latest plan; more than one if nothing was drafted meanwhile.
        """
        return self._plan

    def made_of_text(self) -> DraftPlan:
        """Plan used instead of `plan` if text trees are worth more than any draft."""
        return DraftPlan(0, Reason.TEXT)

    def text_table(self) -> np.ndarray | None:
        """Rows of `Acceptance.table` for trees built from text; None uses the probabilities that the trees carry."""
        return None

    @property
    def text_pays(self) -> bool:
        """Whether trees from text have been worth their time."""
        return True

    @property
    def is_probing(self) -> bool:
        """Whether the next plan continues a probe, whose measurement text trees would disturb."""
        return False

    def node_price(self, running: list[Sequence]) -> float:
        """Time of verifying one more node, expressed in tokens generated in that time."""
        return 0.0

    def slow_down(self, running: list[Sequence], num_drafting: int) -> float | None:
        """Time of a round with a draft for `num_drafting` sequences, divided by that of the round without a draft.

        None if a draft does not pay and none is to be tried.
        """
        return 1.0

    def to_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        """Returns the unfollowed running sequences that the drafter follows from now on."""
        return unfollowed

    def follows_next(self) -> bool:
        """Whether the drafter follows the request that is being admitted; called once per request."""
        return True

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        """Writes the growth rule of the latest plan for the drafter; returns 1, or 0 if every level is grown.

        Args:
            num_context_tokens: context tokens that the drafter processes first, beside the round's accepted tokens.
        """
        return 0

    def prune(self, trees: Trees, decodes: list[Sequence], drafted: Trees) -> Trees:
        """Returns the nodes of a round's trees to verify; None if all are bare roots.

        Args:
            trees: the result of `ModelRunner.check`, including tokens that are certain.
            drafted: the drafter's trees; None if it sent none.
        """
        return trees

    def stats(self) -> PolicyStats | None:
        """Decisions so far; None if nothing is decided."""
        return None
