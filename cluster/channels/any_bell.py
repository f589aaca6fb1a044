"""Sleeping on several bells at once: a drafter of several verifiers wakes for whichever rings first.

Linux has a call for that since 5.16 (futex_waitv). Elsewhere the bells are slept on in turn, briefly each. Bells that
are rung from other nodes are sockets, which are polled together; bells in memory beside them are looked at in between.
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
"""On one of several bells that have to be slept on in turn: a ring of another one is heard that much later."""
MOST_BELLS = 128
"""Of one call; the rest is heard when a sleep ends."""
_CALL, _SIZE_U32, _MONOTONIC = 449, 2, 1
"""The call's number is that of every architecture."""


class _Waiter(ctypes.Structure):
    _fields_: ClassVar = [
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


def _kernel_has_it() -> bool:
    """Asked with no bell at all, which a kernel that knows the call finds invalid."""
    if not sys.platform.startswith("linux"):
        return False
    ctypes.set_errno(0)
    syscall(_CALL, None, 0, 0, None, _MONOTONIC)
    return ctypes.get_errno() == errno.EINVAL


WAITS_FOR_MANY = _kernel_has_it()


def sleep_on(bells: Sequence[Bell], seen: Sequence[int], timeout_s: float) -> None:
    """Sleep until one of the bells is rung or for `timeout_s`; not at all where a counter is not what was `seen`."""
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
    """True as soon as `ready()`, which any of the bells may announce; False after `timeout_s`.

    Args:
        quiet_since: when the waiter last had work (time.monotonic): for a while after that it yields, as one that waits
            on a `Doorbell` does.
    """
    now = time.monotonic()
    deadline = now + timeout_s
    yield_until = (now if quiet_since is None else quiet_since) + YIELD_S
    if len(os.sched_getaffinity(0)) == 1:
        yield_until = now
    while True:
        seen = [bell.words[bell.index] for bell in bells]  # before the condition: a ring in between forbids the sleep
        if ready():
            return True
        if now >= deadline:
            return False
        if now < yield_until:
            os.sched_yield()
        else:
            sleep_on(bells, seen, deadline - now)
        now = time.monotonic()
