"""The drafter's side of the channel: one batched pass over all attached verifiers that wait for trees.

A channel is in host memory, or partly on a device: `cluster.channels.cuda.cuda_ipc` lists the fields. Values that
decide the shapes of a pass are always in host memory. Values that a device computed stay on that device, so that a
drafter on the same device enqueues its pass without synchronising.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from wingbeat.runtime.device_clock import DeviceClock
from wingbeat.runtime.drafters.base import Drafter, NextHead
from wingbeat.runtime.drafters.growth import COMMIT, TREES
from wingbeat.runtime.drafters.merged_batch import Attachment, merge
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import (
    DRAFT_PARTS,
    ChannelSpec,
    DrafterFigures,
    Outcome,
    RoundHeader,
    TokenTree,
)
from wingbeat.runtime.protocol.transfer import copy_all, upload

logger = logging.getLogger(__name__)
LONG_CHUNKS = 64
"""Number of chunk tokens per round above which a verifier is answered in a second pass, after the verifiers with fewer
chunk tokens, so that a verifier's long prompt does not delay the trees of other verifiers."""

MOST_FAILURES = 3
"""Number of consecutive failed single-verifier passes after which the drafter, instead of the verifiers, counts as
broken. If a shared pass fails, each verifier's round is drafted again in a pass of its own.
"""

Pending = list[tuple[Attachment, Outcome]]
HeadFailed = Callable[[Exception], object]


class OfferedHead(NamedTuple):
    """A head to be swapped in between two rounds; see `DraftWorker.offer_head`."""

    version: int
    head: NextHead
    failed: HeadFailed


class DraftWorker:
    """Polls the attached channels and answers pending rounds; rounds that are pending at the same time share a pass.

    Verifiers share the drafter's tensors: each attached verifier has a range of slots and a range of blocks. All
    attached verifiers have the same tree shape, taps and block size.

    Args:
        drafter: the drafter that drafts for all verifiers.
        room: a `DraftRoom`, which limits the slots and memory of all verifiers together; None means no limits.
    """

    def __init__(self, drafter: Drafter, room: Any = None) -> None:
        self.drafter = drafter
        self.room = room
        self.most_threads: int | None = None
        """Maximum number of CPU threads to try once a verifier is attached; None keeps torch's number of threads."""
        self._attached: dict[str, Attachment] = {}
        self._num_failed = 0
        self._watch = PassWatch(drafter)
        self._next_head: OfferedHead | None = None
        self._trial: OfferedHead | None = None
        """Head that is being swapped in or has not yet answered a round; None if there is no such head."""

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
        self.drafter.resize(spec, num_slots, num_blocks)
        if self.most_threads is not None:
            self.drafter.try_threads(self.most_threads)
            self.most_threads = None
        self._attached[name] = attached[-1]
        self._watch.stage_counts = self.drafter.stage_counts

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

    @property
    def head_version(self) -> int:
        """Version of the head that drafts, which every reply contains; 0 is the head from the settings."""
        return self._watch.head_version

    def offer_head(self, version: int, head: NextHead, failed: HeadFailed = lambda error: None) -> None:
        """Draft with another head from the next round on.

        A head that was offered earlier and is not in use yet is dropped.

        Thread-safe.

        Args:
            version: number to report for this head.
            head: result of this drafter's `prepare_head`.
            failed: function that is called with the exception if the swap or the first round after the swap fails; the
                worker raises the exception afterwards.
        """
        self._next_head = OfferedHead(version, head, failed)

    @property
    def has_offer(self) -> bool:
        """Whether a head is offered that no round has used yet."""
        return self._next_head is not None

    @torch.inference_mode()
    def take_offered_head(self) -> bool:
        """Swap to the offered head; returns False if none is offered.

        Call only between two rounds, from the drafting thread.
        """
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
        """Calls `failed` of the head that has not answered a round yet, if there is such a head."""
        if self._trial is not None:
            self._trial.failed(error)

    @torch.inference_mode()
    def run_once(self) -> bool:
        """Answer every pending round; returns False if no round was pending. Closed channels are detached.

        The worker does not wait for verifiers without a pending round. If several verifiers are attached, a round that
        the verifier's device has not finished counts as not pending, because a pass that waits for that device would
        delay all verifiers.
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
    """Measures the passes of one drafter: each pass's host time by phase, for traces, and the total device time."""

    def __init__(self, drafter: Drafter) -> None:
        self.head_version = 0
        self.stage_counts: dict[str, int] = {}
        """Replay counts of the drafter's captured stages, which change whenever a verifier is attached."""
        self._device, self._drafter = DeviceClock(drafter.device), drafter
        self._levels_s = 0.0
        """Device seconds of growing trees that are already divided into `_parts_s`."""
        self._parts_s: dict[str, float] = {}
        """Device seconds by name of `Drafter.stage_s`."""
        self._parts_us = (0,) * len(DRAFT_PARTS)
        self._marks: list[int] = []
        """Host clock, in nanoseconds, at three points of the pass: at the begin, after commit, and after drafting."""
        self._started_ns = 0
        self._began: Any = None
        drafter.on_committed = self._committed

    def begin(self) -> None:
        """Mark the begin of a pass."""
        self._started_ns, self._marks = time.time_ns(), [time.perf_counter_ns()]
        self._began = self._device.begin()

    def _committed(self) -> None:
        self._marks[1:] = [time.perf_counter_ns()]
        self._device.end("commit", self._began)
        self._began = self._device.begin()

    def drafted(self) -> None:
        """Mark the end of drafting. Without an `on_committed` call, commit time counts as time of growing trees."""
        if len(self._marks) == 1:
            self._marks.append(self._marks[0])
        self._marks.append(time.perf_counter_ns())
        self._device.end("levels", self._began)

    def figures(self) -> DrafterFigures:
        """Return the timings of the pass; call after the pass's reply is written."""
        begun, taken_in, drafted = self._marks
        device = self._device.seconds
        levels_s = device.get("levels", 0.0)
        if self._drafter.stage_s:
            self._divide(levels_s)
        commit_s = self._parts_s.get(COMMIT, 0.0)
        return DrafterFigures(
            self._started_ns,
            (taken_in - begun) // 1000,
            (drafted - taken_in) // 1000,
            (time.perf_counter_ns() - drafted) // 1000,
            int(1e6 * (device.get("commit", 0.0) + commit_s)),
            int(1e6 * (levels_s - commit_s)),
            **self.stage_counts,
            head_version=self.head_version,
            device_parts_us=self._parts_us,
        )

    def _divide(self, levels_s: float) -> None:
        """Divides the time of passes since the last call in the ratio of the parts that graphs have measured."""
        measured = self._drafter.stage_s
        more, total = levels_s - self._levels_s, sum(measured.values())
        self._levels_s = levels_s
        for name, seconds in measured.items() if total else ():
            self._parts_s[name] = self._parts_s.get(name, 0.0) + more * seconds / total
        parts = dict.fromkeys(DRAFT_PARTS, 0.0)
        *levels, trees = DRAFT_PARTS
        for name, seconds in self._parts_s.items():
            if name == TREES:
                parts[trees] += seconds
            elif name != COMMIT:
                parts[levels[min(int(name), len(levels)) - 1]] += seconds
        self._parts_us = tuple(int(1e6 * seconds) for seconds in parts.values())


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


def _write_reply(attachment: Attachment, outcome: Outcome, trees: TokenTree, by_slot: TokenTree | None) -> None:
    reply, slots = attachment.end.reply, outcome.proposal_slots[: len(trees.token_ids)]
    copies = [(reply.epochs, outcome.epochs), (reply.committed_lens, outcome.committed_lens)]
    if by_slot is not None:
        # Rows of slots without a proposal hold earlier trees; the verifier reads only the slots that it requested.
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
    """Return the start of the first free range of `size` numbers between the taken ranges (first, length)."""
    first = 0
    for begin, length in sorted(taken):
        if begin - first >= size:
            break
        first = max(first, begin + length)
    return first
