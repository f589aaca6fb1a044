"""Request bodies of the OpenAI API: what every endpoint shares, and `/v1/completions`.

A field is honoured, or accepted because it cannot change the result, or refused by name. Nothing is ignored silently.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from wingbeat.deployments.api.errors import ApiError, shown
from wingbeat.deployments.api.json_body import read_object
from wingbeat.deployments.api.unserved_fields import COMPLETION, IsOff
from wingbeat.runtime.scheduling.request import INT32_MAX

MAX_CHOICES = 128
"""OpenAI's limit of `n`, applied here to all choices of a request: prompts times n."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
DEFAULT_MAX_TOKENS = 16


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    model_config = ConfigDict(extra="forbid", strict=True)

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


class SpeculationOptions(BaseModel):
    """Extension: how this request is decoded. The tokens are the same either way."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool = True


class RequestBody(BaseModel):
    """A body of which every field is known, and of the type it says."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unserved: ClassVar[Mapping[str, IsOff]] = {}
    """Fields that are not served, with the values under which they ask for nothing."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read and check a request body.

        Raises:
            ApiError: 400 naming the field, for anything that is malformed, unknown or not served.
        """
        return cls.of_fields(read_object(body))

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """Check fields that were read already; raises as `parse`."""
        cls.check_unserved(fields)
        try:
            return cls.model_validate({name: fields[name] for name in fields if name not in cls.unserved})
        except ValidationError as error:
            raise invalid_field(error) from error

    @classmethod
    def check_unserved(cls, fields: dict[str, Any]) -> None:
        """Raises ApiError for the first field that asks for something that is not served."""
        for name, is_off in cls.unserved.items():
            if name in fields and not is_off(fields[name]):
                raise unsupported(name)


class GenerationBody(RequestBody):
    """The fields that completions and chat completions share."""

    prompt_field: ClassVar[str] = "prompt"
    """Where the prompt is, for errors about its length."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    """0 and -1 keep the whole vocabulary, as does whatever reaches its size."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    speculation: SpeculationOptions | None = None
    user: str | None = None
    """Cannot change the result, as `metadata`."""
    metadata: dict[str, str] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if isinstance(stops, list) and len(stops) > MAX_STOP_STRINGS:
            raise invalid("stop", f"has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise invalid("stop", "must be a string or a list of strings")
        if not all(stops):
            raise invalid("stop", "holds an empty string")
        if max(map(len, stops), default=0) > MAX_STOP_CHARS:
            raise invalid("stop", f"holds a string of more than {MAX_STOP_CHARS} characters")
        return stops

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is allowed only when 'stream' is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none or several."""
        return tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

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

    unserved: ClassVar[Mapping[str, IsOff]] = COMPLETION

    prompt: list[str] | list[list[int]]
    """Texts, or token ids; a single prompt is a list of one."""
    echo: bool | None = None
    best_of: int | None = None

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

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise unsupported("best_of", "only best_of equal to n is")
        total = len(self.prompt) * self.num_choices
        if total > MAX_CHOICES:
            raise invalid("prompt", f"times n asks for {total} choices, at most {MAX_CHOICES} are allowed")
        return self


def _is_token_ids(value: Any) -> bool:
    # An empty list is neither text nor tokens; saying tokens leads to the message about empty prompts.
    return isinstance(value, list) and all(type(item) is int for item in value)


def unsupported(param: str, instead: str | None = None) -> ApiError:
    """400 for a field whose value asks for something this server does not do."""
    hint = f" ({instead})" if instead else ""
    message = f"'{param}' with this value is not supported by this server{hint}; leave it out."
    return ApiError(message, param=param, code="unsupported_parameter")


def invalid(param: str, problem: str) -> ApiError:
    """400 for a field with a value it cannot have."""
    return ApiError(f"'{param}' {problem}.", param=param, code="invalid_value")


def unknown_parameter(param: str) -> ApiError:
    """400 for a field the API does not have."""
    param = shown(param)
    return ApiError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")


def invalid_field(error: ValidationError) -> ApiError:
    """400 for the first problem pydantic found, in OpenAI's words where it has some."""
    first = error.errors(include_url=False)[0]
    param = shown(_field_path(first["loc"]))
    match first["type"]:
        case "missing":
            return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
        case "extra_forbidden":
            return unknown_parameter(param)
    problem = first["msg"][:1].lower() + first["msg"][1:]
    kind = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(f"Invalid '{param}': {problem}.", param=param, code=kind)


def _field_path(location: tuple[str | int, ...]) -> str:
    """`messages.0.content` for a location inside the body, as OpenAI writes it: `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
