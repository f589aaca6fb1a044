"""Results of `wingbeat.LLM`: a `Generated` for each prompt, a `Completion` for each choice."""

from dataclasses import dataclass

from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import TokenLogprob


@dataclass(frozen=True)
class Completion:
    """A finished choice. Fields that also exist in vLLM have vLLM's names."""

    index: int
    """Index among the prompt's choices."""
    text: str
    """Text without the stop string that ended the choice; empty if the model has no tokenizer."""
    token_ids: list[int]
    """Generated token ids. If a stop string ended the choice, the last id is the token that completed the stop
    string.
    """
    finish_reason: str
    """Why the choice ended: "stop" or "length"."""
    stop_reason: str | int | None
    """The stop string, or the token of `stop_token_ids`, that ended the choice; None otherwise."""
    metrics: SpeculationMetrics
    """Drafts, drafted tokens and accepted tokens of the choice."""
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each token, if `SamplingParams.logprobs` requests them."""


@dataclass(frozen=True)
class Generated:
    """The choices of a prompt. `text`, `token_ids`, `finish_reason` and `metrics` belong to the first choice."""

    prompt: str | None
    """Text of the prompt; for a conversation, as rendered by the chat template; None for a prompt of token ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    """Choices, [n]"""
    num_cached_tokens: int
    """Number of prompt tokens whose keys and values were in the prefix cache when the first choice began."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the prompt's tokens from the second token on, if `SamplingParams.prompt_logprobs` requests
    them.
    """

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
        """Speculation figures of the first choice."""
        return self.outputs[0].metrics
