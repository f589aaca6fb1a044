"""The two ends of the channel between a verifier and its drafter, as the engine sees them.

`wingbeat.cluster` implements them (in one process, over shared memory); the runtime knows only this contract.
One round: the verifier fills an `Outcome` and publishes it, the drafter answers with a `TreeReply`. Two rounds of
buffers alternate by parity, so addresses never change. Every round is answered, also one that asks for no tree: the
answer frees its buffers.
"""

from typing import Protocol

from torch import Tensor

from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TreeReply


class VerifierEnd(Protocol):
    """Held by the engine. It never blocks longer than the time-out it is given."""

    spec: ChannelSpec
    token_ids: Tensor
    """int64 [num_slots, max_model_len + 1]: token history by slot, append-only within an epoch."""

    @property
    def incarnation(self) -> int:
        """Incarnation of the attached drafter; 0 while none is attached."""
        ...

    def peer_alive(self) -> bool:
        """False once the attached drafter's process is gone, or none is attached. Costs microseconds."""
        ...

    def acquire_outcome(self, timeout_s: float) -> Outcome | None:
        """Buffers of the next round, or None while the drafter still uses them after `timeout_s`."""
        ...

    def publish_outcome(self) -> int:
        """Hand the acquired buffers to the drafter; returns the round's number (1, 2, ...)."""
        ...

    def wait_reply(self, round_number: int, timeout_s: float) -> TreeReply | None:
        """The answer to a round, or None when it does not come in time or the drafter dies or changes meanwhile."""
        ...

    def close(self) -> None:
        """Release the buffers; the drafter's end then reports the channel as closed."""
        ...


class DrafterEnd(Protocol):
    """Held by the drafter's worker."""

    spec: ChannelSpec
    token_ids: Tensor
    incarnation: int

    def poll_outcome(self) -> Outcome | None:
        """The oldest round not answered yet, or None; never blocks. Also counts as a heartbeat."""
        ...

    def has_outcome(self) -> bool:
        """Whether a round waits and all of it is there: nothing enqueued now would wait for the verifier's device."""
        ...

    @property
    def reply(self) -> TreeReply:
        """Buffers for the answer to the round last polled."""
        ...

    def publish_reply(self) -> None:
        """Answer the round last polled and release its buffers (writes round and incarnation into the header)."""
        ...

    @property
    def closed(self) -> bool:
        """True once the verifier closed the channel or its process is gone, or another incarnation took over."""
        ...

    def close(self) -> None:
        """Detach; the buffers stay with the verifier."""
        ...
