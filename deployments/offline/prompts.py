"""Converts prompts and conversations of `wingbeat.LLM` to token ids."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.offline.sampling import one_line
from wingbeat.runtime.tokenizer import TextTooLong, Tokenizer

PromptLike = str | list[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's dict with `prompt` or `prompt_token_ids`."""
Conversation = list[dict[str, Any]]
"""Messages of the chat API, each with `role` and `content`."""

_FORMS = "give a string, a list of token ids, or a list of these"
_KEYS = ("prompt", "prompt_token_ids")


class Prompt(NamedTuple):
    """A prompt that is ready to run."""

    place: str
    """Name of the argument, for error messages; with the prompt's index if there are several prompts."""
    text: str | None
    """Text of the prompt; None for a prompt that was given as token ids."""
    token_ids: list[int]


class Reader(NamedTuple):
    """Properties of the model that are needed to read prompts."""

    tokenizer: Tokenizer | None
    max_model_len: int
    """Maximum length of a sequence, in tokens."""
    vocab_size: int


def read_prompts(prompts: PromptLike | Iterable[PromptLike], reader: Reader) -> list[Prompt]:
    """Return the token ids of prompts, in the order of the prompts.

    Raises:
        ValueError: a prompt is of a wrong type, empty or too long; the message is one line that begins with
            `Prompt.place`.
    """
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [_read_prompt(prompts, "prompts", reader)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValueError(f"prompts is of the type {type(prompts).__name__}: {_FORMS}")
    return [_read_prompt(prompt, f"prompts[{index}]", reader) for index, prompt in enumerate(prompts)]


def read_conversations(
    messages: Conversation | Iterable[Conversation], reader: Reader, options: Mapping[str, Any]
) -> list[Prompt]:
    """Return the token ids of conversations as the model's chat template renders them.

    Args:
        options: fields of `/v1/chat/completions` that the template reads, such as `tools`.

    Raises:
        ValueError: a message or an option is malformed, the template refuses the messages, or there is no template; the
            message is one line that begins with `Prompt.place`.
    """
    if reader.tokenizer is None:
        raise ValueError("messages cannot be written as a prompt: the model has no tokenizer")
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        kind = type(messages).__name__
        raise ValueError(f"messages is of the type {kind}: give a list of messages, or a list of such lists")
    given = list(messages)
    if all(isinstance(message, Mapping) for message in given):
        return [_read_conversation(given, "messages", "", reader, options)]
    return [
        _read_conversation(conversation, f"messages[{index}]", f"messages[{index}]: ", reader, options)
        for index, conversation in enumerate(given)
    ]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(item) is int for item in value)


def _read_prompt(prompt: Any, place: str, reader: Reader) -> Prompt:
    if isinstance(prompt, Mapping):
        keys = [key for key in _KEYS if prompt.get(key) is not None]
        if len(keys) != 1 or prompt.keys() - {*_KEYS}:
            raise ValueError(f"{place} has the keys {', '.join(map(str, prompt))}: give one of {' and '.join(_KEYS)}")
        place, prompt = f"{place}[{keys[0]!r}]", prompt[keys[0]]
    if isinstance(prompt, str):
        return Prompt(place, prompt, _encode(prompt, place, reader, special_tokens=True))
    if not _is_token_ids(prompt):
        shown = "empty" if prompt in ([], ()) else f"of the type {type(prompt).__name__}"
        raise ValueError(f"{place} is {shown}: {_FORMS}")
    outside = next((token_id for token_id in prompt if not 0 <= token_id < reader.vocab_size), None)
    if outside is not None:
        raise ValueError(f"{place} holds token id {outside}: the vocabulary has ids 0 to {reader.vocab_size - 1}")
    return Prompt(place, None, list(prompt))


def _read_conversation(messages: Any, place: str, before: str, reader: Reader, options: Mapping[str, Any]) -> Prompt:
    """Read one conversation. Error messages name a path within the conversation; `before` is put in front of them."""
    with one_line(before), none_ignored():
        body = ChatBody.of_fields({"messages": list(messages) if isinstance(messages, tuple) else messages, **options})
    if body.other_parts:
        first = body.other_parts[0]
        raise ValueError(f"{before}{first.path} is of the type {first.type}, which only wingbeat serve accepts")
    try:
        text = reader.tokenizer.render_chat(body.template_messages(), body.template_variables(), body.chat_template)
    except ValueError as error:
        raise ValueError(f"{place} cannot be written as a prompt: {' '.join(str(error).split())}") from error
    return Prompt(place, text, _encode(text, place, reader, special_tokens=False))


def _encode(text: str, place: str, reader: Reader, *, special_tokens: bool) -> list[int]:
    if reader.tokenizer is None:
        raise ValueError(f"{place} is text: the model has no tokenizer; give token ids")
    limit = reader.max_model_len
    try:
        token_ids = reader.tokenizer.encode(text, special_tokens, max_tokens=limit)
    except TextTooLong as error:
        found = f"more than {limit}" if error.num_tokens is None else error.num_tokens
        raise ValueError(
            f"{place} has {found} tokens: max_model_len is {limit}; shorten the prompt or raise max_model_len"
        ) from None
    if not token_ids:
        raise ValueError(f"{place} is empty: give at least one token")
    return token_ids
