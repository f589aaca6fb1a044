"""Data classes for a checked request: its prompts and choices, and the deltas (new text and tokens) of each choice."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from wingbeat.deployments.api.answers.json_pieces import LongList, LongPart
from wingbeat.deployments.fleet.fingerprint import fingerprint
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.scheduling.request import FinishReason, Request, RequestOutput, TokenLogprob, VerifiedRound
from wingbeat.runtime.text_stream import StreamedText, TextStream
from wingbeat.runtime.tokenizer import Tokenizer

RoundBody = dict[str, Any]
"""A round as JSON, with the fields described in `docs/http_api.md`."""


def take_rounds(
    tokenizer: Tokenizer, stream: TextStream, output: RequestOutput, *, hides_rejected: bool
) -> tuple[StreamedText, FinishReason | None, tuple[RoundBody, ...]]:
    """Applies `TextStream.take` to one token after the other, so that each token's text is known.

    Returns the text of all tokens, the finish reason if the text has ended, and the JSON of each round.

    With `hides_rejected`, token ids of rejected nodes are left out, because drafts may come from other requests' texts.
    """
    finish: FinishReason | None = None
    rounds: list[RoundBody] = []
    for verified in output.rounds:
        texts: list[str] = []
        for place, token_id in enumerate(verified.token_ids, 1):
            is_last = verified is output.rounds[-1] and place == len(verified.token_ids)
            got, finish = stream.take((token_id,), output.finish_reason if is_last else None)
            texts.append(got.text)
            if finish is not None:
                break
        rounds.append(_round_body(tokenizer, verified, texts, hides_rejected))
        if finish is not None:
            break
    if finish is None and output.finish_reason is not None:
        rest, finish = stream.take((), output.finish_reason)
        rounds[-1]["texts"][-1] += rest.text
    text = "".join(text for body in rounds for text in body["texts"])
    num_tokens = sum(len(body["texts"]) for body in rounds)
    return StreamedText(text, num_tokens, finish is FinishReason.STOP), finish, tuple(rounds)


class HeldRounds:
    """Holds rounds of a request's choices until a chunk or body is written that can carry them."""

    def __init__(self) -> None:
        self._by_choice: dict[int, list[RoundBody]] = defaultdict(list)

    def hold(self, index: int, rounds: Iterable[RoundBody]) -> None:
        """Adds rounds of one choice."""
        if rounds:
            self._by_choice[index] += rounds

    def hand_over(self, choice: dict[str, Any]) -> None:
        """Moves the rounds held for a choice into `choice`, the body of this choice."""
        rounds = self._by_choice.pop(choice["index"], None)
        if rounds:
            choice["rounds"] = LongList(LongPart(rounds))


def _round_body(tokenizer: Tokenizer, verified: VerifiedRound, texts: list[str], hides_rejected: bool) -> RoundBody:
    """Returns a round as JSON. Only the first `len(texts)` tokens of the round belong to the answer."""
    num_accepted, num_tokens = len(verified.accepted_nodes), len(texts)
    return {
        "token_ids": list(verified.token_ids[:num_tokens]),
        "texts": texts,
        "depths": [index + 1 if index < num_accepted else 0 for index in range(num_tokens)],
        "tree": _tree_body(tokenizer, verified, hides_rejected) if verified.tree_parents else None,
        "plain_reason": verified.plain_reason or None,
    }


def _tree_body(tokenizer: Tokenizer, verified: VerifiedRound, hides_rejected: bool) -> dict[str, Any]:
    token_ids: list[int | None] = list(verified.tree_token_ids)
    if hides_rejected:
        own = {0, *verified.accepted_nodes}
        token_ids = [token_id if node in own else None for node, token_id in enumerate(token_ids)]
    return {
        "token_ids": token_ids,
        "texts": ["" if token_id is None else tokenizer.token_text(token_id) for token_id in token_ids],
        "parents": list(verified.tree_parents),
        "accepted": list(verified.accepted_nodes),
    }


class Details(NamedTuple):
    """Details about tokens that a request asks for."""

    tokenizer: Tokenizer
    logprobs: bool = False
    echo: bool = False
    """Whether the log-probabilities of the prompt's tokens come before those of the answer's tokens."""
    prompt_logprobs: bool = False
    """Whether vLLM's field `prompt_logprobs` is returned."""
    num_top: int = 0
    """Number of most likely tokens shown for each token of the answer and of an echoed prompt."""
    num_prompt_top: int = 0
    """Number of most likely tokens shown per token in `prompt_logprobs`."""
    token_ids: bool = False
    names_by_id: bool = False
    """Whether tokens are written as `token_id:17` instead of text."""

    def text(self, token_id: int) -> str:
        """Returns the text of a single token; special tokens have a text too."""
        return self.tokenizer.token_text(token_id)

    def name(self, token_id: int) -> str:
        """Returns a token's name in log-probabilities."""
        return f"token_id:{token_id}" if self.names_by_id else self.text(token_id)


class Prompt(NamedTuple):
    """A tokenized prompt of a request."""

    token_ids: tuple[int, ...]
    echo: str = ""
    """Text that the answer begins with, if the request asks for an echo."""
    echo_skips_special: bool = True
    """Whether `echo` leaves out special tokens of the prompt."""
    end: str = ""
    """Last `PROMPT_END_CHARS` characters of the text that the chat template has rendered; empty for a completion."""
    spans: tuple[PromptSpan, ...] = ()


@dataclass(frozen=True)
class Choice:
    """A sequence to generate, with the echo that its text begins with and the stop strings that end its text."""

    index: int
    request: Request
    stops: tuple[str, ...]
    echo: str
    skip_special_tokens: bool = True
    echo_skips_special: bool = True
    """See `Prompt.echo_skips_special`."""
    include_stop: bool = False
    is_echo_alone: bool = False
    """Whether the answer consists only of the prompt (max_tokens 0). An engine generates at least one token all the
    same; this token is dropped.
    """


@dataclass(frozen=True)
class Generation:
    """All choices of one HTTP request, and settings that determine the content of its answer."""

    response_id: str
    created: int
    """Unix time in seconds."""
    model: str
    seed: int
    """Seed of each prompt's first choice; choice i of a prompt uses seed + i."""
    choices: tuple[Choice, ...]
    choices_per_prompt: int
    num_prompt_tokens: int
    """Number of tokens of all prompts; each prompt is counted once, however many choices it has."""
    prompt_details: Mapping[str, int]
    """Fields of `prompt_tokens_details` in the usage, in addition to `cached_tokens`."""
    include_usage: bool
    continuous_usage: bool
    """Whether every chunk of a stream carries the usage so far."""
    details: Details
    """Details about tokens to return."""
    answer_bytes: int = 0
    """Maximum bytes of details held for the answer; see `AnswerSizes`."""
    text_identity: str = ""
    """See `AppConfig.text_identity`."""
    num_spec_tokens: int = 0
    """Greatest depth of a draft tree."""
    prompt_field: str = "prompt"
    """Field of the request that holds the prompt, for error messages."""
    new_parser: Callable[[], Any] | None = None
    """Makes the parser that reads tool calls and reasoning in a choice's text; None if the text is not parsed."""
    new_shape: Callable[["Generation"], Any] | None = None
    """Makes the `ResponseShape` of a parsed answer; None if the endpoint's default shape is used."""

    def fingerprint(self, weights: str) -> str:
        """Returns OpenAI's `system_fingerprint` for text generated with these weights; see `ChoiceDelta.weights`."""
        return fingerprint(self.text_identity, weights, self.choices[0].request.variant_digest)

    @property
    def shares_prompt(self) -> bool:
        """Whether a prompt has several choices and log-probabilities of the prompt's tokens are reported. The engine
        returns these log-probabilities only with a prompt's first choice, and the other choices share them.
        """
        return self.choices_per_prompt > 1 and self.choices[0].request.params.prompt_logprobs is not None

    @property
    def has_lists(self) -> bool:
        """Whether the answer has a list with one item for each token."""
        details = self.details
        of_tokens = details.logprobs or details.prompt_logprobs or details.token_ids
        return of_tokens or self.choices[0].request.params.trace


class ChoiceDelta(NamedTuple):
    """New text and tokens of one choice; only the last delta of a choice has a finish reason."""

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    metrics: SpeculationMetrics | None = None
    """Set only on the last delta, if the engine has reported metrics."""
    num_cached_tokens: int = 0
    rounds: tuple[RoundBody, ...] = ()
    """Rounds; empty unless requested, as are `logprobs` and `prompt_logprobs`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    engine_id: str = ""
    weights: str = ""
    """Digest of the pushed weights that generated the delta; empty if the weights are those that the settings name."""
    queue_s: float = 0.0
    """Seconds that the choice waited in its engine's queue; 0 on all deltas but the first."""
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the choice; set only on the last delta."""

    @property
    def is_cut(self) -> bool:
        """Whether a length limit or a stop string cut the choice off; False if a token of the model ended it."""
        return self.finish_reason is FinishReason.LENGTH or isinstance(self.stop_reason, str)
