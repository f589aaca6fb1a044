"""Adaptive speculation for one engine and its drafter, on costs measured with both."""

import logging

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.adaptive import AdaptiveSpeculation
from wingbeat.runtime.engine.adaptive_device import DeviceAdaptiveSpeculation
from wingbeat.runtime.engine.calibration import cost_tables, drafter_times, verifier_times
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.speculation.acceptance import AcceptanceTracker
from wingbeat.runtime.speculation.costs import RoundCosts
from wingbeat.runtime.speculation.policy import SpeculationPolicy
from wingbeat.runtime.verifier.decode_graphs import node_buckets
from wingbeat.runtime.verifier.runner import ModelRunner

logger = logging.getLogger(__name__)


def calibrated_speculation(
    runner: ModelRunner, config: EngineConfig, end: VerifierEnd, patience_s: float
) -> AdaptiveSpeculation | None:
    """Measure what rounds cost; None, and so trees of the configured shape, when the drafter does not answer.

    Args:
        end: of the channel to the drafter.
        patience_s: silence after which the drafter counts as stuck.
    """
    speculation, loaded = config.speculation, runner.loaded
    graphs = runner.graphs if loaded.device.type == "cuda" else None
    device = graphs.pool.device if graphs is not None and graphs.stats.captured else None
    verifier = verifier_times(loaded, runner.model, runner.cache, config, device)
    drafter = drafter_times(end, verifier.batch_sizes, patience_s)
    if drafter is None:
        logger.warning("the drafter did not answer the calibration: speculating with fixed trees")
        return None
    costs = RoundCosts(cost_tables(verifier, drafter))
    max_depth = speculation.max_path - 1
    tracker = AcceptanceTracker(config.max_num_seqs, max_depth)
    policy = SpeculationPolicy(costs, tracker, max_depth, speculation.num_nodes, stops_early=runner.on_host)
    if runner.pruner is None:
        return AdaptiveSpeculation(policy)
    return DeviceAdaptiveSpeculation(policy, runner.pruner, node_buckets(config))
