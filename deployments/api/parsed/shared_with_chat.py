"""Fields of a chat request that the bodies of other clients have under the same name, and hand on unread."""

from typing import Any

from wingbeat.deployments.api.bodies.request_body import RequestBody


class SharedWithChat(RequestBody):
    """Fields that choose tokens and end the text, each checked where the chat's body is made, under the same name."""

    model: str | None = None
    stream: bool | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    min_tokens: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    priority: Any = None
    cache_salt: Any = None
    structured_outputs: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: Any = None

    def shared_fields(self) -> dict[str, Any]:
        """Fields that were given, by name."""
        given = {name: getattr(self, name) for name in SharedWithChat.model_fields}
        return {name: value for name, value in given.items() if value is not None}
