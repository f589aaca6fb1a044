"""Request fields for a grammar that the answer must match."""

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from wingbeat.deployments.api.bodies.unserved_fields import Part
from wingbeat.deployments.api.errors import invalid
from wingbeat.runtime.scheduling.request import GrammarSpec

MAX_GRAMMAR_CHARS = 2**16
GRAMMAR_FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`: exactly one of these fields defines what the answer must match."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    choice: list[str] | None = None
    """Texts of which the answer must be one."""
    grammar: str | None = None
    """EBNF of xgrammar or llama.cpp, or Lark of llguidance."""
    json_object: bool | None = None
    """If true, the answer must be a JSON object, of any content."""
    structural_tag: str | dict[str, Any] | None = None
    """xgrammar's structural tags: formats of parts of an answer."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = self._given()
        if len(given) != 1:
            names = ", ".join(GRAMMAR_FIELDS)
            raise invalid("structured_outputs", f"holds {len(given)} of {names}: give one of them")
        ((name, value),) = given.items()
        if name == "choice" and not (value and all(value)):
            raise invalid("structured_outputs.choice", "must hold texts, none of them empty")
        if value is False:
            raise invalid("structured_outputs.json_object", "must be true")
        if len(self.spec().text) > MAX_GRAMMAR_CHARS:
            raise invalid(f"structured_outputs.{name}", f"is longer than {MAX_GRAMMAR_CHARS} characters")
        return self

    def spec(self) -> GrammarSpec:
        """Return the grammar that the engine compiles."""
        ((name, value),) = self._given().items()
        if name == "json_object":
            return GrammarSpec(name, "")
        field = f"structured_outputs.{name}"
        return GrammarSpec(name, value if isinstance(value, str) else json.dumps(value), field)

    def engine_fields(self) -> dict[str, Any]:
        """See `FieldsOfParts`."""
        return {"grammar": self.spec()}

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, "json_" if name == "json" else name) for name in GRAMMAR_FIELDS}
        return {name: value for name, value in values.items() if value is not None}


class JsonSchemaFormat(Part):
    """OpenAI's `response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Ignored, because the schema is always enforced."""


class ResponseFormat(Part):
    """OpenAI's `response_format`: text, any JSON object, or JSON that matches a schema. As in vLLM, the type may also
    be xgrammar's structural tags.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid("response_format.json_schema", "belongs to type 'json_schema', which needs it")
        if self.type == "json_object" and (self.model_extra or {}).get("schema") is not None:
            # A schema directly in this object is refused: some servers accept a schema here, so clients may send it,
            # and if it were ignored silently, answers would be wrong.
            raise invalid("response_format", "has a 'schema', which belongs to type 'json_schema'")
        spec = self.spec()
        if spec is not None and len(spec.text) > MAX_GRAMMAR_CHARS:
            raise invalid("response_format", f"is longer than {MAX_GRAMMAR_CHARS} characters")
        return self

    def unknown(self) -> Mapping[str, Any]:
        """See `Part`; the fields of a structural tag count as known, because xgrammar defines and checks them."""
        return {} if self.type == "structural_tag" else super().unknown()

    def spec(self) -> GrammarSpec | None:
        """Return the grammar that the engine compiles; None for text."""
        if self.type == "text":
            return None
        if self.type == "json_schema":
            return GrammarSpec("json", json.dumps(self.json_schema.schema_), "response_format")
        if self.type == "structural_tag":
            tag = {"type": self.type, **(self.model_extra or {})}
            return GrammarSpec("structural_tag", json.dumps(tag), "response_format")
        return GrammarSpec("json_object", "")

    def engine_fields(self) -> dict[str, Any]:
        """See `FieldsOfParts`."""
        spec = self.spec()
        return {} if spec is None else {"grammar": spec}


class GrammarFields(Part):
    """The two fields for structured output. Only one of the fields may be given."""

    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    @field_validator("response_format")
    @classmethod
    def _check_other(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and value.spec() and info.data.get("structured_outputs") is not None:
            raise invalid("structured_outputs", "contradicts 'response_format'; give one of them")
        return value
