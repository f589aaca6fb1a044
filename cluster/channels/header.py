"""The words at the start of a channel's memory: what it is, whose it is, how far each end has come. Needs no torch."""

import os
from typing import Any

from wingbeat.cluster.channels.doorbell import process_start

NUM_WORDS = 64
MAGIC = int.from_bytes(b"wingbeat", "little")


ChannelName = str | tuple[Any, ...]
"""Name that a drafter attaches by: that of memory, or of a part's channel."""


class ChannelError(RuntimeError):
    """A channel cannot be made, found or attached to; the message is one line for the operator."""


class Word:
    """Index of each int64 word of the header; a cache line (8 words) has one writer."""

    MAGIC = 0
    VERSION = 1
    HEADER_BYTES = 2
    VERIFIER_PID = 3
    VERIFIER_START = 4

    OUTCOME_SEQ = 8
    """Rounds published."""
    CLOSED = 9

    REPLIED = 16
    """Incarnation << ROUND_BITS | rounds answered."""

    ATTACHED = 24
    """Incarnation << PID_BITS | process id of the drafter; 0 before the first one."""
    DRAFTER_START = 25
    DETACHED = 26
    """The last incarnation that left on its own and has let go of the memory."""


REPLY_EVENTS = slice(32, 48)
"""Words that hold what a drafter hands over before it is attached: the handles of its two events, 64 bytes each."""
ROUND_BITS = 40
PID_BITS = 32
MAX_INCARNATION = 2**22


def write_owner(words: memoryview) -> None:
    """Enter this process as the channel's verifier."""
    words[Word.VERIFIER_PID] = os.getpid()
    words[Word.VERIFIER_START] = process_start(os.getpid())
