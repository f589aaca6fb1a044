"""The channel between a verifier and its drafter: the protocol of its rounds, and the kind for one process.

A kind of channel differs in how its memory is made and in how its doorbell waits; the two ends are the same. They keep
the contract of `wingbeat.runtime.link`.

Rounds. The verifier fills the buffers of round n (parity n % 2) and then raises `OUTCOME_SEQ` to n. The drafter answers
in the reply buffers of the same parity and then raises `REPLIED`. Round n may be filled once round n - 2 is answered.
Each counter has one writer and is written after its data, so no lock is needed.

A change of drafter. Each drafter attaches under an incarnation, larger than any before. It takes over by writing one
word, `ATTACHED` (incarnation and process id together), last. From then on its predecessor's end is closed, and whatever
that one still writes, if it was merely stopped, is fenced:
- `REPLIED` carries the incarnation. A late write of the old one never counts as an answer, and the new one restores its
  own value whenever it polls.
- A reply whose header names another round or incarnation is not returned.
What remains: a process stopped in the middle of filling a reply and resumed while its successor fills the same buffers
may leave a tree mixed of both. The engine takes a tree only with the sequence's epoch and committed length, parents
smaller than their nodes and tokens of the vocabulary; such a tree is safe to verify whatever it says, because
verification decides every token by itself. A bad tree costs speed, not output.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from wingbeat.cluster.doorbell import IDLE_SLEEP_S, Bell, Doorbell, PeerProcess, PumpDoorbell, fence, process_start
from wingbeat.runtime.batch import ChannelSpec, Outcome, TreeReply, outcome_layout, reply_layout

ALIGNMENT_BYTES = 64
NUM_WORDS = 64


class ChannelError(RuntimeError):
    """A channel cannot be made, found or attached to; the message is one line for the operator."""


class Word:
    """Index of each int64 word of the header; a cache line (8 words) has one writer."""

    MAGIC = 0
    VERSION = 1
    SPEC_BYTES = 2
    VERIFIER_PID = 3
    VERIFIER_START = 4

    OUTCOME_SEQ = 8
    """Rounds published."""
    CLOSED = 9
    VERIFIER_BEAT = 10
    """time.monotonic_ns of the side's last sign of life."""

    REPLIED = 16
    """Incarnation << ROUND_BITS | rounds answered."""
    DRAFTER_BEAT = 17

    ATTACHED = 24
    """Incarnation << PID_BITS | process id of the drafter; 0 before the first one."""
    DRAFTER_START = 25
    DETACHED = 26
    """The last incarnation that left on its own."""


ROUND_BITS = 40
PID_BITS = 32
MAX_INCARNATION = 2**22


@dataclass(frozen=True)
class ChannelMemory:
    """What both ends see: the header's words, two parities of messages, and the token history."""

    spec: ChannelSpec
    words: memoryview
    """Format "q", NUM_WORDS long."""
    outcomes: tuple[Outcome, Outcome]
    replies: tuple[TreeReply, TreeReply]
    token_ids: Tensor
    """int64 [num_slots, max_model_len + 1]"""


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def history_layout(spec: ChannelSpec) -> Layout:
    """Shape and dtype of the token history."""
    return {"token_ids": ((spec.num_slots, spec.max_model_len + 1), torch.int64)}


def buffer_bytes(spec: ChannelSpec) -> int:
    """Bytes that `carve` needs: two outcomes, two replies and the token history, each field aligned."""
    return 2 * _bytes_of(outcome_layout(spec)) + 2 * _bytes_of(reply_layout(spec)) + _bytes_of(history_layout(spec))


def carve(spec: ChannelSpec, words: memoryview, raw: Tensor) -> ChannelMemory:
    """Lay the channel's tensors over `raw` (uint8 [buffer_bytes(spec)], aligned to 64 bytes)."""
    layouts = [outcome_layout(spec), outcome_layout(spec), reply_layout(spec), reply_layout(spec), history_layout(spec)]
    parts, start = [], 0
    for layout in layouts:
        parts.append(_views(layout, raw, start))
        start += _bytes_of(layout)
    outcomes = (Outcome(**parts[0]), Outcome(**parts[1]))
    replies = (TreeReply(**parts[2]), TreeReply(**parts[3]))
    return ChannelMemory(spec, words, outcomes, replies, parts[4]["token_ids"])


def _field_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bytes_of(layout: Layout) -> int:
    return sum(_field_bytes(shape, dtype) for shape, dtype in layout.values())


def _views(layout: Layout, raw: Tensor, start: int) -> dict[str, Tensor]:
    views = {}
    for name, (shape, dtype) in layout.items():
        views[name] = raw[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _field_bytes(shape, dtype)
    return views


class VerifierSide:
    """The verifier's end (`runtime.link.VerifierEnd`). One thread uses it."""

    def __init__(self, memory: ChannelMemory, doorbell: Doorbell) -> None:
        self.spec = memory.spec
        self.token_ids = memory.token_ids
        self._words = memory.words
        self._outcomes = memory.outcomes
        self._replies = memory.replies
        self._outcome_headers = [outcome.header.numpy() for outcome in memory.outcomes]
        self._reply_headers = [reply.header.numpy() for reply in memory.replies]
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
        """False once the attached drafter's process is gone, or none is attached."""
        return self.incarnation > 0 and self._peer_process().alive()

    @property
    def peer_silent_s(self) -> float:
        """Seconds since the drafter's last sign of life; inf before the first."""
        return _age_s(self._words[Word.DRAFTER_BEAT])

    def acquire_outcome(self, timeout_s: float) -> Outcome | None:
        """Buffers of the next round, or None while a live drafter still uses them after `timeout_s`, or once closed."""
        self._words[Word.VERIFIER_BEAT] = time.monotonic_ns()
        if self._words[Word.CLOSED]:
            return None
        round_number = self._published + 1
        self._acquired = self._await_answer(round_number - 2, timeout_s) or not self.peer_alive()
        return self._outcomes[round_number % 2] if self._acquired else None

    def publish_outcome(self) -> int:
        """Hand the acquired buffers to the drafter; returns the round's number. RuntimeError if none are acquired."""
        if not self._acquired:
            raise RuntimeError("publish_outcome without an acquired outcome")
        self._acquired = False
        self._published += 1
        self._outcome_headers[self._published % 2][0] = self._published
        self._words[Word.VERIFIER_BEAT] = time.monotonic_ns()
        fence()
        self._words[Word.OUTCOME_SEQ] = self._published
        self._outcome_bell.ring()
        return self._published

    def wait_reply(self, round_number: int, timeout_s: float) -> TreeReply | None:
        """The answer to a round, or None when it does not come in time or the drafter dies or changes meanwhile.

        Its tensors hold until round `round_number + 2` is published.
        """
        incarnation = self.incarnation
        if not incarnation or not self._await_answer(round_number, timeout_s):
            return None
        fence()
        header = self._reply_headers[round_number % 2]
        answers = header[0] == round_number and header[1] == incarnation == self.incarnation
        return self._replies[round_number % 2] if answers else None

    def close(self) -> None:
        """Close the channel for both ends; tensors already handed out stay mapped as long as they are held."""
        self._words[Word.CLOSED] = 1
        self._outcome_bell.ring()
        if self.on_close is not None:
            self.on_close()

    def _await_answer(self, round_number: int, timeout_s: float) -> bool:
        """True once the present drafter answered the round, or is not the present one any more."""
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

        return self._doorbell.wait(ready, timeout_s, gone=lambda: not self._peer_process().alive())

    def _peer_process(self) -> PeerProcess:
        attached = self._words[Word.ATTACHED]
        if self._peer[0] != attached:
            pid = attached & (1 << PID_BITS) - 1
            self._peer = (attached, PeerProcess(pid, self._words[Word.DRAFTER_START]))
        return self._peer[1]


class DrafterSide:
    """A drafter's end (`runtime.link.DrafterEnd`), attached when made. One thread uses it.

    A round may have been filled before its verifier noticed this incarnation: it then holds rows of sequences that this
    drafter has never seen.
    """

    def __init__(self, memory: ChannelMemory, incarnation: int) -> None:
        """Take over as the channel's drafter: rounds published so far are skipped.

        Raises ChannelError if the channel is closed or `incarnation` is not larger than the one attached.
        """
        self.spec = memory.spec
        self.token_ids = memory.token_ids
        self.incarnation = incarnation
        self._words = memory.words
        self._outcomes = memory.outcomes
        self._replies = memory.replies
        self._reply_headers = [reply.header.numpy() for reply in memory.replies]
        self._doorbell = Doorbell(Bell(self._words, Word.OUTCOME_SEQ), IDLE_SLEEP_S)
        self._reply_bell = Bell(self._words, Word.REPLIED)
        self._verifier = PeerProcess(self._words[Word.VERIFIER_PID], self._words[Word.VERIFIER_START])
        self._active_at = time.monotonic()
        self._polled = 0
        self._answered = 0
        self._attached = 0
        self._attach()

    def _attach(self) -> None:
        words, current = self._words, self._words[Word.ATTACHED] >> PID_BITS
        if words[Word.CLOSED] or not self._verifier.alive():
            raise ChannelError(f"the channel's verifier (process {self._verifier.pid}) has closed it or is gone")
        if not current < self.incarnation <= MAX_INCARNATION:
            bounds = f"{current + 1}..{MAX_INCARNATION}"
            raise ChannelError(f"incarnation {self.incarnation} cannot attach, it must be in {bounds}")
        self._answered = words[Word.OUTCOME_SEQ]
        self._attached = self.incarnation << PID_BITS | os.getpid()
        words[Word.DRAFTER_BEAT] = time.monotonic_ns()
        words[Word.REPLIED] = self._own_reply_word()
        words[Word.DRAFTER_START] = process_start(os.getpid())
        fence()
        words[Word.ATTACHED] = self._attached

    def poll_outcome(self) -> Outcome | None:
        """The oldest round not answered yet, or None; never blocks. Also a sign of life."""
        if not self._round_waits():
            return None
        fence()
        self._active_at = time.monotonic()
        self._polled = self._answered + 1
        return self._outcomes[self._polled % 2]

    def wait_outcome(self, timeout_s: float) -> Outcome | None:
        """Like `poll_outcome`, after waiting up to `timeout_s` for a round; None at once when the channel is closed."""
        words = self._words
        self._doorbell.wait(
            lambda: self._round_waits() or words[Word.CLOSED] != 0 or words[Word.ATTACHED] != self._attached,
            timeout_s,
            gone=lambda: not self._verifier.alive(),
            quiet_since=self._active_at,
        )
        return self.poll_outcome()

    @property
    def reply(self) -> TreeReply:
        """Buffers for the answer to the round last polled. RuntimeError if none is."""
        self._require_polled()
        return self._replies[self._polled % 2]

    def publish_reply(self) -> None:
        """Answer the round last polled and release its buffers. RuntimeError if none is.

        Does nothing once the channel is closed or another incarnation took over.
        """
        self._require_polled()
        round_number, self._polled = self._polled, 0
        if not self._in_charge():
            return
        header = self._reply_headers[round_number % 2]
        header[0], header[1] = round_number, self.incarnation
        self._answered = round_number
        self._active_at = time.monotonic()
        fence()
        self._words[Word.REPLIED] = self._own_reply_word()
        self._reply_bell.ring()

    @property
    def closed(self) -> bool:
        """True once the verifier closed the channel or its process is gone, or another incarnation took over."""
        return not (self._in_charge() and self._verifier.alive())

    @property
    def peer_silent_s(self) -> float:
        """Seconds since the verifier's last sign of life; inf before the first."""
        return _age_s(self._words[Word.VERIFIER_BEAT])

    def close(self) -> None:
        """Detach; the buffers stay with the verifier."""
        if self._in_charge():
            self._words[Word.DETACHED] = self.incarnation
        self._attached = -1

    def _in_charge(self) -> bool:
        return self._words[Word.ATTACHED] == self._attached and not self._words[Word.CLOSED]

    def _round_waits(self) -> bool:
        words = self._words
        if not self._in_charge():
            return False
        words[Word.DRAFTER_BEAT] = time.monotonic_ns()
        if words[Word.REPLIED] != self._own_reply_word():  # a stopped predecessor woke up and wrote its own
            words[Word.REPLIED] = self._own_reply_word()
        return words[Word.OUTCOME_SEQ] > self._answered

    def _own_reply_word(self) -> int:
        return self.incarnation << ROUND_BITS | self._answered

    def _require_polled(self) -> None:
        if not self._polled:
            raise RuntimeError("no outcome has been polled that awaits its answer")


class InProcessChannel:
    """A channel whose two ends live in one process, over ordinary memory.

    Where the drafter shares the verifier's thread, set `pump` to the drafter's run-once: the verifier's end runs it
    where it would wait. Without it the drafter runs in another thread.
    """

    def __init__(self, spec: ChannelSpec) -> None:
        words = memoryview(bytearray(8 * NUM_WORDS)).cast("q")
        write_owner(words)
        self._doorbell = PumpDoorbell(Bell(words, Word.REPLIED))
        self._memory = carve(spec, words, torch.zeros(buffer_bytes(spec), dtype=torch.uint8))
        self.verifier_end = VerifierSide(self._memory, self._doorbell)
        self.drafter_end = DrafterSide(self._memory, incarnation=1)

    @property
    def pump(self) -> Callable[[], None] | None:
        """Lets the drafter answer the rounds that wait."""
        return self._doorbell.pump

    @pump.setter
    def pump(self, pump: Callable[[], None] | None) -> None:
        self._doorbell.pump = pump

    def attach(self, incarnation: int) -> DrafterSide:
        """Replace the drafter's end. Raises ChannelError if `incarnation` is not larger than the one attached."""
        self.drafter_end = DrafterSide(self._memory, incarnation)
        return self.drafter_end


def write_owner(words: memoryview) -> None:
    """Enter this process as the channel's verifier."""
    words[Word.VERIFIER_PID] = os.getpid()
    words[Word.VERIFIER_START] = process_start(os.getpid())


def _age_s(beat_ns: int) -> float:
    return (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else float("inf")
