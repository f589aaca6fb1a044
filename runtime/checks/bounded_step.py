"""Steps of a start that must not hang: each has a limit, and a line that says what to change."""

import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class StepTimeout(ValueError):
    """A step of the start took longer than it may; one line that names the step and what starts without it."""


def bounded_step(what: str, most_s: float, instead: str, work: Callable[[], ResultT]) -> ResultT:
    """`work()`, for at most so long. What hangs goes on in a thread of its own until the process ends.

    Args:
        what: the step, in words.
        instead: what to change where it hangs.

    Raises:
        StepTimeout: it took longer.
        Exception: whatever `work` raises.
    """
    results: list[ResultT] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"wingbeat-{what}")
    thread.start()
    thread.join(most_s)
    if thread.is_alive():
        raise StepTimeout(f"{what} takes longer than {most_s:.0f} s: {instead}")
    if errors:
        raise errors[0]
    return results[0]
