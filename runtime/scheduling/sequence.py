"""One request on its way through the engine: its tokens, its blocks, and how far each model is with them."""

from wingbeat.runtime.scheduling.draft_progress import DraftProgress
from wingbeat.runtime.scheduling.request import FinishReason, Request, SpeculationMetrics


class Sequence:
    """Host-side state of a request, as far as the host knows it: a round in flight may have taken it further.

    Positions 0..num_computed-1 have the verifier's KV; chunks count from their launch on, decoded tokens from when the
    host knows them. A running sequence with one token left to compute, known or still in flight, is decoding: that
    token is the root of its next tree.
    """

    __slots__ = (
        "blocks",
        "draft",
        "epoch",
        "in_flight",
        "last_hash",
        "metrics",
        "num_cached_tokens",
        "num_computed",
        "num_hashed_blocks",
        "num_prompt_tokens",
        "num_synced_blocks",
        "num_tokens_at_most",
        "preempted",
        "request",
        "slot",
        "token_ids",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_tokens_at_most = self.num_prompt_tokens + request.params.max_tokens
        self.metrics = SpeculationMetrics()
        self.num_cached_tokens = 0
        self.preempted = False
        """Whether it has run before and waits to be computed again."""
        self.reset()

    def reset(self) -> None:
        """Forget everything that can be computed again: before the first run, and after a preemption."""
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_hashed_blocks = 0
        self.last_hash: bytes | None = None
        self.num_synced_blocks = 0
        """Blocks already written to the device's block table."""
        self.slot = -1
        self.epoch = 0
        self.in_flight: list[int] = []
        """By round launched and not settled, oldest first: the most tokens it may emit; the least is 1."""
        self.draft = DraftProgress()

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is missing."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next round starts from one token, the last one."""
        return bool(self.in_flight) or len(self.token_ids) - self.num_computed == 1

    @property
    def min_len(self) -> int:
        """Tokens it has at least once the rounds in flight are settled."""
        return len(self.token_ids) + len(self.in_flight)

    @property
    def max_len(self) -> int:
        """Tokens it has at most once the rounds in flight are settled."""
        return len(self.token_ids) + sum(self.in_flight)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(
        self, token_ids: list[int], eos_token_ids: frozenset[int], max_model_len: int
    ) -> tuple[list[int], FinishReason | None]:
        """Take the tokens a round emitted, up to the first that ends the request.

        Returns:
            The tokens kept, and why the request ended, if it did.
        """
        params = self.request.params
        room = min(params.max_tokens - self.num_output_tokens, max_model_len - len(self.token_ids))
        kept = token_ids[:room]
        reason = FinishReason.LENGTH if len(kept) == room else None
        if not params.ignore_eos:
            for index, token_id in enumerate(kept):
                if token_id in eos_token_ids:
                    kept, reason = kept[: index + 1], FinishReason.STOP
                    break
        self.token_ids.extend(kept)
        return kept, reason
