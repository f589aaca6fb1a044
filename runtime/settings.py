"""Base class of all settings that users write; its error messages state the problem without pydantic's links."""

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Settings(BaseModel):
    """A pydantic model whose errors contain no links to pydantic's documentation.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside its allowed range.
    """

    def __init__(self, /, **given: Any) -> None:
        # A constructor is defined because pydantic then calls it whichever way an instance is created.
        try:
            super().__init__(**given)
        except ValidationError as error:
            problems = [_plain(found) for found in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(
                error.title, problems, hide_input=bool(self.model_config.get("hide_input_in_errors"))
            ) from None


def _plain(found: Any) -> InitErrorDetails:
    """Returns a pydantic error, converted to a custom kind of error, because pydantic adds links only to its own
    kinds."""
    kind = PydanticCustomError(found["type"], found["msg"].removeprefix("Value error, "))
    return InitErrorDetails(type=kind, loc=found["loc"], input=found["input"])
