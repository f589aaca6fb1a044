"""Turns SIGTERM and SIGINT into KeyboardInterrupt in the main thread, replacing the handlers of Ray's driver.

Ray's handler ends the process with SIGABRT three seconds after a SIGTERM, even if cleanup is not finished: its C++ side
prints a stack and sets an alarm before it calls Python's handler. KeyboardInterrupt is the only exception of a handler
that passes through Ray's blocking calls.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """This process's handlers for both signals, and the signals received so far."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._held = False

    def install(self) -> None:
        """Installs the handlers; to be repeated after any call that installs its own, such as `ray.init`."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def ignore(self) -> None:
        """Ignores both signals, and cancels Ray's alarm, for the rest of the shutdown."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.alarm(0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays a first signal until the end of a short block; a second signal is not delayed.

        An exception while Serve creates its event loop for handles leaves the loop unusable, and every later use of a
        handle would wait forever.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal was received: one that was raised inside a destructor had no effect."""
        if self.received:
            raise KeyboardInterrupt

    def exit_code(self) -> int:
        """Exit code that a shell reports for a process ended by the last signal received."""
        return 128 + (self.received[-1] if self.received else signal.SIGTERM)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        signal.alarm(0)
        self.received.append(number)
        if not self._held or len(self.received) > 1:
            raise KeyboardInterrupt
