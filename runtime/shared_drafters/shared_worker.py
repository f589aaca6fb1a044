"""The drafter's side of several channels: one batched pass over all attached verifiers that wait for trees."""

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch

from wingbeat.runtime.drafters.outcome_batch import batch_of
from wingbeat.runtime.drafters.worker import DraftWorker, write_reply
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, RoundHeader, TokenTree
from wingbeat.runtime.shared_drafters.draft_room import DraftRoom
from wingbeat.runtime.shared_drafters.joined_batch import Attachment, join

logger = logging.getLogger(__name__)
LONG_CHUNKS = 64
"""Number of chunk tokens per round above which a verifier is answered in a second pass, after the verifiers with fewer
chunk tokens, so that a verifier's long prompt does not delay the trees of other verifiers."""

MOST_FAILURES = 3
"""Number of consecutive failed single-verifier passes after which the drafter, instead of the verifiers, counts as
broken. If a shared pass fails, each verifier's round is drafted again in a pass of its own.
"""

Pending = list[tuple[Attachment, Outcome]]


class SharedWorker:
    """Polls the attached channels and answers pending rounds; rounds that are pending at the same time share a pass.

    Verifiers share the drafter's tensors: each attached verifier has a range of slots and a range of blocks. All
    attached verifiers have the same tree shape, taps and block size.

    Args:
        worker: the worker of the drafter, whose head may be swapped. No channel may be attached to it.
        room: limits the slots and memory of all verifiers together; None means no limits.
    """

    def __init__(self, worker: DraftWorker, room: DraftRoom | None = None) -> None:
        self.drafter = worker.drafter
        self.room = room
        self._worker = worker
        self._attached: dict[str, Attachment] = {}
        self._num_failed = 0

    def attach(self, name: str, end: DrafterEnd) -> None:
        """Serve the verifier at the other end of this channel from the next pass on.

        Raises:
            ValueError: the name is in use, the channel's shapes differ from those already served, or a limit of `room`
                is exceeded.
        """
        self._drop_closed()
        if name in self._attached:
            raise ValueError(f"channel {name} is attached already: detach it first")
        others = list(self._attached.values())
        if any(_shape(other.end.spec) != _shape(end.spec) for other in others):
            raise ValueError(f"channel {name} has tree or block shapes other than the verifiers already served")
        slot = first_gap(((a.slot_offset, a.end.spec.num_slots) for a in others), end.spec.num_slots)
        block = first_gap(((a.block_offset, a.end.spec.num_blocks) for a in others), end.spec.num_blocks)
        attached = [*others, Attachment(end, slot, block)]
        spec = _covering(a.end.spec for a in attached)
        num_slots = max(a.slot_offset + a.end.spec.num_slots for a in attached)
        num_blocks = max(a.block_offset + a.end.spec.num_blocks for a in attached)
        if self.room is not None:
            token_bytes = self.drafter.needs.token_bytes
            self.room.check(end.spec, num_slots, num_blocks, token_bytes)
            if self.drafter.device.type != "cpu":
                # Memory for all verifiers that may be attached is allocated at once, because captured graphs hold
                # addresses, and capturing the graphs again would stall the attached verifiers.
                num_slots = self.room.num_slots
                num_blocks = max(num_blocks, self.room.num_blocks(spec, token_bytes))
        self._worker.resize(spec, num_slots, num_blocks)
        self._attached[name] = attached[-1]

    def detach(self, name: str) -> None:
        """Stop serving a verifier and free its slots and blocks. Unknown names are ignored."""
        attachment = self._attached.pop(name, None)
        if attachment is not None:
            attachment.end.close()

    @property
    def ends(self) -> list[DrafterEnd]:
        """Attached channel ends, for a caller that waits on their doorbells."""
        return [attachment.end for attachment in self._attached.values()]

    @property
    def names(self) -> list[str]:
        """Names of the attached channels in order of attachment."""
        return list(self._attached)

    @torch.inference_mode()
    def run_once(self) -> bool:
        """Answer every pending round; returns False if no round was pending. Closed channels are detached.

        The worker does not wait for verifiers without a pending round. If several verifiers are attached, a round that
        the verifier's device has not finished counts as not pending, because a pass that waits for that device would
        delay all verifiers.
        """
        self._drop_closed()
        self._worker.observer.before()
        attached = self._attached.values()
        there = [a for a in attached if len(attached) == 1 or a.end.has_outcome()]
        pending = [(a, outcome) for a in there if (outcome := a.end.poll_outcome()) is not None]
        try:
            for part in _passes(pending):
                self._answer(part)
        except Exception as error:
            self._worker.observer.failed(error)
            raise
        return bool(pending)

    def _drop_closed(self) -> None:
        for name in [name for name, attachment in self._attached.items() if attachment.end.closed]:
            self.detach(name)

    def _answer(self, pending: Pending) -> None:
        """Runs one pass.

        If the pass raises and several verifiers are attached, runs one pass per verifier, because a single verifier's
        round may be the cause.

        Raises:
            Exception: the drafter's exception, if only one verifier is attached or if MOST_FAILURES single-verifier
                passes in a row failed.
        """
        try:
            self._draft(pending)
            return
        except Exception:
            if len(self._attached) == 1:
                raise
            logger.exception("A pass for %d of %d verifiers failed", len(pending), len(self._attached))
        for attachment, outcome in pending:
            try:
                self._draft([(attachment, outcome)])
            except Exception:
                self._num_failed += 1
                if self._num_failed == MOST_FAILURES:
                    raise
                self._give_up(attachment)

    def _give_up(self, attachment: Attachment) -> None:
        """Detaches a verifier whose round failed; until the next attach, the verifier decodes without drafts."""
        name = next(name for name, other in self._attached.items() if other is attachment)
        logger.warning("Channel %s is detached: its round fails in a pass of its own too", name)
        self.detach(name)

    def _draft(self, pending: Pending) -> None:
        attached = list(self._attached.values())
        if len(attached) == 1 and not attached[0].slot_offset and not attached[0].block_offset:
            [(attachment, outcome)] = pending
            self._worker.draft(attachment.end, outcome)
        else:
            self._draft_together(pending, attached)
        self._num_failed = 0

    def _draft_together(self, pending: Pending, attached: list[Attachment]) -> None:
        drafter, watch = self.drafter, self._worker.watch
        watch.begin()
        batches = [(attachment, batch_of(attachment.end, outcome, drafter.device)) for attachment, outcome in pending]
        trees = drafter.draft(join(batches, attached))
        watch.drafted()
        by_slot, start = drafter.trees_by_slot, 0
        for (attachment, outcome), (_, batch) in zip(pending, batches, strict=True):
            stop = start + len(batch.proposal_slots)
            if trees is not None and stop > start:
                own = TokenTree(*(field[start:stop] for field in trees))
                rows = None if by_slot is None else TokenTree(*(field[attachment.slot_offset :] for field in by_slot))
                write_reply(attachment.end, outcome, own, rows)
            start = stop
        for attachment, _ in pending:
            self._worker.publish(attachment.end)


def _passes(pending: Pending) -> list[Pending]:
    """Splits pending rounds into at most two passes: rounds with many chunk tokens are in the second pass."""
    long = [each for each in pending if _chunk_tokens(each[1]) > LONG_CHUNKS]
    if not long or len(long) == len(pending):
        return [pending] if pending else []
    return [[each for each in pending if _chunk_tokens(each[1]) <= LONG_CHUNKS], long]


def _chunk_tokens(outcome: Outcome) -> int:
    return int(outcome.chunk_lens[: RoundHeader.read(outcome.header).num_chunks].sum())


def _shape(spec: ChannelSpec) -> tuple:
    """Returns the properties that all verifiers of one pass must share."""
    return (spec.num_nodes, spec.max_path, spec.taps_size, spec.taps_dtype, spec.block_size, spec.keeps_context)


def _covering(specs: Iterable[ChannelSpec]) -> ChannelSpec:
    """Returns a spec with the largest lengths among several specs, which must otherwise be equal in shape."""
    specs = list(specs)
    longest = {
        name: max(getattr(spec, name) for spec in specs)
        for name in ("max_prefill_tokens", "max_model_len", "max_blocks_per_seq")
    }
    return replace(specs[-1], **longest)


def first_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    """Return the start of the first free range of `size` numbers between the taken ranges (first, length)."""
    first = 0
    for begin, length in sorted(taken):
        if begin - first >= size:
            break
        first = max(first, begin + length)
    return first
