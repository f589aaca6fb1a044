"""Base classes of chat requests and messages, to which parts add fields; `chat_requests` has the complete classes."""

from typing import Any, ClassVar, Literal

from wingbeat.deployments.api.bodies.requests import GenerationBody
from wingbeat.deployments.api.bodies.unserved_fields import Part


class MessageFields(Part):
    """Role and text of a message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    """Text of the message; with media parts, the text of all text parts."""

    def template_fields(self, is_strict: bool) -> dict[str, Any]:
        """Returns the fields added by application parts, in the form that a chat template reads.

        Args:
            is_strict: True after the template has refused the fields as sent by the client.
        """
        return {}


class ChatFields(GenerationBody):
    """Fields of chats beside those of every generating endpoint."""

    template_names: ClassVar[tuple[str, ...]] = ()
    """Names of fields added by application parts that a chat template reads; lists of objects."""
