"""The applications that things go wrong in, and what goes wrong in each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.small_verifiers import save_two_kv_heads
from wingbeat.runtime.drafters.choice import FALLBACK

SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "num_kv_blocks": 40,
    "adaptive": False,
    "drafter_timeout_s": 2.0,
    "drafter_back_off_s": 0.0,
}
"""Little KV, so that prefixes are evicted all the time. Trees are fixed: whether they pay is not the question here."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster; the first node holds Serve's controller, the proxy and the routers."""

    num_cpus: float
    resources: dict[str, float] = field(default_factory=dict)
    is_late: bool = False
    """Whether the node is added when the application is up, with neither a router nor the pool of drafters."""


@dataclass(frozen=True)
class Scenario:
    """An application, and the acts that are played in it one after the other."""

    acts: tuple[str, ...]
    settings: dict[str, Any]
    num_engines: int = 1
    nodes: dict[str, Node] = field(default_factory=dict)
    """Beside the first one."""
    proxies: Literal["EveryNode", "HeadOnly"] = "EveryNode"
    """Where Serve has them; clients know the first node's alone."""
    router_at_head: bool = False
    """At a door on the first node, as `wingbeat serve` has it; else wherever Serve puts routers."""
    save_model: Callable[[Path], None] | None = None
    """Writes the model into an empty folder; None leaves the demo's."""


DRAFTER_ALONE = Node(1, {"drafters": 1}, is_late=True)
OF_DRAFTERS = ("kill drafter", "stop drafter", "delay drafter")
SCENARIOS = {
    "one pair": Scenario((*OF_DRAFTERS, "kill drafter's actor", "exhaust KV", "kill engine", "pause engine"), {}),
    "drafter in the engine": Scenario(("kill engine", "exhaust KV", "pause engine"), {"drafter_place": "engine"}),
    "two pairs": Scenario(
        (
            "kill engine",
            "kill verifier",
            "pause verifier",
            "kill router",
            "pause router",
            "kill proxy",
            "kill controller",
            "pause controller",
            "fill shared memory",
        ),
        {"num_replicas": 2, "num_router_replicas": 2},
        num_engines=2,
    ),
    "shared drafters": Scenario(
        (*OF_DRAFTERS, "kill pool", "kill engine"), {"num_replicas": 2, "drafters": {"num": 2}}, num_engines=2
    ),
    "drafter on another node": Scenario(
        (*OF_DRAFTERS, "cut channel", "kill engine", "remove drafter's node"),
        {"drafter_resources": {"drafters": 1}, "num_cpus_per_verifier": 2},
        nodes={"drafters": Node(1, {"drafters": 1})},
        # A node that holds a drafter alone has no router and no proxy.
        proxies="HeadOnly",
        router_at_head=True,
    ),
    "drafters of two nodes for verifiers of two": Scenario(
        ("kill drafter", "cut channel", "remove shared drafter's node", "freeze shared drafter's node"),
        {
            "num_replicas": 2,
            "num_cpus_per_verifier": 2,
            "drafters": {"num": 2, "start_timeout_s": 1.0},
            "drafter_resources": {"drafters": 1},
            "channel": "remote",
        },
        num_engines=2,
        nodes={
            "drafters": DRAFTER_ALONE,
            "other drafters": DRAFTER_ALONE,
            "verifiers": Node(2),
        },
        proxies="HeadOnly",
    ),
    "verifiers on two nodes": Scenario(
        ("drain verifier's node", "remove verifier's node"),
        {"num_replicas": 2, "num_cpus_per_verifier": 3, "drafter": FALLBACK.kind},
        num_engines=2,
        nodes={"verifiers": Node(4)},
    ),
    "two ranks": Scenario(
        ("kill rank", "kill engine"),
        {"num_replicas": 2, "tensor_parallel_size": 2, "drafter": FALLBACK.kind},
        num_engines=2,
        save_model=save_two_kv_heads,
    ),
}
REPEATED = {
    "one pair": (
        *("kill engine", "pause engine long", "stop engine", "kill fork server", "pause fork server long"),
        *("kill drafter's actor", "pause drafter's actor long", "kill drafter", "pause drafter long"),
    ),
    "two pairs": (
        *("kill verifier", "pause verifier long", "kill engine", "pause engine long", "stop engine"),
        *("kill fork server", "kill drafter's actor", "pause drafter's actor long", "kill drafter"),
    ),
}
"""By scenario, what is done again and again in `test_repeated`."""
CELLS = [(scenario, act) for scenario, played in SCENARIOS.items() for act in played.acts]
