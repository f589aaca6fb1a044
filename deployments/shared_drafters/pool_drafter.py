"""The `DrafterHandle` of a verifier that uses a shared drafter: gets slots in one of the pool's drafters, and releases
them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.placement import node_id
from wingbeat.deployments.handle_calls import call_apart
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.shared_drafters.shared_drafter import Candidate

logger = logging.getLogger(__name__)
RETRY_S = 0.5
CANDIDATES_S = 30.0
"""Maximum seconds to wait until the pool has returned its candidates; after that the pool is called again."""
TELL_AFTER_S = 2.0
"""Seconds without a drafter after which the reason is logged, once."""


class Pool(Protocol):
    """Interface of the `DrafterPool` for a verifier."""

    async def candidates(self) -> list[Candidate]:
        """Return the drafters that this verifier can reach, the least loaded first; raises if the pool cannot be
        called.
        """
        ...

    def left(self, number: int) -> None:
        """Report that a drafter is no longer used, possibly because it does not respond."""
        ...


class ServedPool:
    """The application's pool, called through Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # gRPC is used instead of actor calls, so that a verifier that hangs cannot block the pool; see `ServeEngines`.
        self._handle = handle.options(_by_reference=False)
        self._node = node_id()

    async def candidates(self) -> list[Candidate]:
        """See `Pool`."""
        return await call_apart(self._handle.candidates, self._node)

    def left(self, number: int) -> None:
        """See `Pool`."""
        call_apart(self._handle.left, number)


class PoolDrafter:
    """Gets slots in a shared drafter for one verifier, and releases the slots at the end.

    Args:
        terms: pickled `DrafterTerms`; None if the verifier has not sent them yet.
        falls_back: whether the verifier can offer another channel if no drafter can attach to this channel.
        patience_s: maximum seconds that a starting engine waits for slots.
    """

    def __init__(
        self,
        pool: Pool,
        terms: bytes | None = None,
        falls_back: bool = False,
        patience_s: float | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.terms = terms
        self.lacks_room = False
        """Whether every running drafter has refused this verifier because its slots or memory are in use."""
        self._pool = pool
        self._falls_back = falls_back
        self.patience_s = patience_s
        self._sleep = sleep
        self._clock = clock
        self._channel_name = ""
        self._at: Candidate | None = None

    async def needs(self, terms: bytes) -> None:
        """Store the terms. Returns None, because it is possible that no drafter is running; the engine's process then
        determines the needs itself.
        """
        self.terms = terms

    async def attach(self, channel_name: str, next_incarnation: Callable[[], int]) -> int:
        """Find a drafter with free slots, however long that takes, and attach it to the channel; returns the drafter's
        process id.

        Args:
            next_incarnation: function that returns an unused incarnation number; called once per attempt.

        Raises:
            ChannelError: no running drafter can attach to the channel, and the verifier can offer another channel;
                raised at most once.
        """
        self._channel_name = channel_name
        began, told = self._clock(), ""
        while True:
            pid, why = await self._try_all(next_incarnation)
            if pid is not None:
                return pid
            if why != told and self._clock() - began >= TELL_AFTER_S:
                logger.warning("No drafter of the pool: %s; decoding without drafts until there is one", why)
                told = why
            await self._sleep(RETRY_S)

    async def renew(self) -> bool:
        """Do nothing and return False, because the pool replaces lost drafters, and because another drafter may have
        free slots already.
        """
        return False

    def kill(self) -> None:
        """Release the slots without waiting; the drafter keeps running for other verifiers."""
        at, self._at = self._at, None
        if at is not None:
            at.drafter.detach(self._channel_name)
            self._pool.left(at.number)

    async def _try_all(self, next_incarnation: Callable[[], int]) -> tuple[int | None, str]:
        """Attach the first candidate that has free slots and memory. Returns the drafter's process id and an empty
        reason. If no candidate can be attached, returns None and the reason.
        """
        try:
            async with asyncio.timeout(CANDIDATES_S):
                candidates = await self._pool.candidates()
        except (RayError, RayServeException, TimeoutError) as error:
            self.lacks_room = False
            return None, f"the pool cannot be asked ({root_cause(error)})"
        why, num_refused, num_unreached = "none is running", 0, 0
        for candidate in candidates:
            self._at = candidate
            try:
                placed = await candidate.drafter.attach(self._channel_name, next_incarnation(), self.terms)
            except Exception as error:  # the drafter is gone, unresponsive or unsuitable; another drafter may fit
                why = f"drafter {candidate.number} cannot be used ({root_cause(error)})"
                self.kill()
                num_unreached += isinstance(error, ChannelError)
                if self._falls_back and num_unreached == len(candidates):
                    self._falls_back = False
                    raise ChannelError(why) from None
                continue
            if placed.refusal is None:
                self.lacks_room = False
                return placed.pid, ""
            self._at = None
            why, num_refused = f"no room ({placed.refusal})", num_refused + 1
        self.lacks_room = 0 < num_refused == len(candidates)
        return None, why
