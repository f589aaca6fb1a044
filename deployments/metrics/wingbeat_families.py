"""Metrics of engines: draft trees, drafter, speculation policy, phases of rounds, KV blocks."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import counter, gauge, histogram
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, Read, by_key, figure, in_labels, rows

DRAFTER_STATES = ("attached", "late", "lost", "none")


def _accepted_depths(figures: dict[str, Any]) -> dict[int, int]:
    reached = [figures["speculation"]["num_drafts"], *figures["speculation"]["num_accepted_tokens_per_pos"], 0]
    return {depth: reached[depth] - reached[depth + 1] for depth in range(len(reached) - 1)}


def _by_context(field: str) -> Read:
    return lambda figures: {context: part[field] for context, part in figures["by_context"].items()}


def _by_head(place: int) -> Read:
    return lambda figures: {version: row[place] for version, row in figures["by_head"].items()}


def _phases(figures: dict[str, Any]) -> dict[str, float]:
    return {name.removesuffix("_s"): value for name, value in figures["phases"].items() if name.endswith("_s")}


def _drafter_states(figures: dict[str, Any]) -> dict[str, int]:
    return {name: int(figures["drafter_state"] == name) for name in DRAFTER_STATES}


GAUGES: tuple[tuple[str, str, Read], ...] = (
    (
        "forced_acceptance",
        "1 if acceptance is forced for a benchmark, so that the text is not the model's.",
        lambda figures: int(figures["forced_acceptance"] is not None),
    ),
    (
        "break_even_acceptance_length",
        "Tokens per draft at which the best draft at the current load is as fast as plain decoding.",
        figure("policy", "break_even"),
    ),
    (
        "self_test_passed",
        "1 if the drafter passed the self-test at the engine's start, 0 if it failed and is served anyway.",
        figure("self_test", "passed"),
    ),
    (
        "head_version",
        "Version of the draft head that drafted last; 0 is the head named by the settings.",
        figure("head_version"),
    ),
    ("kv_blocks", "KV blocks in the pool.", figure("num_blocks")),
    ("kv_blocks_free", "KV blocks that can be allocated, evictable cached blocks included.", figure("num_free_blocks")),
    ("kv_blocks_pinned", "KV blocks of saved prefixes, which cannot be evicted.", figure("num_pinned_blocks")),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    (
        "engine_restarts",
        "Engines that the replica has started after an engine died.",
        figure("num_engine_restarts"),
    ),
    ("rounds", "Rounds of the engine.", figure("phases", "num_rounds")),
    (
        "drafter_restarts",
        "Drafters attached after the first one.",
        lambda figures: max(figures["num_drafters_attached"] - 1, 0),
    ),
    (
        "replayed_tokens",
        "Tokens computed again because the drafter lacked their hidden states.",
        figure("num_replayed_tokens"),
    ),
)
COUNTERS_BY_KEY: tuple[tuple[str, str, str, Read], ...] = (
    (
        "trees_by_accepted_depth",
        "Verified trees by the depth of the accepted path; at depth 0 no draft token was accepted.",
        "depth",
        _accepted_depths,
    ),
    ("drafts", "Draft trees verified, by length of the context in tokens.", "context", _by_context("num_drafts")),
    (
        "draft_tokens",
        "Tree nodes verified, by length of the context in tokens.",
        "context",
        _by_context("num_draft_tokens"),
    ),
    (
        "accepted_tokens",
        "Tree nodes accepted, by length of the context in tokens.",
        "context",
        _by_context("num_accepted_tokens"),
    ),
    ("plain_rounds", "Rounds that decoded without any draft tree, by reason.", "reason", figure("plain_rounds")),
    (
        "draft_decisions",
        "Decisions of the speculation policy about the next round's draft.",
        "decision",
        figure("policy", "decisions"),
    ),
    ("round_phase_seconds", "Host seconds in each phase of the rounds.", "phase", _phases),
    (
        "device_seconds",
        "Device seconds in each stage, by CUDA events, or on CPUs by the host's clock.",
        "stage",
        figure("device_s"),
    ),
    ("head_rounds", "Rounds of sequences with a draft tree, by version of the draft head.", "version", _by_head(0)),
    ("head_draft_tokens", "Tree nodes verified, by version of the draft head.", "version", _by_head(1)),
    ("head_accepted_tokens", "Tree nodes accepted, by version of the draft head.", "version", _by_head(2)),
)


def wingbeat_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yields all families with Wingbeat's names."""
    yield _up(snapshot)
    for kind, table in ((gauge, GAUGES), (counter, COUNTERS)):
        for name, text, read in table:
            yield kind(f"wingbeat_{name}", text, LABELS, rows(snapshot, read))
    for name, text, label, read in COUNTERS_BY_KEY:
        yield counter(f"wingbeat_{name}", text, (*LABELS, label), by_key(snapshot, read))
    yield gauge(
        "wingbeat_drafter_state",
        "1 for the current state of the engine's drafter.",
        (*LABELS, "state"),
        by_key(snapshot, _drafter_states),
    )
    yield histogram(
        "wingbeat_tree_nodes",
        "Nodes of each verified tree, without its root.",
        LABELS,
        rows(snapshot, figure("tree_nodes")),
    )
    yield in_labels(
        "wingbeat_tree_config_info",
        "Configuration of the draft trees, as labels.",
        rows(snapshot, figure("tree_config")),
    )
    yield from _by_two_keys(snapshot)


def _up(snapshot: FleetSnapshot) -> Metric:
    answered = (((snapshot.model_name, engine_id), 1) for engine_id in snapshot.engines)
    silent = (((snapshot.model_name, engine_id), 0) for engine_id in snapshot.silent)
    text = "1 if the engine returned its metrics, 0 if it runs and did not answer in time."
    return gauge("wingbeat_engine_up", text, LABELS, (*answered, *silent))


def _by_two_keys(snapshot: FleetSnapshot) -> Iterator[Metric]:
    yield gauge(
        "wingbeat_round_cost_seconds",
        "Expected seconds of a plain round, of a draft of all levels, and of a round that verifies whole trees.",
        (*LABELS, "phase", "requests"),
        (
            ((*labels, str(size)), seconds)
            for labels, by_size in by_key(snapshot, figure("policy", "costs_s"))
            for size, seconds in by_size.items()
        ),
    )
    yield gauge(
        "wingbeat_stages",
        "Stages at one shape by state: captured, failed, or eager because another capture failed.",
        (*LABELS, "process", "state"),
        (
            ((*labels, state), number)
            for labels, counts in by_key(snapshot, figure("stages"))
            for state, number in counts.items()
        ),
    )
