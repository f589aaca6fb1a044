"""The drafter in a process of its own on the verifier's GPU, compared with both in one process.

benchmarks/gpu/run.sh --only two_processes

The same engine, head, chains and forced acceptance twice: once as in `engine_speed.py`, once over the CUDA IPC channel.
Without a GPU, --quick does the same over host shared memory.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, engine_config, facts, new_drafter, speed
from _harness import Bench, Cases, Figure, Result, run
from _model import llama_config, random_model, shape_facts
from engine_speed import engine_of

from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.verifier.loading.loader import LoadedModel

BATCHES = (1, 16)
DRAFTER = "--drafter"


def draft(name: str, device: str, quick: str) -> None:
    """Entry point of the drafter process: answers rounds until its channel closes."""
    torch.set_num_threads(1)
    bench = Bench("drafter", torch.device(device), quick == "quick")
    with torch.no_grad():
        worker = DraftWorker(new_drafter(bench, CHAIN))
        end = attach(name, bench.device)
        worker.attach(name, end)
        while not end.closed:
            if not worker.run_once():
                end.wait_outcome(0.1)
        worker.detach(name)


def attach(name: str, device: torch.device) -> DrafterSide:
    """Attaches the drafter's end of the channel."""
    return CudaIpcChannel.attach(name, 1, device) if device.type == "cuda" else ShmChannel.attach(name, 1)


@contextmanager
def engine_apart(bench: Bench, loaded: LoadedModel, case: Case) -> Iterator[Engine]:
    """Runs an engine whose drafter has a process of its own."""
    on_gpu = bench.device.type == "cuda"
    needs = new_drafter(bench, CHAIN, graphs=False).needs
    engine = Engine(loaded, engine_config(bench, case), needs)
    name, device = f"gpu-two-{os.getpid()}", torch.device("cuda", 0)
    spec = engine.channel_spec
    channel = CudaIpcChannel.create(name, spec, device) if on_gpu else ShmChannel.create(name, spec)
    verifier = channel.verifier_end
    command = [sys.executable, __file__, DRAFTER, name, "cuda:0" if on_gpu else "cpu", "quick" if bench.quick else ""]
    with subprocess.Popen(command) as drafter:
        try:
            while not verifier.peer_alive():
                if drafter.poll() is not None:
                    raise RuntimeError(f"the drafter's process ended with status {drafter.returncode}")
                time.sleep(0.01)
            engine.attach_drafter(verifier)
            yield engine
            if engine.drafter_state != "attached":
                raise RuntimeError(f"the drafter is {engine.drafter_state}: what was measured is plain decoding")
        finally:
            engine.model.remove_taps()
            verifier.close()


def measure(bench: Bench) -> Result:
    """Measures both ways at every batch size; figures are reported as they are measured."""
    torch.set_num_threads(1)
    config = llama_config(bench, max_position_embeddings=131072)
    loaded = random_model(bench, config)
    mps = "on" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "off: two processes take turns on the GPU"
    told = shape_facts(config, bench.dtype) | facts(bench) | {"mps": mps}
    cases = Cases(bench, told, {"forced_acceptance": True})

    def one(batch: int) -> list[Figure]:
        case = Case(f"chain of 7, forced {CHAIN_LENGTH}", batch, CHAIN, ForcedAcceptance.length(CHAIN_LENGTH))
        engine = engine_of(bench, loaded, case)
        together = speed(bench, engine, speculation=True)
        engine.model.remove_taps()
        del engine
        gc.collect()
        with engine_apart(bench, loaded, case) as engine:
            apart = speed(bench, engine, speculation=True)
        del engine
        gc.collect()
        return [
            Figure(f"{case.label}: one process", together.tokens_per_s, "tokens/s"),
            Figure(f"{case.label}: two processes", apart.tokens_per_s, "tokens/s"),
            Figure(f"{case.label}: two processes over one", apart.tokens_per_s / together.tokens_per_s, "x"),
            Figure(f"{case.label}: round of one process", together.round_ms, "ms"),
            Figure(f"{case.label}: round of two processes", apart.round_ms, "ms"),
        ]

    for batch in BATCHES:
        cases.run(f"batch {batch}, both ways", partial(one, batch))
    return cases.result


if __name__ == "__main__":
    if sys.argv[1:2] == [DRAFTER]:
        draft(*sys.argv[2:])
    else:
        run(__doc__, measure)
