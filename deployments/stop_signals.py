"""Handlers of SIGTERM and SIGINT that raise KeyboardInterrupt in the main thread.

They replace the handlers of Ray's driver: after a SIGTERM, the C++ part of Ray's handler prints a stack and sets an
alarm before it calls Python's handler, and the alarm ends the process with SIGABRT after three seconds, even if cleanup
is not finished. KeyboardInterrupt is used because no other exception that a handler raises passes through Ray's
blocking calls.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Handlers of this process for both signals, and a record of the signals that were received."""

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

        The context is needed where Serve creates its event loop for handles, because an exception there would leave the
        loop unusable, and each later use of a handle would wait forever.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal was received. The call is needed because the handler's exception is lost
        if it is raised inside a destructor.
        """
        if self.received:
            raise KeyboardInterrupt

    def exit_code(self) -> int:
        """Exit code that a shell reports for a process that was ended by the signal received last."""
        return 128 + (self.received[-1] if self.received else signal.SIGTERM)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        signal.alarm(0)
        self.received.append(number)
        if not self._held or len(self.received) > 1:
            raise KeyboardInterrupt
