"""A replica's counts of the requests that pass through it."""

from tests.deployments.pool_world import make_request
from wingbeat.deployments.fleet.wire import WireOutput
from wingbeat.deployments.replica.router_streams import ClientLoad, ClientLoads
from wingbeat.runtime.scheduling.request import FinishReason, RequestOutput


def output(count: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("", tuple(range(count)), reason)


def test_a_request_is_its_prompt_until_it_writes_and_then_what_it_has_yet_to_write():
    loads = ClientLoads()
    loads.submitted("a", 0, make_request(prompt=(1, 2, 3), count=20))
    assert loads.by_client() == {"a": ClientLoad(1, 23)}
    loads.written("a", WireOutput.of(0, output(5)))
    assert loads.by_client() == {"a": ClientLoad(1, 15)}
    loads.ended("a", 0)
    assert loads.by_client() == {}
    assert loads.num_passed == 8


def test_what_is_expected_of_a_request_is_what_answers_were_long():
    loads = ClientLoads()
    loads.submitted("a", 0, make_request(count=50))
    loads.written("a", WireOutput.of(0, output(10, FinishReason.STOP)))
    loads.ended("a", 0)
    loads.submitted("b", 0, make_request(prompt=(1,), count=50))
    loads.submitted("b", 1, make_request(prompt=(1,), count=4))
    assert loads.by_client() == {"b": ClientLoad(2, 1 + 10 + 1 + 4)}


def test_a_client_that_leaves_takes_only_its_own_along():
    loads = ClientLoads()
    for client in "ab":
        loads.submitted(client, 0, make_request(prompt=(1,), count=4))
    loads.left("a")
    assert loads.by_client() == {"b": ClientLoad(1, 5)}
