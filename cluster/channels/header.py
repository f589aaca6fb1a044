"""Words at the start of a channel's memory: identity, owners, and the progress of each end. Does not use torch."""

import os
from typing import Any

from wingbeat.cluster.channels.doorbell import process_start

NUM_WORDS = 64
MAGIC = int.from_bytes(b"wingbeat", "little")


ChannelName = str | tuple[Any, ...]
"""Name of the channel that a drafter attaches to: the name of a memory segment, or an address such as `RemoteAddress`.
"""


class ChannelError(RuntimeError):
    """A channel cannot be created, found or attached to; the message is one line for the operator."""


class Word:
    """Index of each int64 word of the header; each cache line (8 words) has a single writer."""

    MAGIC = 0
    VERSION = 1
    HEADER_BYTES = 2
    VERIFIER_PID = 3
    VERIFIER_START = 4

    OUTCOME_SEQ = 8
    """Number of rounds published."""
    CLOSED = 9

    REPLIED = 16
    """Incarnation << ROUND_BITS | number of rounds answered."""

    ATTACHED = 24
    """Incarnation << PID_BITS | process id of the drafter; 0 before the first drafter."""
    DRAFTER_START = 25
    DETACHED = 26
    """The last incarnation that has detached by itself and released the memory."""

    COMPLETED = 48
    """Incarnation << ROUND_BITS | last round whose reply the drafter's device has completed. Written by that device,
    and by the verifier's host to release its own device; used if `cuda.reply_word` works.
    """


REPLY_EVENTS = slice(32, 48)
"""Words for the IPC handles of a drafter's two events, 64 bytes each, written before the drafter attaches."""
ROUND_BITS = 40
PID_BITS = 32
MAX_INCARNATION = 2**22


def write_owner(words: memoryview) -> None:
    """Write this process as the channel's verifier."""
    words[Word.VERIFIER_PID] = os.getpid()
    words[Word.VERIFIER_START] = process_start(os.getpid())
