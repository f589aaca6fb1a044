"""Waits on several bells at once, so that a drafter that several verifiers share wakes at the first ring.

Linux 5.16 and later have a system call for such a wait (futex_waitv). On older kernels the thread waits on one bell
after another, for a short time each. Bells of other nodes are sockets, which are polled together; if there are also
bells in memory, the polls are short, and bells in memory are checked between two polls.
"""

import ctypes
import errno
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from wingbeat.cluster.channels.doorbell import YIELD_S, Bell, Timespec, syscall

TURN_S = 0.3e-3
"""Seconds of each wait if the thread waits on one bell after another. During a wait no other bell in memory is noticed.
"""
MOST_BELLS = 128
"""Maximum number of bells per futex_waitv call; further bells are checked when the wait ends."""
_CALL, _SIZE_U32, _MONOTONIC = 449, 2, 1
"""futex_waitv has the same system call number on all architectures."""


class _Waiter(ctypes.Structure):
    _fields_: ClassVar = [
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


def _kernel_has_it() -> bool:
    """Whether the kernel has futex_waitv: a call with zero bells fails with EINVAL if so, and with ENOSYS if not."""
    if not sys.platform.startswith("linux"):
        return False
    ctypes.set_errno(0)
    syscall(_CALL, None, 0, 0, None, _MONOTONIC)
    return ctypes.get_errno() == errno.EINVAL


WAITS_FOR_MANY = _kernel_has_it()


def sleep_on(bells: Sequence[Bell], seen: Sequence[int], timeout_s: float) -> None:
    """Sleep until a bell rings or for `timeout_s`; return at once if a counter differs from its value in `seen`."""
    descriptors = [descriptor for bell in bells if (descriptor := bell.descriptor) is not None]
    if descriptors:
        _poll(descriptors, timeout_s if len(descriptors) == len(bells) else min(timeout_s, TURN_S))
        return
    if not WAITS_FOR_MANY:
        for bell, value in zip(bells, seen, strict=True):
            bell.sleep(value, min(timeout_s, TURN_S))
        return
    waiters = (_Waiter * min(len(bells), MOST_BELLS))(
        *(
            _Waiter(value & 0xFFFFFFFF, bell.address, _SIZE_U32, 0)
            for bell, value in zip(bells[:MOST_BELLS], seen, strict=False)
        )
    )
    until = time.monotonic() + timeout_s
    limit = Timespec(int(until), int(until % 1 * 1e9))
    syscall(_CALL, ctypes.byref(waiters), len(waiters), 0, ctypes.byref(limit), _MONOTONIC)


def _poll(descriptors: Sequence[int], timeout_s: float) -> None:
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    waiting.poll(1e3 * timeout_s)


def wait_for_any(
    bells: Sequence[Bell], ready: Callable[[], bool], timeout_s: float, quiet_since: float | None = None
) -> bool:
    """True as soon as `ready()` is true, which is checked after each ring; False after `timeout_s`.

    Args:
        quiet_since: time (time.monotonic) at which the waiter last had work; None means now. For `YIELD_S` after this
            time the wait yields instead of sleeping, as `Doorbell.wait` does.
    """
    now = time.monotonic()
    deadline = now + timeout_s
    yield_until = (now if quiet_since is None else quiet_since) + YIELD_S
    if len(os.sched_getaffinity(0)) == 1:
        yield_until = now
    while True:
        # Counters are read before the condition is checked, so that a ring in between prevents the sleep.
        seen = [bell.words[bell.index] for bell in bells]
        if ready():
            return True
        if now >= deadline:
            return False
        if now < yield_until:
            os.sched_yield()
        else:
            sleep_on(bells, seen, deadline - now)
        now = time.monotonic()
