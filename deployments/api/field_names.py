"""Names of fields in errors, for endpoints whose bodies are converted to chats."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from wingbeat.deployments.api.errors import ApiError


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager that renames fields in the errors raised within it. `names` maps the name of a chat request's
    field to the name of the caller's field.
    """
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        for theirs, ours in names.items():
            if param == theirs or param.startswith((f"{theirs}[", f"{theirs}.")):
                error.param = ours
                error.message = error.message.replace(f"'{param}'", f"'{ours}'").replace(f" {theirs}.", f" {ours}.")
                break
        if param.startswith("tools["):
            error.param = param.replace("].function", "]")
        raise
