"""Outputs of one router's requests in the engine's process, until the next message to it."""

import logging

from wingbeat.deployments.fleet.wire import GivenUp, Verdict, WireOutput, merge, pack_given_up, pack_output
from wingbeat.runtime.scheduling.request import RequestOutput

logger = logging.getLogger(__name__)


class Outbox:
    """Filled and emptied by the engine's thread. Tokens of several rounds become one output per request, so memory is
    bounded by the requests, however long nothing can be sent.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._given_up: dict[int, GivenUp] = {}
        self._urgent = False
        self._due_at = 0.0

    def put(self, number: int, output: RequestOutput, *, urgent: bool) -> None:
        """Add one round's output of a request; an urgent one is due at once."""
        self._outputs.setdefault(number, []).append(output)
        self._urgent |= urgent

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Tell the client that its request will not be finished here."""
        self._given_up[number] = GivenUp(verdict, reason)
        self._urgent = True

    def due(self, now: float, *, idle: bool = False) -> bool:
        """Whether something urgent waits, or anything where the interval has passed or no further round will come."""
        return self._urgent or (bool(self._outputs) and (idle or now >= self._due_at))

    def take(self, now: float) -> list[WireOutput]:
        """The next message."""
        outputs, self._outputs = self._outputs, {}
        given_up, self._given_up = self._given_up, {}
        self._urgent, self._due_at = False, now + self._interval_s
        message = [_pack(number, rounds) for number, rounds in outputs.items()]
        return message + [pack_given_up(number, word) for number, word in given_up.items()]


def _pack(number: int, rounds: list[RequestOutput]) -> WireOutput:
    """One request's part of a message; what cannot be packed ends this request and not the message."""
    try:
        return pack_output(number, merge(rounds))
    except Exception as error:
        logger.exception("The output of request %s cannot be sent", rounds[-1].request_id)
        return pack_given_up(number, GivenUp(Verdict.FAILED, f"its output cannot be sent: {type(error).__name__}"))
