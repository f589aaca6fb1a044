"""Saved prefixes in requests: what a prompt with one is, and which tokens a conversation's prefix has."""

import itertools
import json
from typing import Any

from wingbeat.deployments.api.bodies.chat_messages import ChatMessage
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import GenerationBody
from wingbeat.deployments.api.errors import invalid, prompt_too_long, unknown_prefix
from wingbeat.deployments.fleet.prefixes import FleetPrefixes
from wingbeat.runtime.lora.resident import AdapterName
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.tokenizer import TextTooLong, Tokenizer

VARIABLES = ("tools", "documents", "reasoning_effort", "chat_template_kwargs")
"""Of a chat request, what its template reads beside the messages."""
_PROBES = ("0", "x")
"""Contents of messages that differ from their first character on."""


def prefix_of(
    prefixes: FleetPrefixes, body: GenerationBody, adapter: AdapterName | None, served: str
) -> SavedPrefix | None:
    """The prefix that a request names; None where it names none.

    Args:
        adapter: that the request runs with.
        served: name of the base model.

    Raises:
        ApiError: there is no such prefix, or it is another model's.
    """
    if body.prefix is None:
        return None
    prefix = prefixes.catalog.find(body.prefix)
    if prefix is None:
        raise unknown_prefix(body.prefix)
    own, asked = (served if one is None else one.name for one in (prefix.adapter, adapter))
    if own != asked:
        raise invalid("prefix", f"is of the model {own!r}, and the request of {asked!r}")
    return prefix


def behind(prefix: SavedPrefix | None, body: ChatBody) -> ChatBody:
    """A chat request as if its client had sent the prefix's messages first.

    Raises:
        ApiError: the prefix is one of a plain prompt.
    """
    if prefix is None:
        return body
    if not prefix.conversation:
        raise invalid("prefix", "is one of a prompt; a chat needs one that was made of messages")
    first = ChatBody.of_fields(json.loads(prefix.conversation))
    variables = {name: getattr(first, name) for name in VARIABLES if getattr(body, name) is None}
    return body.model_copy(update={"messages": [*first.messages, *body.messages], **variables})


def as_conversation(body: ChatBody) -> str:
    """What `behind` reads."""
    return body.model_dump_json(include={"messages", *VARIABLES}, exclude_none=True)


def conversation_tokens(tokenizer: Tokenizer, body: ChatBody, limit: int, in_parts: bool) -> tuple[int, ...]:
    """The tokens that all conversations have which begin by these messages, as the template writes them.

    Args:
        limit: of a prompt.
        in_parts: as for `ChatMessage.as_template_input`.

    Raises:
        ApiError: the template refuses the messages, or they have too many tokens.
    """
    role = "assistant" if body.messages[-1].role == "user" else "user"
    variables = body.template_variables() | {"add_generation_prompt": False}
    messages = body.template_messages(in_parts)

    def tokens(*more: dict[str, Any]) -> list[int]:
        text = tokenizer.render_chat([*messages, *more], variables)
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=limit)

    try:
        try:
            one, other = (tokens(ChatMessage(role=role, content=text).as_template_input(in_parts)) for text in _PROBES)
        except ValueError:  # of a template that wants another role next
            one = other = tokens()
    except TextTooLong as error:
        raise prompt_too_long("messages", limit, error.num_tokens) from None
    except ValueError as error:
        raise invalid("messages", f"cannot be turned into a prompt: {error}") from error
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token_id for token_id, _ in same)


def prompt_tokens(
    tokenizer: Tokenizer, prompt: str | list[int], add_special_tokens: bool, limit: int
) -> tuple[int, ...]:
    """The tokens of a plain prefix; raises ApiError where there are too many."""
    if isinstance(prompt, list):
        token_ids = prompt
    else:
        try:
            token_ids = tokenizer.encode(prompt, add_special_tokens, max_tokens=limit)
        except TextTooLong as error:
            raise prompt_too_long("prompt", limit, error.num_tokens) from None
    if len(token_ids) > limit:
        raise prompt_too_long("prompt", limit, len(token_ids))
    return tuple(token_ids)
