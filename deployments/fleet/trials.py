"""Who is to blame where an engine vanishes without a word: the request that ran alone there, if one did.

A request that engines have died under is on trial at the next one (`EnginePool.generate`): the engine runs it alone
until it has written a few tokens, one such request after the other in the order in which they came
(`Scheduler.schedule`). So whoever counts what comes back knows which of them ran.
"""

from collections.abc import Hashable

from wingbeat.runtime.scheduling.request import TRIAL_TOKENS


class Trials:
    """Requests on trial at one engine."""

    def __init__(self) -> None:
        self._num_written: dict[Hashable, int] = {}
        """By request, oldest first."""

    def submitted(self, request: Hashable) -> None:
        """A request on trial goes to the engine."""
        self._num_written.setdefault(request, 0)

    def written(self, request: Hashable, num_tokens: int) -> None:
        """Tokens come back; of those that are not on trial too."""
        if request in self._num_written:
            self._num_written[request] += num_tokens
            if self._num_written[request] > TRIAL_TOKENS:
                del self._num_written[request]

    def ended(self, request: Hashable) -> None:
        """A request is gone, for whatever reason; harmless when repeated."""
        self._num_written.pop(request, None)

    @property
    def running(self) -> Hashable | None:
        """The request that runs alone; None where there is none."""
        return next(iter(self._num_written), None)
