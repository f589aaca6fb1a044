"""The channel within a process: two threads at their own pace, and refusals of the drafter's end."""

import threading
import time

import pytest
import torch

from tests.cluster.peers import LONG_S, SHORT_S, SPEC, publish, round_trip
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.cluster.channels.memory import DEVICE_FIELDS, HOST_FIELDS
from wingbeat.runtime.protocol.messages import ReplyHeader, RoundHeader


def test_an_in_process_drafter_may_run_in_another_thread_at_its_own_pace() -> None:
    channel = InProcessChannel(SPEC)
    assert channel.drafter_end.wait_outcome(SHORT_S) is None
    round_number = publish(channel.verifier_end)
    assert channel.verifier_end.wait_reply(round_number, SHORT_S) is None
    assert RoundHeader.read(channel.drafter_end.wait_outcome(LONG_S).header).round_number == round_number
    channel.drafter_end.publish_reply()
    assert ReplyHeader.read(channel.verifier_end.wait_reply(round_number, LONG_S).header).round_number == round_number


@pytest.mark.timeout(60)
def test_rings_wake_a_sleeping_peer_on_either_side() -> None:
    """Sleeps may last 0.9 s here: were a side not rung, a hundred rounds would outlast the test."""
    channel = InProcessChannel(SPEC)
    verifier, drafter = channel.verifier_end, channel.drafter_end
    verifier._doorbell.max_sleep_s = drafter._doorbell.max_sleep_s = 0.9

    def answer_rounds() -> None:
        while not drafter.closed:
            if drafter.wait_outcome(LONG_S) is not None:
                time.sleep(0.002)
                drafter.publish_reply()

    thread = threading.Thread(target=answer_rounds, daemon=True)
    thread.start()
    for _ in range(100):
        time.sleep(0.002)
        assert round_trip(verifier) is not None
    verifier.close()
    thread.join()


def test_a_drafter_answers_only_what_it_polled_and_only_once() -> None:
    channel = InProcessChannel(SPEC)
    drafter = channel.drafter_end
    publish(channel.verifier_end)
    with pytest.raises(RuntimeError, match="no outcome has been polled"):
        drafter.publish_reply()
    assert [RoundHeader.read(drafter.poll_outcome().header).round_number for _ in range(2)] == [1, 1]
    drafter.publish_reply()
    assert drafter.poll_outcome() is None
    with pytest.raises(RuntimeError, match="no outcome has been polled"):
        _ = drafter.reply


def test_a_drafter_that_leaves_is_no_longer_attached() -> None:
    channel = InProcessChannel(SPEC)
    channel.drafter_end.close()
    assert channel.drafter_end.closed
    assert channel.verifier_end.incarnation == 0
    assert not channel.verifier_end.peer_alive()


def test_a_wait_ends_when_another_drafter_attaches() -> None:
    channel = InProcessChannel(SPEC)
    round_number = publish(channel.verifier_end)
    attaching = threading.Timer(SHORT_S, channel.attach, args=(2,))
    attaching.start()
    assert channel.verifier_end.wait_reply(round_number, 600.0) is None
    attaching.join()


def test_with_a_device_rounds_go_through_memory_of_its_own_beside_the_hosts() -> None:
    channel = InProcessChannel(SPEC, torch.device("cpu"))
    round_number = publish(channel.verifier_end)
    outcome = channel.drafter_end.poll_outcome()
    reply = channel.drafter_end.reply
    channel.drafter_end.publish_reply()
    assert channel.verifier_end.wait_reply(round_number, LONG_S).token_ids is reply.token_ids
    memory = {
        name: {tensor.untyped_storage().data_ptr() for field, tensor in fields if field in names}
        for name, names in (("host", HOST_FIELDS), ("device", DEVICE_FIELDS))
        for fields in [[*outcome._asdict().items(), *reply._asdict().items()]]
    }
    assert len(memory["host"]) == len(memory["device"]) == 1
    assert memory["host"] != memory["device"]


def test_a_pumped_drafter_works_when_a_round_is_published_on_a_device_and_when_it_is_waited_for_without_one() -> None:
    for device, answered in ((torch.device("cpu"), True), (None, False)):
        channel = InProcessChannel(SPEC, device)
        end = channel.drafter_end
        channel.pump = lambda end=end: end.poll_outcome() is not None and end.publish_reply()
        round_number = publish(channel.verifier_end)
        assert end.round_waits() != answered
        assert channel.verifier_end.wait_reply(round_number, LONG_S) is not None
