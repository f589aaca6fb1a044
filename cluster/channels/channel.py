"""The channel between a verifier and its drafter: the protocol of rounds, and the kind of channel within one process.

All kinds of channels use the classes of this file for their two ends; the kinds differ in their memory and in how their
doorbells wait. The ends implement the contract of `wingbeat.runtime.protocol.ends`. `docs/architecture.md` specifies
rounds, device order, and changes of drafter.
"""

import os
import time
from collections.abc import Callable

import torch

from wingbeat.cluster.channels.doorbell import (
    IDLE_SLEEP_S,
    Bell,
    Doorbell,
    PeerProcess,
    PumpDoorbell,
    fence,
    poll,
    process_start,
)
from wingbeat.cluster.channels.header import (
    MAX_INCARNATION,
    NUM_WORDS,
    PID_BITS,
    REPLY_EVENTS,
    ROUND_BITS,
    ChannelError,
    Word,
    write_owner,
)
from wingbeat.cluster.channels.memory import DEVICE_FIELDS, HOST_FIELDS, ChannelMemory, Region, buffer_bytes, carve
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, ReplyHeader, RoundHeader, TreeReply


class VerifierSide:
    """The verifier's end (`runtime.protocol.ends.VerifierEnd`), for use by one thread."""

    def __init__(self, memory: ChannelMemory, doorbell: Doorbell) -> None:
        self.spec = memory.spec
        self.token_ids = memory.token_ids
        self._words = memory.words
        self._outcomes = memory.outcomes
        self._replies = memory.replies
        self._outcome_headers = [outcome.header.numpy() for outcome in memory.outcomes]
        self._reply_headers = [reply.header.numpy() for reply in memory.replies]
        self._outcome_ready = memory.outcome_ready
        self._reply_ready = memory.reply_ready
        self._doorbell = doorbell
        self._outcome_bell = Bell(self._words, Word.OUTCOME_SEQ)
        self.on_close: Callable[[], object] | None = None
        self._published = 0
        self._acquired = False
        self._peer = (0, PeerProcess(os.getpid(), 0))

    @property
    def incarnation(self) -> int:
        """Incarnation of the attached drafter; 0 while none is attached."""
        incarnation = self._words[Word.ATTACHED] >> PID_BITS
        return 0 if self._words[Word.CLOSED] or self._words[Word.DETACHED] == incarnation else incarnation

    def peer_alive(self) -> bool:
        """Whether a drafter is attached and its process still runs."""
        return self.incarnation > 0 and self._peer_process().works()

    def acquire_outcome(self, timeout_s: float) -> Outcome | None:
        """Buffers of the next round.

        Returns None if a live drafter still uses these buffers after `timeout_s`, or if the channel is closed.
        """
        if self._words[Word.CLOSED]:
            return None
        round_number, deadline = self._published + 1, time.monotonic() + timeout_s
        # If the drafter has died, its device no longer reads the buffers, so the buffers are free even without an
        # answer.
        free = self._await_answer(round_number - 2, timeout_s) or not self.peer_alive()
        if free and self._reply_ready is not None and self._is_answered(round_number - 2):
            free = self._is_finished(round_number - 2, deadline - time.monotonic()) or not self.peer_alive()
        self._acquired = free
        return self._outcomes[round_number % 2] if free else None

    def publish_outcome(self) -> int:
        """Pass the acquired buffers to the drafter, and return the round's number.

        Raises RuntimeError if no buffers are acquired.
        """
        if not self._acquired:
            raise RuntimeError("publish_outcome without an acquired outcome")
        self._acquired = False
        self._published += 1
        if self._outcome_ready is not None:
            self._outcome_ready.record(self._published)
        RoundHeader.stamp(self._outcome_headers[self._published % 2], self._published)
        fence()
        self._words[Word.OUTCOME_SEQ] = self._published
        self._outcome_bell.ring()
        self._doorbell.after_ring()
        return self._published

    def wait_reply(self, round_number: int, timeout_s: float, *, by_device: bool = False) -> TreeReply | None:
        """The drafter's answer to a round; None if no answer comes in time.

        Also returns None if the drafter dies or is replaced meanwhile.

        The tensors stay valid until round `round_number + 2` is published. This call waits for the drafter's device
        work and notices the drafter's death during the wait. With `by_device` the calling thread's current stream waits
        instead, if it can (`ReadyEvents.follow`).
        """
        incarnation, deadline = self.incarnation, time.monotonic() + timeout_s
        if not incarnation or not self._await_answer(round_number, timeout_s):
            return None
        if incarnation != self.incarnation or not self._is_answered(round_number):
            return None
        events, left_s = self._reply_ready, deadline - time.monotonic()
        number = incarnation << ROUND_BITS | round_number
        if by_device and events is not None and events.follow(number, left_s, self._peer_process()):
            return self._replies[round_number % 2]
        return self._replies[round_number % 2] if self._is_finished(round_number, left_s) else None

    def close(self) -> None:
        """Close the channel for both ends.

        Host tensors that were returned earlier stay mapped as long as they are referenced; device tensors become
        invalid.
        """
        self._acquired = False
        self._words[Word.CLOSED] = 1
        self._outcome_bell.ring()
        if self.on_close is not None:
            self.on_close()

    def _is_answered(self, round_number: int) -> bool:
        """Whether the attached drafter's latest reply in the buffers of this parity answers exactly this round."""
        words, incarnation = self._words, self.incarnation
        if round_number < 1 or not incarnation or words[Word.REPLIED] < incarnation << ROUND_BITS | round_number:
            return False
        fence()
        return ReplyHeader.read(self._reply_headers[round_number % 2]) == (round_number, incarnation)

    def _is_finished(self, round_number: int, timeout_s: float) -> bool:
        """Whether the drafter's device work for an answered round is done.

        Returns False if the drafter dies or is replaced, or after `timeout_s`.
        """
        words, attached, events = self._words, self._words[Word.ATTACHED], self._reply_ready
        if events is None:
            return True

        def decided() -> bool:
            return events.finished(round_number % 2) or words[Word.ATTACHED] != attached

        done = poll(decided, timeout_s, gone=lambda: not self._peer_process().works())
        return done and words[Word.ATTACHED] == attached

    def _await_answer(self, round_number: int, timeout_s: float) -> bool:
        """True once the current drafter has answered the round, or has been replaced or detached."""
        words, incarnation = self._words, self.incarnation
        attached, answered = words[Word.ATTACHED], incarnation << ROUND_BITS | max(round_number, 0)
        if not incarnation:
            return True

        def ready() -> bool:
            return (
                words[Word.REPLIED] >= answered
                or words[Word.ATTACHED] != attached
                or words[Word.DETACHED] == incarnation
            )

        return self._doorbell.wait(ready, timeout_s, gone=lambda: not self._peer_process().works())

    def _peer_process(self) -> PeerProcess:
        attached = self._words[Word.ATTACHED]
        if self._peer[0] != attached:
            pid = attached & (1 << PID_BITS) - 1
            self._peer = (attached, PeerProcess(pid, self._words[Word.DRAFTER_START]))
        return self._peer[1]


class DrafterSide:
    """The drafter's end (`runtime.protocol.ends.DrafterEnd`), attached on construction, for use by one thread.

    A round that this end receives may have been filled before the verifier noticed this incarnation, so the round may
    refer to sequences that this drafter has never received.
    """

    def __init__(self, memory: ChannelMemory, incarnation: int, event_handles: bytes = b"") -> None:
        """Attach as the channel's drafter; rounds published earlier are skipped.

        Args:
            event_handles: IPC handles of the reply events, for the verifier; empty if replies are in host memory.

        Raises ChannelError if the channel is closed or `incarnation` is not larger than the attached drafter's.
        """
        self.spec = memory.spec
        self.token_ids = memory.token_ids
        self.incarnation = incarnation
        self._words = memory.words
        self._outcomes = memory.outcomes
        self._replies = memory.replies
        self._reply_headers = [reply.header.numpy() for reply in memory.replies]
        self._outcome_ready = memory.outcome_ready
        self._reply_ready = memory.reply_ready
        self.on_close: Callable[[], object] | None = None
        """Function that releases the memory; returns False if the memory is still in use and stays mapped."""
        self.bell = Bell(self._words, Word.OUTCOME_SEQ)
        """Bell that the verifier rings for each round and when it closes the channel."""
        self._doorbell = Doorbell(self.bell, IDLE_SLEEP_S)
        self._reply_bell = Bell(self._words, Word.REPLIED)
        self._verifier = PeerProcess(self._words[Word.VERIFIER_PID], self._words[Word.VERIFIER_START])
        self._active_at = time.monotonic()
        self._polled = 0
        self._answered = 0
        self._attached = 0
        self._attach(event_handles)

    def _attach(self, event_handles: bytes) -> None:
        words, current = self._words, self._words[Word.ATTACHED] >> PID_BITS
        if words[Word.CLOSED] or not self._verifier.works():
            raise ChannelError(f"the channel's verifier (process {self._verifier.pid}) has closed it or is gone")
        if not current < self.incarnation <= MAX_INCARNATION:
            bounds = f"{current + 1}..{MAX_INCARNATION}"
            raise ChannelError(f"incarnation {self.incarnation} cannot attach, it must be in {bounds}")
        self._answered = words[Word.OUTCOME_SEQ]
        self._attached = self.incarnation << PID_BITS | os.getpid()
        words[Word.REPLIED] = self._own_reply_word()
        words[Word.DRAFTER_START] = process_start(os.getpid())
        if event_handles:
            words[REPLY_EVENTS] = memoryview(event_handles).cast("q")
        fence()
        words[Word.ATTACHED] = self._attached

    def poll_outcome(self) -> Outcome | None:
        """The oldest unanswered round, or None; never blocks.

        Work that this thread enqueues on its current stream after this call may read the round's device tensors.
        """
        if not self.round_waits():
            return None
        fence()
        round_number = self._answered + 1
        ready = self._outcome_ready
        if ready is not None and not ready.wait(round_number % 2, self._verifier.works()):
            return None
        self._active_at = time.monotonic()
        self._polled = round_number
        return self._outcomes[round_number % 2]

    def has_outcome(self) -> bool:
        """Whether a round is pending that the verifier's device has finished.

        In contrast, `poll_outcome` also returns a round that the verifier's device is still writing.
        """
        ready = self._outcome_ready
        return self.round_waits() and (ready is None or ready.finished((self._answered + 1) % 2))

    def wait_outcome(self, timeout_s: float) -> Outcome | None:
        """Like `poll_outcome`, but waits up to `timeout_s` for a round; None at once if the channel is closed."""
        words = self._words
        self._doorbell.wait(
            lambda: self.round_waits() or words[Word.CLOSED] != 0 or words[Word.ATTACHED] != self._attached,
            timeout_s,
            gone=lambda: not self._verifier.works(),
            quiet_since=self._active_at,
        )
        return self.poll_outcome()

    @property
    def reply(self) -> TreeReply:
        """Reply buffers of the round that was polled last. Raises RuntimeError if no polled round awaits its answer."""
        self._require_polled()
        return self._replies[self._polled % 2]

    def publish_reply(self) -> None:
        """Answer the round that was polled last and release its buffers.

        Does nothing if the channel is closed or another incarnation is attached. Raises RuntimeError if no polled round
        awaits its answer.
        """
        self._require_polled()
        round_number, self._polled = self._polled, 0
        if not self._in_charge():
            return
        self._answered = round_number
        if self._reply_ready is not None:
            self._reply_ready.record(self._own_reply_word())
        ReplyHeader(round_number, self.incarnation).write(self._reply_headers[round_number % 2])
        self._active_at = time.monotonic()
        fence()
        self._words[Word.REPLIED] = self._own_reply_word()
        self._reply_bell.ring()

    @property
    def closed(self) -> bool:
        """Whether the verifier has closed the channel or is gone, or another incarnation is attached."""
        return not (self._in_charge() and self._verifier.works())

    def close(self) -> None:
        """Detach from the channel, whose buffers the verifier keeps. Device tensors become invalid."""
        attached, self._attached = self._attached, -1
        released = self.on_close is None or self.on_close() is not False
        # `Word.DETACHED` is written even if the verifier has already closed the channel, because the verifier waits for
        # this word before it frees the shared memory.
        if released and attached == self._words[Word.ATTACHED]:
            self._words[Word.DETACHED] = self.incarnation

    def round_waits(self) -> bool:
        """Whether the verifier has published a round that is not answered yet."""
        words = self._words
        if not self._in_charge():
            return False
        # If `Word.REPLIED` differs from this drafter's value, an earlier drafter, which had been stopped, has resumed
        # and overwritten the word.
        if words[Word.REPLIED] != self._own_reply_word():
            words[Word.REPLIED] = self._own_reply_word()
        return words[Word.OUTCOME_SEQ] > self._answered

    def _in_charge(self) -> bool:
        return self._words[Word.ATTACHED] == self._attached and not self._words[Word.CLOSED]

    def _own_reply_word(self) -> int:
        return self.incarnation << ROUND_BITS | self._answered

    def _require_polled(self) -> None:
        if not self._polled:
            raise RuntimeError("no outcome has been polled that awaits its answer")


class InProcessChannel:
    """A channel with both ends in one process, without shared memory.

    If the drafter runs in the verifier's thread, set `pump` to a function in which the drafter answers all pending
    rounds. The verifier's end calls `pump` where it would otherwise wait; if there is a device, the verifier's end also
    calls `pump` as soon as a round is published. Without `pump` the drafter must run in another thread.

    Args:
        device: device whose memory holds the fields that devices access, as in `cuda_ipc`; both ends must use the same
            stream of the device. None puts all fields in host memory.
    """

    def __init__(self, spec: ChannelSpec, device: torch.device | None = None) -> None:
        words = memoryview(bytearray(8 * NUM_WORDS)).cast("q")
        write_owner(words)
        self._doorbell = PumpDoorbell(Bell(words, Word.REPLIED), at_once=device is not None)
        parts = [(None, None)] if device is None else [(None, HOST_FIELDS), (device, DEVICE_FIELDS)]
        regions = [
            Region(torch.zeros(buffer_bytes(spec, fields), dtype=torch.uint8, device=where), fields)
            for where, fields in parts
        ]
        self._memory = carve(spec, words, *regions)
        self.verifier_end = VerifierSide(self._memory, self._doorbell)
        self.drafter_end = DrafterSide(self._memory, incarnation=1)

    @property
    def pump(self) -> Callable[[], None] | None:
        """Function in which the drafter answers all pending rounds."""
        return self._doorbell.pump

    @pump.setter
    def pump(self, pump: Callable[[], None] | None) -> None:
        self._doorbell.pump = pump

    def attach(self, incarnation: int) -> DrafterSide:
        """Replace the drafter's end. Raises ChannelError if `incarnation` is not larger than the attached drafter's."""
        self.drafter_end = DrafterSide(self._memory, incarnation)
        return self.drafter_end
