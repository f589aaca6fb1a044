"""Text that the verifier generates before training. The drafter is trained on this text because it will draft text of
the verifier.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wingbeat.kernels.replaced_file import replacing
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.token_windows import WindowSampler

ROLLOUTS_FILE = "rollouts.safetensors"
_ROWS_PER_CHUNK = 64
_PREFIX_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


class RowSampler:
    """Draws batches of whole rows, each row once per epoch. A batch is determined by the rows, the seed and the
    cursor.
    """

    def __init__(self, rows: Tensor, seed: int) -> None:
        self._rows = rows
        self._seed = seed

    def batch(self, cursor: int, batch_size: int) -> Tensor:
        """Returns `batch_size` consecutive rows in the order of drawing, beginning with row number `cursor *
        batch_size` -> int64 [batch_size, length].
        """
        return self.rows(cursor * batch_size, range(batch_size))

    def rows(self, start: int, rows: range) -> Tensor:
        """Returns the rows that have the numbers `start + row` in the order of drawing, one for each `row` in `rows` ->
        int64 [len(rows), length].
        """
        numbers = [divmod(start + row, len(self._rows)) for row in rows]
        return self._rows[[self._order(epoch)[index] for epoch, index in numbers]]

    @lru_cache(maxsize=2)  # noqa: B019 - two permutations, and a sampler lives as long as its run
    def _order(self, epoch: int) -> list[int]:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)).tolist()


def make_rollouts(
    verifier: FrozenVerifier,
    sampler: WindowSampler,
    folder: Path,
    *,
    num_rows: int,
    length: int,
    greedy_fraction: float,
    temperature: float,
    seed: int,
    on_rows: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Continue corpus prefixes to `length` tokens -> int64 [num_rows, length] on the CPU.

    A prefix is 1/16 to 1/2 of a row long. Rows that an earlier run with the same verifier and settings wrote to
    `folder` are kept. Each chunk of rows has its own seed, so that an interrupted run makes the same rows as an
    uninterrupted run.

    Args:
        verifier: generates the text.
        sampler: samples prefixes.
        folder: folder of the rollouts file.
        num_rows: number of rows.
        length: tokens per row.
        greedy_fraction: share of greedy rows.
        temperature: sampling temperature of the other rows.
        seed: number from which the seeds of all chunks are derived.
        on_rows: called with the number of rows made so far.
    """
    path = folder / ROLLOUTS_FILE
    if num_rows == 0:
        return torch.empty(0, length, dtype=torch.int64)
    weights = float(verifier.embedding.double().sum())
    origin = json.dumps([str(verifier.model.name_or_path), weights, length, greedy_fraction, temperature, seed])
    chunks = _kept_chunks(path, origin)[: -(-num_rows // _ROWS_PER_CHUNK)]
    device = verifier.embedding.device
    while sum(map(len, chunks)) < num_rows:
        index = len(chunks)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        prefix_length = max(1, int(length * _PREFIX_SHARES[index % len(_PREFIX_SHARES)]))
        prefix = sampler.batch(index, _ROWS_PER_CHUNK, length)[:, :prefix_length].to(device)
        sampled = torch.arange(_ROWS_PER_CHUNK) >= greedy_fraction * _ROWS_PER_CHUNK
        rows = verifier.continue_text(prefix, length, sampled * temperature, generator)
        chunks.append(rows.cpu())
        with replacing(path) as temporary:
            save_file({"token_ids": torch.cat(chunks).int()}, temporary, metadata={"origin": origin})
        on_rows(min(num_rows, len(chunks) * _ROWS_PER_CHUNK))
    return torch.cat(chunks)[:num_rows]


def _kept_chunks(path: Path, origin: str) -> list[Tensor]:
    if not path.exists():
        return []
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("origin") != origin:
            return []
        return list(file.get_tensor("token_ids").long().split(_ROWS_PER_CHUNK))
