"""Makes the prompts of requests: applies chat templates, tokenizes, resolves variants and saved beginnings, places
media spans, and checks prompts, variants and spans against the model.

Long texts and bodies are processed outside the event loop, so that the streams of other requests are not delayed.
"""

import asyncio
import contextvars
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
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
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.parts import first_result, hooks
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.scheduling.request import Variant
from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS, TextTooLong, Tokenizer

PROMPT_END_CHARS = 64
"""Number of characters that are kept from the end of a chat's rendered text. A template writes fewer characters than
this to open or close reasoning.
"""

HUGE = 2**18
"""Number of characters, tokens or bytes above which an input counts as huge. Processing an input may for a short time
need a hundred times the input's memory.
"""

Made = TypeVar("Made")


class OffLoop:
    """Runs functions in threads. Functions with a huge input run one at a time, and the memory that they free is
    returned to the operating system.
    """

    def __init__(self) -> None:
        # A single thread is used for huge inputs, because each thread has its own arena of the allocator, and each
        # arena keeps as much memory as it ever held.
        self._huge = ThreadPoolExecutor(1, "huge")

    async def run(self, size: int, function: Callable[..., Made], *arguments, long: int = LONG_TEXT_CHARS) -> Made:
        """Returns the function's result. For inputs of size up to `long` the function runs on the event loop.

        If the caller is cancelled while its huge input still waits for its turn, the function is not run.
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
    """Returns freed memory to the operating system, if the C library is one that keeps freed memory (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


TEMPLATES_REFUSED = "templates of requests are run only where the server's setting chat_template is 'request'"


class CutPrompt(Protocol):
    """Fields of a request's body that truncate its prompt."""

    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None

    @property
    def asked_max_tokens(self) -> int | None:
        """Maximum tokens of the answer; None if the request does not set it."""
        ...


class Beginning(Protocol):
    """Saved beginning of prompts; requests refer to it by name."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids to put before a plain prompt."""
        ...

    def before(self, body: ChatBody) -> ChatBody:
        """Returns the chat with the beginning's messages in front; raises ApiError if the beginning was not saved from
        a chat.
        """
        ...


class PromptReader(Protocol):
    """Reader of content parts other than text, for one model; every method may raise ApiError, 400."""

    async def read(self, body: ChatBody) -> Sequence[Any]:
        """Reads a request's parts other than text, in order; `num_tokens` of each result is the part's length in the
        prompt.
        """
        ...

    def expand(self, text: str, parts: Sequence[Any]) -> str:
        """Returns `text`, a conversation's text, with the placeholder tokens of its parts inserted."""
        ...

    def place(self, token_ids: Sequence[int], parts: Sequence[Any]) -> tuple[PromptSpan, ...]:
        """Returns the spans of the prompt that the parts occupy."""
        ...

    def held(self, spans: Sequence[PromptSpan]) -> AbstractContextManager[None]:
        """Context in which a request's spans count as held memory; raises EngineOverloaded if the limit would be
        exceeded.
        """
        ...


class Prompts:
    """Makes the prompts of one model's requests.

    Args:
        reader: reader of media parts; None for a text-only model.
        takes_templates: whether a request may contain a chat template.
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
        """Runs work on long texts in threads."""
        self.pool = pool
        self._tokenizer = tokenizer

    @property
    def in_parts(self) -> bool:
        """Whether the chat template receives each message's content as a list of parts, as multimodal models' templates
        expect.
        """
        return self.reader is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the base model; answers contain the first name."""
        return (self.pool.info.model_name, *self._aliases)

    def knows(self, model: str) -> bool:
        """Returns whether `model` names the base model or a variant."""
        return model in self.names or self.pool.variants.find(model) is not None

    async def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """Returns the prompts in the request's order; raises ApiError if a prompt does not fit into the model's
        context.
        """
        return await self.off_loop.run(sum(map(len, body.prompt)), self._completion_prompts, body)

    async def of_chat(self, body: ChatBody) -> Prompt:
        """Returns a conversation's prompt; raises ApiError if the template refuses the conversation or the prompt is
        too long.
        """
        if body.other_parts:
            self.variant_of(body.model)
            return await asyncio.to_thread(self._chat_prompt, body, await self.read(body))
        # The fields in `template_names` contain many short texts, and the template processes all of them, so a chat
        # with such fields counts as long.
        size = (
            LONG_TEXT_CHARS + 1
            if body.chat_template or any(getattr(body, name) for name in body.template_names)
            else sum(len(message.content) for message in body.messages)
        )
        return await self.off_loop.run(size, self._chat_prompt, body)

    async def read(self, body: ChatBody) -> Sequence[Any]:
        """Reads a request's parts other than text; raises ApiError, 400, for an unusable part."""
        if self.reader is not None:
            return await self.reader.read(body)
        part = body.other_parts[0]
        raise unserved_part(part.part_type, part.part_path, only_served())

    def held(self, spans: Sequence[PromptSpan]) -> AbstractContextManager[None]:
        """See `PromptReader.held`."""
        return self.reader.held(spans) if spans else nullcontext()

    def continued(self, body: ChatBody) -> ChatBody:
        """Returns the chat; if it names a saved beginning, the messages of the beginning come first.

        Raises the errors of `variant_of` and of the hook `beginning`.
        """
        beginning = self._beginning(body)
        return body if beginning is None else beginning.before(body)

    def variant_of(self, model: str | None) -> Variant | None:
        """Returns the variant named `model`; None for the base model. Raises ApiError, 404, if `model` is unknown."""
        if model is None or model in self.names:
            return None
        variant = self.pool.variants.find(model)
        if variant is None:
            raise unknown_model(model, ", ".join(self.names))
        return variant

    def _beginning(self, body: GenerationBody) -> Beginning | None:
        """Returns the saved beginning that a request names; None if it names none.

        Raises the errors of `variant_of` and of the hook `beginning`.
        """
        variant = self.variant_of(body.model)
        if all(getattr(body, name) is None for name in OF_PARTS):
            return None
        return first_result("beginning", self.pool, body, variant)

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
            # The echo is the text of the request, without special tokens, because the tokenizer and not the request has
            # added them.
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
        """Renders the conversation with the chat template; raises ApiError if the template refuses the conversation."""
        if body.chat_template is not None and not self._takes_templates:
            raise unsupported("chat_template", TEMPLATES_REFUSED)
        try:
            return self._rendered(body, body.template_messages(self.in_parts))
        except ValueError as error:
            for messages in chain(*(forms(body, self.in_parts) for forms in hooks("other_forms"))):
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
        """Returns a plain prompt's tokens, and whether the prompt was truncated.

        Args:
            param: field of the request that holds the prompt.

        Raises:
            ApiError: the prompt has too many tokens, or a token id is outside the vocabulary.
        """
        token_ids, is_cut = self._tokens(prompt, body, param, add_special_tokens)
        self._check_ids(token_ids, param)
        return token_ids, is_cut

    def _tokens(
        self, prompt: str | list[int], body: CutPrompt, param: str, add_special_tokens: bool
    ) -> tuple[tuple[int, ...], bool]:
        """Returns the prompt's tokens, and whether the prompt was truncated; raises ApiError for too many tokens."""
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
