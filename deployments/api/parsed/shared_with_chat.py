"""Fields that other APIs' bodies share with chat requests under the same names, passed on without validation."""

from typing import Any

from pydantic import create_model

from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.sampling_fields import SamplingFields

_OWN = ("stop", "response_format", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")
"""Sampling fields that other bodies have under another name, or whose results their answers cannot carry."""
_UNREAD: dict[str, Any] = {name: (Any, None) for name in SamplingFields.model_fields if name not in _OWN}
UnreadFields = create_model("UnreadFields", __base__=RequestBody, **_UNREAD)


class SharedWithChat(UnreadFields):
    """Fields for sampling and ends of the text; each is validated by the chat body made from this body."""

    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: Any = None

    def shared_fields(self) -> dict[str, Any]:
        """Returns the given fields by name."""
        given = {name: getattr(self, name) for name in SharedWithChat.model_fields}
        return {name: value for name, value in given.items() if value is not None}
