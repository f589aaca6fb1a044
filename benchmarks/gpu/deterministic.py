"""Deterministic mode on this card: texts of 256 sequences by hash, and the cost of the mode at the 8B shape.

Texts: a small model in bfloat16 answers greedy and sampled requests plainly at 64 sequences, then at 1, 16 and 64
sequences plainly and in trees of drafts known to be right. In the usual mode the number of equal texts is only
reported. Cost: rounds of the 8B shape, plain and chains at forced acceptance, in both modes.
"""

from functools import partial
from hashlib import sha256

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, engine_config, facts, new_drafter, speed, too_large
from _harness import Bench, Cases, Figure, Result, run
from _model import BLOCK_SIZE, draw_weights, llama_config, shape_facts
from losslessness import KnownTextDrafter
from transformers import AutoModelForCausalLM, LlamaConfig

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model

MODES = {"usual": False, "deterministic": True}
BATCHES = (1, 16, 64)
MOST_COST = {1: 1.25, 64: 1.35}
"""Targets: maximum ratio to a round in the usual mode, by number of sequences."""
SHAPES = {
    "tree": SpeculationConfig(draft_steps=5, draft_top_k=3, verify_tree_size=16),
    "plain": SpeculationConfig(draft_steps=1, draft_top_k=1, verify_tree_size=2),
}
KINDS = ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 50, "top_p": 0.9}, {"temperature": 1.0})


def load(bench: Bench, config: LlamaConfig, deterministic: bool) -> LoadedModel:
    """Creates a verifier with random weights, drawn on the device; the same weights in both modes."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draw_weights(model)
    return prepare_model(model, "random", deterministic=deterministic)


def texts(bench: Bench, loaded: LoadedModel, batch: int, shape: str, known: list[list[int]] | None) -> list[list[int]]:
    """Prompts with their continuations, for requests that join and leave."""
    count = 6 if bench.quick else 256
    config = EngineConfig(
        max_num_seqs=batch,
        max_model_len=192,
        max_num_batched_tokens=64 + batch,
        block_size=BLOCK_SIZE,
        num_kv_blocks=16 + 10 * batch,
        speculation=SHAPES[shape],
        deterministic=loaded.deterministic,
    )
    drafter = None if known is None else KnownTextDrafter(known, loaded.vocab_size)
    engine = build_engine(loaded, config, drafter, InProcessChannel)
    written = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(0, loaded.vocab_size, (3 + index * 7 % 90,), generator=generator).tolist()
        kind = KINDS[index % len(KINDS)]
        params = SamplingParams(
            max_tokens=8 + index % 57, seed=index, ignore_eos=True, speculation=known is not None, **kind
        )
        engine.add_request(Request(str(index), tuple(prompt), params))
        written.append(prompt)
    while engine.has_unfinished_requests():
        for output in engine.step():
            written[int(output.request_id)] += output.token_ids
    engine.model.remove_taps()
    return written


def digest(text: list[int]) -> str:
    """Hash of a prompt with its continuation."""
    return sha256(repr(text).encode()).hexdigest()


def equal_texts(bench: Bench, config: LlamaConfig, mode: str) -> list[Figure]:
    """Share of the texts written plainly at 64 sequences that are equal in every other way."""
    loaded = load(bench, config, MODES[mode])
    plain, figures = texts(bench, loaded, 64, "plain", None), []
    digests = [digest(text) for text in plain]
    for batch in BATCHES:
        for shape, known in (("plain", None), ("tree", plain)):
            written = texts(bench, loaded, batch, shape, known)
            equal = sum(digest(text) == one for text, one in zip(written, digests, strict=True))
            least = float(len(plain)) if MODES[mode] else None
            name = f"{mode}, {shape} at {batch}: equal texts of {len(plain)}"
            figures.append(Figure(name, equal, "texts", None, least))
    return figures


def cost(bench: Bench, config: LlamaConfig, rounds: dict[str, float], mode: str) -> list[Figure]:
    """Measures rounds of one mode, and stores them in `rounds`."""
    loaded, figures = load(bench, config, MODES[mode]), []
    for batch in BATCHES[: 1 if bench.quick else None]:
        case = Case("chain of 7", batch, CHAIN, ForcedAcceptance.length(CHAIN_LENGTH))
        if too_large(bench, loaded, case) is not None:
            continue
        limits = engine_config(bench, case, deterministic=loaded.deterministic)
        drafter = new_drafter(bench, case.speculation)
        engine = build_engine(loaded, limits, drafter, partial(InProcessChannel, device=bench.device))
        for what, drafted in (("plain", False), ("chain of 7", True)):
            name = f"{what} at {batch}"
            rounds[f"{mode}, {name}"] = found = speed(bench, engine, drafted).round_ms
            figures.append(Figure(f"{mode}, {name}: round", found, "ms"))
            usual = rounds.get(f"usual, {name}")
            if MODES[mode] and usual is not None:
                figures.append(Figure(f"{name}: deterministic over usual", found / usual, "x", MOST_COST.get(batch)))
        engine.model.remove_taps()
    return figures


@torch.no_grad()
def measure(bench: Bench) -> Result:
    """Measures texts first, then costs; figures are reported as they are measured."""
    hidden = 64 if bench.quick else 1024
    shape = dict(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, vocab_size=997)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=max(hidden // 8, 16))
    # Logits of which many are about equal, so that a single differing bit soon changes a token.
    small, large = llama_config(bench, **shape, **heads, initializer_range=0.02), llama_config(bench)
    measured = Cases(bench, shape_facts(large, torch.bfloat16) | facts(bench), {"forced_acceptance": True})
    rounds: dict[str, float] = {}
    for mode in reversed(MODES):
        measured.run(f"texts, {mode}", partial(equal_texts, bench, small, mode))
    for mode in MODES:
        measured.run(f"cost, {mode}", partial(cost, bench, large, rounds, mode))
    return measured.result


if __name__ == "__main__":
    run(__doc__, measure)
