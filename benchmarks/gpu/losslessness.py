"""Tokens with and without speculation, and with and without CUDA graphs, on a small model.

In float32 they must be equal. In bfloat16, matrix products of different shapes round ties differently, so the share of
equal sequences is reported, and the distance of the two tokens' logits where sequences first differ.
"""

from functools import partial
from typing import NamedTuple

import torch
from _harness import Bench, Cases, Figure, Result, run
from _model import MAX_DEPTH, Steps, llama_config, random_model, shape_facts
from torch import Tensor

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter
from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.loading.loader import LoadedModel

PROMPT_LENS = (5, 17, 40, 3, 64, 9, 33, 21)
SPECULATION = SpeculationConfig(draft_steps=5, draft_top_k=3, verify_tree_size=16)


class Generated(NamedTuple):
    """Result of one engine."""

    sequences: list[list[int]]
    """Prompts with their continuations."""
    acceptance_length: float


class KnownTextDrafter(Drafter):
    """Drafts the known text behind two wrong siblings on every level; every third tree is wrong."""

    def __init__(self, sequences: list[list[int]], vocab_size: int) -> None:
        self.sequences, self.vocab_size = sequences, vocab_size
        self.num_nodes = self.num_trees = 0

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        self.num_nodes = spec.num_nodes

    def commit(self, batch: DraftBatch) -> None:
        """See `Drafter.commit`; known text needs no state."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter.propose`."""
        slots = batch.proposal_slots.tolist()
        ids = torch.zeros(len(slots), self.num_nodes, dtype=torch.int64)
        parents, depths, num_valid = torch.zeros_like(ids), torch.zeros_like(ids), torch.ones(len(slots)).long()
        parents[:, 0] = -1
        for row, slot in enumerate(slots):
            history = batch.token_ids[slot, : batch.committed_lens[slot]].tolist()
            known = next((text for text in self.sequences if text[: len(history)] == history), history)
            upcoming = known[len(history) :][: min(SPECULATION.draft_steps, (self.num_nodes - 1) // 3)]
            self.num_trees += 1
            ids[row, 0], parent = history[-1], 0
            for depth, token in enumerate(upcoming, start=1):
                first = 3 * depth - 2
                right = (token + 3 * (self.num_trees % 3 == 0)) % self.vocab_size
                ids[row, first : first + 3] = torch.tensor([token + 1, token + 2, right]) % self.vocab_size
                parents[row, first : first + 3], depths[row, first : first + 3] = parent, depth
                parent, num_valid[row] = first + 2, first + 3
        return TokenTree(ids, parents, depths, -depths.float(), num_valid)


def generate(bench: Bench, loaded: LoadedModel, prompts: list[list[int]], drafter: Drafter | None) -> Generated:
    """Greedy continuations by the engine, all prompts concurrently."""
    num_tokens = 16 if bench.quick else 128
    config = EngineConfig(
        max_num_seqs=len(prompts), max_model_len=256, max_num_batched_tokens=64, num_kv_blocks=200,
        speculation=SPECULATION,
    )  # fmt: skip
    engine = build_engine(loaded, config, drafter, InProcessChannel)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, speculation=drafter is not None)
    sequences = [list(prompt) for prompt in prompts]
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), tuple(prompt), params))
    while engine.has_unfinished_requests():
        for output in engine.step():
            sequences[int(output.request_id)] += output.token_ids
    engine.model.remove_taps()
    return Generated(sequences, engine.stats().speculation.acceptance_length)


def first_gap(loaded: LoadedModel, one: list[int], other: list[int]) -> float:
    """Distance of the two tokens' logits where the sequences first differ."""
    at = next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    loaded.model.set_attn_implementation("eager")
    logits = loaded.model(input_ids=torch.tensor([one[:at]], device=loaded.device), use_cache=False).logits[0, -1]
    loaded.model.set_attn_implementation(ATTENTION_NAME)
    return abs(float(logits[one[at]] - logits[other[at]]))


def equal_share(pairs: list[tuple]) -> float:
    """Share of pairs of token lists or tensors that are equal."""
    return sum(bool(torch.equal(a, b)) if isinstance(a, Tensor) else a == b for a, b in pairs) / len(pairs)


def graphs_on_and_off(bench: Bench, loaded: LoadedModel, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Outputs of the captured stages and of the same functions run eagerly: a greedy text, then verified trees."""
    steps = Steps(bench, loaded, 4, 64, num_steps + 16, (1, 2, 3))
    plain, verify = steps.plain_runner([4]), steps.verify_runner([Bucket(4, 16)])
    texts = []
    for decode in (lambda inputs: plain.run(Bucket(4), inputs), steps.decode):
        inputs, text = steps.random_inputs(4, 1), []
        inputs.token_ids.copy_(torch.arange(4)[:, None])
        for _ in range(num_steps):
            text.append(decode(inputs).token_ids.clone())
            inputs = inputs._replace(token_ids=text[-1][:, None], num_context=inputs.num_context + 1)
        texts.append(torch.stack(text))
    # Drafts that repeat the decoded text are accepted in part, so that paths of several lengths are walked and moved.
    trees = steps.random_inputs(4, 16)
    trees.token_ids[:, 0] = torch.arange(4)
    trees.token_ids[:, 3] = texts[1][0]
    captured = [part.clone() for part in verify.run(Bucket(4, 16), trees)]
    return [tuple(texts), *zip(captured, steps.verify(trees), strict=True)]


def measure(bench: Bench) -> Result:
    """Measures eight prompts of 3 to 64 tokens, with 128 new tokens each."""
    torch.set_float32_matmul_precision("highest")
    hidden = 64 if bench.quick else 512
    shape = dict(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4, vocab_size=997)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=max(hidden // 8, 16))
    # Weights are large enough for decisive logits, so that rounding decides nothing in float32.
    config = llama_config(bench, **shape, **heads, initializer_range=1.6 * hidden**-0.5)
    prompts = [torch.randint(0, 997, (length,)).tolist() for length in PROMPT_LENS]
    facts = shape_facts(config, torch.float32) | {
        "workload": f"{len(prompts)} prompts, greedy; trees of {SPECULATION.num_nodes} nodes, right but for every "
        f"third; at most {MAX_DEPTH} levels in the graph stages",
    }
    cases = Cases(bench, facts)

    def one(dtype: torch.dtype, name: str) -> list[Figure]:
        figures = []
        torch.manual_seed(0)
        loaded = random_model(bench, config, dtype)
        plain = generate(bench, loaded, prompts, None)
        speculative = generate(bench, loaded, prompts, KnownTextDrafter(plain.sequences, loaded.vocab_size))
        pairs = list(zip(plain.sequences, speculative.sequences, strict=True))
        exact = 1.0 if dtype == torch.float32 else None
        figures.append(Figure(f"{name}: equal sequences, speculation on and off", equal_share(pairs), "x", None, exact))
        figures.append(Figure(f"{name}: acceptance length", speculative.acceptance_length, "tokens", None, 2.0))
        share = equal_share(graphs_on_and_off(bench, loaded, 4 if bench.quick else 64))
        figures.append(Figure(f"{name}: equal outputs, graphs on and off", share, "x", None, 1.0))
        gaps = [first_gap(loaded, one, other) for one, other in pairs if one != other]
        cases.result.details[f"{name}_logit_gaps"] = gaps
        if dtype == torch.bfloat16:
            figures.append(Figure(f"{name}: largest logit gap at a first difference", max(gaps, default=0.0), "logits"))
        return figures

    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        cases.run(name, partial(one, dtype, name))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
