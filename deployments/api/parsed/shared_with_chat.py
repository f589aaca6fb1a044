"""Fields of a chat request that the bodies of other clients have under the same name, and hand on unread."""

from typing import Any

from pydantic import create_model

from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.sampling_fields import SamplingFields

_OWN = ("stop", "response_format", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")
"""Fields of sampling that those bodies have under another name, or that their answers have no room for."""
_UNREAD: dict[str, Any] = {name: (Any, None) for name in SamplingFields.model_fields if name not in _OWN}
UnreadFields = create_model("UnreadFields", __base__=RequestBody, **_UNREAD)


class SharedWithChat(UnreadFields):
    """Fields that choose tokens and end the text, each checked where the chat's body is made, under the same name."""

    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: Any = None

    def shared_fields(self) -> dict[str, Any]:
        """Fields that were given, by name."""
        given = {name: getattr(self, name) for name in SharedWithChat.model_fields}
        return {name: value for name, value in given.items() if value is not None}
