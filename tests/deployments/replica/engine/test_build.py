"""Construction of both processes of a pair: their channel, and no more imported code than each needs."""

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.needs import needs
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.segment import kind_of
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine import pair_channel
from wingbeat.deployments.replica.engine.pair_channel import attach_channel, open_channel
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


def test_without_gpus_both_sides_meet_in_shared_memory():
    name = f"test-channels-{os.getpid()}"
    channel = open_channel(AppConfig(), name, SPEC)
    assert kind_of(channel.name) == "shm"
    drafter = attach_channel(name, 1, on_gpu=False)
    channel.try_drafter()
    assert channel.verifier_end.incarnation == 1
    assert drafter.spec == SPEC
    assert channel.fall_back("whatever the reason") is None
    drafter.close()
    channel.verifier_end.close()


def test_memory_of_a_gpu_that_is_asked_for_and_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(pair_channel, "first_result", lambda name, *given: None)
    asked = SimpleNamespace(channel="cuda_ipc", channel_kind=lambda: "cuda_ipc")
    with pytest.raises(ChannelError, match="channel is cuda_ipc: nothing that is installed makes it"):
        open_channel(asked, "unused", SPEC)


@needs("tcp")
def test_over_the_network_both_sides_meet_at_an_address():
    channel = open_channel(AppConfig(), "unused", SPEC, "127.0.0.1")
    drafter = attach_channel(pickle.loads(pickle.dumps(channel.name)), 1, on_gpu=False)
    assert channel.verifier_end.incarnation == 1
    assert drafter.spec == SPEC
    drafter.close()
    channel.verifier_end.close()


@pytest.mark.slow
def test_neither_a_replica_nor_its_engines_process_before_it_loads_imports_torch():
    """The replica does not use torch; in the engine's process torch's threads must belong to the engine's thread."""
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
