"""Output of one request from one engine, and the way in which the request ended at the engine."""

import asyncio

from wingbeat.deployments.fleet.interface import RequestFailed, RequestRefused
from wingbeat.deployments.fleet.wire import GivenUp, Verdict, WireOutput
from wingbeat.runtime.scheduling.request import ALONE_TOKENS, Request, RequestOutput


class EngineLost(Exception):
    """The engine has lost or returned the request; another engine can continue the request.

    Args:
        taken_up: whether the request may have run and may therefore have broken the engine.
        suspected: whether it is certain that this request, or one of a few requests that the engine named with it, has
            broken the engine.
    """

    def __init__(self, message: str, *, taken_up: bool = True, suspected: bool = False) -> None:
        super().__init__(message)
        self.taken_up = taken_up
        self.suspected = suspected


class RequestStream:
    """Unread output of one request at one engine, and the request's state there."""

    def __init__(self, number: int, request: Request, num_cached_tokens: int = 0) -> None:
        self.number = number
        self.uncomputed_tokens = request.num_tokens - num_cached_tokens
        """Number of prompt tokens that are not yet computed; 0 after the first output."""
        self.unwritten_tokens = request.params.max_tokens - len(request.output_token_ids)
        """Maximum number of tokens still to be generated."""
        self.begun = False
        """Whether any output has arrived."""
        self.withdrawn = False
        """Whether the router has withdrawn the request."""
        self.ended = False
        """Whether the engine has finished or given up the request."""
        self.num_written = 0
        """Number of tokens received."""
        self._begins_alone = request.alone
        self._unread: WireOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    @property
    def alone(self) -> bool:
        """Whether the engine runs no other request at the same time as this request."""
        return self._begins_alone and self.num_written <= ALONE_TOKENS

    def put(self, output: WireOutput) -> None:
        """Adds an output, or the engine's message that it gives up the request. After an error, outputs are ignored."""
        if self._error is not None:
            return
        if (given_up := output.given_up) is not None:
            # If an output of a request could not be sent, the request may still run in the engine. `ended` therefore
            # stays False, so that the request is aborted there.
            self.ended = given_up.verdict is not Verdict.FAILED
            self.fail(_as_error(given_up))
            return
        if self._unread is None:
            self._unread = output
        else:
            self._unread.add(output)
        self.begun, self.uncomputed_tokens = True, 0
        self.unwritten_tokens -= len(output.token_ids)
        self.num_written += len(output.token_ids)
        self.ended = output.finish_reason is not None
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, which is raised once earlier output has been read; later errors are
        ignored.
        """
        self._error = self._error or error
        self._ready.set()

    async def next(self) -> RequestOutput:
        """Waits for output and returns everything that has arrived as one output.

        Raises:
            EngineLost: the engine has lost or returned the request.
            RequestFailed: processing the request raised an exception.
            RequestRefused: the engine refused the request.
        """
        while self._unread is None:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        output, self._unread = self._unread, None
        return output.opened()


def _as_error(given_up: GivenUp) -> Exception:
    """Returns the error for a request that the engine has given up."""
    match given_up.verdict:
        case Verdict.REFUSED:
            return RequestRefused(given_up.reason)
        case Verdict.FAILED:
            return RequestFailed(given_up.reason)
        case Verdict.SUSPECTED:
            return EngineLost(given_up.reason, suspected=True)
        case Verdict.RETURNED | Verdict.WITHDRAWN:
            return EngineLost(given_up.reason, taken_up=False)
