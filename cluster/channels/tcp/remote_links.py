"""Between an end's memory and its connection: what the end rings for is sent, what comes raises the end's words.

All of it happens in the thread that uses the end, where it rings and where it waits; no thread stands between a round
and the wire. Only a drafter that connects is first met by the listener's thread, and offered to the verifier's.
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
    """One end's, with one connection at a time."""

    def __init__(self, memory: ChannelMemory) -> None:
        self.words = memory.words
        self.connection: Connection | None = None

    @abstractmethod
    def send(self) -> None:
        """Send what was published last."""

    @abstractmethod
    def unpack(self, body: np.ndarray) -> None:
        """Lay what came into the memory and raise its word. Raises FrameError."""

    def receive(self) -> None:
        """Take in the next frame, if it has come; whatever is wrong with it ends the connection.

        No more than one: what came before the connection's end is looked at before the end is.
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
        """Whether there is somebody at the other end."""
        return self.connection is not None and self.connection.alive()


class VerifierLink(Link):
    """The verifier's: each connection that replaces another is a drafter of a later incarnation."""

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
        """Welcome a drafter, or tell it why not; called in a thread of the listener's."""
        replaced = None
        with self._lock:
            if self._closed:
                sock.close()
                return
            code = self._judge(hello)
            if code == Code.WELCOME:
                # Before the drafter hears of it: whoever the drafter tells finds it here.
                self._latest = hello.incarnation
                replaced, self._offered = self._offered, (hello.incarnation, Connection(sock, self._most))
            answer(sock, code, self._latest)
            if code != Code.WELCOME:
                sock.close()
        if replaced is not None:
            replaced[1].close()

    def adopt(self) -> None:
        """Take over the drafter that was welcomed last, if that is news: rounds published so far are not its own."""
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
        """Send the round published last to the drafter, if there is one."""
        if self.connection is not None and not self.words[Word.CLOSED]:
            self.connection.send(self._outcomes.pack(self.words[Word.OUTCOME_SEQ], self.connection.body))

    def receive(self) -> None:
        """As every link's, from the drafter that was welcomed last."""
        self.adopt()
        super().receive()

    def unpack(self, body: np.ndarray) -> None:
        """An answer: to the oldest round that has none."""
        incarnation = self.words[Word.ATTACHED] >> PID_BITS
        due = (self.words[Word.REPLIED] & _ROUND_MASK) + 1
        expected = range(due, min(due, self.words[Word.OUTCOME_SEQ]) + 1)
        answered = self._replies.unpack(body, expected, incarnation)
        self.words[Word.REPLIED] = incarnation << ROUND_BITS | answered

    def drop(self) -> None:
        """End the connection: its drafter has left."""
        if self.connection is not None:
            self.words[Word.DETACHED] = self.words[Word.ATTACHED] >> PID_BITS
        super().drop()

    def close(self) -> None:
        """Admit nobody any more."""
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
    """The drafter's: its one connection is its life.

    Args:
        skip_to: a method that is told the number of the first round that comes, before the round counts as published.
    """

    def __init__(self, memory: ChannelMemory, sock: socket.socket, skip_to: Callable[[int], None]) -> None:
        super().__init__(memory)
        self.connection = Connection(sock, most_bytes(memory.spec))
        self._replies = ReplyFrames(memory)
        self._outcomes = OutcomeReceiver(memory)
        # Its end holds this link, which outlives no end that way.
        self._skip_to = weakref.WeakMethod(skip_to)

    def send(self) -> None:
        """Send the latest answer."""
        if self.connection is not None:
            answered = self.words[Word.REPLIED] & _ROUND_MASK
            self.connection.send(self._replies.pack(answered, self.connection.body))

    def unpack(self, body: np.ndarray) -> None:
        """The next round, where at most one other waits for its answer."""
        published = self.words[Word.OUTCOME_SEQ]
        if published and published > (self.words[Word.REPLIED] & _ROUND_MASK) + 1:
            raise FrameError(f"round {published + 1} came before an answer freed its buffers")
        round_number = self._outcomes.unpack(body, published + 1 if published else None)
        if not published and (skip_to := self._skip_to()) is not None:
            skip_to(round_number)
        self.words[Word.OUTCOME_SEQ] = round_number

    def drop(self) -> None:
        """End the connection, and with it the channel as this drafter sees it."""
        self.words[Word.CLOSED] = 1
        super().drop()


class FrameBell(Bell):
    """Rings by sending a frame, and sleeps until one comes."""

    def __init__(self, link: Link, index: int) -> None:
        super().__init__(link.words, index)
        self._link = link

    @property
    def descriptor(self) -> int | None:
        """See `Bell`."""
        connection = self._link.connection
        return None if connection is None else connection.descriptor

    def ring(self) -> None:
        """Send what was published last."""
        self._link.send()

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Sleep until something comes or for `timeout_s`."""
        if self._link.connection is None:
            super().sleep(seen, timeout_s)
        elif self.words[self.index] == seen:
            self._link.connection.wait_readable(timeout_s)


class FrameDoorbell(Doorbell):
    """Takes in what has come before each look at the condition."""

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
