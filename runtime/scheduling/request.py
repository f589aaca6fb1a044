"""What a caller asks of the engine and what it gets back; no tensors, no text."""

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
"""Logits divided by a smaller temperature overflow; the best token's share is 1 long before."""

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
"""Of `SamplingParams`: field, type, least and largest value, and what an error says."""


MAX_LOGPROBS = 20
"""Most likely tokens that are reported per position, at most; OpenAI's limit, and vLLM's default."""
ALONE_TOKENS = 16
"""A prompt's end and a few rounds: a request that writes more is not what broke engines before."""


class FinishReason(StrEnum):
    """Why a request ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TooDear(Exception):
    """What a request asks for costs others more than it may; the message begins with the field's name."""


class Variant(NamedTuple):
    """A variant of the served model, as requests name it."""

    name: str
    """Name that clients pass as `model`."""
    path: str
    """Its folder, on the machine of each engine."""
    digest: str
    """Digest of its files, which another variant of the same name does not share."""


class GrammarSpec(NamedTuple):
    """What an answer must match from its first token to its last."""

    kind: str
    """`json`, `json_object`, `regex`, `choice`, `grammar` or `structural_tag`."""
    text: str
    """A schema, expression or grammar; choices and structural tags as JSON."""
    field: str = "structured_outputs"
    """Where the request says it, for errors."""


class PromptReport:
    """Report on a prompt whose request has no answer: a `Feature` of rounds finds it, piece by piece."""

    @property
    def is_of_all(self) -> bool:
        """Whether every token of the prompt is looked at, cached or not, and not the last one alone."""
        raise NotImplementedError

    def made_of(self, rows: "Sequence[np.ndarray]", num_prompt_tokens: int) -> bytes:
        """The report: `RequestOutput.report`.

        Args:
            rows: by piece of the prompt that was looked at: as `Feature.told` has them.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen: argmax(processed logits / temperature + Gumbel(seed, position, token)).

    Logits are processed in this order: bias, penalties, masks of allowed tokens. Log-probabilities are those of the
    model's own logits.

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Of tokens in the prompt or the output; the two before look at the output alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else is generated; none allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated; each one's last token is forbidden behind the others."""
    banned_first: tuple[int, ...] = ()
    """Tokens that are not the first to be generated."""
    min_tokens: int = 0
    """Tokens before which neither an end-of-sequence token nor one of `stop_token_ids` is generated."""
    stop_token_ids: tuple[int, ...] = ()
    """They end the request, whatever `ignore_eos` says."""
    logprobs: int | None = None
    """Report each token's log-probability and those of so many of the most likely ones; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens from the second one on."""
    priority: int = 0
    """Requests of a higher one are admitted first and preempted last."""
    cache_salt: str = ""
    """Requests share cached prefixes with others of the same salt only."""
    grammar: GrammarSpec | None = None
    trace: bool = False
    """Whether the outputs carry `rounds`: the trees that were verified."""
    report: PromptReport | None = None
    """Report this of the prompt; the request ends after its first token."""
    learn: bool = True
    """False keeps nothing of this request for a drafter to learn from."""
    force_drafts: bool = False
    """Draft and verify whole trees, also where the measured costs say that it does not pay; the tokens are the same."""

    def __post_init__(self) -> None:
        self.check()
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    def check(self) -> None:
        """Raises ValueError, beginning with the field's name, for a field that is out of range.

        What passes fits the tensors it is copied into, so that no request can fail a batch by its numbers.
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
            raise ValueError("cache_salt is no text")
        if self.report is not None and (not isinstance(self.report, PromptReport) or self.max_tokens != 1):
            raise ValueError(f"report is {self.report}: must be a PromptReport, with max_tokens 1")

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def has_bias(self) -> bool:
        """Whether something is added to logits, minus infinity for what is forbidden included."""
        single = any(len(word) == 1 for word in self.bad_words)
        return bool(self.logit_bias or self.allowed_token_ids or self.min_tokens or self.banned_first or single)

    @cached_property
    def has_masks(self) -> bool:
        """Whether the tokens allowed next are found on the host, from the tokens before."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    @property
    def may_leave_nothing(self) -> bool:
        """Whether there are texts after which the fields forbid every token; the answer ends there."""
        return self.grammar is not None and bool(
            self.allowed_token_ids or self.bad_words or self.min_tokens or self.banned_first
        )

    @cached_property
    def alters_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the model's."""
        return self.has_penalties or self.has_bias or self.has_masks

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError, beginning with the field's name, for a token that the model does not have."""
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
    """One sequence to generate. `n` choices of one prompt are n requests that share it through the prefix cache."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """What another engine has generated already; `max_tokens` and `min_tokens` count it."""
    alone: bool = False
    """Whether engines have died under it: nothing runs beside it until it has written more than `ALONE_TOKENS`."""
    variant: Variant | None = None
    """The variant of the model that it runs with; None is the base model."""
    spans: tuple[PromptSpan, ...] = field(default=(), compare=False)
    """Spans of the prompt that stand for more than text, in order."""
    fresh: bool = False
    """Whether its prompt is computed from its first token on, wherever it is cached."""

    @property
    def variant_digest(self) -> str:
        """Digest of its variant; empty for the base model."""
        return "" if self.variant is None else self.variant.digest

    @property
    def num_tokens(self) -> int:
        """Tokens there are when it arrives."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError, beginning with the field's name, for a token that the model does not have."""
        try:
            ids = array("q", (*self.prompt_token_ids, *self.output_token_ids))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"prompt holds what is no token id: {error}") from None
        bad = [token_id for token_id in ids and (min(ids), max(ids)) if not 0 <= token_id < vocab_size]
        if bad:
            raise ValueError(f"prompt holds token id {bad[0]}: the vocabulary has {vocab_size}")
        self.params.check_token_ids(vocab_size)


class TokenLogprob(NamedTuple):
    """Log-probability of one token, by the model's own logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely ones, best first."""


class VerifiedRound(NamedTuple):
    """What one round did for one request that has `trace`."""

    token_ids: tuple[int, ...]
    """What it brought: the accepted nodes' tokens, then the verifier's own; fewer where the request ended."""
    tree_token_ids: tuple[int, ...] = ()
    """By node, the root first; empty where no draft was verified."""
    tree_parents: tuple[int, ...] = ()
    """By node, smaller than its own index; -1 for the root."""
    accepted_nodes: tuple[int, ...] = ()
    """By depth, from 1 on."""
    plain_reason: str = ""
    """Why there is no tree, where there is none; see `runtime.engine.round_counts`."""


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
    is_refusal: bool = False
    """Whether `failure` is about the request itself, and begins with the name of its field."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """By new token, where the request asks for them."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """By prompt token from the second one on, on the first output, where the request asks for them."""
    report: bytes = b""
    """Report on the prompt, on the first output, where the request has a `report`."""
    rounds: tuple[VerifiedRound, ...] = ()
    """Where the request has `trace`: one for each round that these tokens came from."""
    queue_s: float = 0.0
    """Seconds from arrival in the engine to the first slot; set on the first output."""
    engine_id: str = ""
    """Which engine of several wrote it; known to routers."""
    weights: str = ""
    """Digest of what that engine was loaded from, where it was pushed; known to routers."""
