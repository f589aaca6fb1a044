"""Measures what rounds cost on this machine: the verifier's forward passes and the drafter's trees.

The verifier's part takes seconds and is kept on disk per machine and model; the drafter's part takes less and depends
on what else runs, so it is measured by every engine, when its first drafter attaches. On a host a few points are
measured and the rest lies between them: the rounds that are served correct both parts.
"""

import hashlib
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from wingbeat.kernels.cpu.library import fingerprint
from wingbeat.kernels.cpu.ops import reads_in_place
from wingbeat.kernels.disk_cache import cache_dir, keep, recall
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.outcome_writer import OutcomeWriter
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.kv.pool import KVCache, kv_dtype
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.speculation.costs import CostTables
from wingbeat.runtime.verifier.compiled import replay_ms
from wingbeat.runtime.verifier.loading.loader import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel

logger = logging.getLogger(__name__)

_REPEATS, _HOST_REPEATS = 4, 2
_CURVE_STEP, _MOST_ROWS = 4, 256
"""The passes that are measured without graphs: of 1, 4, 16, 64 and 256 rows."""
_LONG_PASS_S = 1.0
"""Passes of more rows are left out, but for the second point, where one may take as long."""
_LONG_CONTEXT = 1024
"""Tokens of the longer contexts, at most."""
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_EXTRA_NODES = (0, 1, 2, 4, 7, 15, 31, 59)
_LEAST_STEP = 0.75
_VERSION = 7


class VerifierTimes(NamedTuple):
    """Seconds of forward passes, the quickest of a few; axes as in `CostTables`."""

    batch_sizes: tuple[int, ...]
    extra_nodes: tuple[int, ...]
    verify_s: tuple[tuple[float, ...], ...]
    context_s: tuple[float, ...]


class DrafterTimes(NamedTuple):
    """Seconds of drafts by batch size."""

    draft_base_s: tuple[float, ...]
    draft_level_s: tuple[float, ...]


def cost_tables(verifier: VerifierTimes, drafter: DrafterTimes) -> CostTables:
    """Both parts as the policy reads them."""
    return CostTables(
        verifier.batch_sizes,
        verifier.extra_nodes,
        verifier.verify_s,
        verifier.context_s,
        drafter.draft_base_s,
        drafter.draft_level_s,
    )


def verifier_times(
    loaded: LoadedModel,
    model: VerifierModel,
    cache: KVCache,
    config: EngineConfig,
    graphs: GraphDevice | None = None,
) -> VerifierTimes:
    """Forward passes by batch size and drafted nodes, from the cache on disk where the same was measured before.

    Args:
        graphs: captures them; None measures them eagerly.
    """
    path = times_path(loaded, config, graphs is not None)
    kept = recall(path, _from_dict)
    if kept is not None:
        return kept
    logger.info("measuring the forward passes of %s", loaded.name)
    started = time.perf_counter()
    measured = _measure_verifier(loaded, model, cache, config, graphs)
    times = measured._replace(verify_s=levelled(measured.verify_s))
    line, seconds = "measured the forward passes of %s in %.1f s", time.perf_counter() - started
    if not _undisturbed(measured):
        logger.warning(f"{line}; not kept, because other work on this machine disturbed it", loaded.name, seconds)
    elif keep(path, times._asdict()):
        logger.info(f"{line}, kept in %s", loaded.name, seconds, path)
    else:
        logger.info(line, loaded.name, seconds)
    return times


def times_path(loaded: LoadedModel, config: EngineConfig, captured: bool) -> Path:
    """Where `verifier_times` keeps what it has measured.

    Args:
        captured: rounds are graphs.
    """
    return cache_dir() / f"verifier-{_key(loaded, config, captured)}.json"


def drafter_times(
    end: VerifierEnd, batch_sizes: tuple[int, ...], timeout_s: float, on_host: bool = False
) -> DrafterTimes | None:
    """Waits for trees of one level and of all, through the channel; None when the drafter does not answer.

    Nothing may be running: rows of the channel are used that belong to no sequence.

    Args:
        on_host: measure the least, the middle and the largest batch, and take the others to lie between them.
    """
    if on_host:
        few = tuple(sorted({batch_sizes[0], batch_sizes[len(batch_sizes) // 2], batch_sizes[-1]}))
        found = _drafter_times(end, few, timeout_s, _HOST_REPEATS)
        return found and DrafterTimes(*(tuple(np.interp(batch_sizes, few, part).tolist()) for part in found))
    return _drafter_times(end, batch_sizes, timeout_s, _REPEATS)


def _drafter_times(
    end: VerifierEnd, batch_sizes: tuple[int, ...], timeout_s: float, repeats: int
) -> DrafterTimes | None:
    deepest = end.spec.max_path - 1
    bases, levels = [], []
    for num_reqs in batch_sizes:
        waits: list[float] = []
        for depth in sorted({1, deepest}):
            times = [_draft_once(end, num_reqs, depth, timeout_s) for _ in range(1 + repeats)]
            if None in times:
                return None
            waits.append(statistics.median(times[1:]))
        level = max(waits[-1] - waits[0], 0.0) / max(deepest - 1, 1)
        levels.append(level)
        bases.append(max(waits[0] - level, 1e-6))
    return DrafterTimes(tuple(bases), tuple(levels))


def _draft_once(end: VerifierEnd, num_reqs: int, depth: int, timeout_s: float) -> float | None:
    outcome = end.acquire_outcome(timeout_s)
    if outcome is None:
        return None
    slots, max_path = torch.arange(num_reqs), end.spec.max_path
    zeros = torch.zeros(num_reqs, max_path, dtype=torch.int64)
    taps = torch.zeros(num_reqs, max_path, end.spec.taps_size, dtype=end.spec.taps_dtype)
    ends = torch.full_like(slots, max_path)
    writer = OutcomeWriter(outcome)
    writer.decodes(slots.tolist(), AcceptedPaths(slots, zeros[:, 0], zeros, ends, ends, zeros, taps))
    for by_slot in (outcome.epochs, outcome.block_tables, outcome.temperatures, outcome.seeds):
        by_slot.zero_()
    outcome.committed_lens.fill_(max_path + 1)
    writer.finish(slots.tolist(), depth, max_path + 1)
    started = time.perf_counter()
    reply = end.wait_reply(end.publish_outcome(), timeout_s)
    if reply is None:
        return None
    if reply.token_ids.is_cuda:  # the answer says that the trees are enqueued, not that they are there
        torch.cuda.synchronize(reply.token_ids.device)
    return time.perf_counter() - started


@torch.inference_mode()
def _measure_verifier(
    loaded: LoadedModel, model: VerifierModel, cache: KVCache, config: EngineConfig, graphs: GraphDevice | None
) -> VerifierTimes:
    batch_sizes = (*(size for size in _BATCH_SIZES if size < config.max_num_seqs), config.max_num_seqs)
    most = config.speculation.num_nodes - 1
    extra_nodes = (*(extra for extra in _EXTRA_NODES if extra < most), most)
    short = -(-(most + 1) // config.block_size)
    long = max(_long_width(config), short + 1)
    more_tokens = (long - short) * config.block_size

    def forward(num_reqs: int, num_nodes: int, width: int) -> Callable[[], object]:
        batch = dummy_decode_batch(cache, num_reqs, num_nodes, width)
        return lambda: model(batch)

    if graphs is None:
        long_s = _least_s(forward(1, 1, long), loaded.device)
        rows, seconds = _curve(forward, batch_sizes[-1], most + 1, short, loaded.device)
        verify_s = tuple(tuple(_at(size * (1 + extra), rows, seconds) for extra in extra_nodes) for size in batch_sizes)
        slope = max(long_s - seconds[0], 0.0) / more_tokens
        return VerifierTimes(batch_sizes, extra_nodes, verify_s, tuple(slope * size for size in batch_sizes))
    shapes = [(num_reqs, 1 + extra, short) for num_reqs in batch_sizes for extra in extra_nodes]
    shapes += [(num_reqs, 1, long) for num_reqs in batch_sizes]
    seconds = [replay_ms(forward(*shape), graphs, _REPEATS) / 1e3 for shape in shapes]
    width = len(extra_nodes)
    rows = [tuple(seconds[start * width : (start + 1) * width]) for start in range(len(batch_sizes))]
    added = (max(longer - row[0], 0.0) for longer, row in zip(seconds[-len(batch_sizes) :], rows, strict=True))
    return VerifierTimes(batch_sizes, extra_nodes, tuple(rows), tuple(seconds / more_tokens for seconds in added))


def _curve(
    forward: Callable[[int, int, int], Callable[[], object]],
    most_reqs: int,
    most_nodes: int,
    width: int,
    device: torch.device,
) -> tuple[list[int], list[float]]:
    """Rows of a few passes, ascending, and the seconds that each takes; two points at least where there are two."""
    rows, seconds = [], []
    count = 1
    while count <= min(most_reqs * most_nodes, _MOST_ROWS):
        if len(rows) > 1 and seconds[-1] * _CURVE_STEP > _LONG_PASS_S:
            break
        num_reqs = min(count, most_reqs)
        rows.append(num_reqs * (count // num_reqs))
        seconds.append(_least_s(forward(num_reqs, count // num_reqs, width), device))
        count *= _CURVE_STEP
    return rows, seconds


def _at(count: int, rows: list[int], seconds: list[float]) -> float:
    """Seconds of a pass of so many rows; beyond the curve each row adds what the last ones did."""
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
    return float(np.interp(count, rows, seconds)) + max(slope, 0.0) * max(count - rows[-1], 0)


def _long_width(config: EngineConfig) -> int:
    """Blocks of the longer contexts: half of the longest, as far as that is quickly measured."""
    return min(config.max_blocks_per_seq // 2, _LONG_CONTEXT // config.block_size)


def _least_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a pass: the least of a few behind a first one."""
    seconds = []
    for _ in range(1 + _HOST_REPEATS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def levelled(verify_s: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """The same, where no pass takes longer than one of more rows: what disturbs a pass makes it longer."""
    table = torch.tensor(verify_s, dtype=torch.float64)
    for axis in (0, 1):
        table = table.flip(axis).cummin(axis).values.flip(axis)
    return tuple(map(tuple, table.tolist()))


def _undisturbed(times: VerifierTimes) -> bool:
    """Whether more nodes take longer, as they do where nothing else runs; steps of a small model may be noise."""
    return all(now > _LEAST_STEP * before for row in times.verify_s for before, now in pairwise(row))


def _key(loaded: LoadedModel, config: EngineConfig, captured: bool) -> str:
    device = loaded.device
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    parts = (
        _VERSION,
        platform.node(),
        platform.processor(),
        os.cpu_count(),
        cuda,
        torch.__version__,
        transformers.__version__,
        captured,
        config.compile,
        fingerprint() if reads_in_place(kv_dtype(config, loaded.dtype), device) else None,
        str(loaded.dtype),
        config.kv_cache_dtype,
        config.deterministic,
        loaded.description,
        config.max_num_seqs,
        _long_width(config),
        config.block_size,
        config.speculation.num_nodes,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _from_dict(raw: dict[str, Any]) -> VerifierTimes:
    return VerifierTimes(
        tuple(raw["batch_sizes"]),
        tuple(raw["extra_nodes"]),
        tuple(tuple(row) for row in raw["verify_s"]),
        tuple(raw["context_s"]),
    )
