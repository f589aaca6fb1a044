"""Choice of the memory through which a pair with GPUs communicates."""

import os

import pytest
import torch

from tests.cluster.channels.cuda.fake_cuda import FakeCuda
from tests.deployments.replica.engine.test_build import SPEC
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.segment import kind_of
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.gpu_memory.gpu_channel import GpuPairChannel
from wingbeat.deployments.gpu_memory.taking_in import may_take_drafter_in
from wingbeat.deployments.replica.engine.pair_channel import attach_channel

ON_GPU = AppConfig(num_gpus_per_verifier=0.7, num_gpus_per_drafter=0.3, drafter_place="actor")


@pytest.mark.parametrize("fails", ["shares_events", "allocate", "export_memory"])
def test_a_verifier_whose_gpu_memory_cannot_be_shared_takes_host_memory_with_one_warning(caplog, fails):
    name = f"test-channels-{os.getpid()}"
    channel = GpuPairChannel(ON_GPU, name, SPEC, runtime=FakeCuda(fail=fails))
    assert kind_of(channel.name) == "shm"
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "host memory is used" in warning.message
    assert (fails if fails != "shares_events" else "cudaDevAttr") in warning.message
    drafter = attach_channel(channel.name, 1, on_gpu=True)
    assert channel.verifier_end.incarnation == 1
    drafter.close()
    channel.verifier_end.close()


def test_a_verifier_that_may_take_its_drafter_in_warns_of_host_memory_only_once_a_drafter_attaches_there(caplog):
    open_place = AppConfig(num_gpus_per_verifier=0.7, num_gpus_per_drafter=0.3)
    assert may_take_drafter_in(open_place)
    assert not may_take_drafter_in(ON_GPU)
    cuda = FakeCuda(fail="shares_events")
    channel = GpuPairChannel(open_place, f"test-channels-{os.getpid()}", SPEC, runtime=cuda)
    assert "cudaDevAttr" in channel.problem
    assert not caplog.records
    for _ in range(2):
        channel.try_drafter()
    assert [record.message.count("host memory is used") for record in caplog.records] == [1]
    channel.verifier_end.close()


def test_a_channel_that_does_not_carry_falls_back_unless_it_was_asked_for_by_name(caplog):
    name, asked_for = f"test-channels-{os.getpid()}", ON_GPU.model_copy(update={"channel": "cuda_ipc"})
    with pytest.raises(ChannelError, match="shares no events between processes"):
        GpuPairChannel(asked_for, name, SPEC, runtime=FakeCuda(fail="shares_events"))
    cuda = FakeCuda()
    by_name = GpuPairChannel(asked_for, name, SPEC, runtime=cuda)
    assert by_name.fall_back("no peer access") is None
    assert kind_of(by_name.name) == "cuda_ipc"
    by_name.verifier_end.close()
    channel = GpuPairChannel(ON_GPU, name, SPEC, runtime=cuda)
    other = channel.fall_back("no peer access")
    assert kind_of(other) == kind_of(channel.name) == "shm"
    assert [record.message.count("no peer access") for record in caplog.records] == [1]
    assert cuda.machine.is_clean()
    channel.verifier_end.close()


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_a_verifier_configured_for_a_gpu_that_is_not_there_says_so():
    with pytest.raises(ChannelError, match=r"the verifier's device is 'cuda:0'.*this process sees none"):
        GpuPairChannel(ON_GPU.model_copy(update={"channel": "cuda_ipc"}), f"test-channels-{os.getpid()}", SPEC)
