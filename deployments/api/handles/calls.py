"""Methods of a router that other Serve deployments call through a handle. Arguments and results are the bodies of the
HTTP API, but no HTTP is used.
"""

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.answers.json_pieces import fragments
from wingbeat.deployments.api.answers.responses import (
    CompletionShape,
    ResponseShape,
    chat_shape,
    event_stream,
    whole_response,
)
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.bodies.unserved_fields import gather
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import as_api_error, log_failure
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.request_context import RequestContext, enter


class _Planned(NamedTuple):
    """A request ready to run on engines."""

    service: CompletionService
    generation: Generation
    shape: ResponseShape
    name: str
    """Id of the request in logs."""


class HandleCalls:
    """Methods of a router that are called through handles.

    No API key is needed, because only processes of the cluster can have a handle.

    Raises:
        ApiError: raised by each method for a request that HTTP would answer with this error. The caller gets an error
            of Serve whose cause is the ApiError.
    """

    _models: ServedModels
    _refuses_unknown_fields: bool

    async def generate(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """Returns the answer of `/v1/completions` to a prompt and other fields of the body."""
        return await self._whole(await self._completion({**fields, "prompt": prompt}))

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Returns the answer of `/v1/chat/completions` to messages and other fields of the body."""
        return await self._whole(await self._chat({**fields, "messages": messages}))

    async def stream_generate(self, prompt: str | list[int], **fields: Any) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of `/v1/completions`."""
        async for event in self._events(await self._completion({**fields, "prompt": prompt, "stream": True})):
            yield event

    async def stream_chat(self, messages: list[dict[str, Any]], **fields: Any) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of `/v1/chat/completions`."""
        async for event in self._events(await self._chat({**fields, "messages": messages, "stream": True})):
            yield event

    async def _completion(self, fields: dict[str, Any]) -> _Planned:
        name, body = self._begin(), CompletionBody.of_fields(fields)
        service = self._models.choose(body.model)
        return _Planned(service, await service.plan_completion(body), CompletionShape(), name)

    async def _chat(self, fields: dict[str, Any]) -> _Planned:
        name, body = self._begin(), ChatBody.of_fields(fields)
        service = self._models.choose(body.model)
        generation = await service.plan_chat(body)
        return _Planned(service, generation, chat_shape(generation), name)

    def _begin(self) -> str:
        """Starts the context of a request; returns the id of the request for logs."""
        name = uuid.uuid4().hex
        enter(RequestContext(name))
        gather(self._refuses_unknown_fields)
        return name

    async def _whole(self, planned: _Planned) -> dict[str, Any]:
        service, generation, shape, name = planned
        try:
            with service.sizes.held(generation.answer_bytes):
                answer = await whole_response(generation, service.run(generation), shape)
                # A `LongList` becomes a list only when it is written as JSON, so an answer with `LongList`s is written
                # as JSON and parsed again.
                return json.loads("".join(fragments(answer))) if generation.has_lists else answer
        except Exception as error:
            log_failure(error, name)
            raise as_api_error(error) from error

    async def _events(self, planned: _Planned) -> AsyncGenerator[bytes, None]:
        service, generation, shape, name = planned
        deltas = service.run(generation)
        try:
            with service.sizes.held(generation.answer_bytes):
                events = event_stream(generation, deltas, shape, name, service.turn)
                async with aclosing(events):
                    async for event in events:
                        yield event
        except Exception as error:
            raise as_api_error(error) from error
