"""Questions that an engine asks about speculation, round by round; as the class stands here, nothing is decided."""

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
"""Trees of a round's decodes, as its kind of round keeps them; None where all are bare roots."""


class Speculation(RoundObserver):
    """Decides how much is drafted and verified. An engine is built with one and shares it with its drafter client.

    It is asked in this order, for a round and the draft behind it: `prune` and `num_nodes` before the launch;
    `launched`; `plan` and `write_rule` when the drafter is told; `settled`, with what the round accepted and took
    (`RoundInFlight.times`). With overlap a round is settled after the next one was launched. Where no drafter is asked,
    `plan` and `write_rule` are left out; the other calls come in every round.

    Decisions change speed and never tokens. This class decides nothing: drafts have one shape in every round, and all
    of it is verified. `AdaptiveSpeculation` decides.

    Args:
        max_levels: of each draft.
    """

    num_nodes: int | None = None
    """Nodes to keep of each tree where the device chooses them; None keeps all."""
    takes_texts = True
    """Whether trees may be made of earlier text in the place of the drafter's."""

    def __init__(self, max_levels: int) -> None:
        self._plan = DraftPlan(max_levels, "fixed")

    def calibrate(self, end: VerifierEnd, patience_s: float) -> None:
        """A drafter is about to be attached: measure what is not known yet. No round is in flight.

        Args:
            patience_s: silence after which the drafter counts as stuck.
        """

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Within the block every draft has the configured shape, and is the drafter's. No round is in flight when it
        begins or ends."""
        self.takes_texts = False
        try:
            yield
        finally:
            self.takes_texts = True

    def plan(
        self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0, num_rounds: int = 1
    ) -> DraftPlan:
        """Decide the next draft.

        Args:
            running: sequences that decode in the next round.
            proposals: those that may be drafted for.
            num_unfollowed: others could be, if the drafter had their context.
            num_rounds: since the latest plan; more than one where nobody was drafted for.
        """
        return self._plan

    def made_of_text(self) -> DraftPlan:
        """Plan in the place of `plan` where nobody is drafted for, because earlier text is worth more."""
        return DraftPlan(0, Reason.TEXT)

    def text_table(self) -> np.ndarray | None:
        """Rows of `Acceptance.table` of trees made of earlier text; None believes what these say of themselves."""
        return None

    @property
    def text_pays(self) -> bool:
        """Whether trees made of text have been worth their time."""
        return True

    @property
    def is_probing(self) -> bool:
        """Whether the next plan goes on with what is being tried, which trees made of text would hide."""
        return False

    def node_price(self, running: list[Sequence]) -> float:
        """Tokens that the time of verifying one more node is worth."""
        return 0.0

    def slow_down(self, running: list[Sequence], num_drafting: int) -> float | None:
        """Time of a round behind a draft for so many, over that of the same round behind none; None where a draft does
        not pay, and is not to be tried."""
        return 1.0

    def to_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        """Which of the running sequences that the drafter is not told of it is told of from now on."""
        return unfollowed

    def follows_next(self) -> bool:
        """Whether it is told of the request that is admitted now; asked once of each."""
        return True

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        """Hand the drafter its growth rule for the latest plan: 1, or 0 where every level is grown.

        Args:
            num_context_tokens: context that the drafter takes in first, beside what the round accepted.
        """
        return 0

    def prune(self, trees: Trees, decodes: list[Sequence], drafted: Trees) -> Trees:
        """Nodes to verify of the trees of a round; None where all are bare roots.

        Args:
            trees: as `ModelRunner.check` gives them, what is certain included.
            drafted: those that the drafter brought; None where it brought none.
        """
        return trees

    def stats(self) -> PolicyStats | None:
        """Decisions so far; None where nothing is decided."""
        return None
