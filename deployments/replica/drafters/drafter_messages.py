"""What a drafter's process and its actor are told, and tell those that use them."""

from typing import TYPE_CHECKING, NamedTuple

from wingbeat.cluster.channels.tcp.remote_address import ChannelName
from wingbeat.deployments.replica.actor_process import ActorProcess

if TYPE_CHECKING:
    from wingbeat.cluster.channels.cuda.lent_memory import Loan
    from wingbeat.runtime.heads.contract import HeadConvention


class DrafterTerms(NamedTuple):
    """What a verifier tells its drafter before it is asked for its needs, and each of its successors."""

    convention: "HeadConvention | None" = None
    """How its head is to be read; None where its files say that."""
    loan: "Loan | None" = None
    """Weights of the verifier on the GPU that both share; None where it lends none."""


class Placed(NamedTuple):
    """The answer to a verifier that wants to share a drafter."""

    pid: int
    refusal: str | None = None
    """Why it has no place."""


class DrafterStatus(NamedTuple):
    """What a drafter says of itself."""

    process: ActorProcess
    """Of its actor, with which it ends."""
    channels: tuple[ChannelName, ...]
    silent_s: float
    """How long ago its thread last looked for a round."""
