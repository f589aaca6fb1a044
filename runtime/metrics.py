"""Counters as plain data that can be summed and sent: histograms, and speculation metrics."""

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field

REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
"""Histogram bounds for the duration of a request or of its phases, in seconds; like the bounds below, these are vLLM's.
"""
ROUND_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


@dataclass
class Histogram:
    """Counts of values by bucket.

    A bucket counts values above the previous bound, up to and including its own bound.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """A count for each bound, and a last count for values above all bounds."""
    total: float = 0.0
    """Sum of the values."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class SpeculationMetrics:
    """Speculation counts of one request, or of many requests when summed.

    The acceptance length is 1 + accepted tokens / drafts, which is the mean number of tokens per verified tree,
    including the bonus token.
    """

    num_drafts: int = 0
    """Number of rounds in which a draft tree of this request was verified."""
    num_draft_tokens: int = 0
    """Number of verified tree nodes, not counting roots."""
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """Entry p is the number of drafts of which a node at depth p + 1 was accepted."""
    forced_acceptance: bool = False
    """Whether acceptance was drawn from a profile (`wingbeat.runtime.config.ForcedAcceptance`), for a benchmark."""

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Counts a verified tree and its accepted nodes."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos.extend([0] * missing)
        for position in range(num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per draft, including the bonus token; 1.0 before the first draft."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def acceptance_rate_per_pos(self) -> list[float]:
        """Returns rates by depth.

        Entry p is the fraction of drafts with an accepted node at depth p + 1, among drafts with an accepted node at
        depth p.
        """
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [now / before for before, now in itertools.pairwise(reached) if before]

    def add(self, other: "SpeculationMetrics") -> None:
        """Adds another request's counts."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        missing = len(other.num_accepted_tokens_per_pos) - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos.extend([0] * missing)
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[position] += count
        self.forced_acceptance |= other.forced_acceptance

    def acceptance_histogram(self, max_depth: int) -> list[int]:
        """Returns counts.

        Entry j is the number of verified trees of which exactly j nodes were accepted, 0 <= j <= `max_depth`.
        """
        missing = max_depth - len(self.num_accepted_tokens_per_pos)
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos, *[0] * missing, 0]
        return [here - deeper for here, deeper in itertools.pairwise(reached)]

    def as_dict(self, num_spec_tokens: int = 0) -> dict:
        """Returns the response extension `metrics.speculative_decoding`; `forced_acceptance` is present only if true.

        Args:
            num_spec_tokens: maximum depth of a tree.
        """
        marks = {"forced_acceptance": True} if self.forced_acceptance else {}
        depth = max(num_spec_tokens, len(self.num_accepted_tokens_per_pos))
        accepted_share = self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate_per_pos": [round(rate, 4) for rate in self.acceptance_rate_per_pos()],
            # The following keys are the names that vLLM uses for these numbers.
            "num_spec_steps": self.num_drafts,
            "num_spec_tokens": depth,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": round(self.acceptance_length, 4),
            "draft_acceptance_rate": round(accepted_share, 4),
            "acceptance_histogram": self.acceptance_histogram(depth),
            **marks,
        }
