"""State of one request in the engine: its tokens, its blocks, and the progress of verifier and drafter."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from wingbeat.runtime.kv.block_hashes import salted_root
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.prompt_spans import prefix_ids
from wingbeat.runtime.scheduling.request import FinishReason, Request
from wingbeat.runtime.scheduling.token_reports import TokenReports

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class DraftProgress:
    """Drafting state of a sequence; only the drafter client writes this state."""

    followed: bool = False
    """Whether the drafter receives this sequence's tokens; if not, the fields below have no meaning."""
    may_be_followed: bool = False
    """Whether the request allows drafts but the drafter does not follow the sequence yet."""
    length: int = 0
    """Number of positions in the attached drafter's KV cache: 0..length-1."""
    complete: bool = False
    """Whether the drafter has received, or will receive, all computed positions, including positions in flight."""
    num_deferred: int = 0
    """Number of (taps, next token) pairs that the drafter has not received yet, because they are kept back in
    `runtime.deferral.deferred_pairs.DeferredPairs`."""
    deferred_from: int = 0
    """Position of the first deferred pair."""
    tree_requested: bool = False
    text_tree: Any = None
    """Nodes of the next tree, if that tree is built from earlier text instead of requested from the drafter; else None.
    The part that builds such trees writes and reads the nodes."""
    recorded: "Tensor | None" = None
    """Taps [num_tokens, taps_size] of a saved prefix with which the sequence begins; None once the drafter has received
    them."""

    @property
    def num_recorded(self) -> int:
        """Number of leading positions whose taps are recorded and need not be recomputed for the drafter."""
        return 0 if self.recorded is None else len(self.recorded)

    @property
    def is_recorded(self) -> bool:
        """Whether the taps at the first position that the drafter lacks are recorded."""
        return self.recorded is not None and self.length < len(self.recorded)


class NothingAllowed(ValueError):
    """Raised if every token is forbidden at a position where a token was to be accepted."""


class TokenMasker(Protocol):
    """Follows one sequence's tokens and computes the allowed next tokens.

    `wingbeat.runtime.scheduling.maskers` creates maskers.
    """

    def accept(self, token_id: int) -> bool:
        """Advances by the next token; returns whether the sequence must end after that token.

        Raises:
            NothingAllowed: every token is forbidden.
            ValueError: the token is forbidden.
            RequestTooExpensive: matching the sequence against the grammar needs too much computation or memory.
        """
        ...

    def forced(self, most: int) -> list[int]:
        """Returns at most `most` tokens that the grammar probably forces next. A wrong token costs only speed."""
        ...

    def may_force(self) -> bool:
        """Whether `forced` may return tokens after one of the nodes of the latest `fill`."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether a token is known to be allowed next; False if the mask is not computed yet."""
        ...

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        """Writes the mask of tokens allowed after `token_ids`, which have not been passed to `accept` yet.

        Args:
            token_ids: zero or more tokens that follow the last accepted token.
            mask: int32 [ceil(vocab_size / 32)], written like a row of `fill`.

        Returns:
            False if the mask is not computed yet or if no token is forbidden; `mask` must not be read then.
        """
        ...

    def fill(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        """Writes the mask of tokens allowed after each node of a tree whose root is the last accepted token.

        Args:
            token_ids, parents: int64 [num_nodes], valid nodes only; node 0 is the root, with parent -1.
            masks: int32 [num_nodes, ceil(vocab_size / 32)], written: bit b of word w is set if token 32 * w + b is
                allowed.

        Returns:
            False if only the root's row was computed in time.
        """
        ...


class Sequence:
    """State of a request on the host; rounds in flight may already have advanced the request further on the device.

    The verifier's KV is computed for positions 0..num_computed-1. Chunk positions count as computed from the launch of
    the chunk's round on; positions of decoded tokens count once the host has the tokens. A running sequence with one
    token left to compute, on the host or still in flight, is decoding: that token is the root of the sequence's next
    tree.
    """

    __slots__ = (
        "blocks",
        "draft",
        "epoch",
        "in_flight",
        "last_hash",
        "masker",
        "metrics",
        "num_cached_tokens",
        "num_computed",
        "num_hashed_blocks",
        "num_prompt_tokens",
        "num_synced_blocks",
        "num_tokens_at_most",
        "preempted",
        "reports",
        "request",
        "root_hash",
        "seat",
        "slot",
        "token_ids",
    )

    def __init__(self, request: Request, masker: TokenMasker | None = None) -> None:
        self.request = request
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens_at_most = self.num_prompt_tokens + request.params.max_tokens
        self.metrics = SpeculationMetrics()
        self.num_cached_tokens = 0
        self.preempted = False
        """Whether the sequence ran before and waits to be recomputed."""
        self.root_hash = salted_root(request.params.cache_salt, request.variant_digest)
        self.masker = masker
        """Computes the allowed next tokens; None allows all tokens."""
        params = request.params
        asks = not (params.logprobs is params.prompt_logprobs is params.report is None)
        self.reports = TokenReports(params) if asks else None
        self.reset()

    def reset(self) -> None:
        """Clears all state that can be recomputed; called before the first run and after a preemption."""
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_hashed_blocks = 0
        self.last_hash: bytes | None = None
        self.num_synced_blocks = 0
        """Number of blocks already written to the device's block table."""
        self.slot = -1
        self.seat = 0
        """Number of the seat that the sequence holds beside its slot, see `Seats`; 0 for no seat."""
        self.epoch = 0
        self.in_flight: list[int] = []
        """Maximum number of tokens that each round in flight may emit, oldest round first; each round emits at least 1.
        """
        self.draft = DraftProgress()
        if self.reports is not None:
            self.reports.restart()

    def prefix_ids(self) -> list[int]:
        """Returns the numbers from which the sequence's block hashes are computed; see `prompt_spans.prefix_ids`."""
        spans = self.request.spans
        return prefix_ids(self.token_ids, spans) if spans else self.token_ids

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are requested and no output has carried them yet."""
        asked = self.request.params.prompt_logprobs is not None
        return asked and not self.reports.prompt_is_out

    @property
    def computes_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, even if it is in the prefix cache."""
        request, report = self.request, self.request.params.report
        return self.wants_prompt_logprobs or request.fresh or (report is not None and report.is_of_all)

    @property
    def wants_chunk(self) -> bool:
        """Whether the uncomputed tokens form a prompt chunk.

        A single token forms a chunk only if the request has a report; otherwise that token is decoded.
        """
        return self.num_uncomputed > (1 if self.request.params.report is None else 0)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens on the host that have no KV yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next round computes only the sequence's last token (and its draft tree)."""
        return bool(self.in_flight) or (self.num_uncomputed == 1 and not self.wants_chunk)

    @property
    def min_len(self) -> int:
        """Minimum number of tokens of the sequence once the rounds in flight are settled."""
        return len(self.token_ids) + len(self.in_flight)

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of the sequence once the rounds in flight are settled."""
        return len(self.token_ids) + sum(self.in_flight)

    def certain(self, most: int) -> list[int]:
        """Returns at most `most` forced tokens, which are added to the drafter's tree; see `TokenMasker.forced`."""
        params = self.request.params
        if self.masker is None or self.in_flight or not params.speculation:
            return []
        # The last token that may be emitted needs no draft, because it is the bonus token after the accepted path.
        return self.masker.forced(max(min(most, params.max_tokens - self.num_output_tokens - 1), 0))

    @property
    def is_awaited(self) -> bool:
        """Whether the sequence skips a round while its tokens are in flight.

        The grammar may force tokens after the tokens in flight. Drafting these forced tokens saves more time than
        running another round now.
        """
        return self.masker is not None and self.request.params.speculation and self.masker.may_force()

    @property
    def may_draft(self) -> bool:
        """Whether the next tree may have drafted nodes: a tree was requested or built, or tokens are forced."""
        if self.draft.tree_requested or self.draft.text_tree is not None:
            return True
        return self.masker is not None and bool(self.certain(1))

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(
        self, token_ids: list[int], eos_token_ids: frozenset[int], max_model_len: int
    ) -> tuple[list[int], FinishReason | None]:
        """Appends the tokens that a round emitted, up to the first token that ends the request.

        Returns:
            The appended tokens, and the reason if the request ended; else None.
        """
        params, length = self.request.params, len(self.token_ids)
        num_output_tokens = length - self.num_prompt_tokens
        room = min(params.max_tokens - num_output_tokens, max_model_len - length)
        kept = token_ids[:room]
        reason = FinishReason.LENGTH if len(kept) == room else None
        stops = params.stop_token_ids
        for index, token_id in enumerate(kept):
            is_end = token_id in stops or token_id in eos_token_ids
            is_early = is_end and num_output_tokens + index < params.min_tokens
            nothing_left = is_early and params.may_leave_nothing
            try:
                ended = self.masker is not None and self.masker.accept(token_id)
            except NothingAllowed:
                nothing_left = True
            except ValueError:
                if not params.may_leave_nothing:
                    raise
                nothing_left = True
            if nothing_left:
                # Every token was forbidden at this position, so the chosen token is dropped.
                kept, reason = kept[:index], FinishReason.LENGTH
                break
            if ended:
                kept, reason = kept[: index + 1], FinishReason.STOP
                break
            if (token_id in eos_token_ids and not params.ignore_eos) or token_id in stops:
                kept, reason = kept[: index + 1], FinishReason.STOP
                break
        self.token_ids.extend(kept)
        return kept, reason
