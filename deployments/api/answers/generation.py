"""What a checked request generates: its prompts, its choices, and what each of them gains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from wingbeat.deployments.api.answers.round_trace import RoundBody
from wingbeat.deployments.parsing.message import Parser, PlainText
from wingbeat.runtime.scheduling.images import ImageInput
from wingbeat.runtime.scheduling.request import FinishReason, Request, TokenLogprob
from wingbeat.runtime.scheduling.speculation_metrics import SpeculationMetrics
from wingbeat.runtime.tokenizer import Tokenizer


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
    end: str = ""
    """Of a conversation, the end of its text."""
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One sequence to generate, and how its text begins and ends."""

    index: int
    request: Request
    stops: tuple[str, ...]
    echo: str
    skip_special_tokens: bool = True
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
    include_usage: bool
    continuous_usage: bool
    """Whether every chunk of a stream carries the usage so far."""
    details: Details
    """What is said of tokens beside their text."""
    answer_bytes: int = 0
    """The most that it is held with beside its text; see `AnswerSizes`."""
    num_spec_tokens: int = 0
    """Greatest depth of a draft tree."""
    new_parser: Callable[[], Parser] = PlainText
    """Makes what reads a choice's text; `/v1/completions` has no use for it."""

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
    queue_s: float = 0.0
    """Seconds it waited in its engine; on the first one."""
    stop_reason: str | int | None = None
    """On the last one: the stop string, or the token of `stop_token_ids`, that ended the choice."""
