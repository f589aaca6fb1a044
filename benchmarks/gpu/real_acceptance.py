"""Real text and real acceptance at the cost of an 8B: the demo pair widened to the 8B shape (`_wide.py`).

Nothing is forced: prompts are files of the standard library that the demo pair was not trained on, drafts are the
head's, and acceptance follows the verifier's text. Measures plain decoding, chains of 3, 5 and 7, the tree that a GPU
drafts by default, and its adaptive form. Activations are mostly zeros, which draw less power than real ones: products
of many rows may look up to a tenth faster; memory-bound rounds do not.
"""

from functools import partial
from typing import Any

import torch
from _engine import Case, Speed, facts, speed, too_large, workload
from _harness import Bench, Cases, Figure, Result, run
from _model import llama_config, shape_facts
from _wide import WidePair, widened
from engine_speed import engine_of

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.corpus import read_text, split_files
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.llm import LLM, build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer

BATCHES = (1, 16, 64)
CHECKED_PROMPTS, CHECKED_TOKENS, CHECKED_LENGTH = 4, 96, 64
"""Prompts, tokens and prompt length for comparing the wide pair's texts with the narrow pair's."""
_TOY = {
    "vocab_size": 4160,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 25,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Toy shape that differs from the demo pair in hidden size, heads, layers and vocabulary."""


def chain(length: int) -> SpeculationConfig:
    """Chains of `length` drafts."""
    return SpeculationConfig(draft_steps=length, draft_top_k=1, verify_tree_size=length + 1)


SHAPES = {
    "chain of 5": chain(5),
    "tree of 16": SpeculationConfig.default("cuda", adaptive=False),
    "adaptive": SpeculationConfig.default("cuda"),
    "chain of 3": chain(3),
    "chain of 7": chain(7),
}
"""Draft shapes, most important first."""


def wide_config(bench: Bench):
    """The 8B shape; a toy shape in a quick run."""
    return llama_config(bench, **_TOY) if bench.quick else llama_config(bench)


def code_prompts(count: int, length: int) -> list[list[int]]:
    """Token ids of held-out code: the beginnings of files first, then later pieces of the longer files."""
    tokenizer, root = Tokenizer.load(demo_pair().verifier), stdlib_root()
    texts = [tokenizer.encode(read_text(path) or "") for path in split_files(root).held_out]
    pieces = [
        ids[start : start + length]
        for start in range(0, max(map(len, texts)), 2 * length)
        for ids in texts
        if len(ids) >= start + length
    ]
    if len(pieces) < count:
        raise ValueError(f"{root} has {len(pieces)} held-out prompts of {length} tokens, {count} are wanted")
    return pieces[:count]


def wide_pair(bench: Bench) -> WidePair:
    """The demo pair at the 8B shape, or at a toy shape."""
    [text] = code_prompts(1, 512)
    return widened(bench, demo_pair(), wide_config(bench), 3104 if bench.quick else 32000, text)


def drafter_of(bench: Bench, pair: WidePair, shape: SpeculationConfig) -> EagleDrafter:
    """Drafter with the wide head."""
    return EagleDrafter(pair.head, shape, CudaGraphDevice(bench.device) if bench.device.type == "cuda" else None)


def texts_of(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy texts of `num_tokens` tokens, with drafts."""
    params, texts = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True), [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), tuple(prompt), params))
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[int(output.request_id)] += output.token_ids
    return texts


def same_function(bench: Bench, pair: WidePair) -> list[Figure]:
    """Compares texts and acceptance of the wide pair with the narrow pair's; equal in float32."""
    prompts, shape = code_prompts(CHECKED_PROMPTS, CHECKED_LENGTH), chain(5)
    room = CHECKED_LENGTH + CHECKED_TOKENS + shape.num_nodes
    config = EngineConfig(
        max_num_seqs=CHECKED_PROMPTS, max_model_len=room, num_kv_blocks=2 + CHECKED_PROMPTS * (2 + room // 16),
        enable_prefix_caching=False, speculation=shape,
    )  # fmt: skip
    channel = partial(InProcessChannel, device=bench.device)
    dtype = str(bench.dtype).removeprefix("torch.")
    narrow = LLM(*demo_pair(), config, channel, dtype=dtype, device=bench.device.type).engine
    wide = engine_with(bench, pair, config)
    found = [texts_of(engine, prompts, CHECKED_TOKENS) for engine in (narrow, wide)]
    lengths = [engine.stats().speculation.acceptance_length for engine in (narrow, wide)]
    for engine in (narrow, wide):
        engine.model.remove_taps()
    exact = bench.dtype == torch.float32
    same = sum(one == other for one, other in zip(*found, strict=True)) / len(prompts)
    ratio = lengths[1] / lengths[0]
    return [
        Figure("texts equal to the narrow pair's", same, "x", at_least=1.0 if exact else None),
        Figure("acceptance length of the narrow pair", lengths[0], "tokens"),
        Figure("acceptance length over the narrow pair's", ratio, "x", at_least=0.999 if exact else 0.9),
    ]


def engine_with(bench: Bench, pair: WidePair, config: EngineConfig) -> Engine:
    """Engine with the wide pair in one process."""
    drafter = drafter_of(bench, pair, config.speculation)
    return build_engine(pair.loaded, config, drafter, partial(InProcessChannel, device=bench.device))


class Rounds:
    """Measures engines with the wide pair."""

    def __init__(self, bench: Bench, pair: WidePair) -> None:
        self.bench, self.pair = bench, pair
        self.plain: dict[int, Speed] = {}
        """Plain speed by batch size."""

    def measure(self, name: str, batch: int) -> tuple[list[Figure], dict[str, Any]]:
        """Measures an engine's rounds, and plain rounds if that batch size has none yet."""
        bench, shape, label = self.bench, SHAPES[name], f"batch {batch}, {name}"
        case = Case(name, batch, shape, None)
        why_not = too_large(bench, self.pair.loaded, case)
        if why_not is not None:
            return [], {label: why_not}
        engine = engine_of(bench, self.pair.loaded, case, drafter=drafter_of(bench, self.pair, shape))
        prompts, figures = code_prompts(batch, workload(bench)[0]), []
        if batch not in self.plain:
            self.plain[batch] = plain = speed(bench, engine, False, prompts=prompts)
            figures += [
                Figure(f"batch {batch}, plain: speed", plain.tokens_per_s, "tokens/s"),
                Figure(f"batch {batch}, plain: round", plain.round_ms, "ms"),
            ]
        drafted, plain = speed(bench, engine, True, prompts=prompts), self.plain[batch]
        engine.model.remove_taps()
        stats = engine.stats()
        length = drafted.round_ms * drafted.tokens_per_s / 1e3 / batch
        figures += [
            Figure(f"{label}: speed", drafted.tokens_per_s, "tokens/s"),
            Figure(f"{label}: over plain", drafted.tokens_per_s / plain.tokens_per_s, "x"),
            Figure(f"{label}: round", drafted.round_ms, "ms"),
            Figure(f"{label}: tokens a round", length, "tokens"),
            Figure(f"{label}: texts equal to plain decoding's", _alike(drafted, plain), "x"),
        ]
        return figures, {
            label: {
                "accepted_per_position": stats.speculation.num_accepted_tokens_per_pos,
                "num_drafts": stats.speculation.num_drafts,
                "decisions": {} if stats.policy is None else stats.policy.decisions,
                "graphs_failed": [] if stats.graphs is None else [str(one) for one in stats.graphs.failed],
            }
        }


def _alike(drafted: Speed, plain: Speed) -> float:
    """Share of the texts that are equal up to the end of the shorter one."""
    pairs = zip(drafted.texts, plain.texts, strict=True)
    return sum(all(a == b for a, b in zip(one, other, strict=False)) for one, other in pairs) / len(plain.texts)


@torch.no_grad()
def measure(bench: Bench) -> Result:
    """Measures every batch size and shape; figures are reported as they are measured."""
    config = wide_config(bench)
    told = shape_facts(config, bench.dtype) | facts(bench)
    told["model"] = told["model"].replace("random", "the demo pair's") + ", padded by zeros and random weights"
    told["workload"] = told["workload"].replace("random tokens", "tokens of held-out code")
    told["acceptance"] = "real: the head's drafts against the verifier's own text"
    cases = Cases(bench, told)
    pair = wide_pair(bench)
    rounds = Rounds(bench, pair)

    def one(name: str, batch: int) -> list[Figure]:
        figures, details = rounds.measure(name, batch)
        cases.result.details.update(details)
        return figures

    cases.run("the narrow pair's function", partial(same_function, bench, pair))
    for batch in (1, 2) if bench.quick else BATCHES:
        for name in ("chain of 5", "adaptive") if bench.quick else SHAPES:
            cases.run(f"batch {batch}, {name}", partial(one, name, batch))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
