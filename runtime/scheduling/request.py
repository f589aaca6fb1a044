"""Requests to an engine, and outputs of an engine. Both hold token ids, but no tensors and no text."""

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
"""Temperatures below this value become 0, because dividing logits by them overflows. At this value, the best token's
probability is already 1."""

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
"""Maximum number of most likely tokens reported per position; equal to OpenAI's limit and vLLM's default."""
ALONE_TOKENS = 16
"""Number of tokens that a suspected request generates alone, enough for the end of its prompt and a few rounds. A
request that generates more tokens did not cause the earlier failures."""


class FinishReason(StrEnum):
    """Reason why a request ended; the values are OpenAI's if OpenAI has the reason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestTooExpensive(Exception):
    """Raised if a request needs more computation or memory than allowed.

    The message begins with the name of the request's field that asks for too much.
    """


class Variant(NamedTuple):
    """Variant of the served model, such as an adapter, that a request names."""

    name: str
    """Name that clients pass as `model`."""
    path: str
    """Folder of the variant, on the machine of each engine."""
    digest: str
    """Digest of the variant's files. If other content is loaded under the same name, that content has another digest.
    """


class GrammarSpec(NamedTuple):
    """Grammar that an answer must match from its first token to its last."""

    kind: str
    """`json`, `json_object`, `regex`, `choice`, `grammar` or `structural_tag`."""
    text: str
    """Text of the schema, expression or grammar; choices and structural tags are written as JSON."""
    field: str = "structured_outputs"
    """Request field that holds the grammar, for error messages."""


class PromptReport:
    """Report, such as a score or an embedding, on the prompt of a request that gets no answer.

    A `Feature` computes the report's values chunk by chunk.
    """

    @property
    def is_of_all(self) -> bool:
        """Whether the report needs all prompt tokens, including tokens that are in the prefix cache.

        The value is False if the report needs only the last token.
        """
        raise NotImplementedError

    def made_of(self, rows: "Sequence[np.ndarray]", num_prompt_tokens: int) -> bytes:
        """Makes the content of `RequestOutput.report`.

        Args:
            rows: values of `Feature.reported_values`, one row for each prompt chunk that was reported on.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. The chosen token is argmax(processed logits / temperature + Gumbel(seed, position, token)).

    Logits are processed in this order: bias, penalties, masks of allowed tokens. Log-probabilities are computed from
    the model's unprocessed logits.

    Raises:
        ValueError: a field is out of range; the message begins with the field's name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy. Values below `GREEDY_BELOW` become 0."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens that may be sampled; 0, or at least the vocabulary size, allows all tokens."""
    min_p: float = 0.0
    seed: int = 0
    """Seed of the sampling noise; the caller draws a seed if the user gave none."""
    ignore_eos: bool = False
    speculation: bool = True
    """Whether the request may use drafts. A request without drafts runs in the same batches as other requests and gets
    the same tokens."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Penalty on tokens of the prompt and the output; presence and frequency penalties apply only to output tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value added to that token's logit."""
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens that may be generated; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated: each sequence's last token is forbidden after the sequence's other
    tokens."""
    banned_first: tuple[int, ...] = ()
    """Tokens that may not be the first generated token."""
    min_tokens: int = 0
    """Number of tokens to generate before an end-of-sequence token or a token of `stop_token_ids` is allowed."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, even if `ignore_eos` is set."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are reported, in addition to the chosen token's; None
    reports none."""
    prompt_logprobs: int | None = None
    """As `logprobs`, but for all prompt tokens except the first."""
    priority: int = 0
    """Requests of higher priority are admitted first and preempted last."""
    cache_salt: str = ""
    """Salt of the block hashes: cached prefixes are shared only between requests with equal salt."""
    grammar: GrammarSpec | None = None
    trace: bool = False
    """Whether outputs carry `rounds`, the trees that were verified."""
    report: PromptReport | None = None
    """Report to make of the prompt; the request then ends after its first token."""
    learn: bool = True
    """Whether the request may be used to train drafters."""
    force_drafts: bool = False
    """Whether whole trees are drafted and verified even if the measured costs predict no gain; the generated tokens do
    not change."""

    def __post_init__(self) -> None:
        self.check()
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    def check(self) -> None:
        """Raises ValueError for a field that is out of range; the message begins with the name of that field.

        A value within range can be stored in the tensor into which the value is copied, so that no request's values
        make a batch fail.
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
        """Whether the host computes a mask of allowed tokens from the previous tokens (for a grammar or bad words)."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    @property
    def may_leave_nothing(self) -> bool:
        """Whether the fields combined may forbid every token at some position; the answer ends at such a position."""
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
    """A sequence to generate.

    `n` choices of a prompt are n requests, which share the prompt's KV through the prefix cache.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens that another engine has already generated for the request; `max_tokens` and `min_tokens` count these
    tokens too."""
    alone: bool = False
    """Whether engines have died while they ran this request. Such a request runs without other requests until it has
    generated more than `ALONE_TOKENS` tokens."""
    variant: Variant | None = None
    """Variant of the model to run with; None for the base model."""
    spans: tuple[PromptSpan, ...] = field(default=(), compare=False)
    """Spans of the prompt with content other than text, in order of position."""
    fresh: bool = False
    """Whether the whole prompt is computed, without using cached prefixes."""

    @property
    def variant_digest(self) -> str:
        """Digest of the request's variant; empty for the base model."""
        return "" if self.variant is None else self.variant.digest

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output when the request arrives."""
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
    """Emitted tokens: first the tokens of the accepted nodes, then the token that the verifier chose. Tokens after the
    end of the request are cut off."""
    tree_token_ids: tuple[int, ...] = ()
    """Token id of each node, the root first; empty if no draft was verified."""
    tree_parents: tuple[int, ...] = ()
    """Index of each node's parent, which is smaller than the node's own index; -1 for the root."""
    accepted_nodes: tuple[int, ...] = ()
    """Indices of the accepted nodes, in order of depth; the first index is that of the node at depth 1."""
    plain_reason: str = ""
    """Reason for decoding without a tree; empty if there is a tree. See `runtime.engine.round_counts`."""


class RequestOutput(NamedTuple):
    """Tokens that one round emitted for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens only, in order, including an end-of-sequence token that ended the request."""
    finish_reason: FinishReason | None = None
    metrics: SpeculationMetrics | None = None
    """Metrics of the request; set on its last output."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; set on the last output."""
    failure: str | None = None
    """Error raised while the request was processed, which ended the request with `ABORT`; the request's tokens are then
    not a complete answer.
    """
    is_refusal: bool = False
    """Whether the request's content caused `failure`. The text of `failure` then begins with the name of the request's
    field at fault."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the new tokens, if requested."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of all prompt tokens except the first; set on the first output, if requested."""
    report: bytes = b""
    """Report on the prompt; set on the first output, if the request has a `report`."""
    rounds: tuple[VerifiedRound, ...] = ()
    """Trace of the rounds that emitted these tokens, if the request has `trace`."""
    queue_s: float = 0.0
    """Seconds from arrival in the engine to the first slot; set on the first output."""
    engine_id: str = ""
    """Engine that wrote the output; set by routers."""
    weights: str = ""
    """Digest of the engine's weights, if they were pushed; set by routers."""
