"""One request of a router at one engine: what has come of it, and how it ended there."""

import asyncio

from wingbeat.deployments.fleet.interface import RequestFailed, RequestRefused
from wingbeat.deployments.fleet.wire import GivenUp, Verdict, WireOutput
from wingbeat.runtime.scheduling.request import ALONE_TOKENS, Request, RequestOutput


class EngineLost(Exception):
    """The connection broke while the request ran; another engine can continue it.

    Args:
        taken_up: False where the engine cannot have died of this request, which did not run.
        suspected: whether it or one of a few has broken the engine for certain.
    """

    def __init__(self, message: str, *, taken_up: bool = True, suspected: bool = False) -> None:
        super().__init__(message)
        self.taken_up = taken_up
        self.suspected = suspected


class RequestStream:
    """What has come for one request and was not read yet."""

    def __init__(self, number: int, request: Request, num_cached_tokens: int = 0) -> None:
        self.number = number
        self.uncomputed_tokens = request.num_tokens - num_cached_tokens
        """Of the prompt; 0 as soon as anything has come back."""
        self.unwritten_tokens = request.params.max_tokens - len(request.output_token_ids)
        self.begun = False
        """Whether anything has come back."""
        self.asked_back = False
        self.ended = False
        """Whether the engine has nothing left to do for it."""
        self.num_written = 0
        """Tokens that have come back."""
        self._begins_alone = request.alone
        self._unread: WireOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    @property
    def alone(self) -> bool:
        """Whether nothing runs beside it, as soon as it runs."""
        return self._begins_alone and self.num_written <= ALONE_TOKENS

    def put(self, output: WireOutput) -> None:
        """Add an output, or the engine's word that there will be none; behind an error nothing counts any more."""
        if self._error is not None:
            return
        if (given_up := output.given_up) is not None:
            # One that failed while it was sent may still run in the engine: it is aborted there.
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
        """End the stream by an error once what came before has been read; the first error counts."""
        self._error = self._error or error
        self._ready.set()

    async def next(self) -> RequestOutput:
        """Everything that has arrived, as one output.

        Raises:
            EngineLost: the connection broke.
            RequestFailed: processing the request raised.
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
    """What a request ends by in this router."""
    match given_up.verdict:
        case Verdict.REFUSED:
            return RequestRefused(given_up.reason)
        case Verdict.FAILED:
            return RequestFailed(given_up.reason)
        case Verdict.SUSPECTED:
            return EngineLost(given_up.reason, suspected=True)
        case Verdict.RETURNED | Verdict.WITHDRAWN:
            return EngineLost(given_up.reason, taken_up=False)
