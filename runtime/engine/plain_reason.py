"""Why sequences of a round verify no tree."""

from enum import StrEnum

from wingbeat.runtime.engine.drafter_client import DrafterClient, DrafterState
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.policy import Reason


class NoTree(StrEnum):
    """Why nothing was verified, beside the reasons of the policy (`runtime.speculation.policy.Reason`)."""

    PROMPT = "prompt"
    """The token came with its prompt, before anything could be drafted."""
    NO_DRAFTER = "no_drafter"
    DRAFTER_LOST = "drafter_lost"
    NOT_ASKED = "not_asked"
    """Every request asks for plain decoding."""
    NO_ROOM = "no_room"
    """There were no KV blocks for trees."""
    NOT_USABLE = "not_usable"
    """Trees were asked for, and none came that belonged to the round and was worth verifying."""


def plain_reason(drafting: DrafterClient, plan: SchedulerOutput, seqs: list[Sequence]) -> str:
    """Why these decodes of the round being launched, should they verify no tree, verify none.

    A plain word: it is sent to processes that have no use for this module.
    """
    if drafting.state is not DrafterState.ATTACHED:
        reason = NoTree.DRAFTER_LOST if drafting.state is DrafterState.LOST else NoTree.NO_DRAFTER
    elif not any(seq.request.params.speculation for seq in seqs):
        reason = NoTree.NOT_ASKED
    elif any(seq.draft.tree_requested and seq not in plan.without_room for seq in seqs):
        reason = NoTree.NOT_USABLE
    elif plan.without_room:
        reason = NoTree.NO_ROOM
    elif any(seq.request.params.force_drafts for seq in seqs):
        reason = Reason.IDLE  # whatever pays, it would have been drafted for
    else:
        reason = drafting.plain_reason
    return str(reason)
