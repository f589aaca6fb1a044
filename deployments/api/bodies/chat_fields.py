"""Fields of chat requests and of their messages that parts add to; `chat_requests` has the whole classes."""

from typing import Any, ClassVar, Literal

from wingbeat.deployments.api.bodies.requests import GenerationBody
from wingbeat.deployments.api.bodies.unserved_fields import Part


class MessageFields(Part):
    """Role and text of a message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    """Its text; that of all parts where there are media."""

    def template_fields(self, is_strict: bool) -> dict[str, Any]:
        """Fields of parts as a chat template reads them.

        Args:
            is_strict: whether the template refused them as they came.
        """
        return {}


class ChatFields(GenerationBody):
    """Fields that every generating endpoint has."""

    template_names: ClassVar[tuple[str, ...]] = ()
    """Fields of parts that a chat template reads: lists of objects."""
