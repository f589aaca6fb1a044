"""`/tokenize`, `/detokenize` and `/tokenizer_info` in vLLM's form, for clients that count or compare tokens."""

from array import array
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple, Self

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from wingbeat.deployments.api.answers.answering import read_body, written_answer
from wingbeat.deployments.api.answers.json_pieces import LongList, LongPart
from wingbeat.deployments.api.bodies.chat_requests import ChatBody, described
from wingbeat.deployments.api.bodies.request_body import RequestBody, read_object
from wingbeat.deployments.api.bodies.unserved_fields import refused
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import invalid, shown
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS

MAX_TOKENS = 2**20
IDS_AT_ONCE = 2**10
"""Number of token ids in one piece of an answer."""
CHAT_FIELDS = frozenset(
    (
        *("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "model"),
        *ChatBody.template_names,
    )
)


class Fields(NamedTuple):
    """Fields of a body, parsed but not validated. Used before it is known whether the body has a text or a chat."""

    fields: dict[str, Any]

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses a body; raises ApiError if it is not a JSON object."""
        return cls(read_object(body))


class TokenizeBody(described(CHAT_FIELDS)):
    """`POST /tokenize` of a text or of a conversation."""

    unserved: ClassVar = {
        "chat_template": refused("the prompt would be another one"),
        "mm_processor_kwargs": refused("images and audio are not counted here"),
    }

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether special tokens are added. By default they are added to a text but not to a conversation, whose template
    writes them.
    """
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_TOKENS)


BODIES = {"/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}


def add_token_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds the three endpoints."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = (await read_body(Fields, request)).fields
        if "messages" in fields:
            return await _tokenize_chat(models, fields)
        body = TokenizeBody.of_fields(fields)
        service = models.choose(body.model)
        if body.prompt is None:
            raise invalid("prompt", "is missing: give a text, or 'messages'")
        adds = body.add_special_tokens is not False
        token_ids = await service.prompts.off_loop.run(len(body.prompt), _encoded, service, body.prompt, adds)
        return await _answer(service, token_ids, bool(body.return_token_strs))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_body(DetokenizeBody, request)
        service = models.choose(body.model)
        _check_ids(body.tokens, service.pool.info.vocab_size)
        return {
            "prompt": await service.prompts.off_loop.run(len(body.tokens), service.tokenizer.decode, body.tokens, False)
        }

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> dict[str, Any]:
        service = models.choose(request.query_params.get("model"))
        return _description(service.tokenizer.hugging_face)


async def _tokenize_chat(models: ServedModels, fields: dict[str, Any]) -> Response:
    own = TokenizeBody.of_fields({name: value for name, value in fields.items() if name not in CHAT_FIELDS})
    if own.prompt is not None:
        raise invalid("prompt", "is given beside 'messages'; give one of them")
    body = ChatBody.of_fields({name: value for name, value in fields.items() if name in CHAT_FIELDS})
    service = models.choose(body.model)
    if body.other_parts:
        raise invalid(body.other_parts[0].path, "is not counted here; only text is")
    text = await service.prompts.off_loop.run(LONG_TEXT_CHARS + 1, service.prompts.chat_text, body)
    token_ids = await service.prompts.off_loop.run(len(text), _encoded, service, text, bool(own.add_special_tokens))
    return await _answer(service, token_ids, bool(own.return_token_strs))


def _encoded(service: CompletionService, text: str, add_special_tokens: bool) -> array:
    """Returns token ids as a compact array, because the ids stay in memory until a slow client has read them."""
    return array("i", service.tokenizer.encode(text, add_special_tokens))


async def _answer(service: CompletionService, token_ids: array, with_strings: bool) -> Response:
    """Writes the answer in pieces, because a long text can have as many tokens as characters."""

    def spelled(token_id: int) -> str:
        return service.tokenizer.pieces((token_id,))[0]

    body = {
        "count": len(token_ids),
        "max_model_len": service.pool.info.max_model_len,
        "tokens": LongList(LongPart(token_ids, batch=IDS_AT_ONCE)),
        "token_strs": LongList(LongPart(token_ids, spelled, batch=IDS_AT_ONCE)) if with_strings else None,
    }
    with ExitStack() as held:
        held.enter_context(service.sizes.held(token_ids.itemsize * len(token_ids)))
        return await written_answer(body, service.turn, held)


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    ends = (min(token_ids, default=0), max(token_ids, default=0))
    outside = next((token_id for token_id in ends if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        problem = f"holds token id {shown(str(outside))}; the vocabulary has ids 0 to {vocab_size - 1}"
        raise invalid("tokens", problem)


def _description(tokenizer: Any) -> dict[str, Any]:
    """Returns special tokens and chat template of a tokenizer, under the names of `tokenizer_config.json`."""
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        **{name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in tokenizer.added_tokens_decoder.items()
        },
        "chat_template": tokenizer.chat_template,
    }
