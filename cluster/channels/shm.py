"""The channel over POSIX shared memory: two processes of one machine, all messages in host memory."""

import os
import weakref

from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.doorbell import Bell, Doorbell
from wingbeat.cluster.channels.header import Word
from wingbeat.cluster.channels.memory import ChannelMemory, Region, buffer_bytes, carve, check_fits
from wingbeat.cluster.channels.segment import Segment, SegmentHeader
from wingbeat.cluster.channels.segment_files import close_segment, remove_stale_segments
from wingbeat.runtime.free_memory import free_shared_memory
from wingbeat.runtime.protocol.messages import ChannelSpec

KIND = "shm"


class ShmChannel:
    """A segment and its verifier's end. `close`, deletion or the end of the process unlinks the segment."""

    def __init__(self, name: str, segment: Segment) -> None:
        self.name = name
        self.verifier_end = VerifierSide(_memory(segment), Doorbell(Bell(segment.words, Word.REPLIED)))
        self.verifier_end.on_close = weakref.finalize(
            self.verifier_end, close_segment, segment.words, segment.path, os.getpid()
        )

    @classmethod
    def create(cls, name: str, spec: ChannelSpec) -> "ShmChannel":
        """Create the segment `name`, after removing segments of dead verifiers.

        Raises ChannelError if the name is not a plain file name or belongs to a live verifier, or if /dev/shm or the
        machine's memory is too small for the slots.
        """
        remove_stale_segments()
        check_fits(spec, free_shared_memory())
        return cls(name, Segment.create(name, SegmentHeader(KIND, spec, {}), buffer_bytes(spec)))

    @staticmethod
    def attach(name: str, incarnation: int) -> DrafterSide:
        """Attach to the segment `name` as its drafter. Any earlier incarnation is detached.

        Raises ChannelError if the channel does not exist, was created by another version or is of another kind, its
        verifier is gone, or `incarnation` is not larger than the attached drafter's.
        """
        return DrafterSide(_memory(Segment.attach(name, KIND, buffer_bytes)), incarnation)


def _memory(segment: Segment) -> ChannelMemory:
    return carve(segment.header.spec, segment.words, Region(segment.body))
