"""Request bodies of OpenAI's API: fields that all generating endpoints share, and the body of `/v1/completions`.

Each field is used, accepted because it cannot change the result, named as ignored, or refused by name. No field that
could change the result is ignored silently.
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
"""Maximum number of choices of a request, that is, its number of prompts times `n`. OpenAI limits `n` to the same
number.
"""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


class StreamOptions(Part):
    """Options for what a stream carries in addition to its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk carries the usage so far. The field is vLLM's."""
    include_obfuscation: bool | None = None

    @field_validator("include_obfuscation")
    @classmethod
    def _refuse_obfuscation(cls, value: bool | None) -> bool | None:
        if value:
            raise unsupported("stream_options.include_obfuscation")
        return value


class SpeculationOptions(Part):
    """Extension of OpenAI's API: options for the speculative decoding of this request. None of them changes the
    tokens.
    """

    enabled: bool = True
    learn: bool = True
    """Whether a drafter may learn from this request. With false, nothing of the request is stored on disk."""
    trace: bool = False
    """Whether the answer contains a description of each verification round, with the round's tokens and draft tree."""
    force: bool = False
    """Whether to draft even if, according to the measured costs, drafting would not make decoding faster."""

    @model_validator(mode="after")
    def _check_force(self) -> Self:
        if self.force and not self.enabled:
            raise invalid("speculation.force", "contradicts 'speculation.enabled' false; give one of them")
        return self


REQUEST_ID = r"^[!-~]{1,128}$"
"""Pattern of request ids: 1 to 128 printable ASCII characters without spaces."""


MoreFields = create_model("MoreFields", __base__=(*hooks("generation_fields"), SamplingFields))
"""Fields of sampling, and fields that optional parts of the application add."""
OF_PARTS = tuple(MoreFields.model_fields.keys() - SamplingFields.model_fields.keys())
"""Names of the fields that optional parts of the application have added."""


class GenerationBody(MoreFields, RequestBody):
    """Fields that completions and chat completions share."""

    prompt_field: ClassVar[str] = "prompt"
    """Name of the field with the prompt, for errors about its length."""
    logprobs_field: ClassVar[str] = "logprobs"
    """Name of the field with the number of log-probabilities per token, for errors about the answer's size."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    """Number of prompt tokens to keep, by default from the prompt's end. The value -1 keeps as many tokens as fit into
    the context together with `max_tokens`.
    """
    truncation_side: Literal["left", "right"] | None = None
    """Side on which a prompt is truncated. With "right" the prompt's first tokens are kept, with "left" its last
    tokens.
    """
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens such as BOS. By default special tokens are added to a plain prompt but
    not to a chat.
    """
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    """Id of the request chosen by the caller; the answer's `id` ends with this id."""
    user: Any = None
    """Ignored, like `metadata`, because the field cannot change the result."""
    metadata: Any = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and any(self.stream_options.model_dump().values()) and not self.stream:
            raise invalid("stream_options", "is allowed only when 'stream' is true")
        return self

    @property
    def num_choices(self) -> int:
        """Number of choices per prompt."""
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
        """Whether every chunk of a stream carries the usage so far; requires `include_usage`."""
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    @property
    def asked_max_tokens(self) -> int | None:
        """Maximum number of tokens to generate, as set by the caller; None if not set."""
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        """Name of the field that `asked_max_tokens` comes from."""
        return "max_tokens"


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    default_max_tokens: ClassVar[int | None] = DEFAULT_MAX_TOKENS
    """Maximum number of tokens to generate if the request sets no maximum; None means as many as fit into the context.
    """
    unserved: ClassVar[Mapping[str, Unserved]] = {**of_parts("/v1/completions"), **COMPLETION}

    prompt: list[str] | list[list[int]]
    """Texts or lists of token ids; a single prompt becomes a list of one."""
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    """Maximum tokens to generate; with 0 the answer is only the echoed prompt."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of most likely tokens reported per token of the answer, and with `echo` also per token of the prompt."""
    best_of: int | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        # False is refused here, because this field is a number; only a chat's `logprobs` may be false.
        return None if value is False else value

    @field_validator("prompt", mode="plain")
    @classmethod
    def _as_list(cls, value: Any) -> list:
        """Validates the prompts without pydantic, which would copy every token id of a list before its length is
        checked.
        """
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
        """See `SamplingFields`; for an echoed prompt, the number is `logprobs`, as for the answer."""
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
    # An empty list counts as a list of token ids, so that the error message is the one about empty prompts.
    return isinstance(value, list) and all(type(item) is int for item in value)
