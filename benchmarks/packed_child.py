"""An engine with a model in a process of its own, controlled by `packed.py` through stdin and stdout.

    PYTHON benchmarks/packed_child.py wingbeat|llama.cpp|openvino MODEL THREADS AT_ONCE [..]

PYTHON has the engine's package, such as `xllamacpp` or `openvino-genai`. When the model is loaded, one line of JSON
with facts about it is written, including the perplexity of the file TEXT. Then each input line is JSON, [prompts,
tokens], and the output line is the number of seconds that all of them took together. Greedy, without a prefix cache.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], int]
"""(token ids of prompts, tokens per answer) -> tokens of all answers."""
ROOM = 1024
"""Maximum number of tokens of a sequence."""
PIECE = 512
"""Tokens of a text that are scored together."""


def wingbeat(
    model: str, threads: int, at_once: int, dtype: str, activations: str, drafter: str, text: str = ""
) -> tuple[Generate, dict[str, float]]:
    """Wingbeat engine in this process."""
    from wingbeat.cluster.channels.channel import InProcessChannel
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.llm import LLM
    from wingbeat.runtime.scheduling.request import SamplingParams

    config = EngineConfig(
        max_num_seqs=at_once, max_model_len=ROOM, enable_prefix_caching=False, cpu_activations=activations
    )
    llm = LLM(model, drafter, config, InProcessChannel, dtype=dtype, device="cpu", threads=threads)
    facts: dict[str, float] = {"megabytes": llm.engine.loaded.weights_bytes / 1e6}
    if text:
        ids = llm.tokenizer.encode(Path(text).read_text(encoding="utf-8"), add_special_tokens=False)
        pieces = [ids[begin : begin + PIECE] for begin in range(0, len(ids) - PIECE, PIECE)]
        score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        found = [
            one.logprob for _, output in llm.stream(pieces, [score] * len(pieces)) for one in output.prompt_logprobs
        ]
        facts["perplexity"] = math.exp(-sum(found) / len(found))

    def generate(prompts: list[list[int]], tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        return sum(len(one.token_ids) for one in llm.generate(prompts, [params] * len(prompts)))

    return generate, facts


def llama_cpp(model: str, threads: int, at_once: int, drafts: str = "none") -> tuple[Generate, dict[str, float]]:
    """llama.cpp server slots, called without HTTP."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = at_once, ROOM * at_once
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib, params.verbosity = False, 0, -1
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{drafts.upper()}")]
    server, pool = xllamacpp.Server(params), ThreadPoolExecutor(at_once)

    def one(prompt: list[int], tokens: int) -> int:
        body = {"prompt": prompt, "max_tokens": tokens, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        answer: Any = server.handle_completions(body)
        return int(answer["usage"]["completion_tokens"])

    return lambda prompts, tokens: sum(pool.map(one, prompts, [tokens] * len(prompts))), {}


def openvino(model: str, threads: int, at_once: int) -> tuple[Generate, dict[str, float]]:
    """OpenVINO GenAI with continuous batching."""
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
        return sum(len(one.m_generation_ids[0]) for one in pipeline.generate(ids, [config] * len(prompts)))

    return generate, {}


ENGINES: dict[str, Callable[..., tuple[Generate, dict[str, float]]]] = {
    "wingbeat": wingbeat,
    "llama.cpp": llama_cpp,
    "openvino": openvino,
}


def main() -> None:
    """Answers input lines until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("at_once", type=int)
    parser.add_argument(
        "more", nargs="*", help="for wingbeat: DTYPE ACTIVATIONS DRAFTER [TEXT]; for llama.cpp: its kind of drafts"
    )
    args = parser.parse_args()
    generate, facts = ENGINES[args.engine](args.model, args.threads, args.at_once, *args.more)
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        began = time.perf_counter()
        count = generate(prompts, tokens)
        seconds = time.perf_counter() - began
        if count != tokens * len(prompts):
            raise SystemExit(f"{args.engine} wrote {count} tokens where {tokens * len(prompts)} were asked for")
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
