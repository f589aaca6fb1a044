"""Handlers of SIGTERM and SIGINT that raise KeyboardInterrupt in the main thread, instead of the handlers of Ray's
driver.

Ray's handler ends the process with SIGABRT three seconds after a SIGTERM, even if cleanup is not finished, because its
C++ side prints a stack and sets an alarm before it calls Python's handler. KeyboardInterrupt is used because no other
exception that a handler raises passes through Ray's blocking calls.
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
        """Installs the handlers; to be called again after a call that installs other handlers, such as `ray.init`."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def ignore(self) -> None:
        """Ignores both signals, and cancels Ray's alarm, for the rest of the shutdown."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.alarm(0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which the effect of a first signal is delayed until the end of the block; a second signal is not
        delayed.

        Such a block is needed where Serve creates its event loop for handles: an exception would leave the loop
        unusable, and every later use of a handle would wait forever.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal was received, because an exception raised inside a destructor has no
        effect.
        """
        if self.received:
            raise KeyboardInterrupt

    def exit_code(self) -> int:
        """Exit code that a shell reports for a process that the last received signal has ended."""
        return 128 + (self.received[-1] if self.received else signal.SIGTERM)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        signal.alarm(0)
        self.received.append(number)
        if not self._held or len(self.received) > 1:
            raise KeyboardInterrupt
