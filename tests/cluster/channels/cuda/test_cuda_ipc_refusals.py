"""Refusals of a CUDA IPC channel, which leave nothing behind."""

import gc
import os
import re

import pytest
import torch

from tests.cluster.channels.cuda.cuda_pair import Pair
from tests.cluster.channels.cuda.fake_cuda import FakeCuda, FakeMachine
from tests.cluster.peers import DEVICE, LONG_S, SPEC, publish
from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel, host_bytes
from wingbeat.cluster.channels.header import ChannelError, Word
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.runtime.protocol.messages import RoundHeader


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["allocate", "create_event", "export_memory"])
def test_a_channel_that_cannot_be_made_leaves_nothing(name: str, call: str):
    cuda = FakeCuda(fail=call)
    with pytest.raises(ChannelError, match=f"channel {name!r} cannot be made on cuda:0: {call} failed: out of memory"):
        CudaIpcChannel.create(name, SPEC, DEVICE, cuda)
    gc.collect()
    assert cuda.machine.is_clean()


def test_a_name_that_is_taken_leaves_no_memory(name: str):
    channel, cuda = ShmChannel.create(name, SPEC), FakeCuda()
    with pytest.raises(ChannelError, match="its verifier is alive"):
        CudaIpcChannel.create(name, SPEC, DEVICE, cuda)
    gc.collect()
    assert cuda.machine.is_clean()
    channel.verifier_end.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["open_memory", "open_event", "create_event"])
def test_a_drafter_that_cannot_open_the_memory_names_both_devices_and_keeps_nothing(pair: Pair, call: str):
    held = pair.machine.num_mapped, pair.machine.num_events_held
    with pytest.raises(ChannelError, match=rf"the drafter's cuda:0 cannot open the verifier's cuda:0 \(fake.*{call}"):
        CudaIpcChannel.attach(pair.name, 2, DEVICE, FakeCuda(pair.machine, fail=call))
    gc.collect()
    assert (pair.machine.num_mapped, pair.machine.num_events_held) == held


@pytest.mark.parametrize(
    ("fails", "words"), [("record", "cudaEventRecord failed"), ("carry", "data written by the verifier do not arrive")]
)
def test_a_drafter_tries_events_and_memory_before_the_one_that_is_attached_is_replaced(pair: Pair, fails, words):
    with pytest.raises(ChannelError, match=words) as refusal:
        CudaIpcChannel.attach(pair.name, 2, DEVICE, FakeCuda(pair.machine, fail=fails))
    assert "\n" not in str(refusal.value)
    assert pair.verifier.incarnation == 1
    gc.collect()
    assert pair.machine.num_mapped == 1


def test_a_gpu_that_shares_no_events_is_refused_on_either_side(pair: Pair, name: str):
    cuda = FakeCuda(pair.machine, fail="shares_events")
    with pytest.raises(ChannelError, match=r"the verifier's cuda:0 \(fake, GPU-0\) shares no events between processes"):
        CudaIpcChannel.create(f"{name}-other", SPEC, DEVICE, cuda)
    with pytest.raises(ChannelError, match=r"the drafter's cuda:0 .* shares no events"):
        CudaIpcChannel.attach(pair.name, 2, DEVICE, cuda)


def test_a_drafter_that_is_refused_keeps_nothing(pair: Pair):
    with pytest.raises(ChannelError, match="incarnation 1 cannot attach"):
        CudaIpcChannel.attach(pair.name, 1, DEVICE, FakeCuda(pair.machine))
    gc.collect()
    assert pair.machine.num_mapped == 1


def test_another_gpu_of_the_node_serves_if_it_has_peer_access(name: str):
    machine = FakeMachine(num_gpus=2, peers=frozenset({(1, 0)}))
    channel = CudaIpcChannel.create(name, SPEC, DEVICE, FakeCuda(machine, visible=(0, 1)))
    verifier = channel.verifier_end
    drafter = CudaIpcChannel.attach(name, 1, DEVICE, FakeCuda(machine, visible=(1, 0)))
    channel.try_drafter()
    publish(verifier)
    assert RoundHeader.read(drafter.poll_outcome().header).round_number == 1
    drafter.publish_reply()  # an event is recorded by streams of the GPU that it was made on alone
    assert verifier.wait_reply(1, LONG_S) is not None
    drafter.close()
    verifier.close()


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ((1, 0), "the drafter's cuda:0 (fake, GPU-1) has no peer access to the verifier's cuda:0 (fake, GPU-0)"),
        ((1,), "the drafter's cuda:0 (fake, GPU-1) does not see the verifier's cuda:0 (fake, GPU-0)"),
    ],
    ids=["no-peer-access", "hidden"],
)
def test_a_gpu_that_cannot_reach_the_verifiers_is_refused_in_one_line(name: str, visible: tuple, message: str):
    machine = FakeMachine(num_gpus=2)
    verifier = CudaIpcChannel.create(name, SPEC, DEVICE, FakeCuda(machine)).verifier_end
    with pytest.raises(ChannelError, match=re.escape(message)) as refusal:
        CudaIpcChannel.attach(name, 1, DEVICE, FakeCuda(machine, visible))
    assert "\n" not in str(refusal.value)
    assert verifier.incarnation == 0
    verifier.close()


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_a_device_that_is_none_of_this_process_is_refused(name: str, device: str):
    with pytest.raises(ChannelError, match=f"the verifier's device is '{device}', it must be one of cuda:0..cuda:0"):
        CudaIpcChannel.create(name, SPEC, torch.device(device), FakeCuda())


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_without_a_gpu_the_real_runtime_says_so(name: str):
    with pytest.raises(ChannelError, match=r"the verifier's device is 'cuda:0'.*this process sees none"):
        CudaIpcChannel.create(name, SPEC, DEVICE)


def test_a_drafter_of_another_kind_is_refused(pair: Pair):
    with pytest.raises(ChannelError, match="is of kind 'cuda_ipc', this drafter attaches 'shm'"):
        ShmChannel.attach(pair.name, 2)


def test_a_dead_verifiers_handles_are_not_tried(pair: Pair):
    pair.verifier._words[Word.VERIFIER_START] = 1
    untouched = FakeCuda(pair.machine, fail="open_memory")
    with pytest.raises(ChannelError, match="its verifier has closed it or is gone"):
        CudaIpcChannel.attach(pair.name, 2, DEVICE, untouched)


def test_a_segment_cut_short_is_refused(pair: Pair):
    path = SHM_DIR / f"{PREFIX}{pair.name}"
    size = os.path.getsize(path)
    os.truncate(path, size - host_bytes(SPEC))
    with pytest.raises(ChannelError, match="requires another size"):
        CudaIpcChannel.attach(pair.name, 2, DEVICE, FakeCuda(pair.machine))
    os.truncate(path, size)
