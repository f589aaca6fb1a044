"""Waits until a peer process changes a shared counter or is gone. Contains nothing about rounds.

A counter is an aligned int64 in a `memoryview` of format "q", written by one process at a time. A memoryview is read
fastest in Python: 28 ns, against 47 ns for a numpy view and 790 ns for a tensor (2-core x86 machine). CPython copies an
element with one 8-byte move, so a reader sees the old or the new value and never a mixture.
"""

import ctypes
import os
import platform
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

YIELD_S = 300e-6
"""Seconds for which a wait yields the core repeatedly before it sleeps. A yield takes 0.25 us if no other thread can
run. Spinning without yields would keep the peer off a shared core, and yielding for longer would take time from the
peer's work.
"""
ROUND_SLEEP_S = 10e-3
IDLE_SLEEP_S = 20e-3
"""Longest sleeps in seconds: `ROUND_SLEEP_S` within a round, `IDLE_SLEEP_S` between rounds. A ring ends a sleep at
once. These limits bound how late a peer's death is noticed, and waking up for them takes well below 2 % of a core.
"""
NAP_S = 0.5e-3
"""Sleep in seconds where the futex system call is not available."""
GONE_CHECK_S = 1e-3
EXIT_CHECK_S = 10e-3
"""Seconds between two checks whether a process has begun to exit; a check takes 30 us."""
_EXITING = 0x4
"""PF_EXITING of Linux's sched.h, a bit of the ninth field of /proc/PID/stat."""
POLL_NAP_S = 20e-6
"""Seconds between two checks of a device's progress, during which other threads can use the interpreter."""
TIMER_SLACK_NS = 1000
"""Timer slack, in nanoseconds, of a thread that sleeps between checks; Linux's default makes each sleep 50 us longer.
"""
_PR_SET_TIMERSLACK = 29


def _no_fence() -> None:
    """Does nothing, because x86 keeps stores in order and loads in order.

    A counter that is written after its data needs no fence.
    """


# Other architectures (Arm) keep neither the order of stores nor the order of loads. The kernel's scheduler executes a
# full memory barrier before it picks a thread, so a yield is a fence that Python can call without compiled code.
fence: Callable[[], None] = _no_fence if platform.machine() in {"x86_64", "AMD64"} else os.sched_yield
"""Memory fence: call between writing data and its counter, and between reading a counter and its data."""


def never() -> bool:
    """Default of `gone` in waits, for a peer that cannot end; always False."""
    return False


class Timespec(ctypes.Structure):
    """The kernel's struct timespec for 64-bit longs."""

    _fields_: ClassVar = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 2**31 - 1
_FUTEX_CALLS = {("linux", "x86_64"): 202, ("linux", "aarch64"): 98}
_FUTEX_CALL = _FUTEX_CALLS.get((sys.platform, platform.machine()))
_libc = ctypes.CDLL(None, use_errno=True)
syscall = _libc.syscall
_prompt = threading.local()
"""Per thread: `naps` is set once `end_naps_promptly` has run, and is True if the timer slack is short."""


def end_naps_promptly() -> None:
    """Shorten this thread's timer slack, so that naps end on time."""
    if sys.platform == "linux" and not hasattr(_prompt, "naps"):
        _prompt.naps = _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0) == 0


class Bell:
    """A counter that processes can sleep on: word `index` of shared `words` (memoryview of format "q")."""

    def __init__(self, words: memoryview, index: int) -> None:
        self.words = words
        self.index = index
        # A futex has 32 bits. The low half of the word serves as the futex, because it changes with every count; on
        # little-endian machines the low half comes first.
        self._futex = ctypes.c_int32.from_buffer(words, 8 * index)
        self._address = ctypes.byref(self._futex)
        self.address = ctypes.addressof(self._futex)
        """Address of the futex, for `any_bell`."""

    @property
    def descriptor(self) -> int | None:
        """File descriptor that becomes readable when another node rings; None if the peer shares this memory."""
        return None

    def ring(self) -> None:
        """Wake all waiters of the counter. Call after the counter was raised."""
        if _FUTEX_CALL is not None:
            syscall(_FUTEX_CALL, self._address, _FUTEX_WAKE, _EVERYONE, None, None, 0)

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Sleep until the bell rings or for `timeout_s`; return at once if the counter differs from `seen`."""
        if _FUTEX_CALL is None:
            time.sleep(min(timeout_s, NAP_S))
            return
        limit = Timespec(0, int(min(timeout_s, 0.999) * 1e9))
        value = ctypes.c_int32(seen & 0xFFFFFFFF)
        syscall(_FUTEX_CALL, self._address, _FUTEX_WAIT, value, ctypes.byref(limit), None, 0)


class Doorbell:
    """Waits for a condition that a bell announces: yields for `YIELD_S`, then sleeps up to `max_sleep_s` at a time.

    A thread that may use only one core sleeps at once, because its yields would compete with a peer on the same core.
    """

    def __init__(self, bell: Bell, max_sleep_s: float = ROUND_SLEEP_S) -> None:
        self.bell = bell
        self.max_sleep_s = max_sleep_s

    def after_ring(self) -> None:
        """Called after the peer's bell was rung; does nothing in this class.

        A peer in another thread or process wakes by itself.
        """

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        gone: Callable[[], bool] = never,
        quiet_since: float | None = None,
    ) -> bool:
        """True as soon as `ready()` is true; False after `timeout_s`, or if the peer is gone before that.

        Args:
            quiet_since: time (time.monotonic) at which the waiter last had work; None means now. The period of
                `YIELD_S` for yields begins at this time, so a waiter that has been idle for longer sleeps at once
                instead of yielding again in each call.
        """
        words, index = self.bell.words, self.bell.index
        now = time.monotonic()
        since = now if quiet_since is None else quiet_since
        deadline, next_check = now + timeout_s, now + GONE_CHECK_S
        yield_until: float | None = None
        while True:
            seen = words[index]  # read before the condition is checked, so that a ring in between prevents the sleep
            if ready():
                return True
            if now >= deadline:
                return False
            if now >= next_check:
                if gone():
                    return ready()
                next_check = now + GONE_CHECK_S
            if yield_until is None:
                yield_until = since + YIELD_S if len(os.sched_getaffinity(0)) > 1 else now
            if now < yield_until:
                os.sched_yield()
            else:
                self.bell.sleep(seen, min(self.max_sleep_s, deadline - now))
            now = time.monotonic()


def poll(ready: Callable[[], bool], timeout_s: float, gone: Callable[[], bool] = never) -> bool:
    """Like `Doorbell.wait`, for conditions that no bell announces, such as a device's progress."""
    began = time.monotonic()
    next_check = began + GONE_CHECK_S
    while not ready():
        now = time.monotonic()
        if now >= began + timeout_s:
            return False
        if now >= next_check:
            if gone():
                return ready()
            next_check = now + GONE_CHECK_S
        if now < began + YIELD_S:
            os.sched_yield()
        else:
            end_naps_promptly()
            time.sleep(POLL_NAP_S)
    return True


class PumpDoorbell(Doorbell):
    """Doorbell for a peer in the same thread, which runs the peer's `pump` instead of sleeping.

    Without `pump`, this doorbell waits for a peer in another thread, like any other doorbell.

    Args:
        at_once: whether `pump` already runs when the bell is rung. With a device, the peer's work is then enqueued
            after the round and runs while the host waits for the round. Without a device, the peer's work would only
            delay the round's tokens.
    """

    def __init__(self, bell: Bell, at_once: bool = False) -> None:
        super().__init__(bell)
        self.pump: Callable[[], None] | None = None
        self._at_once = at_once

    def after_ring(self) -> None:
        """Run `pump` if `at_once` is set."""
        if self._at_once and self.pump is not None:
            self.pump()

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        gone: Callable[[], bool] = never,
        quiet_since: float | None = None,
    ) -> bool:
        """Like `Doorbell.wait`; runs `pump` at least once, and may exceed `timeout_s` by one run of `pump`."""
        if self.pump is None:
            return super().wait(ready, timeout_s, gone, quiet_since)
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.pump()
            if time.monotonic() >= deadline:
                return ready()
        return True


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat); 0 if there is no such process.

    Process ids are reused, but the pair of id and start time is unique.
    """
    stat = process_stat(pid)
    return int(stat[19]) if stat else 0


def process_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat, beginning with the third field (state).

    The second field is left out, because it may contain blanks and parentheses.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class PeerProcess:
    """A process on this machine, in the same pid namespace, whose end can be detected.

    A process that has ended counts as gone at once, even before its parent has reaped it.
    """

    def __init__(self, pid: int, start: int) -> None:
        self.pid = pid
        self.start = start
        self._is_self = pid == os.getpid() and start == process_start(pid)
        self._poll: select.poll | None = None
        self._exits, self._look_at = False, 0.0
        if not self._is_self:
            self._watch()

    def _watch(self) -> None:
        try:
            fd = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            return  # the process is gone, or a sandbox refuses the call; `alive` reads /proc instead
        weakref.finalize(self, os.close, fd)
        if process_start(self.pid) == self.start:
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)

    def alive(self) -> bool:
        """Whether the process still runs. Takes under a microsecond if the kernel has pidfd_open (Linux 5.3)."""
        if self._is_self:
            return True
        if self._poll is not None:
            return not self._poll.poll(0)
        stat = process_stat(self.pid)
        return bool(stat) and stat[0] not in "ZX" and int(stat[19]) == self.start

    def works(self) -> bool:
        """Whether the process can still do work, that is, whether it is `alive` and has not begun to exit.

        A killed process stays `alive` until the kernel has freed its memory and the memory of its devices, which takes
        a second for 6 GB of host memory. A process that waits for an answer should not wait that long.
        """
        if self._is_self:
            return True
        now = time.monotonic()
        if not self._exits and now >= self._look_at:
            self._look_at = now + EXIT_CHECK_S
            stat = process_stat(self.pid)
            # If /proc cannot be read, for example because the file table is full, `alive` decides, so that a live peer
            # does not count as gone.
            self._exits = bool(stat) and bool(int(stat[6]) & _EXITING)
        return not self._exits and self.alive()
