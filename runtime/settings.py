"""What all settings that a person writes share: errors that say what is wrong, and no more."""

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Settings(BaseModel):
    """A pydantic model whose errors carry no addresses of pydantic's pages.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    def __init__(self, /, **given: Any) -> None:
        # Every way to a model leads through here, once it has a constructor of its own.
        try:
            super().__init__(**given)
        except ValidationError as error:
            problems = [_plain(found) for found in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(
                error.title, problems, hide_input=bool(self.model_config.get("hide_input_in_errors"))
            ) from None


def _plain(found: Any) -> InitErrorDetails:
    """Errors of a kind of one's own alone are written without an address."""
    kind = PydanticCustomError(found["type"], found["msg"].removeprefix("Value error, "))
    return InitErrorDetails(type=kind, loc=found["loc"], input=found["input"])
