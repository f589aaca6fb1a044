"""`wingbeat.SamplingParams`: the sampling fields of the HTTP API as a Python object."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from wingbeat.deployments.api.bodies.request_body import invalid_field
from wingbeat.deployments.api.bodies.requests import MAX_CHOICES
from wingbeat.deployments.api.bodies.sampling_fields import SamplingFields
from wingbeat.deployments.api.bodies.unserved_fields import (
    COMPLETION,
    Unserved,
    check_unserved,
    none_ignored,
    refused,
)
from wingbeat.deployments.api.errors import ApiError
from wingbeat.runtime.scheduling import request
from wingbeat.runtime.scheduling.request import INT32_MAX, MAX_LOGPROBS
from wingbeat.runtime.tokenizer import Tokenizer

_IN_RESULTS = "results always have the token ids"


class SamplingParams(SamplingFields):
    """Parameters of sampling and stopping: the fields of `/v1/completions`, with the same defaults.

    Args:
        fields: keyword arguments; tuples are accepted for lists, and integers for the keys of `logit_bias`.

    Raises:
        ValueError: a field is unknown or out of range; the message is one line that names the field.
    """

    model_config = ConfigDict(frozen=True)

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **COMPLETION,
        "best_of": refused("choices are not ranked", 1),
        "detokenize": refused("results always have the text", True),
        "return_token_ids": refused(_IN_RESULTS, True),
        "return_tokens_as_token_ids": refused(_IN_RESULTS, False),
    }

    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    """Maximum tokens of an answer. None means 16 in `LLM.generate`, and as many as `max_model_len` allows in
    `LLM.chat`.
    """
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Number of choices per prompt."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of most likely tokens whose log-probabilities are returned, in addition to the log-probability of the
    chosen token.
    """
    speculation: bool = True
    """Whether drafts are used; the tokens are the same with and without drafts."""

    def __init__(self, **fields: Any) -> None:
        with one_line(), none_ignored():
            check_unserved(fields, self.unserved)
            served = {name: value for name, value in fields.items() if name not in self.unserved}
            self._check_names(served)
            try:
                super().__init__(**served)
            except ValidationError as error:
                raise invalid_field(error) from error

    @classmethod
    def _check_names(cls, fields: Mapping[str, Any]) -> None:
        """Raise ValueError for an unknown name."""
        for name in fields.keys() - cls.model_fields.keys():
            close = get_close_matches(name, cls.model_fields, 1)
            advice = f": did you mean {close[0]}?" if close else ""
            raise ValueError(f"there is no sampling parameter {name}{advice}")

    @model_validator(mode="before")
    @classmethod
    def _as_json_has_them(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert tuples to lists and integer keys to strings, because JSON has neither tuples nor integer keys."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        if isinstance(bias := fields.get("logit_bias"), dict):
            fields["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
        return fields

    @property
    def asked_logprobs(self) -> int | None:
        """See `SamplingFields`."""
        return self.logprobs

    def of_prompt(
        self, vocab_size: int, tokenizer: Tokenizer | None, max_tokens: int, draw_seed: Callable[[], int]
    ) -> list[request.SamplingParams]:
        """Return the engine's parameters for the choices of a prompt, [n].

        Args:
            max_tokens: maximum tokens of the answer, within `max_model_len`.
            draw_seed: function that returns a random seed, called if `seed` is None.

        Raises:
            ValueError: a token id is outside the vocabulary, or a field needs a tokenizer that the model does not have.
        """
        texts = {"stop": self.stop, "bad_words": self.bad_words}
        needing = next((name for name, given in texts.items() if given and tokenizer is None), None)
        if needing is not None:
            raise ValueError(f"{needing} is text: the model has no tokenizer to find it with; use stop_token_ids")
        with one_line():
            params = self.sampling_params(vocab_size, tokenizer, speculation=self.speculation, max_tokens=max_tokens)
        if params.grammar is not None and tokenizer is None:
            raise ValueError(f"{params.grammar.field} describes text: the model has no tokenizer")
        seed = draw_seed() if self.seed is None else self.seed
        choices = [replace(params, seed=(seed + index + 2**63) % 2**64 - 2**63) for index in range(self.n or 1)]
        # Only the first choice of a prompt reports the prompt's log-probabilities.
        return [choices[0], *(replace(choice, prompt_logprobs=None) for choice in choices[1:])]


@contextmanager
def one_line(before: str = "") -> Iterator[None]:
    """Context manager that turns errors of the HTTP API into a ValueError of one line, prefixed by `before`."""
    try:
        yield
    except ApiError as error:
        raise ValueError(before + " ".join(str(error.message).split())) from None
