"""What both processes of a pair are built from: the channel they meet in, and no more code than each needs."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from tests.cluster.fake_cuda import FakeCuda
from tests.needs import needs
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.segment import kind_of
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.pair_channel import PairChannel, attach_channel
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.messages import ChannelSpec

SPEC = ChannelSpec(
    num_slots=2,
    num_nodes=3,
    max_path=2,
    max_prefill_tokens=4,
    taps_size=2,
    max_model_len=8,
    max_blocks_per_seq=2,
    block_size=4,
    num_blocks=4,
)
ON_GPU = AppConfig(num_gpus_per_verifier=0.7, num_gpus_per_drafter=0.3, drafter_place="actor")


def test_without_gpus_both_sides_meet_in_shared_memory():
    name = f"test-channels-{os.getpid()}"
    channel = PairChannel(AppConfig(), name, SPEC)
    assert kind_of(channel.name) == "shm"
    drafter = attach_channel(name, 1, on_gpu=False)
    channel.try_drafter()
    assert channel.verifier_end.incarnation == 1
    assert drafter.spec == SPEC
    assert channel.fall_back("whatever the reason") is None
    drafter.close()
    channel.verifier_end.close()


@needs("tcp")
def test_over_the_network_both_sides_meet_at_an_address():
    channel = PairChannel(AppConfig(), "unused", SPEC, "127.0.0.1")
    drafter = attach_channel(pickle.loads(pickle.dumps(channel.name)), 1, on_gpu=False)
    assert channel.verifier_end.incarnation == 1
    assert drafter.spec == SPEC
    drafter.close()
    channel.verifier_end.close()


@pytest.mark.parametrize("fails", ["shares_events", "allocate", "export_memory"])
def test_a_verifier_whose_gpu_memory_cannot_be_shared_takes_host_memory_with_one_warning(caplog, fails):
    name = f"test-channels-{os.getpid()}"
    channel = PairChannel(ON_GPU, name, SPEC, runtime=FakeCuda(fail=fails))
    assert kind_of(channel.name) == "shm"
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "host memory does" in warning.message
    assert (fails if fails != "shares_events" else "cudaDevAttr") in warning.message
    drafter = attach_channel(channel.name, 1, on_gpu=True)
    assert channel.verifier_end.incarnation == 1
    drafter.close()
    channel.verifier_end.close()


def test_a_verifier_that_may_take_its_drafter_in_warns_of_host_memory_only_once_a_drafter_attaches_there(caplog):
    open_place = AppConfig(num_gpus_per_verifier=0.7, num_gpus_per_drafter=0.3)
    assert open_place.may_take_drafter_in()
    assert not ON_GPU.may_take_drafter_in()
    cuda = FakeCuda(fail="shares_events")
    channel = PairChannel(open_place, f"test-channels-{os.getpid()}", SPEC, runtime=cuda)
    assert "cudaDevAttr" in channel.problem
    assert not caplog.records
    for _ in range(2):
        channel.try_drafter()
    assert [record.message.count("host memory does") for record in caplog.records] == [1]
    channel.verifier_end.close()


def test_a_channel_that_does_not_carry_falls_back_unless_it_was_asked_for_by_name(caplog):
    name, asked_for = f"test-channels-{os.getpid()}", ON_GPU.model_copy(update={"channel": "cuda_ipc"})
    with pytest.raises(ChannelError, match="shares no events between processes"):
        PairChannel(asked_for, name, SPEC, runtime=FakeCuda(fail="shares_events"))
    cuda = FakeCuda()
    by_name = PairChannel(asked_for, name, SPEC, runtime=cuda)
    assert by_name.fall_back("no peer access") is None
    assert kind_of(by_name.name) == "cuda_ipc"
    by_name.verifier_end.close()
    channel = PairChannel(ON_GPU, name, SPEC, runtime=cuda)
    other = channel.fall_back("no peer access")
    assert kind_of(other) == kind_of(channel.name) == "shm"
    assert [record.message.count("no peer access") for record in caplog.records] == [1]
    assert cuda.machine.is_clean()
    channel.verifier_end.close()


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_a_verifier_configured_for_a_gpu_that_is_not_there_says_so():
    with pytest.raises(ChannelError, match=r"the verifier's device is 'cuda:0'.*this process sees none"):
        PairChannel(ON_GPU.model_copy(update={"channel": "cuda_ipc"}), f"test-channels-{os.getpid()}", SPEC)


@pytest.mark.slow
def test_neither_a_replica_nor_its_engines_process_before_it_loads_imports_torch():
    """The replica has no use for it, and in the engine's process its threads must be those of the engine's thread."""
    code = (
        "import sys, wingbeat.deployments.replica.verifier_replica, wingbeat.deployments.replica.engine.engine_process;"
    )
    code += "print(*sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(got.stdout.split())


@pytest.mark.slow
def test_the_drafters_process_does_not_wait_for_the_verifiers_code():
    rooms = ("runtime.engine.engine", "runtime.verifier.loading.loader", "runtime.recordings", "runtime.checks")
    code = "import sys, wingbeat.deployments.replica.drafters.drafter_thread; print(*sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in got.stdout.split() if name.removeprefix("wingbeat.").startswith(rooms)]


@pytest.mark.parametrize(("threads", "most"), [(0, len(os.sched_getaffinity(0))), (1, None), (3, None)])
def test_the_number_of_threads_is_tried_where_none_is_given(threads, most):
    from wingbeat.deployments.replica.engine.build import pair_settings

    assert pair_settings(AppConfig(threads=threads)).most_threads == most


def test_what_a_drafter_needs_is_known_before_it_is_there():
    from wingbeat.deployments.replica.engine.build import build_draft_worker, needs_loaded_here

    needs = needs_loaded_here(AppConfig(), None)
    assert needs == build_draft_worker(AppConfig()).drafter.needs
    assert needs.tap_layers
    assert needs.token_bytes > 0
    other = HeadConvention(tap_layers=tuple(layer - 1 for layer in needs.tap_layers))
    assert needs_loaded_here(AppConfig(), other).tap_layers == other.tap_layers
