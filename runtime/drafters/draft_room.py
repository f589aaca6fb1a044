"""What the verifiers of a shared drafter may take of it together: slots, and memory for its own KV."""

from dataclasses import dataclass

from wingbeat.runtime.protocol.messages import ChannelSpec

MIB = 1 << 20
CACHED_TIMES = 4
"""Blocks beyond this many times what all slots can hold at once would only cost memory; an engine's pool has the same
bound (`runtime.kv.capacity.fit`)."""


class NoRoomError(ValueError):
    """A verifier does not fit beside those that are attached; one line that says what it takes and what is left."""


@dataclass(frozen=True)
class DraftRoom:
    """Bounds of one drafter."""

    num_slots: int
    """Sequences."""
    num_bytes: int
    """Of the KV that the drafter keeps under its verifiers' blocks."""

    def num_blocks(self, spec: ChannelSpec, token_bytes: int) -> int:
        """Blocks worth having at all.

        Args:
            token_bytes: of the drafter's own KV per position; 0 where it keeps none.
        """
        most = 1 + CACHED_TIMES * self.num_slots * spec.max_blocks_per_seq
        return min(self.num_bytes // (token_bytes * spec.block_size), most) if token_bytes else 0

    def check(self, spec: ChannelSpec, num_slots: int, num_blocks: int, token_bytes: int) -> None:
        """Refuse a verifier that would make the drafter larger than this.

        Args:
            spec: of its channel.
            num_slots, num_blocks: what the drafter would have then, gaps between its verifiers included.

        Raises:
            NoRoomError: it does not fit.
        """
        if num_slots > self.num_slots:
            left = self.num_slots - num_slots + spec.num_slots
            raise NoRoomError(f"the verifier runs {spec.num_slots} sequences, and {max(left, 0)} slots are left")
        block = token_bytes * spec.block_size
        if num_blocks * block > self.num_bytes:
            left = self.num_bytes - (num_blocks - spec.num_blocks) * block
            raise NoRoomError(
                f"the verifier's blocks take {spec.num_blocks * block / MIB:.0f} MiB of the drafter's KV, and "
                f"{max(left, 0) / MIB:.0f} MiB are left"
            )
