"""Limits on the total number of slots and the total bytes of draft KV of all verifiers that share a drafter."""

from dataclasses import dataclass

from wingbeat.runtime.protocol.messages import ChannelSpec

MIB = 1 << 20
CACHED_TIMES = 4
"""Limit on blocks, as a multiple of the number of blocks that all slots can use at once; more blocks would only cost
memory. An engine's KV pool has the same limit (`runtime.kv.capacity.fit`)."""


class NoRoomError(ValueError):
    """A verifier does not fit in addition to the attached verifiers.

    The message states what the verifier needs and what is left.
    """


@dataclass(frozen=True)
class DraftRoom:
    """Upper limits of one drafter."""

    num_slots: int
    """Maximum number of sequences."""
    num_bytes: int
    """Maximum bytes of the draft KV stored under the verifiers' block ids."""

    def num_blocks(self, spec: ChannelSpec, token_bytes: int) -> int:
        """Maximum useful number of blocks, limited by memory and by CACHED_TIMES.

        Args:
            token_bytes: bytes of draft KV per position; 0 if the drafter keeps no KV.
        """
        most = 1 + CACHED_TIMES * self.num_slots * spec.max_blocks_per_seq
        return min(self.num_bytes // (token_bytes * spec.block_size), most) if token_bytes else 0

    def check(self, spec: ChannelSpec, num_slots: int, num_blocks: int, token_bytes: int) -> None:
        """Check that the drafter stays within these limits after a verifier is attached.

        Args:
            spec: shape of the new verifier's channel.
            num_slots, num_blocks: totals of the drafter once the verifier is attached, including gaps between the
                verifiers' ranges.
            token_bytes: bytes of draft KV per position.

        Raises:
            NoRoomError: a limit would be exceeded.
        """
        if num_slots > self.num_slots:
            left = self.num_slots - num_slots + spec.num_slots
            raise NoRoomError(f"the verifier runs {spec.num_slots} sequences, and {max(left, 0)} slots are left")
        block = token_bytes * spec.block_size
        if num_blocks * block > self.num_bytes:
            left = self.num_bytes - (num_blocks - spec.num_blocks) * block
            raise NoRoomError(
                f"the verifier's blocks take {spec.num_blocks * block / MIB:.0f} MiB of the drafter's KV memory, but "
                f"{max(left, 0) / MIB:.0f} MiB are left"
            )
