"""Saved prefixes at the beginning of prompts: finds the prefix that a request names, and creates prefixes from messages
or a text.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from wingbeat.deployments.api.bodies.chat_requests import ChatBody, ChatMessage
from wingbeat.deployments.api.bodies.requests import GenerationBody
from wingbeat.deployments.api.errors import ApiError, invalid, prompt_too_long, shown
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.prefixes.fleet import PREFIXES
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import Variant
from wingbeat.runtime.tokenizer import TextTooLong, Tokenizer

VARIABLES = (*ChatBody.template_names, "documents", "reasoning_effort", "chat_template_kwargs")
"""Fields of a chat request that the chat template reads in addition to the messages."""
_PROBES = ("0", "x")
"""Contents of two probe messages. The tokens that both conversations, each with one probe at its end, have in common
are the prefix. The contents differ in their first character, so that no token of the contents belongs to the prefix.
"""


def unknown_prefix(name: str, param: str = "prefix") -> ApiError:
    """Return a 404 for an unknown saved prefix."""
    return ApiError(f"There is no saved prefix {shown(name)!r}.", status=404, param=param, code="prefix_not_found")


class PrefixBeginning(NamedTuple):
    """A saved prefix in front of a request's own prompt."""

    prefix: SavedPrefix

    @property
    def token_ids(self) -> tuple[int, ...]:
        """See `Beginning.token_ids`."""
        return self.prefix.token_ids

    def before(self, body: ChatBody) -> ChatBody:
        """Return a chat request that begins with the prefix's messages, as if its client had sent them.

        Raises:
            ApiError: the prefix was made of a plain prompt and has no messages.
        """
        if not self.prefix.conversation:
            raise invalid("prefix", "was made of a plain prompt; a chat needs a prefix that was made of messages")
        first = ChatBody.of_fields(json.loads(self.prefix.conversation))
        variables = {name: getattr(first, name) for name in VARIABLES if getattr(body, name) is None}
        return body.model_copy(update={"messages": [*first.messages, *body.messages], **variables})


def beginning_of(pool: EnginePool, body: GenerationBody, variant: Variant | None) -> PrefixBeginning | None:
    """Return the prefix that a request names; None if it names no prefix.

    Args:
        variant: variant that the request runs with.

    Raises:
        ApiError: there is no such prefix, it belongs to another model, or the prompt is to be truncated.
    """
    if body.prefix is None:
        return None
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "contradicts 'prefix'; give one of them")
    prefix = pool.names.catalogs[PREFIXES].find(body.prefix)
    if prefix is None:
        raise unknown_prefix(body.prefix)
    served = pool.info.model_name
    own, asked = (served if one is None else one.name for one in (prefix.variant, variant))
    if own != asked:
        raise invalid("prefix", f"is of the model {own!r}, and the request of {asked!r}")
    return PrefixBeginning(prefix)


def as_conversation(body: ChatBody) -> str:
    """Return the conversation as JSON, in the form that `PrefixBeginning.before` reads."""
    return body.model_dump_json(include={"messages", *VARIABLES}, exclude_none=True)


def conversation_tokens(
    tokenizer: Tokenizer, body: ChatBody, limit: int, in_parts: bool, expand: Callable[[str], str] = str
) -> tuple[int, ...]:
    """Return the tokens that are common to all conversations that start with these messages, as rendered by the
    template.

    Args:
        limit: maximum number of tokens of a prompt.
        in_parts: as for `ChatMessage.as_template_input`.
        expand: function that inserts the placeholder tokens of media parts into the text.

    Raises:
        ApiError: the template refuses the messages, or they have too many tokens.
    """
    role = "assistant" if body.messages[-1].role == "user" else "user"
    variables = body.template_variables() | {"add_generation_prompt": False}
    messages = body.template_messages(in_parts)

    def tokens(*more: dict[str, Any]) -> list[int]:
        text = tokenizer.render_chat([*messages, *more], variables)
        return tokenizer.encode(expand(text), add_special_tokens=False, max_tokens=limit)

    try:
        try:
            one, other = (tokens(ChatMessage(role=role, content=text).as_template_input(in_parts)) for text in _PROBES)
        except ValueError:  # the template requires a message of another role at this point
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
    """Return the tokens of a plain prefix; raises ApiError if there are more than `limit`."""
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
