"""The CUDA IPC channel on a GPU: order between two processes' streams, effects of killed peers, and leaks.

Both peers are plain processes. Run as a script, this file is such a peer: `python FILE ROLE NAME` prints a line of JSON
at its end. Operations that could hang a stream run in a process of their own.
"""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cluster.peers import DEVICE, LONG_S, Nursery, ProcessRig, eventually, publish, round_trip, state_of
from tests.cluster.peers import SPEC as SMALL_SPEC
from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.cluster.channels.memory import DEVICE_FIELDS, buffer_bytes
from wingbeat.runtime.protocol.messages import ChannelSpec, ReplyHeader

pytestmark = pytest.mark.gpu

SPEC = ChannelSpec(
    num_slots=16,
    num_nodes=32,
    max_path=8,
    max_prefill_tokens=1024,
    taps_size=12288,
    max_model_len=2048,
    max_blocks_per_seq=128,
    block_size=16,
    num_blocks=2048,
    taps_dtype=torch.bfloat16,
)
NUM_ROUNDS = 100
BUSY_CYCLES = 20_000_000
"""About 10 ms of a GPU: long beside the host's part of a round."""
LONG_BUSY_CYCLES = 200 * BUSY_CYCLES
DEATH_AFTER_S = 0.3
"""Time for the peer to enqueue its wait, well within the busy time."""
LIMIT_S = 40.0
"""Time limit in seconds for a peer process, which would hang with a hanging stream."""


class CountedEvent:
    """An event that can be referred to weakly: torch does not tell references to its own that they are gone."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.record, self.wait, self.query, self.ipc_handle = event.record, event.wait, event.query, event.ipc_handle


class CountingCuda(CudaRuntime):
    """Knows which of its events still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.events: weakref.WeakSet[CountedEvent] = weakref.WeakSet()

    def create_event(self, device: torch.device) -> torch.cuda.Event:
        event = CountedEvent(super().create_event(device))
        self.events.add(event)
        return event

    def open_event(self, device: torch.device, handle: bytes) -> torch.cuda.Event:
        event = CountedEvent(super().open_event(device, handle))
        self.events.add(event)
        return event


def start(role: str, name: str) -> subprocess.Popen:
    """Another process of this file."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.channels.cuda.test_cuda_ipc_gpu", role, name],
        stdout=subprocess.PIPE,
        text=True,
    )


def report(process: subprocess.Popen) -> dict:
    """Report that a process printed at its end; fails the test if the process hangs or fails."""
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"{process.args[2]} still runs after {LIMIT_S:.0f} s: its stream hangs")
    assert process.returncode == 0
    return json.loads(printed.splitlines()[-1])


def attached(verifier: VerifierSide, incarnation: int) -> bool:
    return eventually(lambda: verifier.incarnation == incarnation, LIMIT_S)


def echo_rounds(end: DrafterSide, limit: int | None = None) -> int:
    """Answer with a function of the taps, computed by the device behind more work; returns the rounds answered."""
    answered = 0
    while not end.closed and answered != limit:
        outcome = end.wait_outcome(0.1)
        if outcome is None:
            continue
        value = outcome.decode_taps[0, 0, 0].float() + outcome.decode_taps[-1, -1, -1].float()
        torch.cuda._sleep(BUSY_CYCLES)
        end.reply.scores.copy_(value.expand_as(end.reply.scores))
        end.reply.token_ids.copy_(end.token_ids[:, : SPEC.num_nodes])
        end.publish_reply()
        answered += 1
    return answered


def run_echo(name: str) -> dict:
    end = CudaIpcChannel.attach(name, 1, DEVICE)
    answered = echo_rounds(end)
    end.close()
    return {"answered": answered}


def run_late_drafter(name: str) -> dict:
    """Answers one round with work that takes seconds, and is killed behind its own doorbell."""
    end = CudaIpcChannel.attach(name, 1, DEVICE)
    assert end.wait_outcome(LIMIT_S) is not None
    torch.cuda._sleep(LONG_BUSY_CYCLES)
    end.reply.scores.fill_(1.0)
    end.publish_reply()
    time.sleep(DEATH_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def run_survivor(name: str, *, by_device: bool = False) -> dict:
    """A verifier whose drafter dies after its doorbell: the verifier works on, alone and with a successor.

    Args:
        by_device: whether the verifier's stream waits for the reply.
    """
    verifier = CudaIpcChannel.create(name, SPEC, DEVICE).verifier_end
    drafter = start("late_drafter", name)
    assert attached(verifier, 1)
    round_number = publish(verifier)
    replied = verifier.wait_reply(round_number, LIMIT_S, by_device=by_device)
    assert (replied is not None) == by_device
    drafter.wait()
    torch.cuda.current_stream(DEVICE).synchronize()
    alone = [round_trip(verifier) for _ in range(3)]
    torch.cuda.current_stream(DEVICE).synchronize()
    verifier.close()
    return {"alone": [reply is None for reply in alone]}


def run_drafter_lives(name: str) -> dict:
    """Attaches and leaves again and again; memory before and after, and events that are left."""
    cuda, free = CountingCuda(), []
    for incarnation in range(1, 13):
        end = CudaIpcChannel.attach(name, incarnation, DEVICE, cuda)
        assert echo_rounds(end, limit=1) == 1
        end.close()
        del end
        free.append(torch.cuda.mem_get_info(DEVICE)[0])
    return {"free_bytes": free[1:], "num_events": len(cuda.events)}


def run_busy_verifier(name: str) -> dict:
    """Publishes a round behind seconds of work and is killed."""
    verifier = CudaIpcChannel.create(name, SPEC, DEVICE).verifier_end
    assert attached(verifier, 1)
    publish(verifier)
    torch.cuda._sleep(LONG_BUSY_CYCLES)
    publish(verifier)
    time.sleep(DEATH_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def run_surviving_drafter(name: str) -> dict:
    """A drafter keeps a working stream when one of its verifiers is killed, as it polls before it enqueues."""
    verifier = start("busy_verifier", name)
    path = Path(f"/dev/shm/wingbeat.{name}")
    assert eventually(path.exists, LIMIT_S)
    end = CudaIpcChannel.attach(name, 1, DEVICE)
    polled = 0
    while not end.closed:
        if end.has_outcome():
            polled += end.poll_outcome() is not None
            end.publish_reply()
    verifier.wait()
    end.close()
    torch.cuda.current_stream(DEVICE).synchronize()
    path.unlink(missing_ok=True)
    return {"survived": bool((torch.ones(4, device=DEVICE) == 1).all()), "answered": polled}


@pytest.mark.parametrize("by_device", [False, True], ids=["host waits", "stream waits"])
def test_each_side_reads_what_the_others_device_wrote_round_after_round(name: str, by_device: bool):
    """Both devices lag far behind both hosts, so a missing wait would read the round before."""
    verifier = CudaIpcChannel.create(name, SPEC, DEVICE).verifier_end
    drafter = start("echo", name)
    assert attached(verifier, 1)
    results, rounds, behind, early = [], [], 0, 0
    for value in range(NUM_ROUNDS):
        outcome = verifier.acquire_outcome(LONG_S)
        torch.cuda._sleep(BUSY_CYCLES)
        outcome.decode_taps.fill_(value)
        verifier.token_ids.fill_(3 * value)
        done = torch.cuda.Event()
        done.record()
        rounds.append(verifier.publish_outcome())
        behind += not done.query()
        reply = verifier.wait_reply(rounds[-1], LONG_S, by_device=by_device)
        early += not verifier._reply_ready.finished(rounds[-1] % 2)
        results.append((reply.scores.clone(), reply.token_ids.clone()))
    for value, (scores, token_ids) in enumerate(results):
        assert bool((scores == 2 * value).all()), value
        assert bool((token_ids == 3 * value).all()), value
    verifier.close()
    assert report(drafter) == {"answered": NUM_ROUNDS}
    assert behind > NUM_ROUNDS // 2, "publishing waited for the device"
    assert (early > NUM_ROUNDS // 2) == by_device


def test_two_rounds_under_way_keep_their_buffers_apart(name: str):
    """Replies that the verifier does not wait for still guard the outcome buffers that they were computed from."""
    verifier = CudaIpcChannel.create(name, SPEC, DEVICE).verifier_end
    drafter = start("echo", name)
    assert attached(verifier, 1)
    for value in range(40):
        verifier.acquire_outcome(LONG_S).decode_taps.fill_(value)
        round_number = verifier.publish_outcome()
    assert bool((verifier.wait_reply(round_number, LONG_S).scores == 2 * 39).all())
    assert bool((verifier.wait_reply(round_number - 1, LONG_S).scores == 2 * 38).all())
    verifier.close()
    assert report(drafter) == {"answered": 40}


def test_a_drafter_killed_in_a_round_leaves_a_working_verifier(nursery: Nursery, name: str):
    rig = ProcessRig("cuda_ipc", nursery, name)
    rig.start(1, "hold")
    round_number = publish(rig.verifier)
    os.kill(rig.pid, signal.SIGKILL)
    assert eventually(lambda: state_of(rig.pid) == "Z")
    assert rig.verifier.wait_reply(round_number, LONG_S) is None
    for _ in range(3):
        assert round_trip(rig.verifier) is None
    torch.cuda.current_stream(DEVICE).synchronize()
    rig.start(2, "answer")
    assert ReplyHeader.read(round_trip(rig.verifier).header).incarnation == 2
    rig.verifier.close()


@pytest.mark.parametrize("role", ["survivor", "following_survivor"])
def test_a_drafter_killed_behind_its_doorbell_does_not_hang_the_verifiers_stream(name: str, role: str):
    """The record was enqueued, the device never reached it: the case that the channel's queries cannot exclude."""
    assert report(start(role, name)) == {"alone": [True, True, True]}


def test_a_verifier_killed_behind_its_doorbell_does_not_hang_the_drafters_stream(name: str):
    assert report(start("surviving_drafter", name)) == {"survived": True, "answered": 1}


def test_ten_lives_of_a_drafter_leak_neither_memory_nor_events(name: str):
    block_bytes = buffer_bytes(SPEC, DEVICE_FIELDS)
    verifier = CudaIpcChannel.create(name, SPEC, DEVICE).verifier_end
    drafter, deadline = start("drafter_lives", name), time.monotonic() + LIMIT_S
    while drafter.poll() is None and time.monotonic() < deadline:
        if verifier.incarnation and verifier.acquire_outcome(0.01) is not None:
            verifier.wait_reply(verifier.publish_outcome(), 1.0)
    figures = report(drafter)
    verifier.close()
    assert figures["num_events"] == 0
    assert figures["free_bytes"][0] - figures["free_bytes"][-1] < block_bytes


def test_ten_lives_of_a_channel_leak_neither_memory_nor_events(name: str):
    cuda, free = CountingCuda(), []
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(11):
        channel = CudaIpcChannel.create(name, SPEC, DEVICE, cuda)
        publish(channel.verifier_end)
        channel.verifier_end.close()
        free.append(torch.cuda.mem_get_info(DEVICE)[0])
        if len(free) == 1:
            open_files = len(os.listdir("/proc/self/fd"))
    del channel
    assert len(cuda.events) == 0
    assert free[0] - free[-1] < buffer_bytes(SPEC, DEVICE_FIELDS)
    assert len(os.listdir("/proc/self/fd")) <= open_files


def test_torch_still_launches_after_a_refused_call(name: str):
    """A failed runtime call must not be reported again by torch's next kernel."""
    cuda = CudaRuntime()
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle on cuda:0 failed"):
        cuda.open_memory(DEVICE, bytes(64))
    assert torch.ones(3, device=DEVICE).sum().item() == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_drafter_on_another_gpu_reads_and_answers(name: str):
    verifier = CudaIpcChannel.create(name, SPEC, DEVICE).verifier_end
    drafter = start("echo_on_second", name)
    assert attached(verifier, 1)
    for value in range(20):
        verifier.acquire_outcome(LONG_S).decode_taps.fill_(value)
        reply = verifier.wait_reply(verifier.publish_outcome(), LONG_S)
        assert bool((reply.scores == 2 * value).all()), value
    verifier.close()
    assert report(drafter) == {"answered": 20}


def run_echo_on_second(name: str) -> dict:
    torch.cuda.set_device(1)
    end = CudaIpcChannel.attach(name, 1, torch.device("cuda", 1))
    answered = echo_rounds(end)
    end.close()
    return {"answered": answered}


def test_a_small_spec_is_served_too(name: str):
    channel = CudaIpcChannel.create(name, SMALL_SPEC, DEVICE)
    assert bool((channel.verifier_end.token_ids == 0).all())
    channel.verifier_end.close()


ROLES = {
    "echo": run_echo,
    "echo_on_second": run_echo_on_second,
    "late_drafter": run_late_drafter,
    "survivor": run_survivor,
    "following_survivor": partial(run_survivor, by_device=True),
    "drafter_lives": run_drafter_lives,
    "busy_verifier": run_busy_verifier,
    "surviving_drafter": run_surviving_drafter,
}

if __name__ == "__main__":
    print(json.dumps(ROLES[sys.argv[1]](sys.argv[2])), flush=True)
