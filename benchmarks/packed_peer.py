"""llama.cpp or OpenVINO GenAI over a model's file, in a process of its own that `packed.py` talks to.

    PYTHON benchmarks/packed_peer.py llama.cpp|openvino MODEL THREADS AT_ONCE

PYTHON has `xllamacpp`, or `openvino-genai`. Each line that comes in is JSON, [prompts, tokens]; the line that goes out
says how many seconds all of them took together. Greedy, without a prefix cache.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Generate = Callable[[list[list[int]], int], int]
"""Token ids of prompts and tokens of an answer -> tokens of all answers."""
ROOM = 1024
"""Tokens of a sequence."""


def llama_cpp(model: str, threads: int, at_once: int) -> Generate:
    """Its server's slots, called without HTTP."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = at_once, ROOM * at_once
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib = False, 0
    server, pool = xllamacpp.Server(params), ThreadPoolExecutor(at_once)

    def one(prompt: list[int], tokens: int) -> int:
        body = {"prompt": prompt, "max_tokens": tokens, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        answer: Any = server.handle_completions(body)
        return int(answer["usage"]["completion_tokens"])

    return lambda prompts, tokens: sum(pool.map(one, prompts, [tokens] * len(prompts)))


def openvino(model: str, threads: int, at_once: int) -> Generate:
    """Its continuous batching."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 1, at_once
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def generate(prompts: list[list[int]], tokens: int) -> int:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        found = pipeline.generate(ids, [config] * len(prompts))
        return sum(len(one.m_generation_ids[0]) for one in found)

    return generate


def main() -> None:
    """Answer lines until there are no more."""
    peer, model, threads, at_once = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    generate = {"llama.cpp": llama_cpp, "openvino": openvino}[peer](model, threads, at_once)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        began = time.perf_counter()
        count = generate(prompts, tokens)
        seconds = time.perf_counter() - began
        if count != tokens * len(prompts):
            raise SystemExit(f"{peer} wrote {count} tokens where {tokens * len(prompts)} were asked for")
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
