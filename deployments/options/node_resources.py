"""Custom Ray resources, with which an operator restricts processes to certain nodes."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from wingbeat.deployments.options.words import object_of_json

_RAYS_OWN = {"CPU", "GPU", "memory", "object_store_memory"}


def _read(value: Any) -> Any:
    return object_of_json(value, '{"cheap_gpu": 1}')


def _check(value: dict[str, float] | None) -> dict[str, float] | None:
    for name, amount in (value or {}).items():
        if name in _RAYS_OWN or not name or not 0 < amount < float("inf"):
            raise ValueError(f"{name!r} is {amount}: give amounts above 0 of resources other than CPU and GPU")
    return value


NodeResources = Annotated[dict[str, float] | None, BeforeValidator(_read), AfterValidator(_check)]
"""Type of settings with custom Ray resources: a mapping from a resource's name to the amount that each process reserves
on its node. On the command line the value is JSON.
"""
