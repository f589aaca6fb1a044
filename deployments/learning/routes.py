"""`/v1/drafter`: versions of the draft head, the acceptance of each version's drafts, and the served version."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field

from wingbeat.deployments.api.answers.answering import read_body
from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.api.errors import ApiError, invalid
from wingbeat.deployments.learning.folder import ledger_of
from wingbeat.deployments.metrics.fleet_figures import FleetFigures, FleetSnapshot
from wingbeat.runtime.learning.head_counts import Accepted
from wingbeat.runtime.learning.head_versions import HeadLedger, learner_figures
from wingbeat.runtime.learning.ledger import Ledger, LedgerError

DRAFTER_PATH = "/v1/drafter"
PROMOTE_PATH, ROLLBACK_PATH = DRAFTER_PATH + "/promote", DRAFTER_PATH + "/rollback"
REPAIR_PATH = DRAFTER_PATH + "/repair"
INCOMING = "incoming"
"""Subfolder of the ledger's folder for heads that operators provide."""
TOLD_S, LOOK_S = 10.0, 0.2
"""TOLD_S: maximum seconds to wait for drafters to refuse a version that does not fit, which they can do only after
reading it. LOOK_S: seconds between two checks whether a drafter has refused.
"""
FILES = ("config.json", "mask_embedding.pt", "model.safetensors", "model.safetensors.index.json")
_INNER = {"folder", "digest", "promotions"}
"""Internal fields of a version, which are not shown."""
SIGMAS = 1.96
"""Half width of the displayed 95 % intervals, in standard errors."""


class PromoteBody(RequestBody):
    """`POST /v1/drafter/promote`: serve a version of the draft head."""

    version: int | None = Field(None, ge=0)
    """Number of an existing version."""
    folder: str | None = Field(None, min_length=1, max_length=4096)
    """Alternative to `version`: path of a head's folder below the subfolder `incoming` of the folder with the
    versions.
    """
    verifier: str | None = None
    """Refused, because weights of the verifier are pushed by /v1/weights/update."""
    reason: str = Field("an operator asks for it", max_length=1024)


class RollbackBody(RequestBody):
    """`POST /v1/drafter/rollback`: serve the version before the current one."""

    reason: str = Field("an operator asks for it", max_length=1024)


class RepairBody(RequestBody):
    """`POST /v1/drafter/repair`: replace an unreadable ledger."""


@dataclass(frozen=True)
class HeadVersions:
    """A router's view of the head's versions."""

    ledger: HeadLedger
    fleet: FleetFigures | None
    """Figures of the fleet; None without metrics."""

    async def described(self) -> dict[str, Any]:
        """Return the answer of `GET /v1/drafter`."""
        ledger = await _told(self.ledger.read)
        snapshot = None if self.fleet is None else await self.fleet.snapshot()
        learner = await asyncio.to_thread(learner_figures, self.ledger.folder)
        return {"object": "drafter", **_card(ledger, snapshot), "learner": learner, "folder": str(self.ledger.folder)}

    async def drafting(self) -> int:
        """Return the version with which most engines draft; 0 if there are no metrics."""
        snapshot = None if self.fleet is None else await self.fleet.snapshot()
        drafting = Counter(figures["head_version"] for figures in (snapshot.engines if snapshot else {}).values())
        return drafting.most_common(1)[0][0] if drafting else 0


BODIES = {PROMOTE_PATH: PromoteBody, ROLLBACK_PATH: RollbackBody, REPAIR_PATH: RepairBody}
"""Body class of each endpoint that changes the served version, by path. These endpoints are for operators only."""


def add_router_routes(app: FastAPI, fronts: Sequence[Any]) -> None:
    """Add `/v1/drafter` if the head of a model is trained; `fronts` are a router's `ModelFront`s."""
    front = next((one for one in fronts if one.config.learn is not None), None)
    if front is not None:
        add_drafter_routes(app, HeadVersions(ledger_of(front.config), front.figures))


def add_drafter_routes(app: FastAPI, heads: HeadVersions) -> None:
    """Add the endpoints below `/v1/drafter`."""
    ledger = heads.ledger

    @app.get(DRAFTER_PATH)
    async def drafter() -> dict[str, Any]:
        return await heads.described()

    @app.post(PROMOTE_PATH)
    async def promote(request: Request) -> dict[str, Any]:
        with none_ignored():
            body = await read_body(PromoteBody, request)
        if body.verifier is not None:
            raise invalid("verifier", "is pushed by POST /v1/weights/update")
        if (body.version is None) == (body.folder is None):
            raise invalid("version", "or 'folder' must be given, and not both")
        number = body.version
        if number is None:
            source = await asyncio.to_thread(_incoming, ledger, body.folder or "")
            number = await _told(lambda: ledger.add(partial(_copy, source), "operator", body.reason, serve=True))
        else:
            await _told(lambda: ledger.promote(number, body.reason))
        await _not_refused(ledger, number, "version" if body.folder is None else "folder")
        return await heads.described()

    @app.post(ROLLBACK_PATH)
    async def roll_back(request: Request) -> dict[str, Any]:
        with none_ignored():
            body = await read_body(RollbackBody, request)
        await _told(lambda: ledger.roll_back(body.reason))
        return await heads.described()

    @app.post(REPAIR_PATH)
    async def repair(request: Request) -> dict[str, Any]:
        with none_ignored():
            await read_body(RepairBody, request)
        served = await heads.drafting()
        await _told(lambda: ledger.repair(served))
        return await heads.described()


async def _told(call: Callable[[], Any]) -> Any:
    """Run a ledger's method in a thread and return its result.

    Raises:
        ApiError: 409 if the ledger refuses; 500 if its folder cannot be read or written.
    """
    try:
        return await asyncio.to_thread(call)
    except LedgerError as error:
        raise ApiError(f"{str(error)[:1].upper()}{str(error)[1:]}.", status=409, code="head_version") from None
    except OSError as error:
        message = f"The folder of the versions: {error}."
        raise ApiError(message, status=500, kind="server_error", code="head_version") from error


async def _not_refused(ledger: HeadLedger, number: int, param: str) -> None:
    """Wait until drafters have loaded or refused a version, but at most `TOLD_S`.

    Raises:
        ApiError: a drafter has refused the version; the error contains the reason.
    """
    deadline = asyncio.get_running_loop().time() + TOLD_S
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(LOOK_S)
        version = (await _told(ledger.read)).version(number)
        if version.state == "refused":
            raise invalid(param, f"cannot be served: {version.reason}")
        if version.taken:
            return


def _incoming(ledger: HeadLedger, name: str) -> Path:
    root = ledger.folder / INCOMING
    try:
        root, source = root.resolve(), (root / name).resolve()
        if source.is_relative_to(root) and (source / "config.json").is_file():
            return source
    # raised, for example, if the path contains a NUL, a name that is too long, or a cycle of links
    except (ValueError, OSError, RuntimeError) as error:
        raise invalid("folder", f"must be a head's folder below {root}: {error}") from None
    raise invalid("folder", f"must be a head's folder below {root}")


def _copy(source: Path, folder: Path) -> None:
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for shard in source.glob("model-*.safetensors"):
        shutil.copyfile(shard, folder / shard.name)


def _card(ledger: Ledger, snapshot: FleetSnapshot | None) -> dict[str, Any]:
    engines = {} if snapshot is None else snapshot.engines
    counts: dict[int, Accepted] = {}
    for figures in engines.values():
        for number, found in figures["by_head"].items():
            counts[int(number)] = counts.get(int(number), Accepted()) + tuple(found)
    last = ledger.decisions[-1].model_dump() if ledger.decisions else None
    return {
        "served": ledger.served,
        "previous": ledger.previous,
        "versions": [
            version.model_dump(exclude=_INNER) | {"acceptance": _acceptance(counts.get(version.number))}
            for version in ledger.versions
        ],
        "engines": {engine_id: figures["head_version"] for engine_id, figures in engines.items()},
        "recording": {engine_id: figures.get("recording") for engine_id, figures in engines.items()},
        "counts": ledger.counts,
        "last_decision": last,
        "decisions": [decision.model_dump() for decision in ledger.decisions],
    }


def _acceptance(counts: Accepted | None) -> dict[str, Any] | None:
    """Return the mean tokens per round with its 95 % interval, and the counts; None if no drafts were verified."""
    if counts is None or not counts.rounds:
        return None
    half = SIGMAS * counts.error
    known = counts.rounds > 1
    return {
        "length": round(counts.length, 4),
        "low": round(counts.length - half, 4) if known else None,
        "high": round(counts.length + half, 4) if known else None,
        "rounds": counts.rounds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
    }
