"""Results of `wingbeat.LLM`: a `Generated` for each prompt, a `Completion` for each choice."""

from dataclasses import dataclass

from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import TokenLogprob


@dataclass(frozen=True)
class Completion:
    """A choice; vLLM's names for the fields that both have."""

    index: int
    """Among the prompt's choices."""
    text: str
    """Without the stop string that ended the choice; empty where the model has no tokenizer."""
    token_ids: list[int]
    """Up to the token that completed a stop string."""
    finish_reason: str
    """"stop" or "length"."""
    stop_reason: str | int | None
    """The stop string, or the token of `stop_token_ids`, that ended the choice."""
    metrics: SpeculationMetrics
    """Drafts, drafted and accepted tokens of the choice."""
    logprobs: list[TokenLogprob] | None = None
    """By token, where `SamplingParams.logprobs` asks for them."""


@dataclass(frozen=True)
class Generated:
    """The choices of a prompt; `text`, `token_ids`, `finish_reason` and `metrics` are the first choice's."""

    prompt: str | None
    """Text of the prompt, a conversation's as the chat template writes it; None for a prompt of token ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    """[n]"""
    num_cached_tokens: int
    """Prompt tokens whose KV another prompt had computed, counted for the first choice."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """From the second prompt token on, where `SamplingParams.prompt_logprobs` asks for them."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first choice's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended: "stop" or "length"."""
        return self.outputs[0].finish_reason

    @property
    def metrics(self) -> SpeculationMetrics:
        """Speculation of the first choice."""
        return self.outputs[0].metrics
