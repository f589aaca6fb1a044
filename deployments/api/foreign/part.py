"""Fields of other servers; imported by commands too, so that it imports what it adds later."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.api.bodies.unserved_fields import Unserved


def unserved_fields(path: str) -> "Mapping[str, Unserved]":
    """Fields of other servers at an endpoint that generates, with what becomes of each."""
    from wingbeat.deployments.api.foreign.fields import FOREIGN, FOREIGN_COMPLETION

    return FOREIGN_COMPLETION if path == "/v1/completions" else FOREIGN
