"""Which context a drafter lacks is computed again for it in a round, from what the prompts left of the budget."""

from wingbeat.runtime.scheduling.plan import length_of
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.state_keeper import StateKeeper


def with_replays(plan: SchedulerOutput, states: StateKeeper | None) -> SchedulerOutput:
    """Add chunks of context the drafter lacks; oldest sequence first.

    The last chunk of a replay must end where the drafter can follow. With a round in flight nobody on the host knows
    where that is, so the sequence sits this round out.

    Args:
        states: of layers that keep a state of their own: a replay begins where there is one.
    """
    budget = plan.budget_left
    chunks: list[Chunk] = []
    held: list[Sequence] = []
    for seq in plan.decodes:
        draft = seq.draft
        if draft.complete or draft.is_recorded or not seq.request.params.speculation or not budget:
            continue
        start = seq.draft.length if states is None else states.replay_start(seq, seq.draft.length)
        if start is None:
            continue
        seq.draft.length = start
        missing = seq.num_computed - start
        if missing <= budget and seq.in_flight:
            held.append(seq)
        else:
            length = length_of(seq, start, min(missing, budget), plan.whole_images)
            chunks += [Chunk(seq, start, length, replay=True)] if length else []
            budget -= length
    if not chunks and not held:
        return plan
    decodes = [seq for seq in plan.decodes if seq not in held] if held else plan.decodes
    return plan._replace(decodes=decodes, chunks=plan.chunks + chunks, budget_left=budget)
