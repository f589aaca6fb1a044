"""Which engine gets a request, whether there is room for it, and when there will be: pure functions of what the router
knows; knows neither Ray nor HTTP."""

import math
from collections.abc import Iterable
from typing import NamedTuple

LONGEST_RETRY_S = 60


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


def num_missing_places(
    num_wanted: int, num_admitted: int, num_engines: int, max_num_seqs: int, max_queued_requests: int
) -> int:
    """Requests that have to end before `num_wanted` more find room; 0 where they fit now.

    Args:
        num_admitted: requests that run or queue.
        max_num_seqs: sequences one engine runs at once.
        max_queued_requests: requests beyond the engines' running capacity.
    """
    return max(0, num_admitted + num_wanted - num_engines * max_num_seqs - max_queued_requests)


def retry_after_s(num_missing: int, num_admitted: int, unwritten_tokens: int, tokens_per_s: float | None) -> int:
    """Whole seconds, 1 to 60, until so many requests will have ended.

    Engines end requests at the rate at which they write tokens, over the tokens that one request still needs.

    Args:
        num_missing: requests that have to end.
        num_admitted: requests that run or queue.
        unwritten_tokens: tokens they may still write, all together.
        tokens_per_s: of all engines together; None before anything was measured.
    """
    if not tokens_per_s or not num_admitted:
        return 1
    needed = unwritten_tokens * min(1.0, num_missing / num_admitted)
    return max(1, min(LONGEST_RETRY_S, math.ceil(needed / tokens_per_s)))


class TokenRate:
    """Tokens per second over the latest seconds in which there was something to write; older ones fade out.

    Args:
        window_s: seconds after which a token counts 1/e.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._at: float | None = None

    def resume(self, now: float) -> None:
        """There is something to write again: the time since the last token was no time of writing."""
        self._at = now

    def add(self, num_tokens: int, now: float) -> None:
        """Tokens have arrived."""
        self._pass(now)
        self._tokens += num_tokens

    def per_s(self, now: float) -> float | None:
        """The rate; None before any time has passed."""
        self._pass(now)
        return self._tokens / self._seconds if self._seconds else None

    def _pass(self, now: float) -> None:
        elapsed = 0.0 if self._at is None else now - self._at
        kept = math.exp(-elapsed / self._window_s)
        self._tokens *= kept
        self._seconds = self._seconds * kept + elapsed
        self._at = now
