"""Round trip of an empty round over each kind of channel, and the cost of a waiting drafter.

    .venv/bin/python benchmarks/hop.py [--rounds 5000] [--think-us 0]

The drafter of the shared-memory channel is a second process that answers immediately. With `--think-us` the verifier
pauses between rounds, as for a forward pass; the drafter then waits longer and sleeps in between.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

from wingbeat.cluster.channels.channel import InProcessChannel, VerifierSide
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.runtime.protocol.messages import ChannelSpec

SPEC = ChannelSpec(
    num_slots=16,
    num_nodes=32,
    max_path=8,
    max_prefill_tokens=256,
    taps_size=768,
    max_model_len=2048,
    max_blocks_per_seq=128,
    block_size=16,
    num_blocks=2048,
)
IDLE_S = 3.0


def answer_rounds(name: str) -> None:
    """Entry point of the drafter process; prints the share of a core it used while no round came for `IDLE_S`."""
    end = ShmChannel.attach(name, incarnation=1)
    quiet_since, cpu_then = time.monotonic(), time.process_time()
    while not end.closed:
        if end.wait_outcome(0.1) is not None:
            end.publish_reply()
            quiet_since, cpu_then = time.monotonic(), time.process_time()
    print((time.process_time() - cpu_then) / (time.monotonic() - quiet_since))


def round_trips_us(verifier: VerifierSide, rounds: int, think_us: float) -> list[float]:
    """Sorted times in microseconds from publishing an outcome to receiving its reply.

    The first tenth, a warm-up, is dropped.
    """
    times = []
    for _ in range(rounds):
        until = time.perf_counter() + think_us / 1e6
        while time.perf_counter() < until:
            time.sleep(0)
        verifier.acquire_outcome(1.0)
        started = time.perf_counter()
        if verifier.wait_reply(verifier.publish_outcome(), 1.0) is None:
            raise RuntimeError("the drafter did not answer within a second")
        times.append((time.perf_counter() - started) * 1e6)
    return sorted(times[rounds // 10 :])


def measure_in_process(rounds: int, think_us: float) -> list[float]:
    """Round trips in process, where the verifier's wait runs the drafter."""
    channel = InProcessChannel(SPEC)

    def pump() -> None:
        if channel.drafter_end.poll_outcome() is not None:
            channel.drafter_end.publish_reply()

    channel.pump = pump
    return round_trips_us(channel.verifier_end, rounds, think_us)


def measure_shm(rounds: int, think_us: float) -> tuple[list[float], float]:
    """Round trips to another process, and that process's share of a core when idle."""
    name = f"hop-{os.getpid()}"
    verifier = ShmChannel.create(name, SPEC).verifier_end
    command = [sys.executable, __file__, "--drafter", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as drafter:
        while not verifier.peer_alive():
            if drafter.poll() is not None:
                raise RuntimeError(f"the drafter's process ended with status {drafter.returncode}")
            time.sleep(0.01)
        times = round_trips_us(verifier, rounds, think_us)
        time.sleep(IDLE_S)
        verifier.close()
        return times, float(drafter.communicate()[0])


def print_row(kind: str, times: list[float]) -> None:
    """Prints one row of the table."""
    cells = [statistics.median(times), times[int(0.9 * len(times))], times[int(0.99 * len(times))], times[-1]]
    print(f"| {kind} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")


def main() -> None:
    """Measures both kinds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--think-us", type=float, default=0.0)
    parser.add_argument("--drafter", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.drafter:
        answer_rounds(args.drafter)
        return
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {cores} cores, load {load:.1f}, {args.rounds} rounds, think {args.think_us:.0f} us\n")
    print("| channel | p50 us | p90 us | p99 us | max us |\n|---|---|---|---|---|")
    print_row("in process", measure_in_process(args.rounds, args.think_us))
    times, idle = measure_shm(args.rounds, args.think_us)
    print_row("shared memory", times)
    print(f"\nan idle drafter takes {100 * idle:.2f} % of a core")


if __name__ == "__main__":
    main()
