"""The verifier's side of drafting: asks for trees, feeds the drafter what was decided, survives its loss.

The verifier is the source of truth. A tree counts only if it was grown from the sequence's committed length, epoch and
root by the attached incarnation; whatever else arrives, or does not arrive, costs speed and never a request.

Nothing here reads what a round in flight decides: a tree that does not count is a bare root in the data, and accepted
tokens go from the device to the channel as they are. A channel in host memory makes `publish` wait for the device,
because what is published must be there; one in device memory does not.
"""

import logging
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.clocks import RoundClock
from wingbeat.runtime.engine.drafter_context import RecordedContexts, advance, begin_following, with_replays
from wingbeat.runtime.engine.drafter_waits import DrafterWaits
from wingbeat.runtime.engine.outcome_writer import (
    DeferredPairs,
    OutcomeWriter,
    rows_of,
    write_context,
    write_history,
    write_root_masks,
)
from wingbeat.runtime.engine.speculation import Speculation, Trees
from wingbeat.runtime.engine.text_drafts import TextDrafts
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.protocol.chunk_inputs import TellInputs
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import AcceptedPaths, DrafterFigures
from wingbeat.runtime.protocol.transfer import copy_into, upload
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.round.slots import DecodeRows, SlotState
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import DraftProgress, Sequence
from wingbeat.runtime.speculation.policy import HOLD, DraftPlan, Reason

logger = logging.getLogger(__name__)


class DrafterState(StrEnum):
    """Whether rounds are drafted."""

    NONE = "none"
    ATTACHED = "attached"
    LATE = "late"
    """Alive, and has not answered in time: the engine decodes plainly until it does, or is lost."""
    LOST = "lost"
    """Dead or silent: the engine decodes plainly until another drafter is attached."""


class DrafterClient(RoundObserver):
    """Verifier's use of one drafter at a time.

    Args:
        slots: device state by slot, shared with the model runner.
        speculation: decides what is drafted, and for whom.
        clock: told what is waiting for the drafter.
        inbox: of the `ModelRunner`: where trees go as they come.
        features: of the engine: each may move the position at which a replay begins.
        contexts: what is recorded of saved prefixes, which needs no replay.
        tell_inputs: see `OutcomeWriter`.
        texts: makes trees of earlier text in the place of the drafter's; None where nothing does.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        slots: SlotState,
        speculation: Speculation,
        clock: RoundClock,
        inbox: Any,
        features: tuple[Feature, ...],
        contexts: RecordedContexts,
        tell_inputs: TellInputs | None,
        texts: TextDrafts | None = None,
    ) -> None:
        self.config, self.block_manager, self.slots = config, block_manager, slots
        self._inbox = inbox
        self._features = features
        self._contexts = contexts
        self._tell_inputs, self._texts = tell_inputs, texts
        self.state = DrafterState.NONE
        self.plain_reason = str(Reason.IDLE)
        """Why a sequence that the latest plan asks no tree for has none."""
        self._speculation, self._clock = speculation, clock
        self._on_cpu = slots.device.type == "cpu"
        self._steps = None if self._on_cpu else torch.arange(1, config.speculation.max_path + 1, device=slots.device)
        # With one round in flight nothing is unknown of a sequence when it comes to be followed.
        self._hands_over_late = self._on_cpu and not config.overlap
        self._end: VerifierEnd | None = None
        self._late_end: VerifierEnd | None = None
        self.waits = DrafterWaits(config.drafter_timeout_s, self._on_cpu)
        self._incarnation = 0
        self._round = 0
        self._stateless = False
        """Whether the drafter keeps nothing per position, so that there is no context to complete."""
        self._asked: list[Sequence] = []
        self._num_unplanned = 0
        """Rounds since the latest plan, of nobody that the drafter follows."""
        self._deferred: DeferredPairs | None = None

    def attach(self, end: VerifierEnd, running: list[Sequence]) -> None:
        """Draft through this end from the next round on; contexts the drafter lacks are replayed.

        No round may be in flight: the history handed over would lack its tokens.
        """
        self.waits.attached(is_same=end.incarnation == self._incarnation)
        self._end, self._late_end, self._incarnation = end, None, end.incarnation
        self._stateless = not end.spec.keeps_context
        self.slots.forget_published()
        self._deferred = DeferredPairs(end.spec, self.slots)
        self.state = DrafterState.ATTACHED
        for seq in running:
            self.admit(seq)

    def detach(self) -> None:
        """Decode plainly from the next round on."""
        self._end = self._late_end = None
        self._forget_asked()
        self.state = DrafterState.NONE

    def returned(self) -> VerifierEnd | None:
        """The end of a late drafter whose answer is there by now: it may be attached again. None for others.

        Lets go of a late drafter that died, or whose patience is over.
        """
        end = self._late_end
        if end is None:
            return None
        if end.incarnation == self._incarnation and self.waits.late_reply(end, self._round):
            return end
        if self.waits.is_over or self._is_gone(end):
            self.lose()
        return None

    def _is_gone(self, end: VerifierEnd) -> bool:
        return end.incarnation != self._incarnation or not end.peer_alive()

    def _missed(self) -> None:
        """The drafter has not answered within the bound of a wait."""
        end = self._end
        if self._is_gone(end) or self.waits.is_over:
            return self.lose()
        logger.debug("drafter incarnation %d is late: decoding plainly until it answers", self._incarnation)
        self.detach()
        self._late_end, self.state = end, DrafterState.LATE

    def admit(self, seq: Sequence) -> None:
        """Decide whether the drafter is told of a sequence, and hand over its tokens, on a host only if it is."""
        draft = seq.draft = DraftProgress()
        params = seq.request.params
        if self._end is None or not params.speculation:
            return
        if not self._hands_over_late:
            self._hand_over(seq)
        draft.may_be_followed = True
        if self._speculation.follows_next() or params.force_drafts or self._stateless:
            self._follow(seq)

    def _hand_over(self, seq: Sequence) -> None:
        history = self._end.token_ids
        copy_into(history[seq.slot, : len(seq.token_ids)], upload(seq.token_ids, history.device))

    def _follow(self, seq: Sequence) -> None:
        if self._hands_over_late:
            self._hand_over(seq)
        begin_following(seq, self.block_manager, self._incarnation, self._contexts, self._stateless)

    def plan_replay(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Add chunks of context the drafter lacks, from what the prompts left of the budget."""
        if self._end is None or self._stateless or not plan.budget_left:
            return plan
        if all(seq.draft.complete or not seq.draft.followed for seq in plan.decodes):
            return plan
        return with_replays(plan, self._features)

    @torch.inference_mode()
    def collect(self, plan: SchedulerOutput, rows: DecodeRows) -> Trees:
        """Wait for the trees asked for in the last round, as long as the bound of a wait is.

        Args:
            rows: the plan's decodes on the device.

        Returns:
            As they came; None where all are known to be bare roots.
        """
        if self._end is None or not any(plan.with_trees()):
            return None
        reply = self.waits.reply(self._end, self._round)
        if reply is None or self._end.incarnation != self._incarnation:
            self._missed()
            return None
        self._clock.drafted(DrafterFigures.read(reply.header), lambda: [seq.request.request_id for seq in self._asked])
        return self._inbox.collect(reply, rows)

    def publish(self, plan: SchedulerOutput, flight: RoundInFlight, before: RoundInFlight | None = None) -> None:
        """Hand the round's tokens and taps to the drafter and ask for the next trees; rings the doorbell.

        Args:
            before: the round before, whose tokens are known, where sequences of it sat this one out.
        """
        asks = self._texts is None or self._choose_texts(plan, flight)
        if self._hands_over_late and not (plan.chunks or any(seq.draft.followed for seq in plan.decodes)):
            return self._publish_unfollowed(plan, flight, asks)
        held = [] if before is None else self._held(before, plan)
        seqs = (*plan.decodes, *(chunk.seq for chunk in plan.chunks), *held)
        if self._end is None or not any(seq.request.params.speculation for seq in seqs):
            return
        # Pieces of prompts have to be published first: they may complete the context of who is drafted for next.
        with_context = any(chunk.seq.draft.followed for chunk in plan.chunks)
        with_context |= any(seq.draft.is_recorded for seq in plan.decodes)
        if not with_context:
            proposals, draft = self._plan_draft(plan, flight, held, asks)
            if not draft.levels and self._defer(plan, flight):
                self._ask(proposals, draft)
                return
        outcome = self.waits.acquire(self._end)
        if outcome is None:
            self._missed()
            return
        writer = OutcomeWriter(outcome, self._tell_inputs)
        if not self._stateless:
            write_context(plan, flight, writer, self._deferred, self._advance)
        self._write_decodes(plan.decodes, flight.decodes, writer)
        self._publish_history(plan, flight)
        if with_context:
            proposals, draft = self._plan_draft(plan, flight, held, asks)
        rule = self._speculation.write_rule(draft, outcome, writer.num_chunk_tokens)
        self._ask(proposals, draft)
        masks = write_root_masks(outcome, self._asked, flight if before is None or before.live else before)
        writer.copy(self.slots.publish(outcome))
        longest = max(seq.max_len for seq in seqs)
        rules = self.slots.told_rules
        ruled = rules.kinds(self._asked) if rules.ruled else 0
        writer.finish([seq.slot for seq in self._asked], draft.levels, longest, rule, masks, ruled)
        with self._clock.draft_wait:
            self._round = self._end.publish_outcome()

    def _choose_texts(self, plan: SchedulerOutput, flight: RoundInFlight) -> bool:
        """Whether the drafter is asked for trees, where some may be made of earlier text."""
        seqs = [*plan.decodes, *(chunk.seq for chunk in plan.chunks if chunk.samples)]
        for seq in seqs:
            seq.draft.text_tree = None
        if self.state is DrafterState.NONE:
            return True
        new = flight.tokens_by_slot()
        able = [
            seq
            for seq in seqs
            if seq.request.params.speculation
            and not seq.request.params.force_drafts
            and self._has_room(seq, len(new[seq.slot]))
        ]
        return self._texts.choose(able, flight)

    def _publish_unfollowed(self, plan: SchedulerOutput, flight: RoundInFlight, asks: bool) -> None:
        """`publish` of a round of which the drafter is told nothing, unless it is to follow somebody from now on.

        That is decided once in as many rounds as a plan holds: a decision takes some hundredths of a small model's
        round, and plain decoding has been better for long.
        """
        if self._end is None or not any(seq.draft.may_be_followed for seq in plan.decodes):
            return
        self._num_unplanned += 1
        if self._num_unplanned < HOLD and not self._asked:
            return
        _, draft = self._plan_draft(plan, flight, [], asks)
        self._ask([], draft)
        if any(seq.draft.followed for seq in plan.decodes):
            self._publish_history(plan, flight)

    def _plan_draft(
        self, plan: SchedulerOutput, flight: RoundInFlight, held: list[Sequence], asks: bool
    ) -> tuple[list[Sequence], DraftPlan]:
        """Sequences that could use a tree next, and what the policy says; it may want more of them followed.

        Args:
            asks: False where trees made of earlier text are worth more than asking for anybody.
        """
        proposals = self._proposals(plan, flight) + held
        if not asks or (not proposals and any(seq.draft.text_tree is not None for seq in plan.decodes)):
            self._num_unplanned = 0
            return [], self._speculation.made_of_text()
        unfollowed = [seq for seq in plan.decodes if seq.draft.may_be_followed and self._has_room(seq, 1)]
        num_rounds, self._num_unplanned = max(self._num_unplanned, 1), 0
        draft = self._speculation.plan(plan.decodes, proposals, len(unfollowed), num_rounds)
        if unfollowed:
            for seq in self._speculation.to_follow(unfollowed):
                self._follow(seq)
        return proposals, draft

    def _proposals(self, plan: SchedulerOutput, flight: RoundInFlight) -> list[Sequence]:
        """Sequences that could use a tree next."""
        others_run = any(not seq.is_awaited for seq in (*plan.decodes, *(c.seq for c in plan.chunks)))
        rows = [*enumerate(plan.decodes), *((None, c.seq) for c in plan.chunks if c.samples)]
        return [
            seq
            for row, seq in rows
            if seq.draft.complete
            and seq.draft.text_tree is None
            and self._has_room(seq, 1 if row is None else flight.num_new_tokens(row))
            # Who sits the next round out is drafted for beside it.
            and not (others_run and seq.is_awaited and flight.result is None)
        ]

    def _held(self, before: RoundInFlight, now: SchedulerOutput) -> list[Sequence]:
        """Sequences that could use a tree once a round is settled whose tokens are known, and do not run now."""
        new, plan = before.tokens_by_slot(), before.plan
        running = {id(seq) for seq in (*now.decodes, *(chunk.seq for chunk in now.chunks))}
        seqs = [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]
        there = [seq for seq, epoch in zip(seqs, before.epochs, strict=True) if seq.slot in new and seq.epoch == epoch]
        waiting = [seq for seq in there if seq.masker is not None and seq.draft.complete and id(seq) not in running]
        # Where it is settled, its tokens are the sequences' own.
        return [seq for seq in waiting if self._has_room(seq, len(new[seq.slot]) if seq.in_flight else 1)]

    def _ask(self, proposals: list[Sequence], draft: DraftPlan) -> None:
        if draft.reason == Reason.FORCED:
            proposals = [seq for seq in proposals if seq.request.params.force_drafts]
            self.plain_reason = str(Reason.PLAIN)
        else:
            self.plain_reason = str(Reason.IDLE if draft.levels else draft.reason)
        self._forget_asked()
        self._asked = proposals if draft.levels else []
        for seq in self._asked:
            seq.draft.tree_requested = True

    def _forget_asked(self) -> None:
        for seq in self._asked:
            seq.draft.tree_requested = False
        self._asked = []

    def _defer(self, plan: SchedulerOutput, flight: RoundInFlight) -> bool:
        """Keep a round back whose tokens the host can count, when no trees are wanted next; False where it has to be
        published."""
        rows = [row for row, seq in enumerate(plan.decodes) if seq.draft.complete]
        seqs = [plan.decodes[row] for row in rows]
        if seqs and not self._stateless:
            bare = flight.decodes.nodes.shape[1] == 1 and all(seq.min_len == seq.max_len for seq in seqs)
            counts = [flight.num_new_tokens(row) for row in rows]
            if not (bare or flight.result is not None) or not self._deferred.has_room(seqs, counts):
                return False
            self._deferred.add(seqs, flight.decodes, self._index(plan.decodes, seqs), counts)
        self._publish_history(plan, flight)
        return True

    def _index(self, decodes: list[Sequence], seqs: list[Sequence]) -> Tensor | slice:
        """Rows of some of the decodes on the device; all of them need no gathering."""
        if len(seqs) == len(decodes):
            return slice(None)
        wanted = set(map(id, seqs))
        return upload([row for row, seq in enumerate(decodes) if id(seq) in wanted], self.slots.device)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Note the tokens that were emitted: the drafter has followed, if it could."""
        if self._end is None or self._stateless:
            return
        for seq, live, token_ids in zip(flight.plan.decodes, flight.live, result.token_ids, strict=False):
            if live and seq.draft.complete and not seq.draft.num_deferred:
                advance(seq, seq.num_computed + len(token_ids), self.block_manager, self._incarnation)

    def abandoned(self) -> None:
        """A drafter may be what raised, and letting go of it costs speed alone."""
        self.lose()

    def _write_decodes(self, decodes: list[Sequence], paths: AcceptedPaths, writer: OutcomeWriter) -> None:
        seqs = [seq for seq in decodes if seq.draft.complete]
        if not seqs:
            return
        if len(seqs) < len(decodes):
            paths = rows_of(paths, self._index(decodes, seqs))
        if self._stateless:
            paths = paths._replace(taps=None)
        writer.decodes([seq.slot for seq in seqs], paths)

    def _publish_history(self, plan: SchedulerOutput, flight: RoundInFlight) -> None:
        write_history(self._end.token_ids, plan, flight, self._steps)

    def _advance(self, seq: Sequence, draft_len: int) -> None:
        advance(seq, draft_len, self.block_manager, self._incarnation)

    def _has_room(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether a drafted token could still be emitted after this round and the next bonus token."""
        # The round itself is among those in flight, with one token at least.
        length = seq.min_len - 1 + num_new_tokens
        left = seq.request.params.max_tokens - (length - seq.num_prompt_tokens)
        return min(left, self.config.max_model_len - length) > 1

    def lose(self) -> None:
        """Let go of the drafter, if there is one, until another one is attached."""
        end = self._end or self._late_end
        if end is None:
            return
        why = "is silent or was in a failed round" if end.peer_alive() else "is gone"
        logger.warning("drafter incarnation %d %s: decoding plainly", self._incarnation, why)
        self.detach()
        self.state = DrafterState.LOST
