"""CUDA events that order the work of the two devices of a channel in GPU memory."""

import logging

import torch

from wingbeat.cluster.channels.cuda.cuda_runtime import HANDLE_BYTES, CudaRuntime
from wingbeat.cluster.channels.cuda.reply_word import ReplyWaits, ReplyWord
from wingbeat.cluster.channels.doorbell import PeerProcess
from wingbeat.cluster.channels.header import REPLY_EVENTS, Word
from wingbeat.cluster.channels.memory import ReadyEvents

logger = logging.getLogger(__name__)
PAIR = (0, 1)


class DeviceEvents(ReadyEvents):
    """`ReadyEvents` implemented by two interprocess CUDA events.

    In CUDA, waiting for an event that was never recorded does nothing, and waiting for an event that was recorded in an
    earlier round returns at once. In both cases a stream would read data that has not been written yet. If a process is
    killed before its device reaches an event that it recorded, the event may never complete, and a stream that waits
    for it would hang. For these reasons the channel uses an event only after the doorbell of the event's round has
    rung. The verifier's stream never waits for an event, because a drafter may be killed at any time, and its death
    must cost speed only. Instead the stream waits for a word that the host can write (`reply_word`), or the verifier's
    host queries the event and meanwhile checks that the drafter still runs.
    The drafter's stream does wait for the verifier's event, so that the drafter's pass is already enqueued when the
    verifier's device is done. If the verifier is killed and the drafter's stream hangs, no work is lost.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        device: torch.device,
        events: list[torch.cuda.Event],
        word: ReplyWord | None = None,
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._events = events
        self._word = word
        self.last_stream: object | None = None
        """The last stream that recorded or awaited one of these events; this stream must be drained before the memory
        is freed.
        """

    def record(self, number: int) -> None:
        """Record the event of this number's parity on the calling thread's current stream of the channel's device."""
        self.last_stream = self._runtime.current_stream(self._device)
        self._events[number % 2].record(self.last_stream)
        if self._word is not None:
            self._word.write(number)

    def wait(self, parity: int, writer_alive: bool) -> bool:
        """Make the calling thread's current stream wait for the event, and return True.

        If the writer is dead, the stream does not wait, and the result is whether the event is finished.
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
        """Destroy the events that this process created, or its handles of another process's events.

        Also unregisters the word of replies.
        """
        self._events.clear()
        self.last_stream = None
        if self._word is not None:
            self._word.release()
            self._word = None


def new_events(runtime: CudaRuntime, device: torch.device) -> tuple[list[torch.cuda.Event], bytes]:
    """Two new events of `device`, by parity, and the IPC handles that another process opens. Raises CudaError."""
    made = [runtime.create_event(device) for _ in PAIR]
    return made, b"".join(event.ipc_handle() for event in made)


def open_events(runtime: CudaRuntime, device: torch.device, handles: bytes) -> list[torch.cuda.Event]:
    """Open the events that `new_events` created in another process. Raises CudaError."""
    return [runtime.open_event(device, handles[parity * HANDLE_BYTES : (parity + 1) * HANDLE_BYTES]) for parity in PAIR]


class DrafterEvents(DeviceEvents):
    """The verifier's view of the reply events, which each drafter creates on its own GPU.

    A drafter passes the handles of its two events to the verifier when it attaches, and only the drafter can record
    these events. An event that can no longer be queried counts as unfinished, like the work of a dead drafter.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device, words: memoryview, waits: ReplyWaits | None) -> None:
        super().__init__(runtime, device, [], None if waits is None else waits.word)
        self._words, self._waits = words, waits
        self._opened_of = 0
        """`Word.ATTACHED` as written by the drafter whose events are open; 0 if no events are open."""

    def open(self) -> None:
        """Open the events of the attached drafter. Raises CudaError."""
        attached = self._words[Word.ATTACHED]
        if attached == self._opened_of:
            return
        self._events, self._opened_of = [], 0
        handles = self._words[REPLY_EVENTS].tobytes()
        self._events = open_events(self._runtime, self._device, handles)
        self._opened_of = attached

    def follow(self, number: int, limit_s: float, writer: PeerProcess) -> bool:
        """Make the calling thread's current stream wait for `Word.COMPLETED`; False if the word is not in use."""
        return self._waits is not None and self._waits.follow(number, limit_s, writer)

    def finished(self, parity: int) -> bool:
        """Whether the drafter's device has reached the event; False if the event cannot be queried."""
        try:
            self.open()
            return super().finished(parity)
        except RuntimeError as error:
            logger.debug("The drafter's event cannot be asked: %s", error)
            return False
