"""transformers' own speculation and continuous batching compared with ours: same widened verifier, same prompts.

The verifier is the demo pair's at the 8B shape (`_wide.py`), so that text and acceptance are real. Peers: `generate()`
plainly and with prompt lookup at batch 1, `generate_batch()` at 1, 16 and 64. Tokens per second of whole calls, prompts
included, after a warm-up call of the same kind.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from _engine import facts
from _harness import Bench, Cases, Figure, Result, run
from _model import BLOCK_SIZE, shape_facts
from _wide import WidePair
from real_acceptance import chain, code_prompts, engine_with, wide_config, wide_pair
from transformers import GenerationConfig

from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME

BATCHES = (1, 16, 64)
LOOKUP_TOKENS = 7
"""Draft tokens of prompt lookup, as many as in our chains."""
Texts = Sequence[Sequence[int]]


def sizes(bench: Bench) -> tuple[int, int]:
    """Tokens of a prompt, and of a text."""
    return (24, 4) if bench.quick else (1024, 128)


def rate(bench: Bench, write: Callable[[Texts], Texts], prompts: Texts) -> tuple[float, Texts]:
    """Tokens per second of a second call, and its texts."""
    write(prompts)
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    texts = write(prompts)
    return sum(map(len, texts)) / (time.perf_counter() - started), texts


class Writers:
    """Ways to write the same texts.

    Args:
        num_tokens: tokens of each text.
    """

    def __init__(self, bench: Bench, pair: WidePair, num_tokens: int) -> None:
        self.bench, self.pair, self.num_tokens = bench, pair, num_tokens

    def by_generate(self, prompts: Texts, **options: int) -> Texts:
        """Runs generate() for each prompt in turn."""
        model, texts = self.pair.loaded.model, []
        limits = {"max_new_tokens": self.num_tokens, "min_new_tokens": self.num_tokens}
        for prompt in prompts:
            token_ids = torch.tensor([prompt], device=self.bench.device)
            mask = torch.ones_like(token_ids)
            out = model.generate(
                token_ids, attention_mask=mask, do_sample=False, pad_token_id=0, **limits, **options
            )  # fmt: skip
            texts.append(out[0, len(prompt) :].tolist())
        return texts

    def by_batches(self, prompts: Texts) -> Texts:
        """Runs transformers' continuous batching."""
        config = GenerationConfig(max_new_tokens=self.num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = self.pair.loaded.model.generate_batch([list(prompt) for prompt in prompts], generation_config=config)
        if len(found) != len(prompts) or any(one.error for one in found.values()):
            raise RuntimeError(f"{len(found)} of {len(prompts)} texts; {[one.error for one in found.values()][:3]}")
        return [one.generated_tokens for one in found.values()]

    def by_engine(self, speculates: bool, batch: int) -> Callable[[Texts], Texts]:
        """Returns a function that runs Wingbeat's engine in this process."""
        length, shape = sizes(self.bench)[0] + self.num_tokens, chain(5) if speculates else SpeculationConfig()
        config = EngineConfig(
            max_num_seqs=batch, max_model_len=length + shape.num_nodes, block_size=BLOCK_SIZE,
            num_kv_blocks=2 + batch * (2 + (length + shape.num_nodes) // BLOCK_SIZE), enable_prefix_caching=False,
            speculation=shape,
        )  # fmt: skip
        engine = engine_with(self.bench, self.pair, config)
        params = SamplingParams(self.num_tokens, temperature=0.0, ignore_eos=True, speculation=speculates)

        def write(prompts: Texts) -> Texts:
            texts: list[list[int]] = [[] for _ in prompts]
            for index, prompt in enumerate(prompts):
                engine.add_request(Request(str(index), tuple(prompt), params))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    texts[int(output.request_id)] += output.token_ids
            return texts

        return write


@torch.no_grad()
def measure(bench: Bench) -> Result:
    """Measures Wingbeat first, because its attention is then removed from the model."""
    config, (length, num_tokens) = wide_config(bench), sizes(bench)
    told = shape_facts(config, bench.dtype) | facts(bench)
    told["workload"] = f"greedy, prompts of {length} tokens of held-out code, {num_tokens} new ones each"
    told["acceptance"] = "real"
    cases, pair = Cases(bench, told), wide_pair(bench)
    writers, batches = Writers(bench, pair, num_tokens), (2,) if bench.quick else BATCHES
    ours: dict[int, Texts] = {}

    def own(batch: int) -> list[Figure]:
        figures = []
        for name, speculates in (("plain", False), ("chains of 5", True)):
            speed, ours[batch] = rate(bench, writers.by_engine(speculates, batch), code_prompts(batch, length))
            pair.loaded.model.set_attn_implementation(ATTENTION_NAME)
            figures.append(Figure(f"batch {batch}, ours, {name}", speed, "tokens/s"))
        return figures

    def peer(batch: int, name: str, write: Callable[[Texts], Texts]) -> list[Figure]:
        speed, texts = rate(bench, write, code_prompts(batch, length))
        label = f"batch {batch}, {name}"
        # Smaller sets of prompts are prefixes of larger ones.
        written = ours.get(batch) or max(ours.values(), key=len, default=())
        same = [list(one) == list(other) for one, other in zip(texts, written, strict=False)]
        alike = sum(same) / max(len(same), 1)
        return [Figure(label, speed, "tokens/s"), Figure(f"{label}: texts equal to ours", alike, "x")]

    for batch in batches:
        cases.run(f"batch {batch}, ours", partial(own, batch))
    pair.loaded.model.set_attn_implementation("sdpa")
    lookup = partial(writers.by_generate, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    for name, write in (("generate()", writers.by_generate), ("generate(), prompt lookup", lookup)):
        cases.run(f"batch 1, {name}", partial(peer, 1, name, write))
    for batch in batches:
        name = f"batch {batch}, generate_batch()"
        cases.run(name, partial(peer, batch, "generate_batch()", writers.by_batches))
    pair.loaded.model.set_attn_implementation(ATTENTION_NAME)
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
