"""Requests to the engine and its outputs, without tensors and text."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan

if TYPE_CHECKING:
    import numpy as np

INT32_MAX = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Temperatures below this become 0: dividing logits by them overflows, and the best token's probability is 1 well
before."""

_RANGES = (
    ("max_tokens", int, 1, INT32_MAX, "an integer from 1 to 2^31 - 1"),
    ("temperature", (int, float), 0.0, 100.0, "between 0 and 100"),
    ("top_p", (int, float), math.ulp(0.0), 1.0, "above 0 and at most 1"),
    ("top_k", int, 0, INT32_MAX, "an integer from 0 (off) to 2^31 - 1"),
    ("min_p", (int, float), 0.0, 1.0, "between 0 and 1"),
    ("seed", int, -(2**63), 2**63 - 1, "a 64-bit integer"),
    ("presence_penalty", (int, float), -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", (int, float), -2.0, 2.0, "between -2 and 2"),
    ("repetition_penalty", (int, float), 0.01, 100.0, "between 0.01 and 100"),
    ("min_tokens", int, 0, INT32_MAX, "an integer from 0 to 2^31 - 1"),
    ("priority", int, -(2**31), INT32_MAX, "a 32-bit integer"),
)
"""Fields of `SamplingParams`: name, type, least and largest value, and the range as an error message gives it."""


MAX_LOGPROBS = 20
"""Most of the likeliest tokens that are reported per position; OpenAI's limit, and vLLM's default."""
ALONE_TOKENS = 16
"""Tokens that a request under suspicion writes alone: its prompt's end and a few rounds. A request that writes more did
not cause the earlier failures."""


class FinishReason(StrEnum):
    """Reason for which a request ended; values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TooDear(Exception):
    """Raised when a request would take more computing or memory than it may.

    The message begins with the field's name.
    """


class Variant(NamedTuple):
    """Variant of the served model (an adapter), as requests name it."""

    name: str
    """Name that clients pass as `model`."""
    path: str
    """Folder of the variant, on the machine of each engine."""
    digest: str
    """Digest of the variant's files; different content under the same name has another digest."""


class GrammarSpec(NamedTuple):
    """Grammar that an answer must match from its first token to its last."""

    kind: str
    """`json`, `json_object`, `regex`, `choice`, `grammar` or `structural_tag`."""
    text: str
    """Schema, expression or grammar; choices and structural tags as JSON."""
    field: str = "structured_outputs"
    """Request field that holds the grammar, for error messages."""


class PromptReport:
    """Report on a prompt whose request has no answer (a score, an embedding).

    A `Feature` computes its values chunk by chunk.
    """

    @property
    def is_of_all(self) -> bool:
        """Whether the report needs every token of the prompt, cached or not, instead of the last token alone."""
        raise NotImplementedError

    def made_of(self, rows: "Sequence[np.ndarray]", num_prompt_tokens: int) -> bytes:
        """Makes the content of `RequestOutput.report`.

        Args:
            rows: values of `Feature.told`, one row for each prompt chunk that was reported on.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: the token is argmax(processed logits / temperature + Gumbel(seed, position, token)).

    Logits are processed in this order: bias, penalties, masks of allowed tokens. Log-probabilities are computed from
    the model's unprocessed logits.

    Raises:
        ValueError: a field is out of range; the message begins with the field's name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    """0 is greedy; values below `GREEDY_BELOW` become 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and values from the vocabulary size on keep the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    """Drawn by the caller where the user gave no seed."""
    ignore_eos: bool = False
    speculation: bool = True
    """False decodes this request without drafts, in the same batch as others; the tokens are the same."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Applies to tokens of the prompt and the output; presence and frequency penalties apply to output tokens alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens that may be generated; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated: each sequence's last token is forbidden behind the other tokens."""
    banned_first: tuple[int, ...] = ()
    """Tokens that may not be the first generated token."""
    min_tokens: int = 0
    """Number of tokens before which no end-of-sequence token and no token of `stop_token_ids` is generated."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, also with `ignore_eos`."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are reported beside the chosen token's; None reports
    nothing."""
    prompt_logprobs: int | None = None
    """The corresponding number for the prompt's tokens, from the second token on."""
    priority: int = 0
    """Requests of higher priority are admitted first and preempted last."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests of equal salt."""
    grammar: GrammarSpec | None = None
    trace: bool = False
    """Whether outputs carry `rounds`, the trees that were verified."""
    report: PromptReport | None = None
    """Report to make of the prompt; the request ends after its first token."""
    learn: bool = True
    """False excludes this request from drafter training."""
    force_drafts: bool = False
    """Drafts and verifies whole trees even where the measured costs predict no gain; the tokens are the same."""

    def __post_init__(self) -> None:
        self.check()
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    def check(self) -> None:
        """Raises ValueError, beginning with the field's name, for a field that is out of range.

        Values that pass fit the tensors into which they are copied, so no request can fail a batch by its numbers.
        """
        for name, kind, low, high, allowed in _RANGES:
            value = getattr(self, name)
            if not isinstance(value, kind) or not low <= value <= high:
                raise ValueError(f"{name} is {value}: must be {allowed}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and 0 <= value <= MAX_LOGPROBS):
                raise ValueError(f"{name} is {value}: must be between 0 and {MAX_LOGPROBS}")
        for name in ("allowed_token_ids", "stop_token_ids", "banned_first"):
            _check_ids(name, getattr(self, name))
        for word in _listed("bad_words", self.bad_words):
            if not word:
                raise ValueError("bad_words holds a word without tokens")
            _check_ids("bad_words", word)
        for entry in _listed("logit_bias", self.logit_bias):
            token_id, value = _listed("logit_bias", entry)
            _check_ids("logit_bias", (token_id,))
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"logit_bias adds {value} to token {token_id}: must be a finite number")
        if not isinstance(self.cache_salt, str):
            raise ValueError("cache_salt must be a string")
        if self.report is not None and (not isinstance(self.report, PromptReport) or self.max_tokens != 1):
            raise ValueError(f"report is {self.report}: must be a PromptReport, with max_tokens 1")

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on previous tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def has_bias(self) -> bool:
        """Whether a bias is added to logits; forbidden tokens get a bias of minus infinity."""
        single = any(len(word) == 1 for word in self.bad_words)
        return bool(self.logit_bias or self.allowed_token_ids or self.min_tokens or self.banned_first or single)

    @cached_property
    def has_masks(self) -> bool:
        """Whether the host computes the allowed next tokens from the previous tokens."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    @property
    def may_leave_nothing(self) -> bool:
        """Whether the fields together may forbid every token at some point; the answer then ends there."""
        return self.grammar is not None and bool(
            self.allowed_token_ids or self.bad_words or self.min_tokens or self.banned_first
        )

    @cached_property
    def alters_logits(self) -> bool:
        """Whether tokens are chosen from processed logits."""
        return self.has_penalties or self.has_bias or self.has_masks

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError, beginning with the field's name, for a token id outside of the vocabulary."""
        words = (token_id for word in self.bad_words for token_id in word)
        for name, token_ids in (
            ("logit_bias", (token_id for token_id, _ in self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", words),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} holds token id {token_id}: the vocabulary has {vocab_size}")


def _listed(name: str, values: object) -> tuple:
    if not isinstance(values, tuple):
        raise ValueError(f"{name} is {values!r}: must be a tuple")
    return values


def _check_ids(name: str, token_ids: object) -> None:
    for token_id in _listed(name, token_ids):
        if not isinstance(token_id, int) or not 0 <= token_id <= INT32_MAX:
            raise ValueError(f"{name} holds {token_id!r}, which is no token id")


@dataclass(frozen=True)
class Request:
    """A sequence to generate. `n` choices of one prompt are n requests that share it through the prefix cache."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens that another engine has generated already; `max_tokens` and `min_tokens` include them."""
    alone: bool = False
    """Whether engines have died while running this request: it runs alone until it has written more than
    `ALONE_TOKENS`."""
    variant: Variant | None = None
    """Variant of the model to run with; None for the base model."""
    spans: tuple[PromptSpan, ...] = field(default=(), compare=False)
    """Spans of the prompt with content other than text, in order."""
    fresh: bool = False
    """Whether the whole prompt is computed, ignoring cached prefixes."""

    @property
    def variant_digest(self) -> str:
        """Digest of the request's variant; empty for the base model."""
        return "" if self.variant is None else self.variant.digest

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output when the request arrives."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError, beginning with the field's name, for a token id outside of the vocabulary."""
        try:
            ids = array("q", (*self.prompt_token_ids, *self.output_token_ids))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"prompt holds a value that is not a token id: {error}") from None
        bad = [token_id for token_id in ids and (min(ids), max(ids)) if not 0 <= token_id < vocab_size]
        if bad:
            raise ValueError(f"prompt holds token id {bad[0]}: the vocabulary has {vocab_size}")
        self.params.check_token_ids(vocab_size)


class TokenLogprob(NamedTuple):
    """Log-probability of one token, from the model's unprocessed logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, best first."""


class VerifiedRound(NamedTuple):
    """Trace of one round for one request that has `trace`."""

    token_ids: tuple[int, ...]
    """Emitted tokens: those of the accepted nodes, then the verifier's own; cut where the request ended."""
    tree_token_ids: tuple[int, ...] = ()
    """Token ids by node, the root first; empty where no draft was verified."""
    tree_parents: tuple[int, ...] = ()
    """Parent by node, smaller than the node's own index; -1 for the root."""
    accepted_nodes: tuple[int, ...] = ()
    """Accepted nodes by depth, from depth 1 on."""
    plain_reason: str = ""
    """Reason for decoding without a tree; empty if there is a tree. See `runtime.engine.round_counts`."""


class RequestOutput(NamedTuple):
    """Tokens that one round emitted for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens only, in order, including an end-of-sequence token that ended the request."""
    finish_reason: FinishReason | None = None
    metrics: SpeculationMetrics | None = None
    """Set on the last output."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; set on the last output."""
    failure: str | None = None
    """Error raised while the request was processed: it ended by ABORT, and its tokens are not a complete answer."""
    is_refusal: bool = False
    """Whether `failure` is caused by the request's content and begins with the name of its field."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the new tokens, if requested."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of the prompt's tokens from the second on; set on the first output, if requested."""
    report: bytes = b""
    """Report on the prompt; set on the first output, if the request has a `report`."""
    rounds: tuple[VerifiedRound, ...] = ()
    """Trace of the rounds that emitted these tokens, if the request has `trace`."""
    queue_s: float = 0.0
    """Seconds from arrival in the engine to the first slot; set on the first output."""
    engine_id: str = ""
    """Engine that wrote the output; set by routers."""
    weights: str = ""
    """Digest of the weights that this engine was loaded with, where they were pushed; set by routers."""
