"""The verifier's side of drafting: requests trees, sends accepted tokens to the drafter, survives the drafter's loss.

The verifier is the source of truth. A tree is used only if the attached drafter incarnation grew it from the sequence's
committed length, epoch and root. A missing or mismatched tree costs speed and never fails a request.

This module never reads the result of a round in flight. Therefore the device itself replaces a rejected tree by a bare
root, and accepted tokens are copied from the device to the channel directly. With a channel in host memory `publish`
waits for the device, because the published data must be complete; with a channel in device memory `publish` does not
wait.
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
    OutcomeWriter,
    rows_of,
    write_context,
    write_history,
    write_root_masks,
)
from wingbeat.runtime.engine.speculation import DraftPlan, Reason, Speculation, Trees
from wingbeat.runtime.engine.text_drafts import TextDrafts
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.chunk_inputs import TellInputs
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import AcceptedPaths, DrafterFigures
from wingbeat.runtime.protocol.transfer import copy_into, upload
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.round.slots import DecodeRows, SlotState
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import DraftProgress, Sequence

logger = logging.getLogger(__name__)


class DrafterState(StrEnum):
    """State of the engine's drafter; trees are requested only from an attached drafter."""

    NONE = "none"
    ATTACHED = "attached"
    LATE = "late"
    """The drafter is alive but missed its deadline: the engine decodes without drafts until the drafter answers or is
    lost."""
    LOST = "lost"
    """The drafter is dead or silent: the engine decodes without drafts until another drafter is attached."""


class DrafterClient(RoundObserver):
    """The verifier's connection to one drafter at a time.

    Args:
        slots: device state by slot, shared with the model runner.
        speculation: decides how much is drafted, and for which sequences.
        clock: measures the time spent waiting for the drafter.
        inbox: receives arriving trees for the `ModelRunner`.
        features: features of the engine; each feature may move the position at which a replay begins.
        contexts: recorded taps (verifier hidden states) of saved prefixes, which need no replay, if any.
        tell_inputs: see `OutcomeWriter`.
        texts: builds trees from earlier text in place of the drafter's trees; None without text drafts.
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
        contexts: RecordedContexts | None,
        tell_inputs: TellInputs | None,
        texts: TextDrafts | None = None,
    ) -> None:
        self.config, self.block_manager, self.slots = config, block_manager, slots
        self._inbox = inbox
        self.features = features
        self.contexts = contexts
        self._tell_inputs, self.texts = tell_inputs, texts
        self.state = DrafterState.NONE
        self.plain_reason = str(Reason.IDLE)
        """Reason to report for sequences without a tree, if the latest plan requested no tree for them."""
        self.speculation, self.clock = speculation, clock
        self._on_cpu = slots.device.type == "cpu"
        self._steps = None if self._on_cpu else torch.arange(1, config.speculation.max_path + 1, device=slots.device)
        # Without overlap the host has all tokens of a sequence whenever the drafter starts to follow that sequence.
        self._hands_over_late = self._on_cpu and not config.overlap
        self._end: VerifierEnd | None = None
        self._late_end: VerifierEnd | None = None
        self.waits = DrafterWaits(config.drafter_timeout_s, self._on_cpu)
        self._incarnation = 0
        self._round = 0
        self._stateless = False
        """Whether the drafter keeps no state per position and so needs no context from earlier rounds."""
        self._asked: list[Sequence] = []
        self._num_unplanned = 0
        """Number of rounds without a followed sequence since the latest plan."""
        self._deferral: Any = None
        """Keeps pairs back while no trees are requested, see the hook `deferral`; None if every round is published."""
        self._has_drafted = False
        """Whether the latest round left its trees in the inbox itself, see `RoundInFlight.has_drafted`."""

    def attach(self, end: VerifierEnd, running: list[Sequence]) -> None:
        """Requests trees through this channel end from the next round on; contexts that the drafter lacks are replayed.

        No round may be in flight, because the token history copied to the channel would lack that round's tokens.
        """
        self.waits.attached(is_same=end.incarnation == self._incarnation)
        self._end, self._late_end, self._incarnation = end, None, end.incarnation
        self._stateless = not end.spec.keeps_context
        self.slots.forget_published()
        self._deferral = first_result("deferral", end.spec, self.slots)
        self.state = DrafterState.ATTACHED
        for seq in running:
            self.admit(seq)

    def detach(self) -> None:
        """Detaches the drafter; from the next round on, the engine decodes without drafts."""
        self._end = self._late_end = None
        self._forget_asked()
        self.state = DrafterState.NONE

    def returned(self) -> VerifierEnd | None:
        """Returns the channel end of a late drafter whose answer has arrived; else None.

        The caller re-attaches the drafter. Gives up the late drafter if it died or was late for
        `DrafterWaits.patience_s`.
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
        """Sets the state to LATE or LOST after the drafter did not answer within the bound of the wait."""
        end = self._end
        if self._is_gone(end) or self.waits.is_over:
            return self.lose()
        logger.debug("drafter incarnation %d is late: decoding without drafts until it answers", self._incarnation)
        self.detach()
        self._late_end, self.state = end, DrafterState.LATE

    def admit(self, seq: Sequence) -> None:
        """Decides whether the drafter follows a new sequence, and copies the sequence's tokens into the channel.

        On a CPU without overlap, the tokens are copied later, when the drafter begins to follow the sequence.
        """
        draft = seq.draft = DraftProgress()
        params = seq.request.params
        if self._end is None or not params.speculation:
            return
        if not self._hands_over_late:
            self._hand_over(seq)
        draft.may_be_followed = True
        if self.speculation.follows_next() or params.force_drafts or self._stateless:
            self._follow(seq)

    def _hand_over(self, seq: Sequence) -> None:
        history = self._end.token_ids
        copy_into(history[seq.slot, : len(seq.token_ids)], upload(seq.token_ids, history.device))

    def _follow(self, seq: Sequence) -> None:
        if self._hands_over_late:
            self._hand_over(seq)
        begin_following(seq, self.block_manager, self._incarnation, self.contexts, self._stateless)

    def plan_replay(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Adds chunks that replay context which the drafter lacks, within the token budget that prompts do not use."""
        if self._end is None or self._stateless or not plan.budget_left:
            return plan
        if all(seq.draft.complete or not seq.draft.followed for seq in plan.decodes):
            return plan
        return with_replays(plan, self.features)

    @torch.inference_mode()
    def collect(self, plan: SchedulerOutput, rows: DecodeRows) -> Trees:
        """Waits for the trees that the last round requested, at most `DrafterWaits.bound_s` seconds.

        Args:
            rows: the plan's decodes on the device.

        Returns:
            The received trees; None if no tree arrived in time; each decode then verifies only its root.
        """
        if self._end is None or not any(plan.with_trees()):
            return None
        if self._has_drafted:
            return self._inbox
        reply = self.waits.reply(self._end, self._round)
        if reply is None or self._end.incarnation != self._incarnation:
            self._missed()
            return None
        self.clock.drafted(DrafterFigures.read(reply.header), lambda: [seq.request.request_id for seq in self._asked])
        return self._inbox.collect(reply, rows)

    def publish(self, plan: SchedulerOutput, flight: RoundInFlight, before: RoundInFlight | None = None) -> None:
        """Sends the round's tokens and taps to the drafter, requests the next trees, and rings the doorbell.

        Args:
            before: the previous round, with its tokens on the host, if sequences of the previous round skipped this
                round; else None.
        """
        self._has_drafted = flight.has_drafted and before is None
        if self._has_drafted:
            self._ask(*self._plan_draft(plan, flight, [], True))
            return
        asks = self.texts is None or self._choose_texts(plan, flight)
        if self._hands_over_late and not (plan.chunks or any(seq.draft.followed for seq in plan.decodes)):
            return self._publish_unfollowed(plan, flight, asks)
        held = [] if before is None else self._held(before, plan)
        seqs = (*plan.decodes, *(chunk.seq for chunk in plan.chunks), *held)
        if self._end is None or not any(seq.request.params.speculation for seq in seqs):
            return
        # Prompt chunks are written before planning, because a chunk may complete the drafter's context of a sequence;
        # the plan can then request a tree for that sequence.
        with_context = any(chunk.seq.draft.followed for chunk in plan.chunks)
        with_context |= any(seq.draft.is_recorded for seq in plan.decodes)
        if not with_context:
            proposals, draft = self._plan_draft(plan, flight, held, asks)
            if not draft.levels and self._deferral is not None and self._defer(plan, flight):
                self._ask(proposals, draft)
                return
        outcome = self.waits.acquire(self._end)
        if outcome is None:
            self._missed()
            return
        writer = OutcomeWriter(outcome, self._tell_inputs)
        if not self._stateless:
            write_context(plan, flight, writer, self._advance)
            if any(seq.draft.num_deferred for seq in plan.decodes):
                self._deferral.hand_over(plan.decodes, writer, self._advance)
        self._write_decodes(plan.decodes, flight.decodes, writer)
        self._publish_history(plan, flight)
        if with_context:
            proposals, draft = self._plan_draft(plan, flight, held, asks)
        rule = self.speculation.write_rule(draft, outcome, writer.num_chunk_tokens)
        self._ask(proposals, draft)
        masks = write_root_masks(outcome, self._asked, flight if before is None or before.live else before)
        writer.copy(self.slots.publish(outcome))
        longest = max(seq.max_len for seq in seqs)
        rules = self.slots.published_rules
        ruled = rules.kinds(self._asked) if rules is not None and rules.ruled else 0
        writer.finish([seq.slot for seq in self._asked], draft.levels, longest, rule, masks, ruled)
        with self.clock.draft_wait:
            self._round = self._end.publish_outcome()

    def _choose_texts(self, plan: SchedulerOutput, flight: RoundInFlight) -> bool:
        """Lets the text drafts choose the sequences that get trees built from earlier text.

        Returns whether the drafter is asked for trees.
        """
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
        return self.texts.choose(able, flight)

    def _publish_unfollowed(self, plan: SchedulerOutput, flight: RoundInFlight, asks: bool) -> None:
        """Publishes a round without followed sequences.

        The drafter is not notified. The token history is written if the drafter starts to follow a sequence.

        Only one of `Speculation.plan_every` such rounds makes a plan, because a plan takes a few hundredths of the time
        of a small model's round. Such rounds occur only after plain decoding has been faster for a long time.
        """
        if self._end is None or not any(seq.draft.may_be_followed for seq in plan.decodes):
            return
        self._num_unplanned += 1
        if self._num_unplanned < self.speculation.plan_every and not self._asked:
            return
        _, draft = self._plan_draft(plan, flight, [], asks)
        self._ask([], draft)
        if any(seq.draft.followed for seq in plan.decodes):
            self._publish_history(plan, flight)

    def _plan_draft(
        self, plan: SchedulerOutput, flight: RoundInFlight, held: list[Sequence], asks: bool
    ) -> tuple[list[Sequence], DraftPlan]:
        """Returns the sequences that could use a tree in the next round, and the policy's plan.

        The drafter may start to follow further sequences.

        Args:
            asks: whether to request trees from the drafter; False if trees built from earlier text are worth more.
        """
        proposals = self._proposals(plan, flight) + held
        if not asks or (not proposals and any(seq.draft.text_tree is not None for seq in plan.decodes)):
            self._num_unplanned = 0
            return [], self.speculation.made_of_text()
        unfollowed = [seq for seq in plan.decodes if seq.draft.may_be_followed and self._has_room(seq, 1)]
        num_rounds, self._num_unplanned = max(self._num_unplanned, 1), 0
        num_unfollowed = len(self.speculation.may_follow(unfollowed)) if unfollowed else 0
        draft = self.speculation.plan(plan.decodes, proposals, num_unfollowed, num_rounds)
        if unfollowed:
            for seq in self.speculation.to_follow(unfollowed):
                self._follow(seq)
        return proposals, draft

    def _proposals(self, plan: SchedulerOutput, flight: RoundInFlight) -> list[Sequence]:
        """Returns the sequences that could use a tree in the next round."""
        others_run = any(not seq.is_awaited for seq in (*plan.decodes, *(c.seq for c in plan.chunks)))
        rows = [*enumerate(plan.decodes), *((None, c.seq) for c in plan.chunks if c.samples)]
        return [
            seq
            for row, seq in rows
            if seq.draft.complete
            and seq.draft.text_tree is None
            and self._has_room(seq, 1 if row is None else flight.num_new_tokens(row))
            # A sequence that skips the next round gets its tree later, while that round runs.
            and not (others_run and seq.is_awaited and flight.result is None)
        ]

    def _held(self, before: RoundInFlight, now: SchedulerOutput) -> list[Sequence]:
        """Returns sequences of the round `before` that do not run in the round `now` and could use a tree."""
        new, plan = before.tokens_by_slot(), before.plan
        running = {id(seq) for seq in (*now.decodes, *(chunk.seq for chunk in now.chunks))}
        seqs = [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]
        there = [seq for seq, epoch in zip(seqs, before.epochs, strict=True) if seq.slot in new and seq.epoch == epoch]
        waiting = [seq for seq in there if seq.masker is not None and seq.draft.complete and id(seq) not in running]
        # Once `before` is settled, the sequences already contain its tokens.
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
        """Stores a round's pairs (taps, next token), to send the pairs to the drafter later.

        Called if no trees are requested for the next round. Returns False if the round has to be published now.
        """
        seqs = [seq for seq in plan.decodes if seq.draft.complete]
        if seqs and not self._stateless and not self._deferral.add(seqs, flight, self._index(plan.decodes, seqs)):
            return False
        self._publish_history(plan, flight)
        return True

    def _index(self, decodes: list[Sequence], seqs: list[Sequence]) -> Tensor | slice:
        """Returns the rows of `seqs` among the decodes, on the device.

        If `seqs` are all decodes, returns a full slice, which needs no gather.
        """
        if len(seqs) == len(decodes):
            return slice(None)
        wanted = set(map(id, seqs))
        return upload([row for row, seq in enumerate(decodes) if id(seq) in wanted], self.slots.device)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Records how far the drafter's KV reaches after the round, for each sequence with complete context."""
        if self._end is None or self._stateless:
            return
        for seq, live, token_ids in zip(flight.plan.decodes, flight.live, result.token_ids, strict=False):
            if live and seq.draft.complete and not seq.draft.num_deferred:
                advance(seq, seq.num_computed + len(token_ids), self.block_manager, self._incarnation)

    def abandoned(self) -> None:
        """Drops the drafter, because it may have caused the failed round and dropping it costs only speed."""
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
        """Whether a sequence may emit a drafted token besides this round's tokens and the next round's bonus token."""
        # `min_len` already includes one token of this round.
        length = seq.min_len - 1 + num_new_tokens
        left = seq.request.params.max_tokens - (length - seq.num_prompt_tokens)
        return min(left, self.config.max_model_len - length) > 1

    def lose(self) -> None:
        """Drops the drafter, if one is attached or late.

        The engine has no drafter until another drafter is attached.
        """
        end = self._end or self._late_end
        if end is None:
            return
        why = "stopped answering or took part in a failed round" if end.peer_alive() else "is gone"
        logger.warning("drafter incarnation %d %s: decoding without drafts", self._incarnation, why)
        self.detach()
        self.state = DrafterState.LOST
