"""Request bodies of vLLM's `/inference/v1/generate`, and the conversion of a chat request to such a body."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.bodies.sampling_fields import SamplingFields
from wingbeat.deployments.api.bodies.unserved_fields import (
    COMMON,
    Unserved,
    check_unserved,
    hint,
    ignored_fields,
    refused,
)
from wingbeat.deployments.api.errors import invalid
from wingbeat.runtime.scheduling.request import GrammarSpec

BESIDE = ("model", "request_id", "stream", "stream_options", "cache_salt", "priority", "speculation")
"""Fields, outside of `sampling_params`, that a completion has under the same name."""
_NOT_SAMPLED = {"cache_salt", "priority", "response_format", "return_token_ids", "return_tokens_as_token_ids"}
SAMPLED = frozenset({"max_tokens", "n", "logprobs", *SamplingFields.model_fields} - _NOT_SAMPLED)
"""Fields of vLLM's `SamplingParams` that a completion has under the same name."""
SAMPLING: Mapping[str, Unserved] = {
    **{name: rule for name, rule in COMMON.items() if name not in SAMPLED},
    "detokenize": hint("the answer has no text"),
    "output_kind": hint("'stream' decides how the answer is sent"),
    "skip_clone": hint("no parameters are copied"),
    "flat_logprobs": refused("log-probabilities have one form", False),
    "extra_args": refused("they are arguments of a server's own plugins", {}),
}
_MEDIA = "prompts are text only here: send images and audio to /v1/chat/completions"
NAMES = {"prompt": "token_ids"} | {name: f"sampling_params.{name}" for name in (*SAMPLED, *SAMPLING)}
"""For error messages: maps the name of a completion's field to the name of this endpoint's field."""


class TokenCompletion(CompletionBody):
    """A completion of token ids; without `max_tokens` it may fill the context."""

    default_max_tokens = None


class GenerateBody(RequestBody):
    """`POST /inference/v1/generate`."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "features": refused(_MEDIA),
        "kv_transfer_params": COMMON["kv_transfer_params"],
        "ec_transfer_params": COMMON["kv_transfer_params"],
        "token_offsets": hint("they describe the text that was tokenized"),
        "assistant_tokens_mask": hint("it describes the conversation"),
    }

    token_ids: Any = Field(json_schema_extra={"type": "array", "items": {"type": "integer"}})
    sampling_params: dict[str, Any]
    """vLLM's `SamplingParams`; fields that are absent have the defaults of `/v1/completions`, except `max_tokens`."""
    model: str | None = None
    request_id: Any = None
    stream: bool | None = None
    stream_options: Any = None
    cache_salt: Any = None
    priority: Any = None
    speculation: Any = None

    @field_validator("token_ids")
    @classmethod
    def _check_token_ids(cls, value: Any) -> Any:
        # The list is not validated by pydantic, because pydantic would copy every id before the list's length is
        # checked.
        if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
            raise invalid("token_ids", "must be a list of token ids, and not empty")
        return value

    def as_completion(self) -> TokenCompletion:
        """Returns the request in the form of a completion.

        Raises:
            ApiError: 400, a field is invalid. The error contains the name that the field has in a completion; the
                caller translates this name by `NAMES`.
        """
        given = self.sampling_params
        check_unserved(given, SAMPLING, "sampling_params")
        ignored_fields().pass_over_unknown(
            {name: value for name, value in given.items() if name not in SAMPLING}, SAMPLED, "sampling_params"
        )
        fields = {name: given[name] for name in SAMPLED & given.keys()}
        fields |= {name: getattr(self, name) for name in BESIDE if getattr(self, name) is not None}
        fields |= {"prompt": self.token_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return TokenCompletion.of_fields(fields)


BODIES = {"/inference/v1/generate": GenerateBody, "/v1/chat/completions/render": ChatBody}


def rendered(body: ChatBody, generation: Generation) -> dict[str, Any]:
    """Returns the body for `/inference/v1/generate` that generates the answer to a chat request."""
    params = generation.choices[0].request.params
    sampled = {name: value for name in SAMPLED if (value := getattr(body, name, None)) is not None}
    sampled |= {"max_tokens": body.asked_max_tokens, "logprobs": body.asked_logprobs}
    sampled["structured_outputs"] = None if params.grammar is None else _structured(params.grammar)
    return {
        "request_id": generation.response_id,
        "token_ids": list(generation.choices[0].request.prompt_token_ids),
        "features": None,
        "sampling_params": {name: value for name, value in sampled.items() if value is not None},
        "model": generation.model,
        "stream": bool(body.stream),
        "stream_options": body.stream_options and body.stream_options.model_dump(exclude_none=True),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": None,
    }


def _structured(grammar: GrammarSpec) -> dict[str, Any]:
    match grammar.kind:
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": json.loads(grammar.text)}
    return {grammar.kind: grammar.text}
