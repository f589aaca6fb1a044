"""Tokens that a round may choose where the host says so, found while the forward pass runs."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import Download, upload
from wingbeat.runtime.round.processors import ProcessorTables
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence

_ROOT = np.zeros(1, np.int64), np.full(1, -1, np.int64)


class TokenMasks:
    """Fills the masks of `ProcessorTables` for the masked sequences of a round, on a thread of its own."""

    def __init__(self, tables: ProcessorTables) -> None:
        self._tables = tables
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def started(self, plan: SchedulerOutput, trees: TokenTree | None) -> "Iterator[Future[list[int]]]":
        """Masks of a round whose plan `is_masked`, computed while the block runs.

        The thread is done when the block ends, also by an exception: a slot's next sequence must not meet a late write.

        Yields:
            The decodes of whose trees only the root's mask was found in time: the others' nodes must not count.
        """
        masks = self._start(plan, trees)
        try:
            yield masks
        finally:
            wait([masks])

    def send(self, plan: SchedulerOutput, trees: TokenTree | None) -> "SentTrees":
        """Have the trees of a masked round come to the host, whose pass is enqueued before their masks are known."""
        decodes = _masked(plan)
        if trees is None or not decodes:
            return SentTrees(decodes, None)
        rows = upload([row for row, _ in decodes], trees.parents.device)
        fields = (trees.token_ids, trees.parents, trees.num_valid)
        return SentTrees(decodes, Download([field.index_select(0, rows) for field in fields]))

    def fill(self, plan: SchedulerOutput, sent: "SentTrees") -> list[int]:
        """The masks of such a round, enqueued behind its pass: once the sequences have the tokens of the round before.

        Returns:
            As `started` yields them.
        """
        return self._fill(sent.decodes, _sampling(plan), None if sent.trees is None else sent.trees.wait())

    def _start(self, plan: SchedulerOutput, trees: TokenTree | None) -> "Future[list[int]]":
        decodes, roots = _masked(plan), _sampling(plan)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="wingbeat-masks")
        drafted = None
        if trees is not None:
            rows = upload([row for row, _ in decodes], trees.parents.device)
            # Copies: the round goes on with the tensors meanwhile.
            drafted = [field[rows].cpu().numpy() for field in (trees.token_ids, trees.parents, trees.num_valid)]
        return self._thread.submit(self._fill, decodes, roots, drafted)

    @torch.inference_mode()
    def _fill(
        self, decodes: list[tuple[int, Sequence]], roots: list[Sequence], drafted: list[np.ndarray] | None
    ) -> list[int]:
        late = []
        for index, (row, seq) in enumerate(decodes):
            if seq.masker is None:  # it has ended meanwhile
                continue
            token_ids, parents = _ROOT
            if drafted is not None:
                num_valid = drafted[2][index]
                token_ids, parents = (field[index, :num_valid] for field in drafted[:2])
            if not self._fill_one(seq, token_ids, parents):
                late.append(row)
        for seq in roots:
            if seq.masker is not None:
                self._fill_one(seq, *_ROOT)
        return late

    def _fill_one(self, seq: Sequence, token_ids: np.ndarray, parents: np.ndarray) -> bool:
        table = self._tables.masks[seq.slot]
        masks = np.zeros((len(token_ids), table.shape[1]), np.int32)
        in_time = seq.masker.fill(token_ids, parents, masks)
        made, on_host = torch.from_numpy(masks), table.device.type == "cpu"
        table[: len(masks)].copy_(made if on_host else made.pin_memory(), non_blocking=not on_host)
        return in_time


class SentTrees(NamedTuple):
    """Trees of masked decodes on their way to the host."""

    decodes: list[tuple[int, Sequence]]
    """Rows of the round, and their sequences."""
    trees: Download | None
    """By these: tokens, parents and numbers of valid nodes; None where all are bare roots."""


def _masked(plan: SchedulerOutput) -> list[tuple[int, Sequence]]:
    return [(row, seq) for row, seq in enumerate(plan.decodes) if seq.masker is not None]


def _sampling(plan: SchedulerOutput) -> list[Sequence]:
    return [chunk.seq for chunk in plan.chunks if chunk.samples and chunk.seq.masker is not None]
