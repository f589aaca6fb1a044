"""A drafter of several verifiers sleeps on connections of several nodes at once."""

import threading

import pytest

from tests.cluster.channels.test_remote import decode
from tests.cluster.peers import LONG_S, SPEC
from wingbeat.cluster.channels.any_bell import wait_for_any
from wingbeat.cluster.channels.doorbell import Bell
from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel


@pytest.mark.parametrize("with_memory", [False, True], ids=["sockets", "sockets and memory"])
@pytest.mark.parametrize("rung", [0, 1])
def test_a_drafter_of_several_nodes_sleeps_on_all_its_connections(rung: int, with_memory: bool):
    channels = [RemoteChannel("127.0.0.1", SPEC) for _ in range(2)]
    ends = [RemoteChannel.attach(channel.name, 1) for channel in channels]
    assert all(channel.verifier_end.incarnation == 1 for channel in channels)
    bells = [end.bell for end in ends]
    if with_memory:
        bells.append(Bell(memoryview(bytearray(8)).cast("q"), 0))
    heard: list[bool] = []
    sleeper = threading.Thread(
        target=lambda: heard.append(wait_for_any(bells, lambda: any(end.round_waits() for end in ends), LONG_S, 0.0))
    )
    sleeper.start()
    decode(channels[rung].verifier_end.acquire_outcome(LONG_S), [0], [1])
    channels[rung].verifier_end.publish_outcome()
    sleeper.join(LONG_S / 2)
    assert heard == [True]
    assert [end.round_waits() for end in ends] == [rung == 0, rung == 1]
    for part in (*ends, *(channel.verifier_end for channel in channels)):
        part.close()
