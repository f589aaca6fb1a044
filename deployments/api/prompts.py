"""Prompts of requests: templates, tokens, adapters, saved prefixes and media, each checked against the model.

Work on long texts and bodies is outside the event loop, so that other streams keep moving.
"""

import asyncio
import contextvars
import ctypes
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from wingbeat.deployments.api import media_prompts
from wingbeat.deployments.api.answers.generation import Prompt
from wingbeat.deployments.api.bodies.chat_requests import ChatBody, ChatMessage
from wingbeat.deployments.api.bodies.embedding_body import EmbeddingsBody
from wingbeat.deployments.api.bodies.requests import CompletionBody, GenerationBody
from wingbeat.deployments.api.errors import (
    invalid,
    prompt_too_long,
    shown,
    unknown_model,
    unknown_prefix,
    unsupported,
)
from wingbeat.deployments.api.template_forms import other_forms
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.prefixes import FleetPrefixes
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import AdapterName
from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS, TextTooLong, Tokenizer

if TYPE_CHECKING:
    from wingbeat.deployments.media.reader import MediaReader
    from wingbeat.runtime.media.processor import ReadMedia

PROMPT_END_CHARS = 64
"""More than what a chat template writes to open or close thoughts."""

HUGE = 2**18
"""Characters, tokens or bytes. What is made of so many can take a hundred times their memory for a moment."""

Made = TypeVar("Made")


class OffLoop:
    """Runs functions in threads; of those with a huge input one at a time, which leaves no memory behind."""

    def __init__(self) -> None:
        # One thread has one of the allocator's arenas, each of which would keep the most that it ever held.
        self._huge = ThreadPoolExecutor(1, "huge")

    async def run(self, size: int, function: Callable[..., Made], *arguments, long: int = LONG_TEXT_CHARS) -> Made:
        """The function's result; with an input of up to `long` it is called here.

        A huge input whose turn has not come is dropped with whoever waits for it.
        """
        if size <= long:
            return function(*arguments)
        if size <= HUGE:
            return await asyncio.to_thread(function, *arguments)
        context = contextvars.copy_context()
        return await asyncio.wrap_future(self._huge.submit(context.run, _trimmed, function, *arguments))


def _trimmed(function: Callable[..., Made], *arguments) -> Made:
    try:
        return function(*arguments)
    finally:
        _give_back()


def _give_back() -> None:
    """Return freed memory to the system, where the C library is one that keeps it: glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


VARIABLES = ("tools", "documents", "reasoning_effort", "chat_template_kwargs")
"""Of a chat request, what its template reads beside the messages."""
TEMPLATES_REFUSED = "templates of requests are run only where the server's setting chat_template is 'request'"
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


def conversation_tokens(
    tokenizer: Tokenizer, body: ChatBody, limit: int, in_parts: bool, expand: Callable[[str], str] = str
) -> tuple[int, ...]:
    """The tokens that all conversations have which begin by these messages, as the template writes them.

    Args:
        limit: of a prompt.
        in_parts: as for `ChatMessage.as_template_input`.
        expand: writes the tokens of images or audio into the text.

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


class Prompts:
    """Makes the prompts of one model's requests.

    Args:
        media: reads images or audio; None for a model of text alone.
        takes_templates: whether requests may have a chat template of their own.
        aliases: further names of the base model.
    """

    def __init__(
        self,
        pool: EnginePool,
        tokenizer: Tokenizer,
        media: "MediaReader | media_prompts.MediaRefused | None" = None,
        takes_templates: bool = False,
        aliases: Sequence[str] = (),
    ) -> None:
        self.media = media
        self._aliases = tuple(aliases)
        self._takes_templates = takes_templates
        self.off_loop = OffLoop()
        """Where long texts are worked on."""
        self._pool = pool
        self._tokenizer = tokenizer

    @property
    def in_parts(self) -> bool:
        """Whether the chat template is given contents in parts: that of a model that takes media."""
        return self.media is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the base model, the one that answers bear first."""
        return (self._pool.info.model_name, *self._aliases)

    def knows(self, model: str) -> bool:
        """Whether it is a name of the base model or of an adapter."""
        return model in self.names or self._pool.adapters.catalog.find(model) is not None

    async def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """In the request's order; raises ApiError where one does not fit the model."""
        return await self.off_loop.run(sum(map(len, body.prompt)), self._completion_prompts, body)

    async def of_embedding(self, body: EmbeddingsBody) -> list[Prompt]:
        """Of each input, in the request's order; raises ApiError where one does not fit the model."""
        return await self.off_loop.run(sum(map(len, body.input)), self._embedding_prompts, body)

    async def of_chat(self, body: ChatBody) -> Prompt:
        """The conversation; raises ApiError where the template refuses it, or it is too long."""
        if body.media:
            self.adapter_of(body.model)
            media = await media_prompts.read_media(self.media, body)
            return await asyncio.to_thread(self._chat_prompt, body, media)
        # Tools are many short texts, and a template goes through all of them.
        size = (
            LONG_TEXT_CHARS + 1
            if body.tools or body.chat_template
            else sum(len(message.content) for message in body.messages)
        )
        return await self.off_loop.run(size, self._chat_prompt, body)

    def with_prefix(self, body: ChatBody) -> ChatBody:
        """As if its client had sent the messages of the prefix that it names; raises ApiError for the name of none."""
        return behind(self._prefix_of(body), body)

    def adapter_of(self, model: str | None) -> AdapterName | None:
        """What runs on top of the base model; raises ApiError, 404, for the name of another model."""
        if model is None or model in self.names:
            return None
        adapter = self._pool.adapters.catalog.find(model)
        if adapter is None:
            raise unknown_model(model, ", ".join(self.names))
        return adapter

    def _prefix_of(self, body: GenerationBody) -> SavedPrefix | None:
        """The saved prefix that comes before a request's prompt; raises ApiError as `adapter_of`, and for its name."""
        return prefix_of(self._pool.prefixes, body, self.adapter_of(body.model), self._pool.info.model_name)

    def _completion_prompts(self, body: CompletionBody) -> list[Prompt]:
        return [self._completion_prompt(prompt, body) for prompt in body.prompt]

    def _completion_prompt(self, prompt: str | list[int], body: CompletionBody) -> Prompt:
        echo, prefix = prompt if isinstance(prompt, str) else None, self._prefix_of(body)
        adds = prefix is None if body.add_special_tokens is None else body.add_special_tokens
        token_ids, is_cut = self._tokens(prompt, body, "prompt", adds)
        self._check_ids(token_ids, "prompt")
        if prefix is not None:
            token_ids, echo = (*prefix.token_ids, *token_ids), None
        if not body.echo:
            return Prompt(token_ids)
        if echo is not None and not is_cut:
            # A text holds none of the special tokens that the tokenizer has put around it.
            return Prompt(token_ids, echo)
        skips = body.skip_special_tokens is not False
        return Prompt(token_ids, self._tokenizer.decode(token_ids, skips), echo_skips_special=skips)

    def _embedding_prompts(self, body: EmbeddingsBody) -> list[Prompt]:
        adds, prompts = body.add_special_tokens is not False, []
        for text in body.input:
            token_ids, _ = self._tokens(text, body, "input", adds)
            self._check_ids(token_ids, "input")
            prompts.append(Prompt(token_ids))
        return prompts

    def _check_ids(self, token_ids: tuple[int, ...], param: str) -> None:
        vocab_size = self._pool.info.vocab_size
        outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if outside is not None:
            problem = f"holds token id {shown(str(outside))}; the vocabulary has ids 0 to {vocab_size - 1}"
            raise invalid(param, problem)

    def chat_text(self, body: ChatBody) -> str:
        """The conversation as its chat template writes it; raises ApiError where the template refuses it."""
        if body.chat_template is not None and not self._takes_templates:
            raise unsupported("chat_template", TEMPLATES_REFUSED)
        try:
            return self._rendered(body, body.template_messages(self.in_parts))
        except ValueError as error:
            for messages in other_forms(body, self.in_parts):
                with suppress(ValueError):
                    return self._rendered(body, messages)
            param = "messages" if body.chat_template is None else "chat_template"
            raise invalid(param, f"cannot be turned into a prompt: {error}") from error

    def _rendered(self, body: ChatBody, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.render_chat(messages, body.template_variables(), body.chat_template)

    def _chat_prompt(self, body: ChatBody, media: "Sequence[ReadMedia]" = ()) -> Prompt:
        text = self.chat_text(body)
        if (num_tokens := sum(one.num_tokens for one in media)) > self._pool.info.max_model_len:
            raise prompt_too_long("messages", self._pool.info.max_model_len, num_tokens)
        expanded = media_prompts.expand(self.media, text, media) if media else text
        token_ids, _ = self._tokens(expanded, body, "messages", bool(body.add_special_tokens))
        placed = media_prompts.place(self.media, token_ids, media) if media else ()
        return Prompt(token_ids, end=text[-PROMPT_END_CHARS:], media=placed)

    def _tokens(
        self, prompt: str | list[int], body: GenerationBody | EmbeddingsBody, param: str, add_special_tokens: bool
    ) -> tuple[tuple[int, ...], bool]:
        """The prompt's tokens, and whether its beginning was cut off; raises ApiError where there are too many."""
        limit, kept = self._pool.info.max_model_len, body.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, limit - (body.asked_max_tokens or 1))
        if isinstance(prompt, str):
            try:
                most = limit if kept is None else None
                prompt = self._tokenizer.encode(prompt, add_special_tokens, max_tokens=most)
            except TextTooLong as error:
                raise prompt_too_long(param, limit, error.num_tokens) from None
        if kept is None:
            if len(prompt) > limit:
                raise prompt_too_long(param, limit, len(prompt))
            return tuple(prompt), False
        first = 0 if body.truncation_side == "right" else max(0, len(prompt) - kept)
        return tuple(prompt[first : first + kept]), kept < len(prompt)
