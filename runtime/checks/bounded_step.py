"""Runs start-up steps that must not hang: each has a time limit, and an error message with the remedy."""

import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class StepTimeout(ValueError):
    """A start-up step exceeded its time limit; one line that names the step and a setting that avoids it."""


def bounded_step(what: str, most_s: float, instead: str, work: Callable[[], ResultT]) -> ResultT:
    """Returns `work()`, which may take `most_s` seconds; a hanging call stays in its thread until the process ends.

    Args:
        what: the step, in words.
        instead: remedy if the step hangs.

    Raises:
        StepTimeout: the step took longer.
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
