"""What an engine that cannot go on says of the requests it had, and how it finds out whether it can."""

from wingbeat.runtime.scheduling.request import Request, SamplingParams

PROBE = Request("probe", (0,), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, speculation=False))
"""What an engine runs to find out whether it still works."""
PROBE_ROUNDS = 8


class RoundFailed(RuntimeError):
    """A round raised and the engine is broken, or what raised in it cannot be told.

    Args:
        suspects: ids of the requests in their first round, one of which may have broken the engine: trying them on
            another engine could break that one too.
        queued: ids of the requests that had not been taken up yet, and so have nothing to do with it.
    """

    def __init__(self, message: str, suspects: tuple[str, ...] = (), queued: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.suspects = suspects
        self.queued = queued


class InnerDrafterFailed(RuntimeError):
    """A drafter that is a part of the engine has raised: what it and the engine share may be in any state."""
