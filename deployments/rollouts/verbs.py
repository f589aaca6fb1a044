"""Rollout verbs, with the names, fields and answers that vLLM has for them. HTTP and Serve handles use the same
verbs. Methods of SkyRL's worker extension, which SkyRL's client calls through `/collective_rpc`, become verbs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from wingbeat.deployments.rollouts.fleet_rollouts import Conflict, FleetRollouts, Refused
from wingbeat.deployments.rollouts.wire import PauseMode


class _SkyRlVerb(NamedTuple):
    """Verb that is run in place of a method of SkyRL."""

    name: str
    fields: Mapping[str, Any] = {}
    """Fields of the verb that are set in addition to the method's arguments."""
    dropped: frozenset[str] = frozenset()
    """Arguments of the method that are ignored."""


# Requests that run when SkyRL pauses are kept during the sleep and prefilled again afterwards. So no keys and values
# are saved, and `offload_kv` is ignored.
_SKYRL_METHODS = {
    "skyrl_start_weight_update": _SkyRlVerb("start_weight_update"),
    "update_weights_nccl": _SkyRlVerb("update_weights"),
    "skyrl_finish_weight_update": _SkyRlVerb("finish_weight_update"),
    "skyrl_sleep_for_weight_sync": _SkyRlVerb("sleep", {"level": 2, "mode": "keep"}, frozenset({"offload_kv"})),
    "skyrl_wake_for_weight_sync": _SkyRlVerb("wake_up"),
}


def as_verb(method: str, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the verb and its fields for a method of SkyRL. For any other method, its name and fields are returned
    unchanged.
    """
    verb = _SKYRL_METHODS.get(method, _SkyRlVerb(method))
    return verb.name, {name: value for name, value in fields.items() if name not in verb.dropped} | dict(verb.fields)


Answer = dict[str, Any]


class Verb(NamedTuple):
    """A verb (operation for operators) with its function and fields."""

    run: Callable[..., Awaitable[Answer]]
    shape: type[Any]
    """Fields of the verb, as a pydantic model."""
    reads: bool = False
    """Whether the verb only reads, so that HTTP serves it by GET."""

    def fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Validate fields and return them; raises Refused, whose message begins with the name of the wrong field."""
        try:
            return dict(TypeAdapter(self.shape).validate_python(dict(given)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"])) or "body"
            message = "is not a field of this path" if first["type"] == "extra_forbidden" else first["msg"]
            raise Refused(f"{name} {message[0].lower()}{message[1:]}") from None


VERBS: dict[str, Verb] = {}


def verb(reads: bool = False, **fields: Any) -> Callable[[Callable[..., Awaitable[Answer]]], Any]:
    """Return a decorator that adds a verb under the function's name. Each field is a tuple (type, default), or (type,
    ...) if the field is required.
    """

    def add(run: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
        shape = create_model(run.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        VERBS[run.__name__] = Verb(run, shape, reads)
        return run

    return add


Text = str | None


@verb(mode=(PauseMode, "abort"), wait_for_inflight_requests=(bool, False), clear_cache=(bool, True))
async def pause(
    fleet: FleetRollouts, mode: str, wait_for_inflight_requests: bool = False, clear_cache: bool = True
) -> Answer:
    """Stop running rounds; depending on the mode, requests are aborted, are finished first, or are kept until
    `resume`.
    """
    await fleet.ask("pause", "wait" if wait_for_inflight_requests else mode, clear_cache)
    return {"status": "paused"}


@verb()
async def resume(fleet: FleetRollouts) -> Answer:
    """Run rounds again."""
    await fleet.ask("resume")
    return {"status": "resumed"}


@verb(reads=True)
async def is_paused(fleet: FleetRollouts) -> Answer:
    """Return whether rounds are held by a pause or a sleep."""
    return {"is_paused": await fleet.ask("is_paused")}


@verb(level=(Literal["0", "1", "2", 0, 1, 2], 1), mode=(PauseMode, "abort"))
async def sleep(fleet: FleetRollouts, level: int | str, mode: str) -> Answer:
    """Free the memory of the KV cache; at level 2 also the memory of the weights."""
    await fleet.ask("check_sleep", int(level))
    await fleet.ask("pause", mode)
    try:
        await fleet.ask("sleep", int(level))
    except Conflict:
        if int(level) == 1:  # the other engines have lost nothing, so they do not sleep either
            await fleet.ask("wake_up")
            await fleet.ask("pause", "keep")
        raise
    return {"status": "sleeping"}


@verb(tags=(list[str] | str | None, None))
async def wake_up(fleet: FleetRollouts, tags: list[str] | str | None = None) -> Answer:
    """Restore memory that a sleep has freed."""
    await fleet.ask("wake_up", [tags] if isinstance(tags, str) else tags)
    return {"status": "awake"}


VERBS["wakeup"] = VERBS["wake_up"]  # Ray Serve LLM's name


@verb(reads=True)
async def is_sleeping(fleet: FleetRollouts) -> Answer:
    """Return whether a sleep has freed memory."""
    return {"is_sleeping": await fleet.ask("is_sleeping")}


@verb(request_ids=(list[str] | None, None))
async def abort_requests(fleet: FleetRollouts, request_ids: list[str] | None = None) -> Answer:
    """End requests with the tokens that they have so far; without `request_ids`, end all requests."""
    if request_ids:
        raise Refused("request_ids must be left out: one request is aborted by closing its connection")
    return {"status": "aborted", "aborted": await fleet.ask("abort_requests")}


@verb(reads=True, include_dp=(bool, True))
async def get_world_size(fleet: FleetRollouts, include_dp: bool = True) -> Answer:
    """Return the number of processes in a trainer's process group, not counting the trainer."""
    return {"world_size": fleet.num_engines if include_dp else 1}


@verb(init_info=(dict[str, Any], ...))
async def init_weight_transfer_engine(fleet: FleetRollouts, init_info: dict[str, Any]) -> Answer:
    """Prepare all engines for the updates of a trainer."""
    await fleet.init_transfer(init_info)
    return {"message": "Weight transfer initialized"}


@verb(is_checkpoint_format=(bool, True))
async def start_weight_update(fleet: FleetRollouts, is_checkpoint_format: bool = True) -> Answer:
    """Begin a weight update."""
    if not is_checkpoint_format:
        raise Refused("is_checkpoint_format must be true: tensors have the names of the checkpoint")
    await fleet.ask("start_update")
    return {"message": "Weight update started"}


@verb()
async def start_draft_weight_update(fleet: FleetRollouts) -> Answer:
    """Begin an update of the draft head."""
    await fleet.ask("start_head_update")
    return {"message": "Draft weight update started"}


@verb(update_info=(dict[str, Any], ...), checksum=(bool, False))
async def update_weights(fleet: FleetRollouts, update_info: dict[str, Any], checksum: bool = False) -> Answer:
    """Write tensors of the open update; with `checksum`, the end of the update reports the checksums of all weights."""
    await fleet.ask("update_weights", update_info, checksum)
    return {"message": "Weights updated"}


@verb(weight_version=(Text, None), keep_kv=(bool, False))
async def finish_weight_update(fleet: FleetRollouts, weight_version: Text = None, keep_kv: bool = False) -> Answer:
    """End the open update and serve the written weights."""
    done = await fleet.finish_update(weight_version, keep_kv)
    answer: Answer = {"message": "Weight update finished", "num_tensors": done.num_tensors}
    return answer if done.checksums is None else answer | {"checksums": done.checksums}


@verb()
async def abort_weight_update(fleet: FleetRollouts) -> Answer:
    """End the open update before it is finished."""
    await fleet.ask("abandon_update")
    return {"message": "Weight update aborted"}


@verb(new_version=(str, ...))
async def update_weight_version(fleet: FleetRollouts, new_version: str) -> Answer:
    """Set the name of the weights."""
    return {"success": True, "new_version": await fleet.ask("weight_version", new_version)}


@verb(reads=True)
async def weight_info(fleet: FleetRollouts) -> Answer:
    """Return the name of the weights."""
    return {"weight_version": await fleet.ask("weight_version")}


@verb()
async def reload_weights(fleet: FleetRollouts) -> Answer:
    """Write the weights of the checkpoint again."""
    await fleet.ask("start_update")
    await fleet.ask("update_weights", {"checkpoint": True})
    done = await fleet.finish_update(None, False, of_checkpoint=True)
    return {"message": "Weights reloaded", "num_tensors": done.num_tensors}


@verb(action=(Literal["checksum", "reset", "compare"], ...), baseline=(dict[str, str] | None, None))
async def weight_checker(fleet: FleetRollouts, action: str, baseline: dict[str, str] | None = None) -> Answer:
    """Depending on `action`: return checksums of the weights, compare them with `baseline`, or overwrite the weights
    with noise.
    """
    if action == "reset":
        await fleet.ask("scramble_weights")
        return {"status": "reset"}
    if action == "compare" and baseline is None:
        raise Refused("baseline must be given to compare with")
    checksums: dict[str, str] = await fleet.ask("weight_checksums")
    if baseline is None or action == "checksum":
        return {"checksums": checksums}
    differ = sorted(name for name in checksums.keys() | baseline.keys() if checksums.get(name) != baseline.get(name))
    return {"match": not differ, "mismatches": differ, "ranks": list(range(fleet.num_engines))}


@verb(method=(str, ...), args=(list[Any], []), kwargs=(dict[str, Any], {}), timeout=(float | None, None))
async def collective_rpc(
    fleet: FleetRollouts, method: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None = None
) -> Answer:
    """Run another verb, given by its own name or by the name of SkyRL's method for it; any other name is refused."""
    method, kwargs = as_verb(method, kwargs)
    if method not in VERBS or method == "collective_rpc":
        raise Refused(f"method is {method!r}: must be one of {', '.join(sorted(VERBS.keys() - {'collective_rpc'}))}")
    chosen = VERBS[method]
    if args:
        names = list(chosen.shape.model_fields)
        if len(args) > len(names):
            raise Refused(f"args has {len(args)} values: {method} takes {len(names)}")
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    try:
        async with asyncio.timeout(timeout):
            answer = await chosen.run(fleet, **chosen.fields(kwargs))
    except TimeoutError:
        raise Conflict(f"{method} has not been done within {timeout:g} s") from None
    return {"results": [answer] * fleet.num_engines}
