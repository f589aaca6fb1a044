"""Which engine gets a request: a pure function of what the router knows; knows neither Ray nor HTTP."""

from collections.abc import Iterable
from typing import NamedTuple


class EngineLoad(NamedTuple):
    """One live engine as its router sees it."""

    engine_id: str
    outstanding_tokens: int
    """Prompt tokens and tokens still to generate of the requests sent there and not finished."""
    num_requests: int


def choose_engine(engines: Iterable[EngineLoad]) -> str | None:
    """Id of the engine with the fewest outstanding tokens, then requests; ties go by id. None without engines."""
    best = min(engines, key=lambda e: (e.outstanding_tokens, e.num_requests, e.engine_id), default=None)
    return None if best is None else best.engine_id


def admits(engines: Iterable[EngineLoad], max_num_seqs: int, max_queued_requests: int) -> bool:
    """False once the engines' running capacity and the queue beyond it are both full."""
    loads = list(engines)
    outstanding = sum(load.num_requests for load in loads)
    return outstanding < len(loads) * max_num_seqs + max_queued_requests
