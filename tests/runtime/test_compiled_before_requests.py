"""Kernels are compiled while a model loads: a request that waits for a compiler waits for seconds."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.runtime.fake_gpu import CUDA
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import ALTERED, GREEDY, SAMPLED, TREE, engine_config, new_drafter, verifier
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.kernels.sampling.reference import choose_tokens
from wingbeat.runtime.engine.memory import reserved_bytes
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams


def test_no_number_of_rows_compiles_a_sampling_kernel_anew(gpu):
    seen = {}
    for num_rows in (1, 2, 3, 9, 16, 17, 60, 128, 264, 300):
        gpu.variants.clear()
        ones, zeros = torch.ones(num_rows, device=CUDA), torch.zeros(num_rows, dtype=torch.int64, device=CUDA)
        logits = torch.zeros(num_rows, 128256, dtype=torch.bfloat16, device=CUDA)
        choose_tokens(logits, ones, zeros, ones, ones, zeros, zeros, any_sampled=True, any_filtered=True)
        seen[num_rows] = set(gpu.variants)
    assert all(variants == seen[1] for variants in seen.values())


MIXED = [
    GREEDY,
    SAMPLED,
    ALTERED,
    SamplingParams(max_tokens=3, temperature=0.7, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.7, top_k=5, min_p=0.1, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.7, seed=3, ignore_eos=True, frequency_penalty=0.3),
]
LENGTHS = (1, 2, 5, 9, 16, 17, 31, 33, 64, 100, 300)


@pytest.mark.slow
def test_no_round_after_the_load_compiles_a_kernel(gpu):
    """Prompts of every tile height and beyond a split, alone and beside others, with each way to choose."""
    config = engine_config(TREE, 4, max_model_len=1024, max_num_batched_tokens=512, num_kv_blocks=512)
    drafter, device, model = new_drafter("eagle-3", TREE, FakeGraphDevice(gpu)), FakeGraphDevice(gpu), verifier()
    reserved_bytes(model, config, drafter.needs)
    engine = build_engine(model, config, drafter, partial(InProcessChannel, device=CUDA), device)
    engine.add_request(Request("first", (1, 2, 3), GREEDY))  # a drafter compiles for its self-test
    while engine.has_unfinished_requests():
        engine.step()
    known = set(gpu.variants)
    for at, length in enumerate(LENGTHS):
        for params in (MIXED[at % 6], MIXED[(at + 1) % 6], MIXED[(at + 3) % 6]):
            engine.add_request(Request(f"{length}-{id(params)}", (1,) * length, params))
        while at % 2 and engine.has_unfinished_requests():
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert not sorted(map(str, gpu.variants - known))
