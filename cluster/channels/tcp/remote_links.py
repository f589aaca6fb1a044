"""Connects an end's memory to its connection: sends published rounds and replies, and unpacks received frames.

Rounds and replies are sent and received in the thread that uses the end, when it rings and when it waits. As the only
exception, a new drafter's connection is first handled by a thread of the listener, which then offers the connection to
the verifier's thread.
"""

import logging
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from wingbeat.cluster.channels.doorbell import Bell, Doorbell, never
from wingbeat.cluster.channels.header import MAX_INCARNATION, PID_BITS, ROUND_BITS, Word
from wingbeat.cluster.channels.memory import ChannelMemory
from wingbeat.cluster.channels.tcp.remote_connection import Connection, FrameError
from wingbeat.cluster.channels.tcp.remote_frames import OutcomeReceiver, OutcomeSender, ReplyFrames, most_bytes
from wingbeat.cluster.channels.tcp.remote_handshake import Code, Hello, answer

logger = logging.getLogger(__name__)
_ROUND_MASK = (1 << ROUND_BITS) - 1


class Link(ABC):
    """Link from one end of a channel to the other end; has at most one connection at a time."""

    def __init__(self, memory: ChannelMemory) -> None:
        self.words = memory.words
        self.connection: Connection | None = None

    @abstractmethod
    def send(self) -> None:
        """Send the round or reply that was published last."""

    @abstractmethod
    def unpack(self, body: np.ndarray) -> None:
        """Unpack a received body into the memory and raise the word that announces it. Raises FrameError."""

    def receive(self) -> None:
        """Process the next frame if it is complete; an invalid frame ends the connection.

        A call processes at most one frame. Frames that arrived before the connection ended are all processed before the
        end is noticed.
        """
        if self.connection is None:
            return
        try:
            body = self.connection.receive()
            if body is not None:
                self.unpack(body)
        except ConnectionError:
            self.drop()
        except FrameError as error:
            logger.warning("the remote channel's connection is closed: %s", error)
            self.drop()

    def drop(self) -> None:
        """End the connection."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def works(self) -> bool:
        """Whether the other end is connected."""
        return self.connection is not None and self.connection.alive()


class VerifierLink(Link):
    """The verifier's link. A drafter's connection is replaced only by the connection of a drafter of a later
    incarnation.
    """

    def __init__(self, memory: ChannelMemory) -> None:
        super().__init__(memory)
        self._memory = memory
        self._most = most_bytes(memory.spec)
        self._replies = ReplyFrames(memory)
        self._outcomes = OutcomeSender(memory)
        self._lock = threading.Lock()
        self._offered: tuple[int, Connection] | None = None
        self._latest = 0
        self._closed = False

    def admit(self, sock: socket.socket, hello: Hello) -> None:
        """Accept or refuse a drafter; called in a thread of the listener."""
        replaced = None
        with self._lock:
            if self._closed:
                sock.close()
                return
            code = self._judge(hello)
            if code == Code.WELCOME:
                # The incarnation is set before the answer is sent, so that any process that the drafter then notifies
                # finds the drafter attached here.
                self._latest = hello.incarnation
                replaced, self._offered = self._offered, (hello.incarnation, Connection(sock, self._most))
            answer(sock, code, self._latest)
            if code != Code.WELCOME:
                sock.close()
        if replaced is not None:
            replaced[1].close()

    def adopt(self) -> None:
        """Switch to the drafter that was accepted since the last call, if any.

        Rounds that were published earlier are not sent to this drafter.
        """
        if self._offered is None:
            return
        with self._lock:
            offered, self._offered = self._offered, None
        if offered is None:
            return
        incarnation, connection = offered
        self.drop()
        self._outcomes = OutcomeSender(self._memory)
        self.connection = connection
        self.words[Word.REPLIED] = incarnation << ROUND_BITS | self.words[Word.OUTCOME_SEQ]
        self.words[Word.ATTACHED] = incarnation << PID_BITS

    def send(self) -> None:
        """Send the round published last to the drafter, if one is connected."""
        if self.connection is not None and not self.words[Word.CLOSED]:
            self.connection.send(self._outcomes.pack(self.words[Word.OUTCOME_SEQ], self.connection.body))

    def receive(self) -> None:
        """Like `Link.receive`, from the drafter that was accepted last."""
        self.adopt()
        super().receive()

    def unpack(self, body: np.ndarray) -> None:
        """Unpack a reply, which must answer the oldest unanswered round."""
        incarnation = self.words[Word.ATTACHED] >> PID_BITS
        due = (self.words[Word.REPLIED] & _ROUND_MASK) + 1
        expected = range(due, min(due, self.words[Word.OUTCOME_SEQ]) + 1)
        answered = self._replies.unpack(body, expected, incarnation)
        self.words[Word.REPLIED] = incarnation << ROUND_BITS | answered

    def drop(self) -> None:
        """End the connection and mark its drafter as detached."""
        if self.connection is not None:
            self.words[Word.DETACHED] = self.words[Word.ATTACHED] >> PID_BITS
        super().drop()

    def close(self) -> None:
        """Accept no further drafters, and end the connection."""
        with self._lock:
            self._closed = True
            offered, self._offered = self._offered, None
        if offered is not None:
            offered[1].close()
        self.drop()

    def _judge(self, hello: Hello) -> Code:
        if not self._latest < hello.incarnation <= MAX_INCARNATION:
            return Code.OLD_INCARNATION
        return Code.WELCOME if hello.same_layout else Code.OTHER_LAYOUT


class DrafterLink(Link):
    """The drafter's link. A drafter's channel has only one connection, and ends when the connection ends.

    Args:
        skip_to: method that is called with the number of the first received round before the round counts as published.
    """

    def __init__(self, memory: ChannelMemory, sock: socket.socket, skip_to: Callable[[int], None]) -> None:
        super().__init__(memory)
        self.connection = Connection(sock, most_bytes(memory.spec))
        self._replies = ReplyFrames(memory)
        self._outcomes = OutcomeReceiver(memory)
        # A weak reference, because the end owns this link, and a strong reference would keep the end alive.
        self._skip_to = weakref.WeakMethod(skip_to)

    def send(self) -> None:
        """Send the latest reply."""
        if self.connection is not None:
            answered = self.words[Word.REPLIED] & _ROUND_MASK
            self.connection.send(self._replies.pack(answered, self.connection.body))

    def unpack(self, body: np.ndarray) -> None:
        """Unpack the next round. Raises FrameError if two rounds are already unanswered."""
        published = self.words[Word.OUTCOME_SEQ]
        if published and published > (self.words[Word.REPLIED] & _ROUND_MASK) + 1:
            raise FrameError(f"round {published + 1} came before an answer freed its buffers")
        round_number = self._outcomes.unpack(body, published + 1 if published else None)
        if not published and (skip_to := self._skip_to()) is not None:
            skip_to(round_number)
        self.words[Word.OUTCOME_SEQ] = round_number

    def drop(self) -> None:
        """End the connection, and mark the channel as closed for this drafter."""
        self.words[Word.CLOSED] = 1
        super().drop()


class FrameBell(Bell):
    """Rings by sending a frame, and sleeps until a frame arrives."""

    def __init__(self, link: Link, index: int) -> None:
        super().__init__(link.words, index)
        self._link = link

    @property
    def descriptor(self) -> int | None:
        """Socket of the connection, or None; see `Bell`."""
        connection = self._link.connection
        return None if connection is None else connection.descriptor

    def ring(self) -> None:
        """Send the round or reply that was published last."""
        self._link.send()

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Sleep until a frame arrives or for `timeout_s`."""
        if self._link.connection is None:
            super().sleep(seen, timeout_s)
        elif self.words[self.index] == seen:
            self._link.connection.wait_readable(timeout_s)


class FrameDoorbell(Doorbell):
    """Doorbell that processes received frames before each check of the condition."""

    def __init__(self, link: Link, index: int) -> None:
        super().__init__(FrameBell(link, index))
        self._link = link

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        gone: Callable[[], bool] = never,
        quiet_since: float | None = None,
    ) -> bool:
        """Like `Doorbell.wait`."""

        def received() -> bool:
            self._link.receive()
            return ready()

        return super().wait(received, timeout_s, gone, quiet_since)
