"""An engine's figures: plain data, copied out of it between two rounds."""

from dataclasses import dataclass, field

import torch

from wingbeat.runtime.config import EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.engine.clocks import PhaseTimes, RequestTimes
from wingbeat.runtime.graphs.graph_runner import GraphStats
from wingbeat.runtime.metrics import Histogram, SpeculationMetrics
from wingbeat.runtime.protocol.messages import DrafterFigures
from wingbeat.runtime.speculation.policy import PolicyStats


@dataclass
class EngineStats:
    """A snapshot of the engine's load and what speculation brought so far."""

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
    """What was decided on speculation, and why; None where trees have a fixed shape."""
    graphs: GraphStats | None = None
    """Captured rounds and their replays; None where nothing is captured."""
    forced_acceptance: ForcedAcceptance | None = None
    """The profile that acceptance is drawn from, in a benchmark: the text is not the model's."""
    requests: RequestTimes = field(default_factory=RequestTimes)
    num_deferred: int = 0
    """Requests among the waiting ones that more room alone would not admit."""
    num_pinned_blocks: int = 0
    """Of saved prefixes; they are never free."""
    prefix_query_tokens: int = 0
    """Of prompts that were looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    plain_rounds: dict[str, int] = field(default_factory=dict)
    """Rounds that decoded without any tree, by reason."""
    by_context: dict[str, SpeculationMetrics] = field(default_factory=dict)
    """`speculation` by tokens of context, such as 513-2048."""
    tree_nodes: Histogram | None = None
    """Nodes of each verified tree, its root not counted."""
    by_text: tuple[int, ...] = (0, 0, 0)
    """As `RoundCounter.by_text`."""
    by_head: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By version of the head, as `RoundCounter.by_head`."""
    head_version: int = 0
    """Of the head that drafted last; 0 is the one that the settings name."""
    num_spec_tokens: int = 0
    """Greatest depth of a tree."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures of parts of the runtime that have some, by the part's name."""
    cache_config: dict[str, str] = field(default_factory=dict)
    """The KV cache in words."""
    tree_config: dict[str, str] = field(default_factory=dict)
    """The shape of trees in words; empty without a drafter."""
    request_labels: dict[str, str] | None = None
    """Labels of requests in metrics beside their number; None where there are none."""
    stages: dict[str, dict[str, int]] = field(default_factory=dict)
    """By process, `verifier` and `drafter`: its stages at one shape by what became of them, as `GraphStats.counts`; a
    process that captures nothing is left out."""
    device_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the devices by stage: prefill, verify, accept, encoder, draft_commit, draft_levels."""


def cache_config(config: EngineConfig, dtype: torch.dtype, num_blocks: int, block_bytes: int) -> dict[str, str]:
    """The KV cache under vLLM's names. Sizes in tokens leave out the block that belongs to nobody."""
    num_tokens = (num_blocks - 1) * config.block_size
    return {
        "block_size": str(config.block_size),
        "cache_dtype": str(dtype).removeprefix("torch."),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "kv_cache_max_concurrency": f"{num_tokens / config.max_model_len:.2f}",
        "kv_cache_memory_bytes": str(num_blocks * block_bytes),
        "kv_cache_size_tokens": str(num_tokens),
        "num_gpu_blocks": str(num_blocks),
    }


def tree_config(speculation: SpeculationConfig) -> dict[str, str]:
    """What trees are drafted, under the settings' names."""
    return {
        "draft_steps": str(speculation.draft_steps),
        "draft_top_k": str(speculation.draft_top_k),
        "verify_tree_size": str(speculation.verify_tree_size),
        "adaptive": str(speculation.adaptive),
    }


def stages_of(verifier: GraphStats | None, drafter: DrafterFigures) -> dict[str, dict[str, int]]:
    """Of both processes, as `EngineStats.stages`."""
    said = {name: getattr(drafter, name) for name in ("captured", "failed", "eager")}
    found = {"verifier": {} if verifier is None else verifier.counts(), "drafter": said}
    return {process: counts for process, counts in found.items() if any(counts.values())}
