"""What orders the devices of a channel through GPU memory: CUDA events, that each process makes on its own GPU."""

import logging

import torch

from wingbeat.cluster.channels.cuda.cuda_runtime import HANDLE_BYTES, CudaRuntime
from wingbeat.cluster.channels.header import REPLY_EVENTS, Word

logger = logging.getLogger(__name__)
PAIR = (0, 1)


class DeviceEvents:
    """`ReadyEvents` by two interprocess CUDA events.

    CUDA makes a wait for an event that was never recorded do nothing, and one for an event of an earlier round end
    early: both would let a stream read what is not there yet. And the record of a process that was killed before its
    device got there may never complete, so that a waiting stream would hang. Hence the channel looks only at events of
    a round whose doorbell rang. A verifier's stream never waits: its host asks, and looks meanwhile whether the drafter
    lives, because a drafter may be killed at any time and must cost speed alone. A drafter's stream waits, so that its
    pass is enqueued by the time the verifier's device is done; one whose verifier is gone has nobody to work for.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device, events: list[torch.cuda.Event]) -> None:
        self._runtime = runtime
        self._device = device
        self._events = events
        self.last_stream: object | None = None
        """The last stream that recorded or waited here: the one to drain before the memory goes."""

    def record(self, parity: int) -> None:
        """Mark the calling thread's current stream of the channel's device."""
        self.last_stream = self._runtime.current_stream(self._device)
        self._events[parity].record(self.last_stream)

    def wait(self, parity: int, writer_alive: bool) -> bool:
        """Order the calling thread's current stream after the mark; of a dead writer only finished work is taken."""
        if not writer_alive:
            return self._events[parity].query()
        self.last_stream = self._runtime.current_stream(self._device)
        self._events[parity].wait(self.last_stream)
        return True

    def finished(self, parity: int) -> bool:
        """Whether the device of the writer has reached the mark."""
        return self._events[parity].query()

    def release(self) -> None:
        """Destroy the events, or this process's hold on them."""
        self._events.clear()
        self.last_stream = None


def new_events(runtime: CudaRuntime, device: torch.device) -> tuple[list[torch.cuda.Event], bytes]:
    """Two events of `device`, by parity, and the handles by which another process opens them. Raises CudaError."""
    made = [runtime.create_event(device) for _ in PAIR]
    return made, b"".join(event.ipc_handle() for event in made)


def open_events(runtime: CudaRuntime, device: torch.device, handles: bytes) -> list[torch.cuda.Event]:
    """The events of `new_events`, made in another process. Raises CudaError."""
    return [runtime.open_event(device, handles[parity * HANDLE_BYTES : (parity + 1) * HANDLE_BYTES]) for parity in PAIR]


class DrafterEvents(DeviceEvents):
    """The verifier's view of the events of replies, which each drafter makes on its own GPU, where alone it may record
    them, and hands over when it attaches.

    They go with their drafter: what cannot be asked any more counts as unfinished, as a dead drafter's work does.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device, words: memoryview) -> None:
        super().__init__(runtime, device, [])
        self._words = words
        self._opened_of = 0
        """The word by which a drafter is attached whose events these are."""

    def open(self) -> None:
        """Take over the events of the drafter that is attached. Raises CudaError."""
        attached = self._words[Word.ATTACHED]
        if attached == self._opened_of:
            return
        self._events, self._opened_of = [], 0
        handles = self._words[REPLY_EVENTS].tobytes()
        self._events = open_events(self._runtime, self._device, handles)
        self._opened_of = attached

    def finished(self, parity: int) -> bool:
        """Whether the drafter's device has reached the mark, as far as its event can be asked."""
        try:
            self.open()
            return super().finished(parity)
        except RuntimeError as error:
            logger.debug("The drafter's event cannot be asked: %s", error)
            return False
