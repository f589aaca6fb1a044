"""Errors of a chat request under the names that its fields have in another form of the request."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from wingbeat.deployments.api.errors import ApiError


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors raised within: `names` maps a chat request's field to the caller's."""
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
