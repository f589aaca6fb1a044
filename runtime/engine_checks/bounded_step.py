"""Runs start-up steps that must not hang. Each step has a time limit, and an error message that names a remedy."""

import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class StepTimeout(ValueError):
    """A start-up step exceeded its time limit.

    The message is one line that names the step and a setting that avoids the step.
    """


def bounded_step(what: str, most_s: float, instead: str, work: Callable[[], ResultT]) -> ResultT:
    """Returns the result of `work()`, which may take at most `most_s` seconds.

    A hanging call stays in its thread until the process ends.

    Args:
        what: description of the step.
        instead: remedy if the step hangs.

    Raises:
        StepTimeout: the step took longer than `most_s` seconds.
        Exception: the exception that `work` raised.
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
