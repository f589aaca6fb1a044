"""Load reports of a replica, and the documents' figures of the policy."""

from pathlib import Path

import pytest

from tests.deployments.pool_world import make_request
from wingbeat.cluster.autoscaling import DELAYS, TARGET_QUEUE_S, ReplicaLoad
from wingbeat.deployments.fleet.wire import WireOutput
from wingbeat.deployments.load_policy.load_reports import replica_load
from wingbeat.deployments.replica.router_streams import ClientLoads
from wingbeat.runtime.scheduling.request import RequestOutput

DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"


def output(count: int) -> RequestOutput:
    return RequestOutput("", tuple(range(count)))


def test_a_policy_is_told_of_slots_and_memory_that_are_held():
    loads = ClientLoads()
    for number in range(3):
        loads.submitted("a", number, make_request(prompt=(1, 2, 3), count=20))
    loads.written("a", WireOutput.of(0, output(7)))
    assert replica_load(loads, 16, 100, 50.0) == ReplicaLoad(3, 1, 13 + 23 + 23, 0.1, 16, 50.0)
    assert replica_load(loads, 16, 0, 50.0).kv_share == 0.0


@pytest.mark.parametrize(
    "sentence",
    [
        f"for the mean need of the last `upscale_delay_s` ({DELAYS['upscale_delay_s']:.0f} s)",
        f"removed after `downscale_delay_s` ({DELAYS['downscale_delay_s']:.0f} s)",
        f"wait of a new request: {TARGET_QUEUE_S:.0f} s by default",
    ],
)
def test_what_the_document_says_of_the_policy_holds(sentence: str):
    assert sentence in " ".join(DOCUMENT.read_text(encoding="utf-8").split())
