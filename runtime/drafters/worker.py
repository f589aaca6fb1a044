"""The drafter's side of the channel: answers the rounds of the attached verifier.

A channel is in host memory, or partly on a device: `cluster.channels.cuda.cuda_ipc` lists the fields. Values that
decide the shapes of a pass are always in host memory. Values that a device computed stay on that device, so that a
drafter on the same device enqueues its pass without synchronising.
"""

import time
from typing import Any

import torch

from wingbeat.runtime.device_clock import DeviceClock
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.growth import COMMIT, TREES
from wingbeat.runtime.drafters.outcome_batch import batch_of
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import DRAFT_PARTS, ChannelSpec, DrafterFigures, Outcome, TokenTree
from wingbeat.runtime.protocol.transfer import copy_all, upload


class RoundObserver:
    """Called in the drafting thread around the rounds of a worker; this class does nothing."""

    @property
    def has_work(self) -> bool:
        """Whether `before` has something to do before the next round is drafted."""
        return False

    def before(self) -> None:
        """Called before the worker looks for a pending round."""

    def answered(self) -> None:
        """Called when a round is answered."""

    def failed(self, error: Exception) -> None:
        """Called when a round has raised an error, which the worker raises afterwards."""


class DraftWorker:
    """Polls the attached channel and answers its rounds.

    Args:
        drafter: the drafter that drafts for the verifier.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.most_threads: int | None = None
        """Maximum number of CPU threads to try once a verifier is attached; None keeps torch's number of threads."""
        self.watch = PassWatch(drafter)
        self.observer = RoundObserver()
        self._attached: dict[str, DrafterEnd] = {}
        """The attached channel's end by the channel's name; empty if no verifier is attached."""

    def attach(self, name: str, end: DrafterEnd) -> None:
        """Serve the verifier at the other end of this channel from the next pass on, instead of any other verifier.

        Raises:
            ValueError: the channel's shapes do not fit the drafter.
        """
        self.resize(end.spec, end.spec.num_slots, end.spec.num_blocks)
        for other in self.names:
            self.detach(other)
        self._attached[name] = end

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Allocate the drafter's state for channels of this shape; see `Drafter.resize`."""
        self.drafter.resize(spec, num_slots, num_blocks)
        if self.most_threads is not None:
            self.drafter.try_threads(self.most_threads)
            self.most_threads = None
        self.watch.stage_counts = self.drafter.stage_counts

    def detach(self, name: str) -> None:
        """Stop serving a verifier. Unknown names are ignored."""
        end = self._attached.pop(name, None)
        if end is not None:
            end.close()

    @property
    def ends(self) -> list[DrafterEnd]:
        """Attached channel ends, for a caller that waits on their doorbells."""
        return list(self._attached.values())

    @property
    def names(self) -> list[str]:
        """Names of the attached channels."""
        return list(self._attached)

    @torch.inference_mode()
    def run_once(self) -> bool:
        """Answer the pending round; returns False if no round was pending. A closed channel is detached."""
        for name in [name for name, end in self._attached.items() if end.closed]:
            self.detach(name)
        self.observer.before()
        for end in self.ends:
            if (outcome := end.poll_outcome()) is not None:
                try:
                    self.draft(end, outcome)
                except Exception as error:
                    self.observer.failed(error)
                    raise
                return True
        return False

    def draft(self, end: DrafterEnd, outcome: Outcome) -> None:
        """Answer a round of the only attached verifier, in a pass of its own."""
        self.watch.begin()
        if self.drafter.answer(end, outcome):
            self.watch.drafted()
        else:
            trees = self.drafter.draft(batch_of(end, outcome, self.drafter.device))
            self.watch.drafted()
            if trees is not None:
                write_reply(end, outcome, trees, self.drafter.trees_by_slot)
        self.publish(end)

    def publish(self, end: DrafterEnd) -> None:
        """Publish the reply that was written, with the pass's figures."""
        self.watch.figures().write(end.reply.header.numpy())
        end.publish_reply()
        self.observer.answered()


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


def write_reply(end: DrafterEnd, outcome: Outcome, trees: TokenTree, by_slot: TokenTree | None) -> None:
    """Write a verifier's trees into the reply's buffers.

    Args:
        trees: trees by proposal.
        by_slot: `Drafter.trees_by_slot`, from the verifier's first slot on; None if trees are not stored by slot.
    """
    reply, slots = end.reply, outcome.proposal_slots[: len(trees.token_ids)]
    copies = [(reply.epochs, outcome.epochs), (reply.committed_lens, outcome.committed_lens)]
    if by_slot is not None:
        # Rows of slots without a proposal hold earlier trees; the verifier reads only the slots that it requested.
        num_slots = len(reply.epochs)
        copy_all(copies + [(getattr(reply, name), field[:num_slots]) for name, field in by_slot._asdict().items()])
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
