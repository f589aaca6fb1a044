"""Waiting for a peer process: until a shared counter changes, or until the process is gone.

Independent of rounds. A counter is an aligned int64 in a `memoryview` of format "q", written by one process at a time.
A memoryview is Python's cheapest reader (28 ns; a numpy view 47 ns, a tensor 790 ns on a 2-core x86 machine). CPython
copies an element with one 8-byte move, so a reader sees the old or the new value and never a mixture.
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
"""Seconds of yielding before a wait sleeps. A yield with nothing else to run is a spin (0.25 us); a pure spin would
keep the peer off a shared core. Longer yielding would take time from the work that is waited for.
"""
ROUND_SLEEP_S = 10e-3
IDLE_SLEEP_S = 20e-3
"""Longest sleeps in seconds. A ring ends a sleep at once; these limits bound how late a peer's death is noticed, and
cost well below 2 % of a core.
"""
NAP_S = 0.5e-3
"""Sleep in seconds where the futex system call is not available."""
GONE_CHECK_S = 1e-3
EXIT_CHECK_S = 10e-3
"""Seconds between checks whether a process has begun to exit, which cost 30 us each."""
_EXITING = 0x4
"""PF_EXITING of Linux's sched.h, in the ninth field of /proc/PID/stat."""
POLL_NAP_S = 20e-6
"""Seconds between looks at a device, in which other threads can use the interpreter."""
TIMER_SLACK_NS = 1000
"""Timer slack of a thread that naps between looks; with Linux's default a nap is 50 us longer."""
_PR_SET_TIMERSLACK = 29


def _no_fence() -> None:
    """No-op: x86 keeps stores in order and loads in order, which is all that a counter behind its data needs."""


# Other architectures (Arm) keep neither in order. The kernel's scheduler executes a full memory barrier before it picks
# a thread, so a yield is a fence that Python can reach without compiled code.
fence: Callable[[], None] = _no_fence if platform.machine() in {"x86_64", "AMD64"} else os.sched_yield
"""Memory fence: call between writing data and its counter, and between reading a counter and its data."""


def never() -> bool:
    """Default for `gone`: the peer cannot end."""
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
"""`naps` is set where the thread's timer slack is short."""


def end_naps_promptly() -> None:
    """Shorten this thread's timer slack, so that naps end on time."""
    if sys.platform == "linux" and not hasattr(_prompt, "naps"):
        _prompt.naps = _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0) == 0


class Bell:
    """A counter that processes can sleep on: word `index` of shared `words` (memoryview of format "q")."""

    def __init__(self, words: memoryview, index: int) -> None:
        self.words = words
        self.index = index
        # A futex has 32 bits: the low half of the word, which comes first on little-endian machines, changes with every
        # count.
        self._futex = ctypes.c_int32.from_buffer(words, 8 * index)
        self._address = ctypes.byref(self._futex)
        self.address = ctypes.addressof(self._futex)
        """Address of the futex, for `any_bell`."""

    @property
    def descriptor(self) -> int | None:
        """File descriptor that becomes readable on a ring from another node; None if the ringer shares this memory."""
        return None

    def ring(self) -> None:
        """Wake all waiters of the counter; call after raising it."""
        if _FUTEX_CALL is not None:
            syscall(_FUTEX_CALL, self._address, _FUTEX_WAKE, _EVERYONE, None, None, 0)

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Sleep until rung or for `timeout_s`; return at once if the counter differs from `seen`."""
        if _FUTEX_CALL is None:
            time.sleep(min(timeout_s, NAP_S))
            return
        limit = Timespec(0, int(min(timeout_s, 0.999) * 1e9))
        value = ctypes.c_int32(seen & 0xFFFFFFFF)
        syscall(_FUTEX_CALL, self._address, _FUTEX_WAIT, value, ctypes.byref(limit), None, 0)


class Doorbell:
    """Waits for a condition that a bell announces: yields for `YIELD_S`, then sleeps up to `max_sleep_s` at a time.

    A thread with only one core sleeps at once: its yields would compete with a peer on the same core.
    """

    def __init__(self, bell: Bell, max_sleep_s: float = ROUND_SLEEP_S) -> None:
        self.bell = bell
        self.max_sleep_s = max_sleep_s

    def rang(self) -> None:
        """Hook that is called after the peer was rung; a peer in another thread or process needs nothing more."""

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        gone: Callable[[], bool] = never,
        quiet_since: float | None = None,
    ) -> bool:
        """True as soon as `ready()`; False after `timeout_s`, or once `gone()` with still nothing ready.

        Args:
            quiet_since: time (time.monotonic) at which the waiter last had work: a waiter that has been idle for long
                sleeps at once, instead of yielding anew in each call.
        """
        words, index = self.bell.words, self.bell.index
        now = time.monotonic()
        since = now if quiet_since is None else quiet_since
        deadline, next_check = now + timeout_s, now + GONE_CHECK_S
        yield_until: float | None = None
        while True:
            seen = words[index]  # before the condition is checked: a ring in between then forbids the sleep
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
    """Doorbell for a peer in the same thread: runs the peer's `pump` instead of sleeping.

    Without `pump` it waits like any doorbell, for a peer in another thread.

    Args:
        at_once: run `pump` already when the bell is rung. On a device the peer's work is then queued behind the round
            and runs while the host waits for the round; on the host it would only delay the round's tokens.
    """

    def __init__(self, bell: Bell, at_once: bool = False) -> None:
        super().__init__(bell)
        self.pump: Callable[[], None] | None = None
        self._at_once = at_once

    def rang(self) -> None:
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
        """Like `Doorbell.wait`; runs `pump` at least once, and may exceed `timeout_s` by one run of it."""
        if self.pump is None:
            return super().wait(ready, timeout_s, gone, quiet_since)
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.pump()
            if time.monotonic() >= deadline:
                return ready()
        return True


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), or 0 if it does not exist.

    Process ids are reused; id and start time together are unique.
    """
    stat = process_stat(pid)
    return int(stat[19]) if stat else 0


def process_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on: the second may hold blanks and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class PeerProcess:
    """A process on this machine, in the same pid namespace, whose end can be detected.

    A killed process counts as gone at once, even before its parent has reaped it.
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
            return  # the process is gone, or a sandbox refuses the call: /proc distinguishes the two, more slowly
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
        """Whether the process can still do anything: it is `alive` and has not begun to exit.

        A killed process exits for as long as the kernel frees its memory and its devices': a second for 6 GB of host
        memory. Waiters for its answer should not wait that long.
        """
        if self._is_self:
            return True
        now = time.monotonic()
        if not self._exits and now >= self._look_at:
            self._look_at = now + EXIT_CHECK_S
            stat = process_stat(self.pid)
            # If /proc cannot be read, `alive` decides: a full file table must not make a live peer count as gone.
            self._exits = bool(stat) and bool(int(stat[6]) & _EXITING)
        return not self._exits and self.alive()
