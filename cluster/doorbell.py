"""Waiting for a peer process: until a shared counter moves, or until the process is gone.

It knows nothing of rounds. A counter is an aligned int64 in a `memoryview` of format "q", written by one process at a
time. That is the cheapest reader Python has (28 ns; a numpy view 47 ns, a tensor 790 ns on a 2-core x86 machine), and
CPython copies such an element with one 8-byte move, so a reader sees the old or the new value and never a mixture.
"""

import os
import platform
import select
import time
import weakref
from collections.abc import Callable
from pathlib import Path

SPIN_S = 20e-6
"""Kept short: a spinning thread holds the interpreter lock."""
YIELD_S = 500e-6
"""A reply of an idle-handed peer arrives within this; on two cores more yielding would take time from its drafting."""
MIN_NAP_S = 50e-6
NAP_SHARE = 0.125
"""Naps grow with the time waited, so a wait is at most this much longer than it had to be."""
ROUND_NAP_S = 0.5e-3
IDLE_NAP_S = 4e-3
"""About 250 wake-ups a second, below 2 % of a core."""
GONE_CHECK_S = 1e-3


def _no_fence() -> None:
    """x86 keeps stores in order and loads in order, and that is all a counter behind its data needs."""


# Elsewhere (Arm) neither is kept. The scheduler takes a full memory barrier before it picks a thread, so a yield is a
# fence that Python can reach without compiled code.
fence: Callable[[], None] = _no_fence if platform.machine() in {"x86_64", "AMD64"} else os.sched_yield
"""Call between writing data and its counter, and between reading a counter and its data."""


def never() -> bool:
    """Nothing can be gone."""
    return False


class Doorbell:
    """Waits on a condition over shared counters: spins, then yields, then takes naps that grow up to `max_nap_s`."""

    def __init__(self, max_nap_s: float = ROUND_NAP_S) -> None:
        self.max_nap_s = max_nap_s

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        gone: Callable[[], bool] = never,
        quiet_since: float | None = None,
    ) -> bool:
        """True as soon as `ready()`; False after `timeout_s`, or once `gone()` with still nothing ready.

        `quiet_since` (time.monotonic) says when the waiter last had work: one that has been idle for long naps at once
        instead of spinning anew in each call.
        """
        if ready():
            return True
        now = time.monotonic()
        since = now if quiet_since is None else quiet_since
        deadline, next_check = now + timeout_s, now + GONE_CHECK_S
        while now < deadline:
            self._pause(now - since, deadline - now)
            if ready():
                return True
            now = time.monotonic()
            if now >= next_check:
                if gone():
                    return ready()
                next_check = now + GONE_CHECK_S
        return False

    def _pause(self, waited_s: float, left_s: float) -> None:
        if waited_s < SPIN_S:
            return
        if waited_s < YIELD_S:
            os.sched_yield()
        else:
            time.sleep(min(max(waited_s * NAP_SHARE, MIN_NAP_S), self.max_nap_s, left_s))


class PumpDoorbell(Doorbell):
    """For a peer in the same thread: runs `pump` to let it work, where another doorbell would sleep.

    Without a pump it waits like any doorbell, which serves a peer in another thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pump: Callable[[], None] | None = None

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        gone: Callable[[], bool] = never,
        quiet_since: float | None = None,
    ) -> bool:
        """Like `Doorbell.wait`; runs the pump at least once, and may overrun `timeout_s` by one run of it."""
        if self.pump is None:
            return super().wait(ready, timeout_s, gone, quiet_since)
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.pump()
            if time.monotonic() >= deadline:
                return ready()
        return True


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), or 0 when there is none.

    With the process id it names a process for good: ids are reused.
    """
    stat = _process_stat(pid)
    return int(stat[19]) if stat else 0


def _process_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on: the second may hold blanks and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class PeerProcess:
    """A process on this machine, in the same pid namespace, that can be asked whether it still runs.

    A killed process counts as gone at once, also while its parent has not collected it.
    """

    def __init__(self, pid: int, start: int) -> None:
        self.pid = pid
        self.start = start
        self._is_self = pid == os.getpid() and start == process_start(pid)
        self._poll: select.poll | None = None
        if not self._is_self:
            self._watch()

    def _watch(self) -> None:
        try:
            fd = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            return  # the process is gone, or a sandbox refuses the call: /proc tells which, more slowly
        weakref.finalize(self, os.close, fd)
        if process_start(self.pid) == self.start:
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)

    def alive(self) -> bool:
        """Whether the process still runs; under a microsecond where the kernel has pidfd_open (Linux 5.3)."""
        if self._is_self:
            return True
        if self._poll is not None:
            return not self._poll.poll(0)
        stat = _process_stat(self.pid)
        return bool(stat) and stat[0] not in "ZX" and int(stat[19]) == self.start
