"""Interfaces of the two ends of the channel between a verifier and its drafter.

`wingbeat.cluster` implements the interfaces (within a process, and over shared memory). The runtime uses only the
interfaces. In each round the verifier fills an `Outcome` and publishes it, and the drafter answers with a `TreeReply`.
Two sets of buffers alternate by the round's parity, so addresses never change. The drafter answers every round, even if
the round requests no tree, because the answer frees the round's buffers.
"""

from typing import Protocol

from torch import Tensor

from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TreeReply


class VerifierEnd(Protocol):
    """The engine's end of the channel; no method blocks longer than its time-out."""

    spec: ChannelSpec
    token_ids: Tensor
    """int64 [num_slots, max_model_len + 1]: token history by slot, append-only within an epoch."""

    @property
    def incarnation(self) -> int:
        """Incarnation of the attached drafter; 0 if none is attached."""
        ...

    def peer_alive(self) -> bool:
        """Whether a drafter is attached and its process is alive. The check takes microseconds."""
        ...

    def acquire_outcome(self, timeout_s: float) -> Outcome | None:
        """Returns the buffers of the next round; None if the drafter still uses these buffers after `timeout_s`."""
        ...

    def publish_outcome(self) -> int:
        """Passes the acquired buffers to the drafter; returns the round's number (1, 2, ...)."""
        ...

    def wait_reply(self, round_number: int, timeout_s: float, *, by_device: bool = False) -> TreeReply | None:
        """Returns the answer to a round; None if no answer arrives in time, or if the drafter dies or is replaced.

        Args:
            by_device: whether the current stream may wait for the drafter's device in place of the host. If the drafter
                dies, its trees are then incomplete.
        """
        ...

    def close(self) -> None:
        """Releases the buffers; the drafter's end then reports the channel as closed."""
        ...


class DrafterEnd(Protocol):
    """The drafter worker's end of the channel."""

    spec: ChannelSpec
    token_ids: Tensor
    incarnation: int

    def poll_outcome(self) -> Outcome | None:
        """Returns the oldest unanswered round, or None; never blocks.

        A call also counts as a heartbeat of the drafter.
        """
        ...

    def has_outcome(self) -> bool:
        """Whether a round with complete data is pending.

        A pass over such a round does not have to wait for the verifier's device.
        """
        ...

    @property
    def reply(self) -> TreeReply:
        """Buffers for the answer to the round polled last."""
        ...

    def publish_reply(self) -> None:
        """Answers the round polled last and releases the round's buffers.

        Writes round and incarnation into the header.
        """
        ...

    @property
    def closed(self) -> bool:
        """Whether the verifier closed the channel, its process ended, or another drafter incarnation is attached."""
        ...

    def close(self) -> None:
        """Detaches this end; the verifier keeps the buffers."""
        ...
