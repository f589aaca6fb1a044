"""Base classes of chat requests and messages, without the fields that optional parts of the application add;
`chat_requests` has the complete classes.
"""

from typing import Any, ClassVar, Literal

from wingbeat.deployments.api.bodies.requests import GenerationBody
from wingbeat.deployments.api.bodies.unserved_fields import Part


class MessageFields(Part):
    """Role and text of a message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    """Text of the message; if the message has media parts, the joined text of all text parts."""

    def template_fields(self, is_strict: bool) -> dict[str, Any]:
        """Returns the fields that optional parts of the application have added, in the form that a chat template reads.

        Args:
            is_strict: True in the second attempt, after the template has refused the fields as the client sent them.
        """
        return {}


class ChatFields(GenerationBody):
    """Fields of chats: the fields that all generating endpoints share, and fields that only chats have."""

    template_names: ClassVar[tuple[str, ...]] = ()
    """Names of fields that optional parts of the application add and that a chat template reads. The fields' values are
    lists of objects.
    """
