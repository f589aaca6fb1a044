"""Masks of allowed tokens (grammars, bad words) for a round, computed on the host while the forward pass runs."""

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
    """Fills `ProcessorTables.masks` for those sequences of a round that have a masker (a grammar or bad words)."""

    def __init__(self, tables: ProcessorTables) -> None:
        self._tables = tables
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def started(self, plan: SchedulerOutput, trees: TokenTree | None) -> "Iterator[Future[list[int]]]":
        """Context manager that computes a round's masks on the worker thread while the `with` block runs.

        The round's plan must be masked (`SchedulerOutput.is_masked`).

        At its end, the context manager waits until the worker has finished, even if an exception is raised, because a
        later write could change the mask of the slot's next sequence.

        Yields:
            Future of the decode rows for which only the root's mask was ready in time; only the roots of these trees
            may be verified.
        """
        masks = self._start(plan, trees)
        try:
            yield masks
        finally:
            wait([masks])

    def send(self, plan: SchedulerOutput, trees: TokenTree | None) -> "SentTrees":
        """Starts the download of the trees of a round's masked decodes.

        Used for rounds whose forward pass is enqueued before the masks can be computed.
        """
        decodes = _masked(plan)
        if trees is None or not decodes:
            return SentTrees(decodes, None)
        rows = upload([row for row, _ in decodes], trees.parents.device)
        fields = (trees.token_ids, trees.parents, trees.num_valid)
        return SentTrees(decodes, Download([field.index_select(0, rows) for field in fields]))

    def fill(self, plan: SchedulerOutput, sent: "SentTrees") -> list[int]:
        """Computes the masks of a round passed to `send`.

        Call `fill` after the sequences have taken the previous round's tokens.

        The copies to the device are enqueued after the round's forward pass.

        Returns:
            Decode rows for which only the root's mask was ready in time, as in `started`.
        """
        return self._fill(sent.decodes, _sampling(plan), None if sent.trees is None else sent.trees.wait())

    def _start(self, plan: SchedulerOutput, trees: TokenTree | None) -> "Future[list[int]]":
        decodes, roots = _masked(plan), _sampling(plan)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="wingbeat-masks")
        drafted = None
        if trees is not None:
            rows = upload([row for row, _ in decodes], trees.parents.device)
            # The worker gets copies, because the round changes its tensors while the worker runs.
            drafted = [field[rows].cpu().numpy() for field in (trees.token_ids, trees.parents, trees.num_valid)]
        return self._thread.submit(self._fill, decodes, roots, drafted)

    @torch.inference_mode()
    def _fill(
        self, decodes: list[tuple[int, Sequence]], roots: list[Sequence], drafted: list[np.ndarray] | None
    ) -> list[int]:
        late = []
        for index, (row, seq) in enumerate(decodes):
            if seq.masker is None:  # the request ended after the download was started
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
    """Trees of a round's masked decodes, whose download to the host has started."""

    decodes: list[tuple[int, Sequence]]
    """(row of the round, sequence) of each masked decode."""
    trees: Download | None
    """Token ids, parents and num_valid of these decodes' trees, in the order of `decodes`; None if all trees are bare
    roots."""


def _masked(plan: SchedulerOutput) -> list[tuple[int, Sequence]]:
    return [(row, seq) for row, seq in enumerate(plan.decodes) if seq.masker is not None]


def _sampling(plan: SchedulerOutput) -> list[Sequence]:
    return [chunk.seq for chunk in plan.chunks if chunk.samples and chunk.seq.masker is not None]
