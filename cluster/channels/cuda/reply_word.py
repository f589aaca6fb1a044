"""Makes the verifier's stream wait for the drafter's device, so that a round is launched before its trees are complete.

Once a reply is complete, the drafter's stream writes the reply's number to a word that both processes share; the
verifier's stream waits until the word has at least this number. The numbers only grow. If the drafter dies or is too
slow, a thread of the verifier stores a larger number, so that the stream continues. The round then reads an incomplete
tree, which can only cost speed. For this reason the word is in host memory, in the segment of the channel, which each
process registers with its own device: a store is no CUDA call, so it never waits for a lock that CUDA holds.
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.cluster.channels.doorbell import PeerProcess
from wingbeat.cluster.channels.header import PID_BITS, ROUND_BITS, Word
from wingbeat.cluster.channels.segment import HEADER_BYTES
from wingbeat.kernels.cuda_driver import CudaError

logger = logging.getLogger(__name__)
CHECK_S = 10e-3
"""Seconds between two checks of the waits, which take tens of microseconds."""
QUIET_CHECKS = 100
"""Number of checks without a wait after which the checking thread ends."""
PROBE_TIMEOUT_S = 5.0
Made = TypeVar("Made")
_PROBE = 1
"""Number that the verifier's own device writes at first; smaller than that of any reply."""
_RELEASED = (1 << ROUND_BITS) - 1
"""Round number that no round of an incarnation exceeds; releases all waits for the incarnation."""


class ReplyWord:
    """`Word.COMPLETED` of a segment, as streams of a device write it and wait for it.

    The current stream writes `first` at once. Raises CudaError if the device cannot do so.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device, words: memoryview, first: int) -> None:
        self._runtime, self._device = runtime, device
        self._memory = ctypes.c_char.from_buffer(words)  # keeps the pages mapped
        self._page = ctypes.addressof(self._memory)
        self._address = runtime.map_host(device, self._page, HEADER_BYTES) + 8 * Word.COMPLETED
        try:
            self.write(first)
        except CudaError:
            self.release()
            raise

    def write(self, number: int) -> None:
        """Make the current stream write the number once its earlier work is done."""
        self._runtime.write_value(self._device, self._address, number)

    def wait(self, number: int) -> None:
        """Make the current stream wait until the word is at least this number."""
        self._runtime.wait_value(self._device, self._address, number)

    def release(self) -> None:
        """Unregister the memory; no stream may use the word any more."""
        self._runtime.unmap_host(self._device, self._page)


def if_supported(make: Callable[[], Made]) -> Made | None:
    """Returns a new object of this module; None if the device or the driver does not support the word."""
    try:
        return make()
    except CudaError as error:
        logger.info("Hosts, not streams, wait for drafters: %s", error)
        return None


@dataclass
class _Wait:
    """A wait that the verifier's stream has not passed yet."""

    number: int
    limit_s: float
    drafter: PeerProcess
    passed: Any
    """Event after the wait."""
    until: float | None = None
    """Time at which the drafter's device is too slow; None while the verifier's own device has not sent the round."""


class ReplyWaits:
    """Waits of the verifier's stream, and the thread that ends them if the drafter does not.

    Args:
        sent: whether the verifier's device has passed the outcome of a round of this parity.

    Raises CudaError on construction if a stream cannot write or wait.
    """

    def __init__(
        self, runtime: CudaRuntime, device: torch.device, words: memoryview, sent: Callable[[int], bool]
    ) -> None:
        self._runtime, self._device, self._words, self._sent = runtime, device, words, sent
        self.word = ReplyWord(runtime, device, words, _PROBE)
        self._waits: deque[_Wait] = deque()
        self._lock, self._checked = threading.Lock(), False
        try:
            self._probe()
        except CudaError:
            self.word.release()
            raise

    def _probe(self) -> None:
        self.word.wait(_PROBE)
        done = self._runtime.drain(self._device, self._runtime.current_stream(self._device), PROBE_TIMEOUT_S)
        if not done or self._words[Word.COMPLETED] != _PROBE:
            raise CudaError(f"{self._device} does not write to host memory that another process maps")

    def follow(self, number: int, limit_s: float, drafter: PeerProcess) -> bool:
        """See `ReadyEvents.follow`; False unless the word was last written by this drafter's device."""
        word = self._words[Word.COMPLETED]
        if word >> ROUND_BITS != number >> ROUND_BITS or word == number | _RELEASED:
            return False
        try:
            self.word.wait(number)
            wait = _Wait(number, limit_s, drafter, self._runtime.mark(self._device))
        except RuntimeError as error:
            logger.debug("The stream does not wait for the drafter: %s", error)
            self._release(number)
            return False
        with self._lock:
            self._waits.append(wait)
            if not self._checked:
                self._checked = True
                threading.Thread(target=self._check_waits, name="wingbeat-reply-waits", daemon=True).start()
        return True

    def _check_waits(self) -> None:
        quiet = 0
        while quiet < QUIET_CHECKS:
            time.sleep(CHECK_S)
            with self._lock:
                self._check()
                quiet = 0 if self._waits else quiet + 1
                self._checked = quiet < QUIET_CHECKS

    def _check(self) -> None:
        """Forget waits that the stream has passed, and release the stream if the oldest other wait has lasted too long.

        The word is stored again at each check, because a late write of the drafter's device may have lowered it.
        """
        while self._waits and self._waits[0].passed.query():
            self._waits.popleft()
        if not self._waits:
            return
        oldest, now = self._waits[0], time.monotonic()
        if oldest.until is None and self._sent(oldest.number % 2):
            oldest.until = now + oldest.limit_s
        replaced = self._words[Word.ATTACHED] >> PID_BITS != oldest.number >> ROUND_BITS
        late = oldest.until is not None and now >= oldest.until
        if replaced or late or not oldest.drafter.works():
            self._release(oldest.number)

    def _release(self, number: int) -> None:
        self._words[Word.COMPLETED] = max(self._words[Word.COMPLETED], number | _RELEASED)
