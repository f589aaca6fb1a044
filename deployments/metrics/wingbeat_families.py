"""Metrics that vLLM does not have: draft trees, drafter, speculation policy, phases of rounds."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import counter, gauge, histogram
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, Read, by_key, figure, in_labels, rows

DRAFTER_STATES = ("attached", "late", "lost", "none")


def wingbeat_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yields all families with Wingbeat's names."""
    yield from _up(snapshot)
    yield from _acceptance(snapshot)
    yield from _rounds(snapshot)
    yield from _drafter(snapshot)
    yield from _heads(snapshot)
    yield from _kv(snapshot)


def _up(snapshot: FleetSnapshot) -> Iterator[Metric]:
    answered = (((snapshot.model_name, engine_id), 1) for engine_id in snapshot.engines)
    silent = (((snapshot.model_name, engine_id), 0) for engine_id in snapshot.silent)
    text = "1 if the engine returned its metrics, 0 if it runs and did not answer in time."
    yield gauge("wingbeat_engine_up", text, LABELS, (*answered, *silent))
    yield counter(
        "wingbeat_engine_restarts",
        "Engines that the replica has started after an engine died.",
        LABELS,
        rows(snapshot, figure("num_engine_restarts")),
    )


def _acceptance(snapshot: FleetSnapshot) -> Iterator[Metric]:
    yield counter(
        "wingbeat_trees_by_accepted_depth",
        "Verified trees by the depth of the accepted path; at depth 0 no draft token was accepted.",
        (*LABELS, "depth"),
        by_key(snapshot, _accepted_depths),
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
    yield gauge(
        "wingbeat_forced_acceptance",
        "1 if acceptance is forced for a benchmark, so that the text is not the model's.",
        LABELS,
        rows(snapshot, lambda figures: int(figures["forced_acceptance"] is not None)),
    )
    parts = (
        ("drafts", "num_drafts", "Draft trees verified, by length of the context in tokens."),
        ("draft_tokens", "num_draft_tokens", "Tree nodes verified, by length of the context in tokens."),
        ("accepted_tokens", "num_accepted_tokens", "Tree nodes accepted, by length of the context in tokens."),
    )
    for name, field, text in parts:
        yield counter(f"wingbeat_{name}", text, (*LABELS, "context"), by_key(snapshot, _by_context(field)))


def _rounds(snapshot: FleetSnapshot) -> Iterator[Metric]:
    yield counter("wingbeat_rounds", "Rounds of the engine.", LABELS, rows(snapshot, figure("phases", "num_rounds")))
    yield counter(
        "wingbeat_plain_rounds",
        "Rounds that decoded without any draft tree, by reason.",
        (*LABELS, "reason"),
        by_key(snapshot, figure("plain_rounds")),
    )
    yield counter(
        "wingbeat_draft_decisions",
        "Decisions of the speculation policy about the next round's draft.",
        (*LABELS, "decision"),
        by_key(snapshot, figure("policy", "decisions")),
    )
    yield gauge(
        "wingbeat_break_even_acceptance_length",
        "Tokens per draft at which the best draft at the current load is as fast as plain decoding.",
        LABELS,
        rows(snapshot, figure("policy", "break_even")),
    )
    costs = rows(snapshot, figure("policy", "costs_s"))
    yield gauge(
        "wingbeat_round_cost_seconds",
        "Expected seconds of a plain round, of a draft of all levels, and of a round that verifies whole trees.",
        (*LABELS, "phase", "requests"),
        (
            ((*labels, phase, str(size)), seconds)
            for labels, phases in costs
            for phase, by_size in phases.items()
            for size, seconds in by_size.items()
        ),
    )
    yield counter(
        "wingbeat_round_phase_seconds",
        "Host seconds in each phase of the rounds.",
        (*LABELS, "phase"),
        by_key(snapshot, _phases),
    )
    yield counter(
        "wingbeat_device_seconds",
        "Device seconds in each stage, by CUDA events, or on CPUs by the host's clock.",
        (*LABELS, "stage"),
        by_key(snapshot, figure("device_s")),
    )
    stages = rows(snapshot, figure("stages"))
    yield gauge(
        "wingbeat_stages",
        "Stages at one shape by state: captured, failed, or eager because another capture failed.",
        (*LABELS, "process", "state"),
        (
            ((*labels, process, state), number)
            for labels, processes in stages
            for process, counts in processes.items()
            for state, number in counts.items()
        ),
    )


def _drafter(snapshot: FleetSnapshot) -> Iterator[Metric]:
    yield gauge(
        "wingbeat_drafter_state",
        "1 for the current state of the engine's drafter.",
        (*LABELS, "state"),
        by_key(snapshot, lambda figures: {name: int(figures["drafter_state"] == name) for name in DRAFTER_STATES}),
    )
    yield gauge(
        "wingbeat_self_test_passed",
        "1 if the drafter passed the self-test at the engine's start, 0 if it failed and is served anyway.",
        LABELS,
        rows(snapshot, figure("self_test", "passed")),
    )
    yield counter(
        "wingbeat_drafter_restarts",
        "Drafters attached after the first one.",
        LABELS,
        rows(snapshot, lambda figures: max(figures["num_drafters_attached"] - 1, 0)),
    )
    yield counter(
        "wingbeat_replayed_tokens",
        "Tokens computed again because the drafter lacked their hidden states.",
        LABELS,
        rows(snapshot, figure("num_replayed_tokens")),
    )


def _heads(snapshot: FleetSnapshot) -> Iterator[Metric]:
    yield gauge(
        "wingbeat_head_version",
        "Version of the draft head that drafted last; 0 is the head named by the settings.",
        LABELS,
        rows(snapshot, figure("head_version")),
    )
    parts = ("rounds", "draft_tokens", "accepted_tokens")
    texts = ("Rounds of sequences with a draft tree", "Tree nodes verified", "Tree nodes accepted")
    for index, (name, text) in enumerate(zip(parts, texts, strict=True)):
        yield counter(
            f"wingbeat_head_{name}",
            f"{text}, by version of the draft head.",
            (*LABELS, "version"),
            by_key(snapshot, lambda figures, at=index: {key: row[at] for key, row in figures["by_head"].items()}),
        )


def _kv(snapshot: FleetSnapshot) -> Iterator[Metric]:
    yield gauge("wingbeat_kv_blocks", "KV blocks in the pool.", LABELS, rows(snapshot, figure("num_blocks")))
    text = "KV blocks that can be allocated, evictable cached blocks included."
    yield gauge("wingbeat_kv_blocks_free", text, LABELS, rows(snapshot, figure("num_free_blocks")))
    text = "KV blocks of saved prefixes, which cannot be evicted."
    yield gauge("wingbeat_kv_blocks_pinned", text, LABELS, rows(snapshot, figure("num_pinned_blocks")))


def _accepted_depths(figures: dict[str, Any]) -> dict[int, int]:
    reached = [figures["speculation"]["num_drafts"], *figures["speculation"]["num_accepted_tokens_per_pos"], 0]
    return {depth: reached[depth] - reached[depth + 1] for depth in range(len(reached) - 1)}


def _by_context(field: str) -> Read:
    return lambda figures: {context: part[field] for context, part in figures["by_context"].items()}


def _phases(figures: dict[str, Any]) -> dict[str, float]:
    return {name.removesuffix("_s"): value for name, value in figures["phases"].items() if name.endswith("_s")}
