"""SIGTERM and SIGINT as KeyboardInterrupt in the main thread, in place of the handlers of Ray's driver.

Ray's own end the process by SIGABRT three seconds after a SIGTERM, whatever is still to be cleaned up: its C++ side
prints a stack and sets an alarm before it calls Python's handler. KeyboardInterrupt is the one exception of a handler
that Ray's blocking calls let through.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Handlers of this process for both signals, and which of them have come."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._held = False

    def install(self) -> None:
        """Take both signals over; again after everything that installs handlers of its own, as `ray.init` does."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def ignore(self) -> None:
        """Let nothing disturb what is left to do."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.alarm(0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let a first signal wait for the end of a short block: Serve's loop for handles is never made whole where an
        exception meets its making, and whoever uses a handle then waits for ever. A second signal does not wait."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt where a signal has come: raised in a destructor, the first one went unseen."""
        if self.received:
            raise KeyboardInterrupt

    def exit_code(self) -> int:
        """What a shell reports of a process that the last signal ended."""
        return 128 + (self.received[-1] if self.received else signal.SIGTERM)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        signal.alarm(0)
        self.received.append(number)
        if not self._held or len(self.received) > 1:
            raise KeyboardInterrupt
