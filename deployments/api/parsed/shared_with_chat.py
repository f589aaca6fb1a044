"""Fields that other APIs' bodies share with chat requests; the bodies pass them on without validation."""

from typing import Any

from pydantic import create_model

from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.sampling_fields import SamplingFields

_OWN = ("stop", "response_format", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")
"""Sampling fields that are not shared, because the other bodies have them under other names, or because the other APIs'
answers have no field for their results.
"""
_UNREAD: dict[str, Any] = {name: (Any, None) for name in SamplingFields.model_fields if name not in _OWN}
UnreadFields = create_model("UnreadFields", __base__=RequestBody, **_UNREAD)


class SharedWithChat(UnreadFields):
    """Fields about sampling and about where the text ends. The fields are validated by the chat body that is made from
    this body.
    """

    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: Any = None

    def shared_fields(self) -> dict[str, Any]:
        """Returns the shared fields that the request has, by name."""
        given = {name: getattr(self, name) for name in SharedWithChat.model_fields}
        return {name: value for name, value in given.items() if value is not None}
