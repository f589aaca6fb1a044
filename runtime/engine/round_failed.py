"""Exception of a broken engine, and the probe request that tests whether an engine still works."""

from wingbeat.runtime.scheduling.request import Request, SamplingParams

PROBE = Request("probe", (0,), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, speculation=False))
"""Request that an engine runs after a failed round to test whether it still works."""
PROBE_ROUNDS = 8


class RoundFailed(RuntimeError):
    """The engine is broken, or the request that caused a failed round cannot be determined.

    Args:
        suspects: ids of requests in their first round. Any of these requests may have broken the engine, and a retry
            could break another engine.
        queued: ids of requests that had not been admitted and therefore cannot have caused the failure.
    """

    def __init__(self, message: str, suspects: tuple[str, ...] = (), queued: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.suspects = suspects
        self.queued = queued


class InnerDrafterFailed(RuntimeError):
    """A drafter that runs inside the engine raised; state shared between drafter and engine may be corrupt."""
