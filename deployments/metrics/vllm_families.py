"""The application's figures under vLLM's names, so that its dashboards and benchmarks read them."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import counter, gauge, histogram
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot

logger = logging.getLogger(__name__)
LABELS = ("model_name", "engine")
Read = Callable[[dict[str, Any]], Any]
"""From an engine's figures to one of them; None where it has none, KeyError where it does not know such figures."""


def kv_usage(figures: dict[str, Any]) -> float:
    """Share of the KV blocks that sequences hold; cached ones that can be evicted are free."""
    # One block is reserved for what belongs to nobody.
    usable = figures["num_blocks"] - 1
    return (usable - figures["num_free_blocks"]) / usable


def figure(*path: str) -> Read:
    """Reads a figure of a figure, down the path; None where one of them is None."""

    def read(figures: dict[str, Any]) -> Any:
        for name in path:
            if figures is None:
                return None
            figures = figures[name]
        return figures

    return read


def _drafted(name: str) -> Read:
    """vLLM shows these where it speculates at all."""
    return lambda figures: figures["speculation"][name] if figures["num_drafters_attached"] else None


GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("num_requests_running", "Requests in the rounds of an engine.", figure("num_running")),
    ("num_requests_waiting", "Requests waiting for a slot of an engine.", figure("num_waiting")),
    ("num_requests_swapped", "Requests on the host's memory: none, as preempted ones are computed again.", lambda _: 0),
    ("kv_cache_usage_perc", "Share of the KV cache in use: 1 is all of it.", kv_usage),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", figure("prefix_query_tokens")),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", figure("prefix_hit_tokens")),
    ("num_preemptions", "Preemptions.", figure("num_preemptions")),
    ("prompt_tokens", "Prompt tokens of requests that got their first token.", figure("requests", "num_prompt_tokens")),
    ("generation_tokens", "Tokens generated.", figure("requests", "num_generation_tokens")),
    ("spec_decode_num_drafts", "Draft trees verified.", _drafted("num_drafts")),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", _drafted("num_draft_tokens")),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", _drafted("num_accepted_tokens")),
)
HISTOGRAMS: tuple[tuple[str, str, Read], ...] = (
    ("request_queue_time_seconds", "From arrival in the engine to the first slot.", figure("requests", "queue_s")),
    ("request_prefill_time_seconds", "From the first slot to the first token.", figure("requests", "prefill_s")),
    ("request_decode_time_seconds", "From the first token to the last.", figure("requests", "decode_s")),
    ("request_inference_time_seconds", "From the first slot to the last token.", figure("requests", "inference_s")),
    ("request_num_preemptions", "Preemptions per request.", figure("requests", "num_preemptions")),
    ("iteration_tokens_total", "Tokens computed per round.", figure("requests", "round_tokens")),
    ("time_to_first_token_seconds", "From arrival in the router.", figure("clients", "time_to_first_token_s")),
    ("inter_token_latency_seconds", "Time per token after the first.", figure("clients", "inter_token_s")),
    (
        "request_time_per_output_token_seconds",
        "Its mean over a request.",
        figure("clients", "time_per_output_token_s"),
    ),
    ("e2e_request_latency_seconds", "From arrival in the router to the end.", figure("clients", "e2e_s")),
    ("request_prompt_tokens", "Prompt tokens per request.", figure("clients", "prompt_tokens")),
    ("request_generation_tokens", "Tokens generated per request.", figure("clients", "generation_tokens")),
    (
        "request_max_num_generation_tokens",
        "The same: each choice counts alone.",
        figure("clients", "generation_tokens"),
    ),
    ("request_params_max_tokens", "max_tokens of requests.", figure("clients", "max_tokens")),
    ("request_params_n", "n of requests, once for each prompt.", figure("clients", "num_choices")),
)


def vllm_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Everything, by engine."""
    for kind, table in ((gauge, GAUGES), (counter, COUNTERS), (histogram, HISTOGRAMS)):
        for name, text, read in table:
            yield kind(f"vllm:{name}", text, LABELS, rows(snapshot, read))
    yield gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests: capacity, for room; deferred, for a seat of its variant or a request that runs alone.",
        (*LABELS, "reason"),
        by_key(snapshot, _waiting_by_reason),
    )
    yield counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts with an accepted token at a position, the first one being 0.",
        (*LABELS, "position"),
        by_key(snapshot, _accepted_by_position),
    )
    yield counter(
        "vllm:request_success",
        "Requests by how they ended.",
        (*LABELS, "finished_reason"),
        by_key(snapshot, figure("clients", "ended")),
    )
    yield _cache_config(snapshot)


def rows(snapshot: FleetSnapshot, read: Read) -> Iterator[tuple[tuple[str, str], Any]]:
    """A figure of every engine that has it."""
    for engine_id, figures in snapshot.engines.items():
        try:
            value = read(figures)
        except (KeyError, TypeError) as error:
            # An engine by a factory of the operator's has figures of its own, and so may one of another version.
            say_missing(engine_id, repr(error))
            continue
        if value is not None:
            yield (snapshot.model_name, engine_id), value


@lru_cache(maxsize=1024)
def say_missing(engine_id: str, error: str) -> None:
    """Log it once for each engine and figure."""
    logger.warning("Engine %s lacks a figure, and the metrics what is made of it: %s", engine_id, error)


def by_key(snapshot: FleetSnapshot, read: Read) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A figure of every engine that is a table, with its keys as one more label."""
    for labels, table in rows(snapshot, read):
        yield from (((*labels, str(key)), value) for key, value in table.items())


def _waiting_by_reason(figures: dict[str, Any]) -> dict[str, int]:
    deferred = figures["num_deferred"]
    return {"capacity": figures["num_waiting"] - deferred, "deferred": deferred}


def _accepted_by_position(figures: dict[str, Any]) -> dict[int, int] | None:
    if not figures["num_drafters_attached"]:
        return None
    counts = figures["speculation"]["num_accepted_tokens_per_pos"]
    missing = max(figures["num_spec_tokens"] - len(counts), 0)
    return dict(enumerate([*counts, *[0] * missing]))


def _cache_config(snapshot: FleetSnapshot) -> Metric:
    return in_labels("vllm:cache_config_info", "The KV cache, in labels.", rows(snapshot, figure("cache_config")))


def in_labels(name: str, text: str, configs: Iterable[tuple[tuple[str, str], dict[str, str]]]) -> Metric:
    """A gauge that is 1 with a configuration of each engine as its labels."""
    found = list(configs)
    names = sorted({one for _, config in found for one in config})
    values = (((*labels, *(config.get(one, "") for one in names)), 1) for labels, config in found)
    return gauge(name, text, (*LABELS, *names), values)
