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
"""Draft trees of a round's decodes, in a type that depends on the round kind; None if all trees are bare roots."""


class Reason(StrEnum):
    """Reason why a draft is or is not requested for a round."""

    IDLE = "idle"
    """No sequence can use a draft."""
    PLAIN = "plain"
    """Plain decoding is faster."""
    TEXT = "text"
    """Trees built from earlier text gain more than a draft, so no draft is requested."""
    SPECULATE = "speculate"
    PROBE_PLAIN = "probe_plain"
    """Rounds are plain for a while, to measure the cost of plain rounds, on which all decisions depend."""
    PROBE_DRAFT = "probe_draft"
    """Rounds are drafted for a while, because otherwise no measurement could show that drafts pay."""
    FORCED = "forced"
    """Plain decoding would be chosen, but some requests demand drafts; only these requests get drafts."""


class DraftPlan(NamedTuple):
    """Limits of the next draft."""

    levels: int
    """Maximum number of levels to grow; 0 requests no trees."""
    reason: str
    num_nodes: int | None = None
    """Number of nodes of each tree to verify, including its root; None if the number is not decided before drafting."""
    growth: tuple[float, float] | None = None
    """Limits for the drafter's growth rule, which stops growth early; None grows every level."""


@dataclass
class PolicyStats:
    """Statistics of the policy's decisions."""

    decisions: dict[str, int] = field(default_factory=dict)
    """Number of rounds by reason."""
    levels: int = 0
    """Number of levels of the latest decision."""
    expected_speedup: float = 1.0
    """Predicted ratio of the latest decision's token rate to that of plain decoding."""
    expected_accepted: float = 0.0
    """Number of accepted nodes that the calibrated probabilities predict; about equal to `num_accepted` if the
    calibration is right."""
    num_accepted: int = 0
    break_even: float | None = None
    """Number of tokens per draft, including the bonus token, at which the best draft would be as fast as plain decoding
    at the latest load; None before the first decision."""
    costs_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """Predicted seconds of rounds with whole trees, by phase and number of requests."""


class Speculation(RoundObserver):
    """Decides how much is drafted and verified. An engine shares one instance with its drafter client.

    An engine calls the methods in this order for a round and the draft after that round: `prune` and `num_nodes` before
    the launch; `launched`; `plan` and `write_rule` when the drafter is notified; `settled`, with the accepted tokens
    and the times (`RoundInFlight.times`). With overlap, a round is settled after the next round was launched. `plan`
    and `write_rule` are not called if no drafter is asked for trees; the other methods are called in every round.

    Decisions change speed and never tokens. This class uses the same draft shape in every round and verifies all nodes;
    the part `adaptive` adapts both.

    Args:
        max_levels: number of levels of each draft.
    """

    num_nodes: int | None = None
    """Number of nodes of each tree that the device keeps; None keeps all nodes."""
    plan_every = 1
    """Number of rounds without followed sequences from one plan to the next."""
    takes_texts = True
    """Whether trees may be built from earlier text instead of by the drafter."""

    def __init__(self, max_levels: int) -> None:
        self._plan = DraftPlan(max_levels, "fixed")

    def calibrate(self, end: VerifierEnd, patience_s: float) -> None:
        """Measures costs that are not known yet, before a drafter is attached; this class does nothing.

        No round may be in flight.

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
            proposals: sequences for which a tree may be requested.
            num_unfollowed: number of further sequences that could get a tree if the drafter had the sequences' context.
            num_rounds: number of rounds since the latest plan; may exceed 1 if no drafts were requested in these
                rounds.
        """
        return self._plan

    def made_of_text(self) -> DraftPlan:
        """Returns the plan of a round whose trees are all built from earlier text.

        Called instead of `plan` if text trees are worth more than any draft.
        """
        return DraftPlan(0, Reason.TEXT)

    def text_table(self) -> np.ndarray | None:
        """Returns the rows of `Acceptance.table` for trees built from text.

        None means that the trees' own probabilities are used.
        """
        return None

    @property
    def text_pays(self) -> bool:
        """Whether trees built from earlier text took less time per token than drafts and plain decoding would take."""
        return True

    @property
    def is_probing(self) -> bool:
        """Whether the next plan continues a probe.

        Text trees must not be used then, because they would disturb the measurement.
        """
        return False

    def text_prices(self, running: list[Sequence], most: int) -> np.ndarray | None:
        """Returns the cost of rounds whose trees are all built from earlier text, with 0, 1, .. `most` drafted nodes.

        The costs are float64 [most + 1], in tokens generated in the same time; the first cost is that of a plain round.
        Returns None if all nodes are to be verified.
        """
        return None

    def slow_down(self, running: list[Sequence], num_drafting: int) -> float | None:
        """Returns a round's time with drafting for `num_drafting` sequences, divided by the time without drafting.

        Returns None if drafting does not pay and no draft is to be tried.
        """
        return 1.0

    def may_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        """Returns the unfollowed running sequences for which drafts are worth the replay of the sequence's context."""
        return unfollowed

    def to_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        """Returns the unfollowed running sequences that the drafter is to follow from now on."""
        return unfollowed

    def follows_next(self) -> bool:
        """Whether the drafter follows the request that is being admitted; called once per request."""
        return True

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        """Writes the latest plan's growth rule into the outcome for the drafter.

        Returns 1, or 0 if there is no rule and the drafter grows every level.

        Args:
            num_context_tokens: number of context tokens that the drafter processes before it drafts, not counting the
                round's accepted tokens.
        """
        return 0

    def prune(self, trees: Trees, decodes: list[Sequence], drafted: Trees) -> Trees:
        """Returns the nodes of a round's trees to verify; None if all are bare roots.

        Args:
            trees: result of `ModelRunner.check`, which includes tokens that a grammar forces.
            drafted: the drafter's trees; None if the drafter sent no trees.
        """
        return trees

    def stats(self) -> PolicyStats | None:
        """Returns the counts of decisions so far; None if this class makes no decisions."""
        return None
