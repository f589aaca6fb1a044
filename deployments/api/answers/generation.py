"""What a checked request generates: its prompts, its choices, what each gains; the extension `rounds` where it asks."""

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
"""One round as JSON; `docs/http_api.md` has its fields."""


def take_rounds(
    tokenizer: Tokenizer, stream: TextStream, output: RequestOutput, *, hides_rejected: bool
) -> tuple[StreamedText, FinishReason | None, tuple[RoundBody, ...]]:
    """`TextStream.take` token by token, so that each token's share of the text is known; with the rounds it came in.

    Where `hides_rejected`, only the accepted nodes of the trees have tokens.
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
    """Rounds of a request's choices until something is said in which they can go."""

    def __init__(self) -> None:
        self._by_choice: dict[int, list[RoundBody]] = defaultdict(list)

    def hold(self, index: int, rounds: Iterable[RoundBody]) -> None:
        """Keep rounds of one choice."""
        if rounds:
            self._by_choice[index] += rounds

    def hand_over(self, choice: dict[str, Any]) -> None:
        """Give a choice's body the rounds held for it, if there are any."""
        rounds = self._by_choice.pop(choice["index"], None)
        if rounds:
            choice["rounds"] = LongList(LongPart(rounds))


def _round_body(tokenizer: Tokenizer, verified: VerifiedRound, texts: list[str], hides_rejected: bool) -> RoundBody:
    """A round whose first tokens, one for each text, belong to the answer."""
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
    """Which of it a request asks for."""

    tokenizer: Tokenizer
    logprobs: bool = False
    echo: bool = False
    """The prompt's tokens come before the answer's."""
    prompt_logprobs: bool = False
    """vLLM's field, in which they are told apart."""
    num_top: int = 0
    """Most likely tokens beside each one, where the prompt is echoed; an answer's tokens have no others."""
    num_prompt_top: int = 0
    """The same for `prompt_logprobs`."""
    token_ids: bool = False
    names_by_id: bool = False
    """Tokens are named `token_id:17`."""

    def text(self, token_id: int) -> str:
        """The text of a token alone, special ones included."""
        return self.tokenizer.token_text(token_id)

    def name(self, token_id: int) -> str:
        """How log-probabilities name a token."""
        return f"token_id:{token_id}" if self.names_by_id else self.text(token_id)


class Prompt(NamedTuple):
    """One prompt of a request."""

    token_ids: tuple[int, ...]
    echo: str = ""
    """Text the answer begins with."""
    echo_skips_special: bool = True
    """Whether that text leaves out special tokens of the prompt."""
    end: str = ""
    """Of a conversation, the end of its text."""
    spans: tuple[PromptSpan, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One sequence to generate, and how its text begins and ends."""

    index: int
    request: Request
    stops: tuple[str, ...]
    echo: str
    skip_special_tokens: bool = True
    echo_skips_special: bool = True
    """See `Prompt`."""
    include_stop: bool = False
    is_echo_alone: bool = False
    """Whether the answer is the prompt, and the token that an engine writes is dropped."""


@dataclass(frozen=True)
class Generation:
    """All choices of one HTTP request."""

    response_id: str
    created: int
    """Seconds since 1970."""
    model: str
    seed: int
    """Seed of each prompt's first choice; choice i of a prompt uses seed + i."""
    choices: tuple[Choice, ...]
    choices_per_prompt: int
    num_prompt_tokens: int
    """Every prompt counted once, however many choices it has."""
    prompt_details: Mapping[str, int]
    """Further `prompt_tokens_details` of the usage."""
    include_usage: bool
    continuous_usage: bool
    """Whether every chunk of a stream carries the usage so far."""
    details: Details
    """What is said of tokens beside their text."""
    answer_bytes: int = 0
    """The most that it is held with beside its text; see `AnswerSizes`."""
    text_identity: str = ""
    """Of the settings; `AppConfig.text_identity`."""
    num_spec_tokens: int = 0
    """Greatest depth of a draft tree."""
    prompt_field: str = "prompt"
    """Where the request has its prompt, for errors about it."""
    new_parser: Callable[[], Any] | None = None
    """Makes what reads a choice's text, of the part that does; None: the text is the answer."""
    new_shape: Callable[["Generation"], Any] | None = None
    """Makes that part's `ResponseShape`."""

    def fingerprint(self, weights: str) -> str:
        """OpenAI's `system_fingerprint` of what was written by these weights; see `ChoiceDelta.weights`."""
        return fingerprint(self.text_identity, weights, self.choices[0].request.variant_digest)

    @property
    def shares_prompt(self) -> bool:
        """Whether a prompt's first choice reports on it for the others, too."""
        return self.choices_per_prompt > 1 and self.choices[0].request.params.prompt_logprobs is not None

    @property
    def has_lists(self) -> bool:
        """Whether the answer says something of each of its tokens."""
        details = self.details
        of_tokens = details.logprobs or details.prompt_logprobs or details.token_ids
        return of_tokens or self.choices[0].request.params.trace


class ChoiceDelta(NamedTuple):
    """What one choice gained; the last one of a choice has a finish reason."""

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    metrics: SpeculationMetrics | None = None
    """On the last one, where the engine had reported any."""
    num_cached_tokens: int = 0
    rounds: tuple[RoundBody, ...] = ()
    """Where they were asked for, as the next two."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    engine_id: str = ""
    weights: str = ""
    """Digest of those that were pushed and wrote it."""
    queue_s: float = 0.0
    """Seconds it waited in its engine; on the first one."""
    stop_reason: str | int | None = None
    """On the last one: the stop string, or the token of `stop_token_ids`, that ended the choice."""

    @property
    def is_cut(self) -> bool:
        """Whether the model was not done: a limit or a stop string ended the choice."""
        return self.finish_reason is FinishReason.LENGTH or isinstance(self.stop_reason, str)
