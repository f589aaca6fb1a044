"""CUDA events that order the two devices of a channel in GPU memory; each process creates events on its own GPU."""

import logging

import torch

from wingbeat.cluster.channels.cuda.cuda_runtime import HANDLE_BYTES, CudaRuntime
from wingbeat.cluster.channels.header import REPLY_EVENTS, Word

logger = logging.getLogger(__name__)
PAIR = (0, 1)


class DeviceEvents:
    """`ReadyEvents` implemented by two interprocess CUDA events.

    In CUDA, waiting for an event that was never recorded does nothing, and waiting for an event of an earlier round
    returns early: both would let a stream read data that is not there yet. A record by a process that was killed before
    its device got there may never complete, so that a waiting stream would hang. Hence the channel uses an event only
    after its round's doorbell rang. The verifier's stream never waits: its host queries the event and checks meanwhile
    that the drafter lives, because a drafter may be killed at any time and must only cost speed. The drafter's stream
    does wait, so that its pass is already enqueued when the verifier's device is done; without a verifier the drafter
    has no work to lose.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device, events: list[torch.cuda.Event]) -> None:
        self._runtime = runtime
        self._device = device
        self._events = events
        self.last_stream: object | None = None
        """The last stream that recorded or waited here, which must be drained before the memory is freed."""

    def record(self, parity: int) -> None:
        """Record the parity's event on the calling thread's current stream of the channel's device."""
        self.last_stream = self._runtime.current_stream(self._device)
        self._events[parity].record(self.last_stream)

    def wait(self, parity: int, writer_alive: bool) -> bool:
        """Order the calling thread's current stream after the event, and return True.

        If the writer is dead, the stream does not wait; returns whether the event is finished.
        """
        if not writer_alive:
            return self._events[parity].query()
        self.last_stream = self._runtime.current_stream(self._device)
        self._events[parity].wait(self.last_stream)
        return True

    def finished(self, parity: int) -> bool:
        """Whether the writer's device has reached the event."""
        return self._events[parity].query()

    def release(self) -> None:
        """Destroy the events, or this process's handles of them."""
        self._events.clear()
        self.last_stream = None


def new_events(runtime: CudaRuntime, device: torch.device) -> tuple[list[torch.cuda.Event], bytes]:
    """Two new events of `device`, by parity, and the IPC handles that another process opens. Raises CudaError."""
    made = [runtime.create_event(device) for _ in PAIR]
    return made, b"".join(event.ipc_handle() for event in made)


def open_events(runtime: CudaRuntime, device: torch.device, handles: bytes) -> list[torch.cuda.Event]:
    """Open the events that `new_events` created in another process. Raises CudaError."""
    return [runtime.open_event(device, handles[parity * HANDLE_BYTES : (parity + 1) * HANDLE_BYTES]) for parity in PAIR]


class DrafterEvents(DeviceEvents):
    """The verifier's view of the reply events, which each drafter creates on its own GPU.

    The drafter passes their handles on when it attaches, and only the drafter can record them. An event that cannot be
    queried any more counts as unfinished, like a dead drafter's work.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device, words: memoryview) -> None:
        super().__init__(runtime, device, [])
        self._words = words
        self._opened_of = 0
        """Value of `Word.ATTACHED` of the drafter that owns the opened events."""

    def open(self) -> None:
        """Open the events of the attached drafter. Raises CudaError."""
        attached = self._words[Word.ATTACHED]
        if attached == self._opened_of:
            return
        self._events, self._opened_of = [], 0
        handles = self._words[REPLY_EVENTS].tobytes()
        self._events = open_events(self._runtime, self._device, handles)
        self._opened_of = attached

    def finished(self, parity: int) -> bool:
        """Whether the drafter's device has reached the event; False if the event cannot be queried."""
        try:
            self.open()
            return super().finished(parity)
        except RuntimeError as error:
            logger.debug("The drafter's event cannot be asked: %s", error)
            return False
