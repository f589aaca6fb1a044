"""Interface of an engine's decisions about speculation; the base class drafts and verifies fixed trees."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.flight import RoundObserver
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.policy import DraftPlan, PolicyStats, Reason

Trees = Any
"""Trees of a round's decodes in the representation of that kind of round; None if all are bare roots."""


class Speculation(RoundObserver):
    """Decides how much is drafted and verified. An engine shares one instance with its drafter client.

    Calls for a round and the draft after it come in this order: `prune` and `num_nodes` before the launch; `launched`;
    `plan` and `write_rule` when the drafter is notified; `settled`, with the accepted tokens and the times
    (`RoundInFlight.times`). With overlap, a round is settled after the next one was launched. `plan` and `write_rule`
    are skipped if no drafter is asked; the other calls come in every round.

    Decisions change speed and never tokens. This class uses the same draft shape in every round and verifies all nodes;
    `AdaptiveSpeculation` adapts both.

    Args:
        max_levels: levels of each draft.
    """

    num_nodes: int | None = None
    """Nodes of each tree that the device keeps; None keeps all."""
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
