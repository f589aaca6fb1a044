"""Waiting for a peer process: until a shared counter moves, or until the process is gone.

It knows nothing of rounds. A counter is an aligned int64 in a `memoryview` of format "q", written by one process at a
time. That is the cheapest reader Python has (28 ns; a numpy view 47 ns, a tensor 790 ns on a 2-core x86 machine), and
CPython copies such an element with one 8-byte move, so a reader sees the old or the new value and never a mixture.
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
"""A yield with nobody else to run is a spin (0.25 us); a pure spin would keep the peer off a shared core. More of it
would take time from what is waited for."""
ROUND_SLEEP_S = 10e-3
IDLE_SLEEP_S = 20e-3
"""A ring ends a sleep at once; these bound how late a peer's death is noticed, and cost well below 2 % of a core."""
NAP_S = 0.5e-3
"""Sleep where the kernel's futex cannot be reached."""
GONE_CHECK_S = 1e-3
EXIT_CHECK_S = 10e-3
"""Between looks at whether a process has begun to exit: 30 us each."""
_EXITING = 0x4
"""PF_EXITING of Linux's sched.h, in the ninth field of /proc/PID/stat."""
POLL_NAP_S = 20e-6
"""Between looks at a device, so that the interpreter is free for others meanwhile."""
TIMER_SLACK_NS = 1000
"""Of a thread that naps between looks: by Linux's default a nap is 50 us longer."""
_PR_SET_TIMERSLACK = 29


def _no_fence() -> None:
    """x86 keeps stores in order and loads in order, and that is all a counter behind its data needs."""


# Elsewhere (Arm) neither is kept. The scheduler takes a full memory barrier before it picks a thread, so a yield is a
# fence that Python can reach without compiled code.
fence: Callable[[], None] = _no_fence if platform.machine() in {"x86_64", "AMD64"} else os.sched_yield
"""Call between writing data and its counter, and between reading a counter and its data."""


def never() -> bool:
    """Nothing can be gone."""
    return False


class Timespec(ctypes.Structure):
    """The kernel's, where longs have 64 bits."""

    _fields_: ClassVar = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 2**31 - 1
_FUTEX_CALLS = {("linux", "x86_64"): 202, ("linux", "aarch64"): 98}
_FUTEX_CALL = _FUTEX_CALLS.get((sys.platform, platform.machine()))
_libc = ctypes.CDLL(None, use_errno=True)
syscall = _libc.syscall
_prompt = threading.local()
"""`naps` where naps of the thread end when they should."""


def end_naps_promptly() -> None:
    """Let naps of this thread end when they should."""
    if sys.platform == "linux" and not hasattr(_prompt, "naps"):
        _prompt.naps = _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0) == 0


class Bell:
    """A counter that processes can sleep on: word `index` of shared `words` (memoryview of format "q")."""

    def __init__(self, words: memoryview, index: int) -> None:
        self.words = words
        self.index = index
        # A futex is 32 bits: the low half of the word, first on these little-endian machines, changes with every count.
        self._futex = ctypes.c_int32.from_buffer(words, 8 * index)
        self._address = ctypes.byref(self._futex)
        self.address = ctypes.addressof(self._futex)
        """For `any_bell`."""

    @property
    def descriptor(self) -> int | None:
        """What becomes readable where the counter's ringer is on another node; None where it shares this memory."""
        return None

    def ring(self) -> None:
        """Wake whoever sleeps on the counter; call after raising it."""
        if _FUTEX_CALL is not None:
            syscall(_FUTEX_CALL, self._address, _FUTEX_WAKE, _EVERYONE, None, None, 0)

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Sleep until rung or for `timeout_s`; not at all if the counter is not the value `seen` any more."""
        if _FUTEX_CALL is None:
            time.sleep(min(timeout_s, NAP_S))
            return
        limit = Timespec(0, int(min(timeout_s, 0.999) * 1e9))
        value = ctypes.c_int32(seen & 0xFFFFFFFF)
        syscall(_FUTEX_CALL, self._address, _FUTEX_WAIT, value, ctypes.byref(limit), None, 0)


class Doorbell:
    """Waits on a condition that a bell announces: yields for a while, then sleeps up to `max_sleep_s` at a time.

    A thread that has but one core sleeps at once: a peer beside it would have to share that core with its yields.
    """

    def __init__(self, bell: Bell, max_sleep_s: float = ROUND_SLEEP_S) -> None:
        self.bell = bell
        self.max_sleep_s = max_sleep_s

    def rang(self) -> None:
        """The peer has been rung for: one in another thread needs no more."""

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        gone: Callable[[], bool] = never,
        quiet_since: float | None = None,
    ) -> bool:
        """True as soon as `ready()`; False after `timeout_s`, or once `gone()` with still nothing ready.

        `quiet_since` (time.monotonic) says when the waiter last had work: one idle for long sleeps at once, instead of
        yielding anew in each call.
        """
        words, index = self.bell.words, self.bell.index
        now = time.monotonic()
        since = now if quiet_since is None else quiet_since
        deadline, next_check = now + timeout_s, now + GONE_CHECK_S
        yield_until: float | None = None
        while True:
            seen = words[index]  # before the condition is looked at: a ring in between then forbids the sleep
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
    """As `Doorbell.wait`, for what no bell announces: a device's work."""
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
    """For a peer in the same thread: runs `pump` to let it work, where another doorbell would sleep.

    Without a pump it waits like any doorbell, which serves a peer in another thread.

    Args:
        at_once: run the pump with the ring already. On a device the peer's work is then queued behind what rang for it,
            and runs while the host waits for the round; on the host, it would only come between a round and its tokens.
    """

    def __init__(self, bell: Bell, at_once: bool = False) -> None:
        super().__init__(bell)
        self.pump: Callable[[], None] | None = None
        self._at_once = at_once

    def rang(self) -> None:
        """Let the peer work at once, where that is wanted."""
        if self._at_once and self.pump is not None:
            self.pump()

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
    stat = process_stat(pid)
    return int(stat[19]) if stat else 0


def process_stat(pid: int) -> list[str]:
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
        self._exits, self._look_at = False, 0.0
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
        stat = process_stat(self.pid)
        return bool(stat) and stat[0] not in "ZX" and int(stat[19]) == self.start

    def works(self) -> bool:
        """Whether the process may still do anything: `alive`, and it has not begun to exit.

        A killed process exits for as long as the kernel takes back its memory and its devices': a second for 6 GB of
        the host's. Nobody who waits for its answer is to wait for that.
        """
        if self._is_self:
            return True
        now = time.monotonic()
        if not self._exits and now >= self._look_at:
            self._look_at = now + EXIT_CHECK_S
            stat = process_stat(self.pid)
            # Whom /proc does not tell of, `alive` knows: a table of files that is full must cost nobody a peer.
            self._exits = bool(stat) and bool(int(stat[6]) & _EXITING)
        return not self._exits and self.alive()
