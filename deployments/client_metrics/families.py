"""Metrics under vLLM's names, so that vLLM's dashboards and benchmarks work."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import counter, gauge, histogram
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, Read, by_key, figure, in_labels, rows


def kv_usage(figures: dict[str, Any]) -> float:
    """Returns the fraction of KV blocks that sequences hold; cached blocks that can be evicted count as free."""
    # Block 0 is not counted, because it is reserved for writes that belong to no sequence.
    usable = figures["num_blocks"] - 1
    return (usable - figures["num_free_blocks"]) / usable


def _drafted(name: str) -> Read:
    """Returns a reader of a speculation figure; if there is no drafter, the figure has no value, as in vLLM."""
    return lambda figures: figures["speculation"][name] if figures["num_drafters_attached"] else None


GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("num_requests_running", "Requests that run in an engine.", figure("num_running")),
    ("num_requests_waiting", "Requests waiting for a slot of an engine.", figure("num_waiting")),
    (
        "num_requests_swapped",
        "Requests swapped to host memory: always 0, as preempted ones are recomputed.",
        lambda _: 0,
    ),
    ("kv_cache_usage_perc", "Fraction of the KV cache in use; 1 is full.", kv_usage),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", figure("prefix_query_tokens")),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", figure("prefix_hit_tokens")),
    ("num_preemptions", "Preempted requests.", figure("num_preemptions")),
    ("prompt_tokens", "Prompt tokens of requests that got their first token.", figure("requests", "num_prompt_tokens")),
    ("generation_tokens", "Tokens generated.", figure("requests", "num_generation_tokens")),
    ("spec_decode_num_drafts", "Draft trees verified.", _drafted("num_drafts")),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", _drafted("num_draft_tokens")),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", _drafted("num_accepted_tokens")),
)
HISTOGRAMS: tuple[tuple[str, str, Read], ...] = (
    ("request_queue_time_seconds", "Seconds from arrival in the engine to a slot.", figure("requests", "queue_s")),
    (
        "request_prefill_time_seconds",
        "Seconds from the first slot to the first token.",
        figure("requests", "prefill_s"),
    ),
    ("request_decode_time_seconds", "Seconds from the first token to the last.", figure("requests", "decode_s")),
    ("request_inference_time_seconds", "Seconds from the slot to the last token.", figure("requests", "inference_s")),
    ("request_num_preemptions", "Preemptions per request.", figure("requests", "num_preemptions")),
    ("iteration_tokens_total", "Tokens computed per round.", figure("requests", "round_tokens")),
    ("time_to_first_token_seconds", "Seconds from arrival in the router.", figure("clients", "time_to_first_token_s")),
    ("inter_token_latency_seconds", "Seconds per token after the first.", figure("clients", "inter_token_s")),
    (
        "request_time_per_output_token_seconds",
        "Mean seconds per token after the first, per request.",
        figure("clients", "time_per_output_token_s"),
    ),
    ("e2e_request_latency_seconds", "Seconds from arrival in the router to the end.", figure("clients", "e2e_s")),
    ("request_prompt_tokens", "Prompt tokens per request.", figure("clients", "prompt_tokens")),
    ("request_generation_tokens", "Tokens generated per request.", figure("clients", "generation_tokens")),
    (
        "request_max_num_generation_tokens",
        "Tokens generated per choice; each choice counts as a request.",
        figure("clients", "generation_tokens"),
    ),
    ("request_params_max_tokens", "max_tokens of requests.", figure("clients", "max_tokens")),
    ("request_params_n", "n of requests, once per prompt.", figure("clients", "num_choices")),
)


def families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yields all families with vLLM's names, and the families of routers."""
    yield from vllm_families(snapshot)
    yield from router_families(snapshot)


def vllm_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yields all families with vLLM's names."""
    for kind, table in ((gauge, GAUGES), (counter, COUNTERS), (histogram, HISTOGRAMS)):
        for name, text, read in table:
            yield kind(f"vllm:{name}", text, LABELS, rows(snapshot, read))
    yield gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests by reason: capacity (no room), deferred (variant not loaded, or a request that runs alone).",
        (*LABELS, "reason"),
        by_key(snapshot, _waiting_by_reason),
    )
    yield counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts with an accepted token at each position, counted from 0.",
        (*LABELS, "position"),
        by_key(snapshot, _accepted_by_position),
    )
    yield counter(
        "vllm:request_success",
        "Requests by how they ended.",
        (*LABELS, "finished_reason"),
        by_key(snapshot, figure("clients", "ended")),
    )
    yield in_labels(
        "vllm:cache_config_info", "Configuration of the KV cache, as labels.", rows(snapshot, figure("cache_config"))
    )


def _waiting_by_reason(figures: dict[str, Any]) -> dict[str, int]:
    deferred = figures["num_deferred"]
    return {"capacity": figures["num_waiting"] - deferred, "deferred": deferred}


def _accepted_by_position(figures: dict[str, Any]) -> dict[int, int] | None:
    if not figures["num_drafters_attached"]:
        return None
    counts = figures["speculation"]["num_accepted_tokens_per_pos"]
    missing = max(figures["num_spec_tokens"] - len(counts), 0)
    return dict(enumerate([*counts, *[0] * missing]))


def router_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yields the families of all routers."""
    routers = snapshot.routers.items()
    yield gauge(
        "wingbeat_router_requests",
        "Choices admitted by the router, in engines and in its queue.",
        ("router",),
        (((router_id,), figures["num_admitted"]) for router_id, figures in routers),
    )
    yield counter(
        "wingbeat_router_answers",
        "HTTP answers by status.",
        ("router", "status"),
        (((router_id, status), n) for router_id, figures in routers for status, n in figures["answers"].items()),
    )
