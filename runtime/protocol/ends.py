"""Interfaces of the two ends of the channel between a verifier and its drafter.

`wingbeat.cluster` implements the interfaces (within one process, over shared memory); the runtime uses them alone. In
each round the verifier fills an `Outcome` and publishes it, and the drafter answers with a `TreeReply`. Two sets of
buffers alternate by the round's parity, so addresses never change. Every round is answered, even if it requests no
tree, because the answer frees its buffers.
"""

from typing import Protocol

from torch import Tensor

from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TreeReply


class VerifierEnd(Protocol):
    """The engine's end; no method blocks longer than its time-out."""

    spec: ChannelSpec
    token_ids: Tensor
    """int64 [num_slots, max_model_len + 1]: token history by slot, append-only within an epoch."""

    @property
    def incarnation(self) -> int:
        """Incarnation of the attached drafter; 0 if none is attached."""
        ...

    def peer_alive(self) -> bool:
        """Whether a drafter is attached and its process is alive. Costs microseconds."""
        ...

    def acquire_outcome(self, timeout_s: float) -> Outcome | None:
        """Buffers of the next round; None if the drafter still uses them after `timeout_s`."""
        ...

    def publish_outcome(self) -> int:
        """Passes the acquired buffers to the drafter; returns the round's number (1, 2, ...)."""
        ...

    def wait_reply(self, round_number: int, timeout_s: float) -> TreeReply | None:
        """The answer to a round; None if it does not arrive in time or the drafter dies or is replaced meanwhile."""
        ...

    def close(self) -> None:
        """Releases the buffers; the drafter's end then reports the channel as closed."""
        ...


class DrafterEnd(Protocol):
    """The drafter worker's end."""

    spec: ChannelSpec
    token_ids: Tensor
    incarnation: int

    def poll_outcome(self) -> Outcome | None:
        """The oldest unanswered round, or None; never blocks. Also serves as heartbeat."""
        ...

    def has_outcome(self) -> bool:
        """Whether a round is waiting and complete, so that work enqueued now need not wait for the verifier's
        device."""
        ...

    @property
    def reply(self) -> TreeReply:
        """Buffers for the answer to the round polled last."""
        ...

    def publish_reply(self) -> None:
        """Answers the round polled last and releases its buffers; writes round and incarnation into the header."""
        ...

    @property
    def closed(self) -> bool:
        """True once the verifier closed the channel, its process is gone, or another drafter incarnation took over."""
        ...

    def close(self) -> None:
        """Detaches; the buffers remain with the verifier."""
        ...
