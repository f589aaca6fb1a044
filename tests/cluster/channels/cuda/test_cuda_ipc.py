"""The CUDA IPC channel without a GPU: layout of fields, waits, releases and refusals."""

import ctypes
import gc
import time

import pytest
import torch

from tests.cluster.channels.cuda.cuda_pair import Pair
from tests.cluster.channels.cuda.fake_cuda import FakeMachine
from tests.cluster.peers import DEVICE, LONG_S, SHORT_S, SPEC, publish
from wingbeat.cluster.channels.cuda import cuda_ipc
from wingbeat.cluster.channels.cuda.cuda_runtime import tensor_at
from wingbeat.cluster.channels.header import ChannelError, Word
from wingbeat.cluster.channels.memory import DEVICE_FIELDS, HOST_FIELDS, buffer_bytes, channel_layouts
from wingbeat.runtime.protocol.messages import ReplyHeader

OUTCOME = ["0", "1"]
REPLY = ["2", "3"]
"""Names of the fake's events, by parity: the verifier makes the outcome's, then the drafter its replies'."""


def test_every_field_has_one_place():
    names = {field for layout in channel_layouts(SPEC) for field in layout}
    assert names <= HOST_FIELDS | DEVICE_FIELDS
    assert not HOST_FIELDS & DEVICE_FIELDS


def test_the_two_regions_hold_exactly_what_one_would():
    both = buffer_bytes(SPEC, HOST_FIELDS) + buffer_bytes(SPEC, DEVICE_FIELDS)
    assert both == buffer_bytes(SPEC)


def test_bulk_lies_on_the_device_and_what_hosts_read_in_the_segment(pair: Pair):
    outcome = pair.verifier.acquire_outcome(0.0)
    segment = pair.verifier._outcomes[0].header.untyped_storage().data_ptr()
    for field, tensor in (*outcome._asdict().items(), ("token_ids", pair.verifier.token_ids)):
        assert (tensor.untyped_storage().data_ptr() == segment) == (field in HOST_FIELDS), field
    pair.verifier.publish_outcome()
    pair.answer()


def test_a_round_records_before_each_doorbell_and_the_drafters_stream_waits_after_it(pair: Pair):
    for parity in (1, 0, 1):
        before = len(pair.verifier_cuda.log), len(pair.drafter_cuda.log)
        round_number = publish(pair.verifier)
        pair.answer()
        assert pair.verifier.wait_reply(round_number, LONG_S) is not None
        mine, theirs = pair.verifier_cuda.log[before[0] :], pair.drafter_cuda.log[before[1] :]
        assert mine[-2:] == [("record", OUTCOME[parity]), ("query", REPLY[parity])]
        assert theirs == [("wait", OUTCOME[parity]), ("record", REPLY[parity])]


def test_buffers_are_reused_only_after_the_answer_even_if_nobody_asked_for_it(pair: Pair):
    for _ in range(2):
        publish(pair.verifier)
        pair.answer()
    assert ("query", REPLY[1]) not in pair.verifier_cuda.log
    pair.machine.busy = True
    publish(pair.verifier)  # whose own mark is another event
    pair.answer()
    assert pair.verifier.acquire_outcome(0.0) is not None
    assert pair.verifier_cuda.log[-1] == ("query", REPLY[0])
    pair.verifier.publish_outcome()
    pair.answer()
    assert pair.verifier.acquire_outcome(SHORT_S) is None, "the drafter's device still reads these"
    pair.verifier_cuda.finish()
    assert pair.verifier.acquire_outcome(SHORT_S) is not None


def test_no_event_is_waited_for_before_its_doorbell(pair: Pair):
    round_number = publish(pair.verifier)
    assert pair.verifier.wait_reply(round_number, SHORT_S) is None
    pair.drafter.poll_outcome()
    assert pair.verifier.wait_reply(round_number, SHORT_S) is None
    assert [entry for entry in pair.verifier_cuda.log if entry[0] != "record"] == []


def test_the_drafter_enqueues_its_pass_behind_a_device_that_is_busy(pair: Pair):
    pair.machine.busy = True
    publish(pair.verifier)
    pair.answer()
    assert "query" not in {kind for kind, _ in pair.drafter_cuda.log}


def test_a_verifiers_stream_never_waits_for_a_mark_that_a_drafter_may_not_reach(pair: Pair):
    """Killed between its doorbell and the record on its device, a drafter would hang that stream for good."""
    pair.machine.busy = True
    round_number = publish(pair.verifier)
    pair.answer()
    assert pair.verifier.wait_reply(round_number, SHORT_S) is None
    pair.verifier_cuda.finish()
    assert pair.verifier.wait_reply(round_number, SHORT_S) is not None
    assert "wait" not in {kind for kind, _ in pair.verifier_cuda.log}


def test_the_death_of_a_drafter_ends_the_wait_for_its_device(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    pair.machine.busy = True
    round_number = publish(pair.verifier)
    pair.answer()
    pair.kill_drafter(monkeypatch)
    started = time.monotonic()
    assert pair.verifier.wait_reply(round_number, 60.0) is None
    assert time.monotonic() - started < 30.0, "it was waited for until its time was over"


def test_a_drafter_killed_before_it_recorded_leaves_nothing_to_wait_for(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    round_number = publish(pair.verifier)
    pair.drafter.poll_outcome()
    pair.kill_drafter(monkeypatch)
    assert pair.verifier.wait_reply(round_number, LONG_S) is None
    for _ in range(3):
        assert pair.verifier.wait_reply(publish(pair.verifier), LONG_S) is None
    assert "wait" not in {kind for kind, _ in pair.verifier_cuda.log}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_of_a_drafter_killed_after_it_answered_only_finished_work_is_taken(
    pair: Pair, finished: bool, monkeypatch: pytest.MonkeyPatch
):
    pair.machine.busy = not finished
    round_number = publish(pair.verifier)
    pair.answer()
    pair.kill_drafter(monkeypatch)
    assert (pair.verifier.wait_reply(round_number, LONG_S) is not None) == finished
    for _ in range(3):
        publish(pair.verifier)
    assert "wait" not in {kind for kind, _ in pair.verifier_cuda.log}


def test_a_successor_is_not_made_to_wait_for_its_predecessors_work(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Round 1 was answered by a drafter that died: its event, of the same parity as round 3, must not be waited for."""
    publish(pair.verifier)
    pair.answer()
    publish(pair.verifier)
    dead = pair.drafter
    pair.attach(2)
    pair.verifier.acquire_outcome(0.0)
    assert "wait" not in {kind for kind, _ in pair.verifier_cuda.log}
    assert pair.verifier.publish_outcome() == 3
    pair.answer()
    assert ReplyHeader.read(pair.verifier.wait_reply(3, LONG_S).header) == (3, 2)
    dead.close()


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_of_a_verifier_that_died_only_finished_work_is_taken(
    pair: Pair, finished: bool, monkeypatch: pytest.MonkeyPatch
):
    pair.machine.busy = not finished
    publish(pair.verifier)
    pair.kill_verifier(monkeypatch)
    assert (pair.drafter.poll_outcome() is not None) == finished
    assert "wait" not in {kind for kind, _ in pair.drafter_cuda.log}


def test_ten_lives_release_memory_mappings_and_events(name: str):
    machine = FakeMachine()
    for _ in range(10):
        pair = Pair(name, machine)
        round_number = publish(pair.verifier)
        pair.answer()
        assert pair.verifier.wait_reply(round_number, LONG_S) is not None
        pair.drafter.close()
        pair.drafter.close()
        for incarnation in (2, 3):
            pair.attach(incarnation)
            pair.channel.try_drafter()
            pair.drafter.close()
        assert machine.num_mapped == 0
        assert machine.num_events_held == 4, "the verifier's own two, and two of the latest drafter"
        pair.verifier.close()
        assert machine.is_clean()


def test_a_dropped_channel_is_closed_and_released(name: str):
    machine = FakeMachine()
    pair = Pair(name, machine)
    drafter, pair.drafter = pair.drafter, None
    drafter.close()
    del pair
    gc.collect()
    assert machine.is_clean()
    assert drafter.closed


def test_memory_outlives_a_drafter_that_does_not_let_go(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_ipc, "DETACH_TIMEOUT_S", SHORT_S)
    pair.verifier.close()
    assert pair.machine.open_files
    for path in pair.machine.open_files:
        path.unlink()


def test_memory_is_freed_at_once_when_the_drafter_let_go_after_the_close(pair: Pair):
    pair.verifier._words[Word.CLOSED] = 1
    pair.drafter.close()
    assert pair.verifier._words[Word.DETACHED] == 1
    pair.verifier.close()
    assert pair.machine.is_clean()


def test_what_a_hanging_device_still_uses_stays_mapped(pair: Pair):
    publish(pair.verifier)
    pair.answer()
    pair.machine.busy = True
    pair.drafter.close()
    assert pair.machine.num_mapped == 1
    assert pair.verifier._words[Word.DETACHED] == 0
    pair.drafter_cuda.close_memory(DEVICE, *pair.drafter_cuda._mappings)
    pair.verifier._words[Word.DETACHED] = 1
    pair.machine.busy = False


def test_each_drafters_writes_and_marks_are_seen_by_the_verifier_before_it_drafts(pair: Pair):
    assert pair.channel.try_drafter()
    pair.machine.busy = True
    pair.attach(2)
    assert not pair.channel.try_drafter(wait_s=0.0), "nobody's stream waits for it"
    pair.machine.busy = False
    pair.attach(3)
    assert pair.channel.try_drafter(wait_s=0.0)
    pair.machine.busy = True
    pair.attach(4)
    with pytest.raises(ChannelError, match=r"the drafter's events do not finish on the verifier's cuda:0"):
        pair.channel.try_drafter(SHORT_S)
    pair.machine.busy = False
    pair.attach(5)
    pair.verifier_cuda.fail = "carry"
    with pytest.raises(ChannelError, match="the drafter's data do not arrive on the verifier's cuda:0") as refusal:
        pair.channel.try_drafter()
    assert "\n" not in str(refusal.value)


def test_an_event_that_cannot_be_asked_counts_as_unfinished(pair: Pair):
    round_number = publish(pair.verifier)
    pair.answer()
    pair.verifier_cuda.fail = "open_event"
    assert pair.verifier.wait_reply(round_number, SHORT_S) is None
    with pytest.raises(ChannelError, match="the verifier cannot open the drafter's events: open_event failed"):
        pair.channel.try_drafter()
    pair.verifier_cuda.fail = ""
    assert pair.verifier.wait_reply(round_number, LONG_S) is not None


def test_a_tensor_over_an_address_shares_its_bytes():
    block = (ctypes.c_ubyte * 256)()
    tensor = tensor_at(ctypes.addressof(block), 256, torch.device("cpu"))
    tensor[8:16].view(torch.int64).fill_(258)
    assert (tensor.dtype, tensor.shape, list(block[8:10])) == (torch.uint8, (256,), [2, 1])
    view = tensor[128:]
    del tensor
    gc.collect()
    block[130] = 7
    assert view[2] == 7
