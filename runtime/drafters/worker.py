"""The drafter's side of the channel: one batched pass over every attached verifier that waits.

A channel may lie in host memory, or partly on a device: `cluster.channels.cuda.cuda_ipc` says which fields. What
decides the shapes of a pass is read on the host and lies there in both kinds; what a device computed stays on the
device, so that a drafter beside it enqueues its pass without waiting.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from wingbeat.runtime.device_clock import DeviceClock
from wingbeat.runtime.drafters.base import Drafter, NextHead
from wingbeat.runtime.drafters.merged_batch import Attachment, merge
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, DrafterFigures, Outcome, RoundHeader, TokenTree
from wingbeat.runtime.protocol.transfer import copy_all, upload

logger = logging.getLogger(__name__)
LONG_CHUNKS = 64
"""Context tokens of a round that have a pass of their own, behind that of verifiers that bring fewer: a prompt of one
is not to hold up the trees of another."""

MOST_FAILURES = 3
"""Rounds in a row that raised alone: then it is the drafter that is broken, not its verifiers."""

Pending = list[tuple[Attachment, Outcome]]
HeadFailed = Callable[[Exception], object]


class OfferedHead(NamedTuple):
    """A head to be taken between two rounds; see `DraftWorker.offer_head`."""

    version: int
    head: NextHead
    failed: HeadFailed


class DraftWorker:
    """Polls the attached channels and answers all pending rounds, those that wait at the same time in one pass.

    Verifiers share the drafter's tensors: each owns a range of slots and a range of blocks, for as long as it is
    attached. All attached verifiers have the same tree shape, taps and block size.

    Args:
        room: what they may take together, a `DraftRoom`; None takes whatever they need.
    """

    def __init__(self, drafter: Drafter, room: Any = None) -> None:
        self.drafter = drafter
        self.room = room
        self.most_threads: int | None = None
        """On CPUs, as many threads at most, tried once a verifier is attached; None leaves torch's number."""
        self._attached: dict[str, Attachment] = {}
        self._num_failed = 0
        self._watch = PassWatch(drafter)
        self._next_head: OfferedHead | None = None
        self._trial: OfferedHead | None = None
        """The head that is being taken, or that has not answered a round yet."""

    def attach(self, name: str, end: DrafterEnd) -> None:
        """Serve the verifier behind this end from the next pass on.

        Raises:
            ValueError: the name is taken, the channel's shapes differ from those already served, or the room is full.
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
                # All at once: what is captured holds its addresses, and capturing it anew would hold up the others.
                num_slots = self.room.num_slots
                num_blocks = max(num_blocks, self.room.num_blocks(spec, token_bytes))
        self.drafter.resize(spec, num_slots, num_blocks)
        if self.most_threads is not None:
            self.drafter.try_threads(self.most_threads)
            self.most_threads = None
        self._attached[name] = attached[-1]
        self._watch.stage_counts = self.drafter.stage_counts

    def detach(self, name: str) -> None:
        """Stop serving a verifier; its slots and blocks are free for the next one. Unknown names are ignored."""
        attachment = self._attached.pop(name, None)
        if attachment is not None:
            attachment.end.close()

    @property
    def ends(self) -> list[DrafterEnd]:
        """The attached ends, for whoever waits on their doorbells."""
        return [attachment.end for attachment in self._attached.values()]

    @property
    def names(self) -> list[str]:
        """The attached channels, in the order in which they came."""
        return list(self._attached)

    @property
    def head_version(self) -> int:
        """Of the head that drafts: 0 is the one that the settings name. Every answer says it."""
        return self._watch.head_version

    def offer_head(self, version: int, head: NextHead, failed: HeadFailed = lambda error: None) -> None:
        """Draft with another head from the next round on; in place of one that was offered and not taken. Any thread.

        Args:
            head: made by this drafter's `prepare_head`.
            failed: called with what the swap, or the first round behind it, raises, before that is raised here.
        """
        self._next_head = OfferedHead(version, head, failed)

    @torch.inference_mode()
    def take_offered_head(self) -> bool:
        """Swap now, where a head is offered; only between two rounds, by whoever drafts."""
        offered, self._next_head = self._next_head, None
        if offered is None:
            return False
        self._trial = offered
        try:
            self.drafter.take_head(offered.head)
        except Exception as error:
            self._blame(error)
            raise
        self._watch.head_version = offered.version
        logger.info("drafting with version %d of the head from this round on", offered.version)
        return True

    def _blame(self, error: Exception) -> None:
        """Call the `failed` of a head that has not answered a round yet, if there is one."""
        if self._trial is not None:
            self._trial.failed(error)

    @torch.inference_mode()
    def run_once(self) -> bool:
        """Answer every pending round; False if there was none. Closed channels are detached.

        Nobody waits for a verifier that has nothing pending. With several attached, one whose device is still at its
        round counts as such: a pass enqueued behind that device would keep all of them waiting for it.
        """
        self._drop_closed()
        if self._next_head is not None:
            self.take_offered_head()
        attached = self._attached.values()
        there = [a for a in attached if len(attached) == 1 or a.end.has_outcome()]
        pending = [(a, outcome) for a in there if (outcome := a.end.poll_outcome()) is not None]
        try:
            for part in _passes(pending):
                self._answer(part)
        except Exception as error:
            self._blame(error)
            raise
        return bool(pending)

    def _drop_closed(self) -> None:
        for name in [name for name, attachment in self._attached.items() if attachment.end.closed]:
            self.detach(name)

    def _answer(self, pending: Pending) -> None:
        """One pass. Where it raises, one verifier's round may be the cause: each then has a pass of its own.

        Raises:
            Exception: the drafter's own, where there is one verifier, or where rounds of several have raised alone.
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
        """Detach a verifier whose round cannot be drafted for; it decodes plainly until it attaches again."""
        name = next(name for name, other in self._attached.items() if other is attachment)
        logger.warning("Channel %s is given up: its round alone fails too", name)
        self.detach(name)

    def _draft(self, pending: Pending) -> None:
        self._watch.begin()
        if len(self._attached) == 1:
            [(attachment, outcome)] = pending
            apart = attachment.slot_offset or attachment.block_offset
            if not apart and self.drafter.answer(attachment.end, outcome):
                self._watch.drafted()
                self._publish(attachment)
                return
        trees = self.drafter.draft(merge(pending, list(self._attached.values()), self.drafter.device))
        self._watch.drafted()
        start = 0
        for attachment, outcome in pending:
            count = RoundHeader.read(outcome.header).num_proposals
            if trees is not None and count:
                own = TokenTree(*(field[start : start + count] for field in trees))
                _write_reply(attachment, outcome, own, self.drafter.trees_by_slot)
            start += count
        for attachment, _ in pending:
            self._publish(attachment)

    def _publish(self, attachment: Attachment) -> None:
        end = attachment.end
        self._watch.figures().write(end.reply.header.numpy())
        end.publish_reply()
        self._num_failed, self._trial = 0, None


class PassWatch:
    """Times the passes of one drafter: on its host by stretches, for a trace, and on its device over all of them."""

    def __init__(self, drafter: Drafter) -> None:
        self.head_version = 0
        self.stage_counts: dict[str, int] = {}
        """Of the drafter, which captures when a verifier is attached."""
        self._device = DeviceClock(drafter.device)
        self._marks: list[int] = []
        """Nanoseconds of the host's clock: begun, taken in, drafted."""
        self._started_ns = 0
        self._began: Any = None
        drafter.on_committed = self._committed

    def begin(self) -> None:
        """A pass begins."""
        self._started_ns, self._marks = time.time_ns(), [time.perf_counter_ns()]
        self._began = self._device.begin()

    def _committed(self) -> None:
        self._marks[1:] = [time.perf_counter_ns()]
        self._device.end("commit", self._began)
        self._began = self._device.begin()

    def drafted(self) -> None:
        """The pass has trees; where nobody has said when it had taken in, that is a part of growing them."""
        if len(self._marks) == 1:
            self._marks.append(self._marks[0])
        self._marks.append(time.perf_counter_ns())
        self._device.end("levels", self._began)

    def figures(self) -> DrafterFigures:
        """Of the pass, once its answer is written."""
        begun, taken_in, drafted = self._marks
        device = self._device.seconds
        return DrafterFigures(
            self._started_ns,
            (taken_in - begun) // 1000,
            (drafted - taken_in) // 1000,
            (time.perf_counter_ns() - drafted) // 1000,
            int(1e6 * device.get("commit", 0.0)),
            int(1e6 * device.get("levels", 0.0)),
            **self.stage_counts,
            head_version=self.head_version,
        )


def _passes(pending: Pending) -> list[Pending]:
    """Who is answered together, in this order: long prompts wait for the others, and no longer than one pass."""
    long = [each for each in pending if _chunk_tokens(each[1]) > LONG_CHUNKS]
    if not long or len(long) == len(pending):
        return [pending] if pending else []
    return [[each for each in pending if _chunk_tokens(each[1]) <= LONG_CHUNKS], long]


def _chunk_tokens(outcome: Outcome) -> int:
    return int(outcome.chunk_lens[: RoundHeader.read(outcome.header).num_chunks].sum())


def _shape(spec: ChannelSpec) -> tuple:
    """What one pass must have in common."""
    return (spec.num_nodes, spec.max_path, spec.taps_size, spec.taps_dtype, spec.block_size, spec.keeps_context)


def _covering(specs: Iterable[ChannelSpec]) -> ChannelSpec:
    """A channel as long as the longest of these, which have one shape."""
    specs = list(specs)
    longest = {
        name: max(getattr(spec, name) for spec in specs)
        for name in ("max_prefill_tokens", "max_model_len", "max_blocks_per_seq")
    }
    return replace(specs[-1], **longest)


def _write_reply(attachment: Attachment, outcome: Outcome, trees: TokenTree, by_slot: TokenTree | None) -> None:
    reply, slots = attachment.end.reply, outcome.proposal_slots[: len(trees.token_ids)]
    copies = [(reply.epochs, outcome.epochs), (reply.committed_lens, outcome.committed_lens)]
    if by_slot is not None:
        # Rows of slots that asked for nothing hold earlier trees: the verifier knows what it asked for.
        own = slice(attachment.slot_offset, attachment.slot_offset + len(reply.epochs))
        copy_all(copies + [(getattr(reply, name), field[own]) for name, field in by_slot._asdict().items()])
        return
    copy_all(copies)
    where = reply.token_ids.device
    if where != slots.device:
        slots = upload(slots.tolist(), where)
    width = trees.token_ids.shape[1]
    for name, field in trees._asdict().items():
        into = getattr(reply, name)
        into = into[:, :width] if into.dim() == 2 else into
        into[slots] = field.to(where)


def first_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    """Where a range of `size` begins that meets none of the ranges (first, length) that are taken."""
    first = 0
    for begin, length in sorted(taken):
        if begin - first >= size:
            break
        first = max(first, begin + length)
    return first
