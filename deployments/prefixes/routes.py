"""`/v1/prefixes`: beginnings of prompts that, at an operator's request, the engines compute once and keep."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request

from wingbeat.deployments.api.bodies.chat_requests import ChatBody, described
from wingbeat.deployments.api.bodies.request_body import read_object
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import ApiError, invalid
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.prefixes.beginnings import (
    VARIABLES,
    as_conversation,
    conversation_tokens,
    prompt_tokens,
    unknown_prefix,
)
from wingbeat.deployments.prefixes.fleet import FleetPrefixes, PrefixExists, PrefixRefused
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix, is_prefix_name

PREFIXES_PATH = "/v1/prefixes"
_CHAT_FIELDS = frozenset(("messages", *VARIABLES))
Fleets = Mapping[CompletionService, FleetPrefixes]
"""The saved prefixes of each model; the keys are the models' services."""


class SavePrefixBody(described(_CHAT_FIELDS)):
    """`POST /v1/prefixes`: save a prefix, or load a saved prefix from disk."""

    name: str
    model: str | None = None
    prompt: str | list[int] | None = None
    """Text of the prefix, or its token ids; alternative to `messages`."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens around the prompt; true by default."""
    replace: bool | None = None
    """Whether an existing prefix of that name may be replaced."""


PATHS = (PREFIXES_PATH, PREFIXES_PATH + "/{name}")
BODIES = {PREFIXES_PATH: SavePrefixBody}


def add_prefix_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the endpoints that list, save and delete prefixes."""
    fleets = {service: FleetPrefixes(service.pool) for service in models}

    @app.api_route(PREFIXES_PATH, methods=["GET", "POST"])
    async def prefixes(request: Request) -> dict[str, Any]:
        if request.method == "GET":
            return await _listed(fleets)
        with none_ignored():
            return await _save(models, fleets, read_object(await request.body()))

    @app.delete(PATHS[1])
    async def delete(name: str, request: Request) -> dict[str, Any]:
        model = request.query_params.get("model")
        for service in models if model is None else [models.choose(model)]:
            if fleets[service].catalog.find(name) is not None and await fleets[service].delete(name):
                return {"object": "prefix", "name": name, "deleted": True}
        raise unknown_prefix(name, "name")


async def _save(models: ServedModels, fleets: Fleets, fields: dict[str, Any]) -> dict[str, Any]:
    own = SavePrefixBody.of_fields({name: value for name, value in fields.items() if name not in _CHAT_FIELDS})
    if not is_prefix_name(own.name):
        problem = "must be 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first"
        raise invalid("name", problem)
    service = models.choose(own.model)
    fleet = fleets[service]
    param, prefix = await _read(service, fleet, own, {name: fields[name] for name in _CHAT_FIELDS & fields.keys()})
    try:
        saved = await fleet.save(prefix, bool(own.replace))
    except PrefixExists:
        raise invalid("name", "is taken; set 'replace' to put another prefix in its place") from None
    except PrefixRefused as error:
        raise ApiError(f"'{param}' {error}.", param=param, code=error.code) from None
    found = (card for card in (await _listed({service: fleet}))["data"] if card["name"] == saved.name)
    return next(found, _card(service, saved, []))


async def _read(
    service: CompletionService, fleet: FleetPrefixes, own: SavePrefixBody, chat: dict[str, Any]
) -> tuple[str, SavedPrefix]:
    """Return the name of the body's field that contains the prefix, and the prefix."""
    tokenizer, limit = service.tokenizer, service.pool.info.max_model_len
    variant = service.pool.variants.find(own.model) if own.model is not None else None
    if chat.get("messages") is not None:
        if own.prompt is not None or own.add_special_tokens is not None:
            param = "prompt" if own.prompt is not None else "add_special_tokens"
            raise invalid(param, "is given beside 'messages'; give one of them")
        body, reader = ChatBody.of_fields(chat), service.prompts.reader
        read = await service.prompts.read(body) if body.other_parts else ()
        token_ids = await asyncio.to_thread(
            conversation_tokens,
            tokenizer,
            body,
            limit,
            service.prompts.in_parts,
            (lambda text: reader.expand(text, read)) if read else str,
        )
        spans = reader.place(token_ids, read) if read else ()
        # If there are media parts, the messages are kept in the form in which the client sent them.
        conversation = json.dumps(chat) if spans else as_conversation(body)
        return "messages", SavedPrefix(own.name, 0, token_ids, variant, conversation, spans)
    beside = sorted(name for name in chat if chat[name] is not None)
    if beside:
        raise invalid(beside[0], "needs 'messages'")
    if own.prompt is not None:
        adds = own.add_special_tokens is not False
        token_ids = await asyncio.to_thread(prompt_tokens, tokenizer, own.prompt, adds, limit)
        return "prompt", SavedPrefix(own.name, 0, token_ids, variant)
    prefix = await fleet.stored(own.name)
    if prefix is None:
        raise invalid("name", "is of no file in prefix_dir; give 'messages' or 'prompt'")
    if prefix.variant is not None:
        variant = service.pool.variants.find(prefix.variant.name)
        if variant is None:
            raise invalid("name", f"is of the adapter {prefix.variant.name!r}, which is not loaded")
    return "name", prefix._replace(variant=variant)


async def _listed(fleets: Fleets) -> dict[str, Any]:
    """Return all prefixes, each with the figures that the engines report about it."""
    cards, engines = [], []
    for service, fleet in fleets.items():
        described = await fleet.describe()
        cards += [_card(service, prefix, described) for prefix in fleet.catalog.things]
        engines += described
    return {
        "object": "list",
        "data": cards,
        "pinned_tokens": max(engine["pinned_tokens"] for engine in engines),
        "max_pinned_tokens": min(engine["max_pinned_tokens"] for engine in engines),
    }


def _card(service: CompletionService, prefix: SavedPrefix, engines: list[dict[str, Any]]) -> dict[str, Any]:
    key = prefix.name, prefix.version
    held = [one for engine in engines for one in engine["prefixes"] if (one["name"], one["version"]) == key]
    figures = held[0] if held else {"blocks": 0, "bytes": 0, "saved": None}
    return {
        "object": "prefix",
        "name": prefix.name,
        "model": service.pool.info.model_name if prefix.variant is None else prefix.variant.name,
        "tokens": len(prefix.token_ids),
        "blocks": figures["blocks"],
        "bytes": figures["bytes"],
        "engines": len(held),
        "saved": figures["saved"],
    }
