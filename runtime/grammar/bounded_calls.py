"""Calls into a library that nothing can interrupt, on threads that are given up where a call takes too long."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

MOST_CALL_S = 0.05
"""CPU time of one call, for which a round waits."""
MOST_RUNAWAY_S = 2.0
"""CPU time of a call that was given up, which goes on and takes memory: what cannot be ended but with its process."""
MOST_SILENT_S = 60.0
"""Wall time of a call that takes none, such as one that waits for a lock."""
_POLL_S = 0.02


class TookTooLong(Exception):
    """A call was given up: it goes on, and what it was handed must not be touched any more."""


class Called(NamedTuple):
    """What a call returned."""

    value: Any
    cpu_s: float


class BoundedCalls:
    """Runs calls one at a time per caller; safe to share between threads.

    Args:
        on_runaway: told, from a thread of its own, of a call that goes on long after it was given up.
    """

    def __init__(self, most_s: float = MOST_CALL_S, on_runaway: Callable[[str], None] = logger.error) -> None:
        self.on_runaway = on_runaway
        self._most_s = most_s
        self._idle: list[_Caller] = []

    def run(self, work: Callable[..., Any], *args: Any) -> Called:
        """`work(*args)`, which must give the interpreter up while it is long.

        Raises:
            TookTooLong: it was given up.
            Exception: whatever the call raised.
        """
        try:
            caller = self._idle.pop()
        except IndexError:
            caller = _Caller()
        begun = time.monotonic()
        caller.tasks.put((work, args))
        while True:
            try:
                value, error, cpu_s = caller.results.get(timeout=_POLL_S)
                break
            except queue.Empty:
                if caller.cpu_s() > self._most_s or time.monotonic() - begun > MOST_SILENT_S:
                    threading.Thread(target=self._watch, args=(caller,), daemon=True).start()
                    raise TookTooLong from None
        self._idle.append(caller)
        if error is not None:
            raise error
        return Called(value, cpu_s)

    def _watch(self, caller: "_Caller") -> None:
        """Wait for a call that was given up, and say so where it does not end."""
        while caller.cpu_s() <= MOST_RUNAWAY_S:
            try:
                caller.results.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            caller.tasks.put(None)
            return
        self.on_runaway(
            f"a grammar has computed for more than {MOST_RUNAWAY_S:.0f} s at one token and cannot be stopped"
        )


class _Caller(threading.Thread):
    """One thread, with the call that it runs."""

    def __init__(self) -> None:
        super().__init__(name="wingbeat-grammar-calls", daemon=True)
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.results: queue.SimpleQueue = queue.SimpleQueue()
        self._begun_s = 0.0
        self.start()
        self._clock = time.pthread_getcpuclockid(self.ident)

    def cpu_s(self) -> float:
        """CPU time of the call that runs."""
        return time.clock_gettime(self._clock) - self._begun_s

    def run(self) -> None:
        """Run calls until told None."""
        while (task := self.tasks.get()) is not None:
            work, args = task
            value, failed = None, None
            self._begun_s = time.thread_time()
            try:
                value = work(*args)
            except Exception as error:
                failed = error
            self.results.put((value, failed, time.thread_time() - self._begun_s))
            del task, work, args, value, failed
