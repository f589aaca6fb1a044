"""Limits on the slots and bytes that several verifiers may use in one drafter."""

from dataclasses import replace

import pytest
import torch

from tests.runtime.models import TREE, eagle_drafter, reference
from tests.runtime.shared_drafters.test_shared_drafter import SPEC, Asking, SpyDrafter
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.shared_drafters.draft_room import DraftRoom, NoRoomError
from wingbeat.runtime.shared_drafters.shared_worker import SharedWorker


def test_who_does_not_fit_is_refused_and_fits_once_another_has_left():
    worker = SharedWorker(DraftWorker(SpyDrafter()), DraftRoom(num_slots=8, num_bytes=0))
    first = Asking(worker, "a")
    Asking(worker, "b")
    with pytest.raises(NoRoomError, match="runs 4 sequences, and 0 slots are left"):
        Asking(worker, "c")
    first.channel.verifier_end.close()
    Asking(worker, "d")
    assert worker.names == ["b", "d"]


def test_memory_is_bounded_by_what_all_verifiers_blocks_take():
    ref = reference("llama")
    drafter = eagle_drafter(ref.loaded, TREE)
    spec = replace(SPEC, taps_size=drafter.head.taps_size, keeps_context=True)
    block = drafter.needs.token_bytes * spec.block_size
    worker = SharedWorker(DraftWorker(drafter), DraftRoom(num_slots=64, num_bytes=block * 100))
    for name in "ab":
        worker.attach(name, InProcessChannel(spec).drafter_end)
    with pytest.raises(NoRoomError, match=r"blocks take 0 MiB of the drafter's KV memory, but 0 MiB are left"):
        worker.attach("c", InProcessChannel(spec).drafter_end)
    worker.attach("d", InProcessChannel(replace(spec, num_blocks=20)).drafter_end)
    assert drafter.pool.num_blocks == 100
    assert len(worker.names) == 3


def test_on_a_device_a_verifier_that_comes_later_moves_nothing():
    """Captured graphs hold the addresses of the pool."""
    head = eagle_drafter(reference("llama").loaded, TREE)
    head.device = head.pool.device = torch.device("meta")
    worker = SharedWorker(DraftWorker(head), DraftRoom(num_slots=12, num_bytes=head.needs.token_bytes * 16 * 90))
    spec = replace(SPEC, taps_size=head.head.taps_size, keeps_context=True)
    worker.attach("a", InProcessChannel(spec).drafter_end)
    before = head.pool.caches[0][0]
    worker.attach("b", InProcessChannel(spec).drafter_end)
    assert head.pool.caches[0][0] is before
    assert (head.pool.num_slots, head.pool.num_blocks) == (12, 90)
