"""An application that asks the one named `llm_app` by its handle."""

import json
from typing import Any

from ray import serve
from ray.exceptions import RayTaskError
from starlette.requests import Request

FIELDS: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Caller:
    """Asks in each way that a handle has."""

    async def __call__(self, request: Request) -> dict[str, Any]:
        prompt = (await request.json())["prompt"]
        messages = [{"role": "user", "content": prompt}]
        handle = serve.get_app_handle("llm_app")
        streams = handle.options(stream=True)
        return {
            "generate": await handle.generate.remote(prompt, **FIELDS),
            "chat": await handle.chat.remote(messages, **FIELDS),
            "streamed": "".join(
                [choice["text"] async for choice in _choices(streams.stream_generate.remote(prompt, **FIELDS))]
            ),
            "streamed_chat": "".join(
                [
                    choice["delta"].get("content") or ""
                    async for choice in _choices(streams.stream_chat.remote(messages, **FIELDS))
                ]
            ),
            "error": await _error(handle.generate.remote(prompt, model="another")),
        }


async def _choices(events: Any) -> Any:
    """Choices in all chunks of server-sent events."""
    told = b"".join([event async for event in events]).decode()
    for line in told.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                yield choice


async def _error(answer: Any) -> list[Any]:
    try:
        await answer
    except RayTaskError as error:
        return [error.cause.status, error.cause.param]
    return []


app = Caller.bind()
