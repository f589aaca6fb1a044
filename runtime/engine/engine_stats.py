"""An engine's statistics as plain data, copied between two rounds."""

from dataclasses import dataclass, field

import torch

from wingbeat.runtime.config import EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.engine.clocks import PhaseTimes, RequestTimes
from wingbeat.runtime.engine.speculation import PolicyStats
from wingbeat.runtime.graphs.graph_runner import GraphStats
from wingbeat.runtime.metrics import Histogram, SpeculationMetrics
from wingbeat.runtime.protocol.messages import DrafterFigures


@dataclass
class EngineStats:
    """A snapshot of the engine's load and of speculation so far."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    drafter_state: str
    num_drafters_attached: int
    num_replayed_tokens: int
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    policy: PolicyStats | None = None
    """Speculation decisions and their reasons; None if trees have a fixed shape."""
    graphs: GraphStats | None = None
    """Captured rounds and their replays; None if nothing is captured."""
    forced_acceptance: ForcedAcceptance | None = None
    """Acceptance profile that a benchmark forces, so that the generated text is not the model's; None normally."""
    requests: RequestTimes = field(default_factory=RequestTimes)
    num_deferred: int = 0
    """Number of waiting requests that are held back for a reason other than slots and blocks, see
    `Scheduler.num_deferred`."""
    num_pinned_blocks: int = 0
    """Number of KV blocks of saved prefixes, which are not freed while the prefixes are pinned."""
    prefix_query_tokens: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    plain_rounds: dict[str, int] = field(default_factory=dict)
    """Number of rounds that decoded without any tree, by reason."""
    by_context: dict[str, SpeculationMetrics] = field(default_factory=dict)
    """Metrics as in `speculation`, by range of context tokens, such as 513-2048."""
    tree_nodes: Histogram | None = None
    """Histogram of the number of nodes of verified trees, roots not counted."""
    by_text: tuple[int, ...] = (0, 0, 0)
    """Counts of trees built from earlier text, as in `RoundCounter.by_text`."""
    by_head: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Counts by version of the draft head, as in `RoundCounter.by_head`."""
    head_version: int = 0
    """Version of the draft head that drafted last; 0 is the head that the settings name."""
    num_spec_tokens: int = 0
    """Maximum depth of a draft tree."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of the runtime's optional parts (`runtime.parts`), by part name."""
    cache_config: dict[str, str] = field(default_factory=dict)
    """KV cache settings under vLLM's names."""
    tree_config: dict[str, str] = field(default_factory=dict)
    """Tree shape settings; empty without a drafter."""
    request_labels: dict[str, str] | None = None
    """Request labels for metrics; None if the model has no labels."""
    stages: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of captured stages by process (`verifier`, `drafter`) and state, as in `GraphStats.counts`; a process that
    captures no graphs is absent."""
    device_s: dict[str, float] = field(default_factory=dict)
    """Device seconds by stage: prefill, verify, accept, round, encoder, draft_commit, draft_levels."""


def cache_config(config: EngineConfig, dtype: torch.dtype, num_blocks: int, num_bytes: int) -> dict[str, str]:
    """KV cache settings under vLLM's names. Sizes in tokens do not count the null block."""
    num_tokens = (num_blocks - 1) * config.block_size
    return {
        "block_size": str(config.block_size),
        "cache_dtype": str(dtype).removeprefix("torch."),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "kv_cache_max_concurrency": f"{num_tokens / config.max_model_len:.2f}",
        "kv_cache_memory_bytes": str(num_bytes),
        "kv_cache_size_tokens": str(num_tokens),
        "num_gpu_blocks": str(num_blocks),
    }


def tree_config(speculation: SpeculationConfig) -> dict[str, str]:
    """Tree shape settings under their setting names."""
    return {
        "draft_steps": str(speculation.draft_steps),
        "draft_top_k": str(speculation.draft_top_k),
        "verify_tree_size": str(speculation.verify_tree_size),
        "adaptive": str(speculation.adaptive),
    }


def stages_of(verifier: GraphStats | None, drafter: DrafterFigures) -> dict[str, dict[str, int]]:
    """Builds `EngineStats.stages` from the figures of the verifier's and the drafter's process."""
    said = {name: getattr(drafter, name) for name in ("captured", "failed", "eager")}
    found = {"verifier": {} if verifier is None else verifier.counts(), "drafter": said}
    return {process: counts for process, counts in found.items() if any(counts.values())}
