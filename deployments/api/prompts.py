"""Prompts of requests: templates, tokens, variants, beginnings and spans, each checked against the model.

Work on long texts and bodies is outside the event loop, so that other streams keep moving.
"""

import asyncio
import contextvars
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, Protocol, TypeVar

from wingbeat.deployments.api.answers.generation import Prompt
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.content_parts import only_served, unserved_part
from wingbeat.deployments.api.bodies.requests import OF_PARTS, CompletionBody, GenerationBody
from wingbeat.deployments.api.errors import (
    invalid,
    prompt_too_long,
    shown,
    unknown_model,
    unsupported,
)
from wingbeat.deployments.api.template_forms import other_forms
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.parts import first
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.scheduling.request import Variant
from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS, TextTooLong, Tokenizer

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


TEMPLATES_REFUSED = "templates of requests are run only where the server's setting chat_template is 'request'"


class CutPrompt(Protocol):
    """A request's body, as far as it says how its prompt is cut."""

    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None

    @property
    def asked_max_tokens(self) -> int | None:
        """Tokens that the answer may have, where the request says it."""
        ...


class Beginning(Protocol):
    """Beginning of a request's prompt, which the request names."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids that a plain prompt begins by."""
        ...

    def before(self, body: ChatBody) -> ChatBody:
        """A chat request as if its client had sent the beginning; raises ApiError where that is no chat's."""
        ...


class PromptReader(Protocol):
    """Reads the parts of contents that are no text, for one model; all of it may raise ApiError, 400."""

    async def read(self, body: ChatBody) -> Sequence[Any]:
        """A request's other parts, in their order; each has `num_tokens`, which stand for it in a prompt."""
        ...

    def expand(self, text: str, parts: Sequence[Any]) -> str:
        """A conversation's text with the tokens of its parts in it."""
        ...

    def place(self, token_ids: Sequence[int], parts: Sequence[Any]) -> tuple[PromptSpan, ...]:
        """Spans of a prompt that its parts are."""
        ...

    def held(self, spans: Sequence[PromptSpan]) -> AbstractContextManager[None]:
        """While it is entered a request's spans count as held; raises EngineOverloaded where there is no room."""
        ...


class Prompts:
    """Makes the prompts of one model's requests.

    Args:
        reader: None for a model of text alone.
        takes_templates: whether requests may have a chat template of their own.
        aliases: further names of the base model.
    """

    def __init__(
        self,
        pool: EnginePool,
        tokenizer: Tokenizer,
        reader: PromptReader | None = None,
        takes_templates: bool = False,
        aliases: Sequence[str] = (),
    ) -> None:
        self.reader = reader
        self._aliases = tuple(aliases)
        self._takes_templates = takes_templates
        self.off_loop = OffLoop()
        """Where long texts are worked on."""
        self.pool = pool
        self._tokenizer = tokenizer

    @property
    def in_parts(self) -> bool:
        """Whether the chat template is given contents in parts: that of a model that takes more than text."""
        return self.reader is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the base model, the one that answers bear first."""
        return (self.pool.info.model_name, *self._aliases)

    def knows(self, model: str) -> bool:
        """Whether it is a name of the base model or of a variant."""
        return model in self.names or self.pool.variants.find(model) is not None

    async def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """In the request's order; raises ApiError where one does not fit the model."""
        return await self.off_loop.run(sum(map(len, body.prompt)), self._completion_prompts, body)

    async def of_chat(self, body: ChatBody) -> Prompt:
        """The conversation; raises ApiError where the template refuses it, or it is too long."""
        if body.other_parts:
            self.variant_of(body.model)
            return await asyncio.to_thread(self._chat_prompt, body, await self.read(body))
        # A template goes through all of these, which are many short texts.
        size = (
            LONG_TEXT_CHARS + 1
            if body.chat_template or any(getattr(body, name) for name in body.template_names)
            else sum(len(message.content) for message in body.messages)
        )
        return await self.off_loop.run(size, self._chat_prompt, body)

    async def read(self, body: ChatBody) -> Sequence[Any]:
        """A request's parts that are no text; raises ApiError, 400 naming the part that cannot be used."""
        if self.reader is not None:
            return await self.reader.read(body)
        part = body.other_parts[0]
        raise unserved_part(part.part_type, part.part_path, only_served())

    def held(self, spans: Sequence[PromptSpan]) -> AbstractContextManager[None]:
        """See `PromptReader.held`."""
        return self.reader.held(spans) if spans else nullcontext()

    def continued(self, body: ChatBody) -> ChatBody:
        """A chat with the messages that it goes on from; raises ApiError as `beginning` of parts."""
        beginning = self._beginning(body)
        return body if beginning is None else beginning.before(body)

    def variant_of(self, model: str | None) -> Variant | None:
        """What runs on top of the base model; raises ApiError, 404, for the name of another model."""
        if model is None or model in self.names:
            return None
        variant = self.pool.variants.find(model)
        if variant is None:
            raise unknown_model(model, ", ".join(self.names))
        return variant

    def _beginning(self, body: GenerationBody) -> Beginning | None:
        """Beginning that a request names; raises ApiError as `variant_of`, and as parts do."""
        variant = self.variant_of(body.model)
        if all(getattr(body, name) is None for name in OF_PARTS):
            return None
        return first("beginning", self.pool, body, variant)

    def _completion_prompts(self, body: CompletionBody) -> list[Prompt]:
        return [self._completion_prompt(prompt, body) for prompt in body.prompt]

    def _completion_prompt(self, prompt: str | list[int], body: CompletionBody) -> Prompt:
        echo, beginning = prompt if isinstance(prompt, str) else None, self._beginning(body)
        adds = beginning is None if body.add_special_tokens is None else body.add_special_tokens
        token_ids, is_cut = self.tokens(prompt, body, "prompt", adds)
        if beginning is not None:
            token_ids, echo = (*beginning.token_ids, *token_ids), None
        if not body.echo:
            return Prompt(token_ids)
        if echo is not None and not is_cut:
            # A text holds none of the special tokens that the tokenizer has put around it.
            return Prompt(token_ids, echo)
        skips = body.skip_special_tokens is not False
        return Prompt(token_ids, self._tokenizer.decode(token_ids, skips), echo_skips_special=skips)

    def _check_ids(self, token_ids: tuple[int, ...], param: str) -> None:
        vocab_size = self.pool.info.vocab_size
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

    def _chat_prompt(self, body: ChatBody, parts: Sequence[Any] = ()) -> Prompt:
        text = self.chat_text(body)
        if (num_tokens := sum(one.num_tokens for one in parts)) > self.pool.info.max_model_len:
            raise prompt_too_long("messages", self.pool.info.max_model_len, num_tokens)
        expanded = self.reader.expand(text, parts) if parts else text
        token_ids, _ = self._tokens(expanded, body, "messages", bool(body.add_special_tokens))
        placed = self.reader.place(token_ids, parts) if parts else ()
        return Prompt(token_ids, end=text[-PROMPT_END_CHARS:], spans=placed)

    def tokens(
        self, prompt: str | list[int], body: CutPrompt, param: str, add_special_tokens: bool
    ) -> tuple[tuple[int, ...], bool]:
        """A plain prompt's tokens, and whether its beginning was cut off.

        Args:
            param: where the request has the prompt.

        Raises:
            ApiError: there are too many, or one is not in the vocabulary.
        """
        token_ids, is_cut = self._tokens(prompt, body, param, add_special_tokens)
        self._check_ids(token_ids, param)
        return token_ids, is_cut

    def _tokens(
        self, prompt: str | list[int], body: CutPrompt, param: str, add_special_tokens: bool
    ) -> tuple[tuple[int, ...], bool]:
        """The prompt's tokens, and whether its beginning was cut off; raises ApiError where there are too many."""
        limit, kept = self.pool.info.max_model_len, body.truncate_prompt_tokens
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
