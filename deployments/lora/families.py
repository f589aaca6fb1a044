"""Prometheus metrics of adapters in use."""

import time
from collections.abc import Iterator

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import gauge
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, figure, rows

LORA_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


def lora_requests(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yield vLLM's metric of adapters in use. Its labels name the adapters; its value is the time at which the figures
    were read.
    """
    found = list(rows(snapshot, figure("request_labels")))
    values = (((*labels, *(loras[name] for name in LORA_LABELS)), time.time()) for labels, loras in found)
    yield gauge("vllm:lora_requests_info", "LoRA adapters of requests, in labels.", (*LABELS, *LORA_LABELS), values)
