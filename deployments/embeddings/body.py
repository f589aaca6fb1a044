"""The body of `/v1/embeddings`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.unserved_fields import Unserved, refused
from wingbeat.deployments.api.errors import invalid
from wingbeat.runtime.scheduling.request import INT32_MAX

MAX_INPUTS = 2048
"""OpenAI's limit of inputs in one request."""


class EmbeddingsBody(RequestBody):
    """`POST /v1/embeddings`: compute embeddings."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "messages": refused("give the text of a conversation as 'input'"),
        "normalize": refused("embeddings have length 1"),
        "embed_dtype": refused("numbers are float32"),
    }
    prompt_field: ClassVar[str] = "input"
    """Name of the field with the prompt, for errors about its length."""
    limit_field: ClassVar[str] = "truncate_prompt_tokens"
    """Name of the field that shortens a prompt."""

    model: str | None = None
    input: list[str] | list[list[int]]
    """Texts or lists of token ids; a single text or list is wrapped in a list."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)
    """Number of dimensions of a shortened embedding; allowed only if the model was trained for shortened embeddings."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    """Number of tokens of each input to keep, by default its last tokens; -1 keeps as many tokens as fit into the
    context.
    """
    truncation_side: Literal["left", "right"] | None = None
    """Side on which an input is truncated. With "right" the input's first tokens are kept."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens around a prompt; true by default."""
    priority: int | None = Field(None, ge=-(2**31), le=INT32_MAX)
    user: Any = None
    """Ignored, because the field cannot change the result."""

    @model_validator(mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, fields: Any) -> Any:
        given = fields.get("input") if isinstance(fields, dict) else None
        single = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int))
        return {**fields, "input": [given]} if single else fields

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if not self.input:
            raise invalid("input", "is empty: at least one text is needed")
        if len(self.input) > MAX_INPUTS:
            raise invalid("input", f"has {len(self.input)} texts, more than {MAX_INPUTS}")
        return self

    @property
    def asked_max_tokens(self) -> int:
        """Returns 1, because an engine generates at least one token even for an embedding."""
        return 1
