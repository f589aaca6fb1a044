"""Request bodies of the OpenAI API: what every endpoint shares, and `/v1/completions`.

A field is honoured, or accepted because it cannot change the result, or passed over by name, or refused by name.
Nothing is ignored silently.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, create_model, field_validator, model_validator

from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.sampling_fields import SamplingFields
from wingbeat.deployments.api.bodies.unserved_fields import COMPLETION, Part, Unserved, of_parts
from wingbeat.deployments.api.errors import invalid, unsupported
from wingbeat.deployments.parts import hooks
from wingbeat.runtime.scheduling.request import INT32_MAX, MAX_LOGPROBS

MAX_CHOICES = 128
"""OpenAI's limit of `n`, applied here to all choices of a request: prompts times n."""
DEFAULT_MAX_TOKENS = 16


class StreamOptions(Part):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk carries the usage so far."""
    include_obfuscation: bool | None = None

    @field_validator("include_obfuscation")
    @classmethod
    def _refuse_obfuscation(cls, value: bool | None) -> bool | None:
        if value:
            raise unsupported("stream_options.include_obfuscation")
        return value


class SpeculationOptions(Part):
    """Extension: how this request is decoded. The tokens are the same either way."""

    enabled: bool = True
    learn: bool = True
    """Whether a drafter may learn from it; false keeps nothing of it on disk."""
    trace: bool = False
    """Whether the answer says of each token where it came from, and shows the trees."""
    force: bool = False
    """Whether it is drafted for where the measured costs say that this does not pay."""

    @model_validator(mode="after")
    def _check_force(self) -> Self:
        if self.force and not self.enabled:
            raise invalid("speculation.force", "contradicts 'speculation.enabled' false; give one of them")
        return self


REQUEST_ID = r"^[!-~]{1,128}$"
"""Printable ASCII without spaces."""


MoreFields = create_model("MoreFields", __base__=(*hooks("generation_fields"), SamplingFields))
"""Fields of sampling, and of the parts that are there."""
OF_PARTS = tuple(MoreFields.model_fields.keys() - SamplingFields.model_fields.keys())


class GenerationBody(MoreFields, RequestBody):
    """The fields that completions and chat completions share."""

    prompt_field: ClassVar[str] = "prompt"
    """Where the prompt is, for errors about its length."""
    logprobs_field: ClassVar[str] = "logprobs"
    """How many log-probabilities a token has, for errors about the answer's length."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    """Only the prompt's last tokens count, so many of them; -1 keeps what fits beside the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a prompt is cut: right keeps its first tokens."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds those that stand around a prompt; by default around a plain prompt alone."""
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    """The caller's name of the request, which the answer's `id` ends by."""
    user: Any = None
    """Cannot change the result, as `metadata`."""
    metadata: Any = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is allowed only when 'stream' is true")
        return self

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far; nothing does where no usage is asked for."""
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    @property
    def asked_max_tokens(self) -> int | None:
        """The limit the caller gave, if any."""
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        """The field `asked_max_tokens` was given in."""
        return "max_tokens"


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**of_parts("/v1/completions"), **COMPLETION}

    prompt: list[str] | list[list[int]]
    """Texts, or token ids; a single prompt is a list of one."""
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    """0 answers an echoed prompt alone."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of the tokens, and so many of the most likely ones for each; with `echo` the prompt's, too."""
    best_of: int | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        # The chat field's way of asking for nothing.
        return None if value is False else value

    @field_validator("prompt", mode="plain")
    @classmethod
    def _as_list(cls, value: Any) -> list:
        """Checked here alone: pydantic would copy every id of a list that is then too long."""
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if isinstance(prompts, list) and len(prompts) > MAX_CHOICES:
            raise invalid("prompt", f"holds {len(prompts)} prompts, at most {MAX_CHOICES} are allowed")
        if not isinstance(prompts, list) or not (
            all(isinstance(prompt, str) for prompt in prompts) or all(_is_token_ids(prompt) for prompt in prompts)
        ):
            message = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
            raise invalid("prompt", message)
        if not prompts or not all(prompts):
            raise invalid("prompt", "is empty: at least one token is needed")
        return prompts

    @property
    def asked_logprobs(self) -> int | None:
        """See `SamplingFields`."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """See `GenerationBody`."""
        return bool(self.echo)

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """See `SamplingFields`; an echoed prompt is reported like the answer."""
        if not self.echo or None in (self.logprobs, self.prompt_logprobs):
            return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs)

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise unsupported("best_of", "only best_of equal to n is")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "is 0: that is allowed only where 'echo' is true")
        total = len(self.prompt) * self.num_choices
        if total > MAX_CHOICES:
            raise invalid("prompt", f"times n asks for {total} choices, at most {MAX_CHOICES} are allowed")
        return self


def _is_token_ids(value: Any) -> bool:
    # An empty list is neither text nor tokens; saying tokens leads to the message about empty prompts.
    return isinstance(value, list) and all(type(item) is int for item in value)
