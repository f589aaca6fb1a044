"""Request fields about sampling, the end of the answer, and the details that are reported about its tokens."""

from typing import Any

from pydantic import ConfigDict, Field, create_model, field_validator

from wingbeat.deployments.api.bodies.unserved_fields import Part
from wingbeat.deployments.api.errors import invalid, shown
from wingbeat.deployments.parts import hooks
from wingbeat.runtime.scheduling.request import INT32_MAX, MAX_LOGPROBS, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LISTED_TOKENS = 1024
"""Maximum number of entries in each of `logit_bias`, `stop_token_ids` and `bad_words`."""
MAX_BAD_CHARS = 2**14
"""Maximum number of characters of all `bad_words` of a request together. The limit exists because the engine searches
for the words after each node of each draft tree.
"""
MAX_ALLOWED_TOKENS = 2**14
MAX_SALT_CHARS = 1024
MAX_BIAS = 100


FieldsOfParts = create_model("FieldsOfParts", __base__=(*(fields() for fields in hooks("sampling_fields")), Part))
"""Fields that optional parts of the application add. Each value has a method `engine_fields()`, which returns the
fields of `SamplingParams` that the value sets.
"""
_OF_PARTS = tuple(FieldsOfParts.model_fields)


class SamplingFields(FieldsOfParts):
    """Fields that all generating endpoints share; a field that is null has its default value, like an absent field."""

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    """Number of most likely tokens to sample from; 0, -1 and numbers not below the vocabulary's size mean all
    tokens.
    """
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LISTED_TOKENS)
    """For each token id (as a string), the number that is added to the token's logit."""
    allowed_token_ids: list[int] | None = Field(None, max_length=MAX_ALLOWED_TOKENS)
    bad_words: list[str] | None = Field(None, max_length=MAX_LISTED_TOKENS)
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_LISTED_TOKENS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probabilities write tokens as `token_id:17`."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Requests of higher priority are admitted first and preempted last."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)

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

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 11 and str(int(key)) == key):
                raise invalid("logit_bias", f"has the key '{shown(key)}', which is not a token id")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise invalid("logit_bias", f"adds {bias:g} to token {key}: must be between -{MAX_BIAS} and {MAX_BIAS}")
        return value

    @field_validator("bad_words")
    @classmethod
    def _check_words(cls, value: list[str] | None) -> list[str] | None:
        for word in value or ():
            if not word.strip() or len(word) > MAX_STOP_CHARS:
                raise invalid("bad_words", f"holds a word that is empty or has more than {MAX_STOP_CHARS} characters")
        if sum(map(len, value or ())) > MAX_BAD_CHARS:
            raise invalid("bad_words", f"has more than {MAX_BAD_CHARS} characters")
        return value

    @field_validator("allowed_token_ids")
    @classmethod
    def _check_allowed(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and not value:
            raise invalid("allowed_token_ids", "is empty: no token could be generated")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of the request; empty if there are none."""
        return tuple(self.stop or ())

    @property
    def asked_logprobs(self) -> int | None:
        """Number of most likely tokens to report per token; if None, no log-probabilities are reported."""
        return None

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report per prompt token; if None, no log-probabilities of the prompt are
        reported.
        """
        return self.prompt_logprobs

    def sampling_params(self, vocab_size: int, tokenizer: Tokenizer, **fields: Any) -> SamplingParams:
        """Returns the engine's parameters, which are the same for all choices. `fields` are fields of `SamplingParams`
        from other sources.

        Raises:
            ApiError: a token id is outside the vocabulary.
        """
        top_k = max(0, self.top_k or 0)
        bias = tuple((int(key), float(value)) for key, value in (self.logit_bias or {}).items())
        listed = {
            "logit_bias": [token_id for token_id, _ in bias],
            "allowed_token_ids": self.allowed_token_ids or [],
            "stop_token_ids": self.stop_token_ids or [],
        }
        for name, token_ids in listed.items():
            outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
            if outside is not None:
                problem = f"holds token id {shown(str(outside))}; the vocabulary has ids 0 to {vocab_size - 1}"
                raise invalid(name, problem)
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k if top_k < vocab_size else 0,
            min_p=self.min_p or 0.0,
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=bias,
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            bad_words=_word_tokens(self.bad_words or (), tokenizer),
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.asked_logprobs,
            prompt_logprobs=self.asked_prompt_logprobs,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            **self._engine_fields(),
            **fields,
        )

    def _engine_fields(self) -> dict[str, Any]:
        given = (value for name in _OF_PARTS if (value := getattr(self, name)) is not None)
        return {name: field for value in given for name, field in value.engine_fields().items()}


def _word_tokens(words: list[str] | tuple[()], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns two token sequences per word, without and with a leading space, because both spellings are forbidden."""
    spelled = (
        tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
        for word in words
        for space in ("", " ")
    )
    return tuple(dict.fromkeys(tokens for tokens in spelled if tokens))
