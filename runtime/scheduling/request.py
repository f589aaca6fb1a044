"""What a caller asks of the engine and what it gets back; no tensors, no text."""

import itertools
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

INT32_MAX = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Logits divided by a smaller temperature overflow; the best token's share is 1 long before."""

_RANGES = (
    ("max_tokens", int, 1, INT32_MAX, "an integer from 1 to 2^31 - 1"),
    ("temperature", (int, float), 0.0, 100.0, "between 0 and 100"),
    ("top_p", (int, float), math.ulp(0.0), 1.0, "above 0 and at most 1"),
    ("top_k", int, 0, INT32_MAX, "an integer from 0 (off) to 2^31 - 1"),
    ("min_p", (int, float), 0.0, 1.0, "between 0 and 1"),
    ("seed", int, -(2**63), 2**63 - 1, "a 64-bit integer"),
)
"""Of `SamplingParams`: field, type, least and largest value, and what an error says."""


class FinishReason(StrEnum):
    """Why a request ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen: argmax(processed logits / temperature + Gumbel(seed, position, token)).

    Raises:
        ValueError: a field is out of range; the message begins with the field's name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    """0 is greedy, and what is below `GREEDY_BELOW` becomes 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary, as does whatever reaches its size."""
    min_p: float = 0.0
    seed: int = 0
    """The caller draws one where the user gave none."""
    ignore_eos: bool = False
    speculation: bool = True
    """False decodes this request plainly, in the same batch as the others; the tokens are the same."""

    def __post_init__(self) -> None:
        # What passes fits the tensors it is copied into, so that no request can fail a batch by its numbers.
        for name, kind, low, high, allowed in _RANGES:
            value = getattr(self, name)
            if not isinstance(value, kind) or not low <= value <= high:
                raise ValueError(f"{name} is {value}: must be {allowed}")
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)


@dataclass(frozen=True)
class Request:
    """One sequence to generate. `n` choices of one prompt are n requests that share it through the prefix cache."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass
class SpeculationMetrics:
    """What speculation did for one request, or for all of them when summed.

    Acceptance length is 1 + accepted / drafts: tokens per verified tree, the bonus token included.
    """

    num_drafts: int = 0
    """Rounds in which a token tree of this request was verified."""
    num_draft_tokens: int = 0
    """Tree nodes verified, roots not counted."""
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """[p] counts the drafts whose node at depth p + 1 was accepted."""
    forced_acceptance: bool = False
    """Whether acceptance was drawn from a profile (`wingbeat.runtime.config.ForcedAcceptance`): a benchmark's text."""

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verified tree."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos.extend([0] * missing)
        for position in range(num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens per draft, the bonus token included; 1.0 before the first draft."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def acceptance_rate_per_pos(self) -> list[float]:
        """[p] is P(depth p + 1 accepted | depth p accepted)."""
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [now / before for before, now in itertools.pairwise(reached) if before]

    def add(self, other: "SpeculationMetrics") -> None:
        """Sum another request's counts into these."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        missing = len(other.num_accepted_tokens_per_pos) - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos.extend([0] * missing)
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[position] += count
        self.forced_acceptance |= other.forced_acceptance

    def acceptance_histogram(self, max_depth: int) -> list[int]:
        """[j] counts the verified trees that accepted exactly j nodes: 0 to `max_depth`, which none may exceed."""
        missing = max_depth - len(self.num_accepted_tokens_per_pos)
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos, *[0] * missing, 0]
        return [here - deeper for here, deeper in itertools.pairwise(reached)]

    def as_dict(self, num_spec_tokens: int = 0) -> dict:
        """The response extension `metrics.speculative_decoding`; `forced_acceptance` is there only where it is true.

        Args:
            num_spec_tokens: greatest depth of a tree.
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
            # vLLM's names of the same.
            "num_spec_steps": self.num_drafts,
            "num_spec_tokens": depth,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": round(self.acceptance_length, 4),
            "draft_acceptance_rate": round(accepted_share, 4),
            "acceptance_histogram": self.acceptance_histogram(depth),
            **marks,
        }


class RequestOutput(NamedTuple):
    """Tokens one round brought for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens only, in order. An end-of-sequence token that ended the request is included."""
    finish_reason: FinishReason | None = None
    metrics: SpeculationMetrics | None = None
    """Set on the last output."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; set on the last output."""
    failure: str | None = None
    """What processing the request raised: it ended by ABORT, and the tokens it had are no answer."""
    queue_s: float = 0.0
    """Seconds from arrival in the engine to the first slot; set on the first output."""
    engine_id: str = ""
    """Which engine of several wrote it; known to routers."""
