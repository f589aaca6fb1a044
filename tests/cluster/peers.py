"""Channels of every kind, and peers in other processes, for the tests of this folder.

Run as a script, this file is a nursery of peers: each line `NAME INCARNATION MODE KIND` on its input forks a process,
whose id it prints. Forking spares each peer the seconds that importing torch takes; the nursery itself never touches
CUDA, so its children may.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.cluster.channels.channel import DrafterSide, InProcessChannel, VerifierSide
from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.kernels.parts import load_function
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, RoundHeader, TreeReply

ROOT = Path(__file__).parents[2]
SPEC = ChannelSpec(
    num_slots=3,
    num_nodes=5,
    max_path=4,
    max_prefill_tokens=7,
    taps_size=6,
    max_model_len=11,
    max_blocks_per_seq=2,
    block_size=4,
    num_blocks=9,
    taps_dtype=torch.bfloat16,
)
DEVICE = torch.device("cuda", 0)
LONG_S = 30.0
"""Never waited out where the property holds."""
SHORT_S = 0.05


def channels_of(kind: str) -> Any:
    """Class or object that creates and attaches channels between processes: "shm", "fake-cuda" or "cuda_ipc"."""
    return ShmChannel if kind == "shm" else load_function("tests.cluster.channels.cuda.cuda_pair:CudaChannels")(kind)


def create_channel(kind: str, name: str, spec: ChannelSpec = SPEC) -> Any:
    """A channel of that kind."""
    return channels_of(kind).create(name, spec)


def attach_channel(kind: str, name: str, incarnation: int) -> DrafterSide:
    """The drafter's end of a channel of that kind."""
    return channels_of(kind).attach(name, incarnation)


def fill_reply(outcome: Outcome, token_ids: Tensor, reply: TreeReply, incarnation: int) -> None:
    """An answer that names the bytes of every field it was given."""
    fields = [field.cpu().contiguous().view(torch.uint8).numpy() for field in (*outcome, token_ids)]
    digests = [zlib.crc32(field.tobytes()) for field in fields]
    reply.token_ids.flatten()[:] = torch.tensor(digests[:15])
    reply.parents.flatten()[: len(digests) - 15] = torch.tensor(digests[15:])
    for index, field in enumerate((reply.epochs, reply.committed_lens, reply.depths, reply.scores, reply.num_valid)):
        field.fill_(100 * RoundHeader.read(outcome.header).round_number + 10 * index + incarnation)


def run_drafter(name: str, incarnation: int, mode: str, kind: str) -> None:
    """A drafter until its channel closes: it answers, holds every round, or stops with a reply half published."""
    serve_rounds(attach_channel(kind, name, incarnation), mode)


def serve_rounds(end: DrafterSide, mode: str) -> None:
    """As `run_drafter`, from the moment it has attached."""
    while not end.closed:
        outcome = end.wait_outcome(SHORT_S)
        if outcome is None or mode == "hold":
            continue
        fill_reply(outcome, end.token_ids, end.reply, end.incarnation)
        if mode == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        end.publish_reply()
    end.close()


def serve_in_thread(end: DrafterSide, mode: str) -> threading.Thread:
    """`serve_rounds` in a thread of this process, which ends with the channel."""
    thread = threading.Thread(target=serve_rounds, args=(end, mode), daemon=True)
    thread.start()
    return thread


def run_verifier(name: str, mode: str, kind: str) -> None:
    """A verifier that never closes its channel: it ends at once, or lives as long as the nursery."""
    channel, parent = create_channel(kind, name), os.getppid()
    while mode == "verifier" and os.getppid() == parent:
        channel.verifier_end.acquire_outcome(0.0)
        time.sleep(0.005)


def run_peer(name: str, incarnation: int, mode: str, kind: str) -> None:
    """The body of a forked peer."""
    if mode in {"verifier", "leave"}:
        run_verifier(name, mode, kind)
    else:
        run_drafter(name, incarnation, mode, kind)


def run_nursery() -> None:
    """Children are not collected, as under a busy parent: a killed one stays a zombie."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    while line := sys.stdin.readline():
        name, incarnation, mode, kind = line.split()
        pid = os.fork()
        if not pid:
            run_peer(name, int(incarnation), mode, kind)
            if mode != "leave":
                os._exit(0)  # spares the seconds that an interpreter with torch takes to end
            return
        print(pid, flush=True)


class Nursery:
    """Starts peers and kills those left over."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", __spec__.name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"
        self.pids: list[int] = []

    def start(self, name: str, incarnation: int, mode: str, kind: str = "shm") -> int:
        self.process.stdin.write(f"{name} {incarnation} {mode} {kind}\n")
        self.process.stdin.flush()
        self.pids.append(int(self.process.stdout.readline()))
        return self.pids[-1]

    def kill_peers(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)  # uncollected, so the id still is the peer's
        self.pids.clear()

    def close(self) -> None:
        self.kill_peers()
        self.process.communicate()


class InProcessRig:
    """The drafter runs whenever the verifier waits."""

    def __init__(self) -> None:
        self.channel = InProcessChannel(SPEC)
        self.verifier = self.channel.verifier_end
        self.drafter = self.channel.drafter_end
        self.drafter.close()

    def start(self, incarnation: int, mode: str) -> None:
        self.drafter = self.channel.attach(incarnation)
        self.channel.pump = self._answer if mode == "answer" else lambda: None

    def _answer(self) -> None:
        outcome = self.drafter.poll_outcome()
        if outcome is not None:
            fill_reply(outcome, self.drafter.token_ids, self.drafter.reply, self.drafter.incarnation)
            self.drafter.publish_reply()

    def close_witness(self) -> Callable[[], bool]:
        drafter = self.drafter
        return lambda: drafter.closed


class ProcessRig:
    """The drafter is another process."""

    def __init__(self, kind: str, nursery: Nursery, name: str) -> None:
        self.kind, self.nursery, self.name = kind, nursery, name
        self.channel = create_channel(kind, name)
        self.verifier = self.channel.verifier_end
        self.pid = 0

    def start(self, incarnation: int, mode: str) -> None:
        self.pid = self.nursery.start(self.name, incarnation, mode, self.kind)
        assert eventually(lambda: self.verifier.incarnation == incarnation)

    def close_witness(self) -> Callable[[], bool]:
        pid = self.pid
        return lambda: eventually(lambda: not is_alive(pid))


Rig = InProcessRig | ProcessRig


def eventually(condition: Callable[[], bool], timeout_s: float = LONG_S) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return PeerProcess(pid, process_start(pid)).alive()


def state_of(pid: int) -> str:
    """The process's state as /proc has it: R, S, T, Z."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def publish(verifier: VerifierSide) -> int:
    """The number of a new round with whatever its buffers hold."""
    assert verifier.acquire_outcome(LONG_S) is not None
    return verifier.publish_outcome()


def round_trip(verifier: VerifierSide) -> TreeReply | None:
    """The answer to a new round."""
    return verifier.wait_reply(publish(verifier), LONG_S)


if __name__ == "__main__":
    run_nursery()
