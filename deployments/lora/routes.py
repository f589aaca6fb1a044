"""vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, for operators of a server that allows them."""

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from wingbeat.deployments.api.answers.answering import read_body
from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.api.errors import ApiError, invalid, shown
from wingbeat.deployments.api.field_names import field_names
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.lora.fleet import AdapterExists, AdapterRefused, FleetAdapters
from wingbeat.runtime.lora.names import MOST_NAME_CHARS, name_problem

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadAdapterBody(RequestBody):
    """`POST /v1/load_lora_adapter`: load an adapter."""

    lora_name: str = Field(min_length=1, max_length=MOST_NAME_CHARS)
    lora_path: str = Field(min_length=1, max_length=4096)
    """Folder of the adapter below `lora_update_dir`; a relative path is relative to `lora_update_dir`."""
    load_inplace: bool | None = None
    """Whether an existing adapter of that name may be replaced."""
    base_model_name: str | None = Field(None, max_length=MOST_NAME_CHARS)
    """Base model of the adapter; required if several models are served."""


class UnloadAdapterBody(RequestBody):
    """`POST /v1/unload_lora_adapter`: unload an adapter."""

    lora_name: str = Field(min_length=1, max_length=MOST_NAME_CHARS)
    lora_int_id: int | None = None
    """vLLM's number of the adapter; ignored, because the name is sufficient."""


BODIES = {LOAD_PATH: LoadAdapterBody, UNLOAD_PATH: UnloadAdapterBody}
"""Body class of each path; the paths are for operators only."""


def add_adapter_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the endpoints that load and unload adapters."""

    @app.post(LOAD_PATH)
    async def load(request: Request) -> PlainTextResponse:
        with none_ignored():
            body = await read_body(LoadAdapterBody, request)
        if (problem := name_problem(body.lora_name)) is not None:
            raise invalid("lora_name", problem)
        if body.lora_name in models.names():
            raise invalid("lora_name", "is the name of the base model")
        with field_names({"model": "base_model_name"}):
            service = models.choose(body.base_model_name)
        if any(other is not service and other.prompts.knows(body.lora_name) for other in models):
            raise invalid("lora_name", "is the name of an adapter of another model")
        try:
            await FleetAdapters(service.pool).load(body.lora_name, body.lora_path, bool(body.load_inplace))
        except AdapterExists:
            raise invalid("lora_name", "is loaded already; set 'load_inplace' to replace it") from None
        except AdapterRefused as error:
            raise invalid("lora_path", f"cannot be served: {error}") from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post(UNLOAD_PATH)
    async def unload(request: Request) -> PlainTextResponse:
        with none_ignored():
            body = await read_body(UnloadAdapterBody, request)
        for service in models:
            if await FleetAdapters(service.pool).delete(body.lora_name) is not None:
                break
        else:
            message = f"The lora adapter {shown(body.lora_name)!r} cannot be found."
            raise ApiError(message, status=404, param="lora_name", code="model_not_found")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
