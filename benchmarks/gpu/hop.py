"""Hop between verifier and drafter, two processes on one GPU: doorbell and events over the CUDA IPC channel.

benchmarks/gpu/run.sh --only hop

A round trip is two hops. The host's round trip ends when the verifier's host observes that the reply is enqueued; the
device's ends when the verifier's device has run a kernel that reads the reply, after the drafter's device has run one
that reads the outcome. Rounds are also measured over host shared memory; without a GPU, --quick measures those
alone.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
from _harness import Bench, Cases, Figure, Result, run

from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.memory import DEVICE_FIELDS, buffer_bytes
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.runtime.protocol.messages import ChannelSpec

SPEC = ChannelSpec(
    num_slots=64,
    num_nodes=64,
    max_path=8,
    max_prefill_tokens=2048,
    taps_size=3 * 4096,
    max_model_len=2048,
    max_blocks_per_seq=128,
    block_size=16,
    num_blocks=4096,
    taps_dtype=torch.bfloat16,
)
SMALL_SPEC = dataclasses.replace(SPEC, taps_size=48)
"""Specification for host memory, of which rounds touch a few fields only: /dev/shm may be small."""
DEVICE = torch.device("cuda", 0)
NUM_ROUNDS, WARM_UP_ROUNDS = 2000, 200
HOP_US = 30
"""Target: maximum microseconds of a hop by doorbell and event."""
TIMEOUT_S = 30.0
DRAFTER = "--drafter"


def answer_rounds(kind: str, name: str) -> None:
    """Entry point of the drafter process."""
    end = attach(kind, name)
    while not end.closed:
        outcome = end.wait_outcome(0.1)
        if outcome is not None:
            end.reply.num_valid.copy_(outcome.committed_lens)
            end.publish_reply()
    end.close()


def attach(kind: str, name: str) -> DrafterSide:
    """Attaches the drafter's end of a channel of that kind."""
    return CudaIpcChannel.attach(name, 1, DEVICE) if kind == "cuda_ipc" else ShmChannel.attach(name, 1)


def round_trips_us(verifier: VerifierSide, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds of each round trip, at the host's and at the device's end."""
    on_gpu = verifier.token_ids.is_cuda
    seen = torch.zeros(SPEC.num_slots, dtype=torch.int64, device=verifier.token_ids.device)
    by_host, by_device = [], []
    for index in range(rounds + WARM_UP_ROUNDS):
        outcome = verifier.acquire_outcome(TIMEOUT_S)
        started = time.perf_counter()
        outcome.committed_lens.fill_(index)
        reply = verifier.wait_reply(verifier.publish_outcome(), TIMEOUT_S, by_device=True)
        if reply is None:
            raise RuntimeError(f"the drafter did not answer within {TIMEOUT_S:.0f} s")
        enqueued = time.perf_counter()
        seen.copy_(reply.num_valid)
        if on_gpu:
            torch.cuda.current_stream(DEVICE).synchronize()
        done = time.perf_counter()
        if index >= WARM_UP_ROUNDS:
            by_host.append((enqueued - started) * 1e6)
            by_device.append((done - started) * 1e6)
        if bool((seen != index).any()):
            raise RuntimeError(f"round {index} brought the reply to another one")
    return by_host, by_device


def measure_kind(kind: str, rounds: int) -> tuple[list[float], list[float]]:
    """Measures round trips to a drafter in another process."""
    name = f"gpu-hop-{kind}-{os.getpid()}"
    channel = CudaIpcChannel.create(name, SPEC, DEVICE) if kind == "cuda_ipc" else ShmChannel.create(name, SMALL_SPEC)
    verifier = channel.verifier_end
    with subprocess.Popen([sys.executable, __file__, DRAFTER, kind, name]) as drafter:
        try:
            while not verifier.peer_alive():
                if drafter.poll() is not None:
                    raise RuntimeError(f"the drafter's process ended with status {drafter.returncode}")
                time.sleep(0.01)
            return round_trips_us(verifier, rounds)
        finally:
            verifier.close()


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Quantiles for the JSON file."""
    cuts = statistics.quantiles(times, n=100)
    return {"p50_us": cuts[49], "p90_us": cuts[89], "p99_us": cuts[98], "max_us": max(times)}


def measure(bench: Bench) -> Result:
    """Measures medians of 2000 round trips."""
    torch.set_num_threads(1)
    rounds = 50 if bench.quick else NUM_ROUNDS
    facts = {
        "workload": f"{rounds} rounds after {WARM_UP_ROUNDS}, one small kernel per side; a hop is half a round trip",
        "buffers": f"{buffer_bytes(SPEC, DEVICE_FIELDS) / 2**20:.0f} MiB in GPU memory",
        "mps": "on" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "off: two processes take turns on the GPU",
    }
    cases = Cases(bench, facts)

    def one(kind: str) -> list[Figure]:
        figures: list[Figure] = []
        by_host, by_device = measure_kind(kind, rounds)
        for end, times in (("host", by_host), ("device", by_device)):
            if kind == "cuda_ipc" or end == "host":
                target = HOP_US if (kind, end) == ("cuda_ipc", "device") else None
                name = f"hop by {kind}, to the {end}"
                figures.append(Figure(name, statistics.median(times) / 2, "us", at_most=target))
                figures.append(Figure(f"round trip by {kind}, to the {end}", statistics.median(times), "us"))
                cases.result.details[f"{kind}, {end}"] = quantiles(times)
        return figures

    for kind in ("cuda_ipc", "shm") if bench.device.type == "cuda" else ("shm",):
        cases.run(kind, partial(one, kind))
    return cases.result


if __name__ == "__main__":
    if sys.argv[1:2] == [DRAFTER]:
        answer_rounds(*sys.argv[2:])
    else:
        run(__doc__, measure)
