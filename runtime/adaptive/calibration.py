"""Measures the two curves of `runtime.adaptive.curves` when an engine's first drafter attaches, which takes seconds.

The curves are not stored on disk, because a few dozen served rounds suffice to correct them.
"""

import statistics
import time
from collections.abc import Callable

import torch

from wingbeat.runtime.adaptive.curves import DraftCurve, PassCurve
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.outcome_writer import OutcomeWriter
from wingbeat.runtime.graphs.graph_device import GraphDevice, replay_ms
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.round.rows import Model

POINTS = 4
"""Number of passes of different size that make up a curve. Each pass is also run this many times; the first run is a
warm-up.
"""
HOST_ROWS, HOST_PASS_S = 64, 1.0
"""Rows of the largest pass measured on a CPU, and the predicted seconds above which a pass is not measured."""
LONG_S = 0.02
"""Seconds of measured passes of one size after which no further pass of that size is measured."""
LONG_CONTEXT = 1024
"""Upper bound of the long context, in tokens."""


@torch.inference_mode()
def pass_curve(model: Model, cache: KVCache, config: EngineConfig, graphs: GraphDevice | None = None) -> PassCurve:
    """Measures the verifier's forward passes.

    Args:
        graphs: device that captures the passes as graphs; None runs the passes eagerly.
    """
    most_reqs, num_nodes = config.max_num_seqs, config.speculation.num_nodes
    short = -(-num_nodes // config.block_size)
    # Positions stay below max_model_len, because the model may have no further positions.
    more = max(min(config.max_blocks_per_seq - short, LONG_CONTEXT // config.block_size), 0)

    def seconds(num_reqs: int, rows: int, width: int = short) -> float:
        batch = dummy_decode_batch(cache, num_reqs, rows // num_reqs, width)
        return replay_ms(lambda: model(batch), graphs, POINTS) / 1e3 if graphs else _least_s(lambda: model(batch))

    most = most_reqs * num_nodes if graphs else min(most_reqs * num_nodes, HOST_ROWS)
    rows, taken = [], []
    for wanted in sorted({round(most ** (point / (POINTS - 1))) for point in range(POINTS)}):
        if len(rows) > 1 and not graphs and taken[-1] * wanted / rows[-1] > HOST_PASS_S:
            break
        num_reqs = min(wanted, most_reqs)
        rows.append(wanted - wanted % num_reqs)
        taken.append(seconds(num_reqs, rows[-1]))
    # A pass cannot take longer than a pass of more rows, so a measured time that exceeds the time of a larger pass was
    # disturbed.
    short_s = [min(taken[index:]) for index in range(len(taken))]
    if not more:
        return PassCurve(tuple(rows), tuple(short_s))
    few = min(num_nodes, rows[min(1, len(rows) - 1)])
    per_token = [
        max(seconds(1, count, short + more) - seconds(1, count), 0.0) / (more * config.block_size) for count in (1, few)
    ]
    further = max(per_token[1] - per_token[0], 0.0) / max(few - 1, 1)
    return PassCurve(tuple(rows), tuple(short_s), (per_token[0], further))


def draft_curve(end: VerifierEnd, config: EngineConfig, patience_s: float) -> DraftCurve | None:
    """Measures the drafter's time for trees of one level and of all levels; None if the drafter does not answer.

    No sequence may be running, because the measurement overwrites channel rows of sequences.

    Args:
        patience_s: silence after which the drafter counts as stuck.
    """
    deepest, short = end.spec.max_path - 1, end.spec.max_path + 1
    # With one block per sequence only the short context is measured, because a drafter may treat a context beyond
    # that block as lost.
    long = max(min(config.max_model_len // 2, LONG_CONTEXT), short) if config.max_blocks_per_seq > 1 else short
    batches = sorted({1, config.max_num_seqs})
    points = [(num_reqs, levels, short) for num_reqs in batches for levels in (1, deepest)] + [(1, deepest, long)]
    waits = {}
    for point in dict.fromkeys(points):
        times = [took for _ in range(POINTS) if (took := _draft_once(end, *point, patience_s)) is not None]
        if len(times) < POINTS:
            return None
        waits[point] = statistics.median(times[1:])
    pairs = [(waits[num_reqs, 1, short], waits[num_reqs, deepest, short]) for num_reqs in batches]
    levels_s = [max(deep - one, 0.0) / max(deepest - 1, 1) for one, deep in pairs]
    bases_s = [max(one - level, 1e-6) for (one, _), level in zip(pairs, levels_s, strict=True)]
    further_s = max(waits[1, deepest, long] - waits[1, deepest, short], 0.0)
    context_s = further_s / (deepest * max(long - short, 1))
    return DraftCurve(tuple(batches), tuple(bases_s), tuple(levels_s), context_s)


def _draft_once(end: VerifierEnd, num_reqs: int, depth: int, context: int, timeout_s: float) -> float | None:
    outcome = end.acquire_outcome(timeout_s)
    if outcome is None:
        return None
    slots, max_path = torch.arange(num_reqs), end.spec.max_path
    zeros = torch.zeros(num_reqs, max_path, dtype=torch.int64)
    taps = torch.zeros(num_reqs, max_path, end.spec.taps_size, dtype=end.spec.taps_dtype)
    ends = torch.full_like(slots, max_path)
    writer = OutcomeWriter(outcome)
    roots = torch.full_like(slots, context - max_path - 1)
    writer.decodes(slots.tolist(), AcceptedPaths(slots, roots, zeros, ends, ends, zeros, taps))
    for by_slot in (outcome.epochs, outcome.block_tables, outcome.temperatures, outcome.seeds):
        by_slot.zero_()
    outcome.committed_lens.fill_(context)
    writer.finish(slots.tolist(), depth, context)
    started = time.perf_counter()
    reply = end.wait_reply(end.publish_outcome(), timeout_s)
    if reply is None:
        return None
    if reply.token_ids.is_cuda:  # the drafter answers before the device has computed the trees
        torch.cuda.synchronize(reply.token_ids.device)
    return time.perf_counter() - started


def _least_s(run: Callable[[], object]) -> float:
    """Runs a pass once to warm up, then a few times (once if the pass is long), and returns the least seconds."""
    seconds = []
    while len(seconds) < POINTS and sum(seconds[1:]) < LONG_S:
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
