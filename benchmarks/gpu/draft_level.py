"""A level of an EAGLE-3 head for the 8B model: head, tree attention, draft logits, candidates, next frontier."""

from functools import partial
from typing import NamedTuple

import torch
from _harness import Bench, Cases, Figure, Result, run
from _model import BLOCK_SIZE, llama_config, random_head, shape_facts
from torch import Tensor

from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.kv.reference import slot_mapping, store_kv
from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.kernels.tree.table import select_frontier
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphPool, GraphRunner, Stage

CONTEXT = 1024
WIDTHS = (1, 8, 16, 32, 64)
TOP_K = 8
OVER_FLOOR = 1.25
"""Target: maximum ratio to the time in which this card copies a level's weights."""
EARLIER_NODES = 64
"""Nodes drafted before the measured level, to which its nodes attend as well."""


class LevelInputs(NamedTuple):
    """Nodes of a level; one sequence per row."""

    token_ids: Tensor
    """int64 [num_reqs, width]."""
    hidden: Tensor
    """[num_reqs, width, hidden_size]."""
    scores: Tensor
    """float32 [num_reqs, width]: cumulative log-probabilities."""


class LevelOutputs(NamedTuple):
    """The next frontier, as wide as this one."""

    token_ids: Tensor
    hidden: Tensor
    scores: Tensor


class Level:
    """A head of random weights with the KV of one sequence's context and earlier nodes."""

    def __init__(self, bench: Bench, context: int) -> None:
        self.bench, self.context, device = bench, context, bench.device
        self.head = random_head(bench)
        self.config = self.head.config
        width = -(-(context + EARLIER_NODES + max(WIDTHS)) // BLOCK_SIZE)
        shape = (1 + width, BLOCK_SIZE, self.config.num_key_value_heads, self.config.head_dim)
        self.caches = tuple(torch.randn(shape, dtype=bench.dtype, device=device) for _ in range(2))
        self.tables = 1 + torch.randperm(width, device=device)[None]

    @property
    def weight_bytes(self) -> int:
        """Bytes a level must read: the layer and the draft vocabulary's matrix.

        Embeddings are a few rows, `fc` is not used.
        """
        skipped = ("embed_tokens.", "fc.")
        return sum(p.numel() * p.element_size() for n, p in self.head.named_parameters() if not n.startswith(skipped))

    def padding_row(self, width: int) -> LevelInputs:
        """Arbitrary tokens: the level leaves no state behind."""
        device = self.bench.device
        return LevelInputs(
            torch.zeros(1, width, dtype=torch.int64, device=device),
            torch.zeros(1, width, self.config.hidden_size, dtype=self.bench.dtype, device=device),
            torch.zeros(1, width, device=device),
        )

    def __call__(self, inputs: LevelInputs) -> LevelOutputs:
        """Expands every node into TOP_K candidates and keeps the best."""
        width, device = inputs.token_ids.shape[1], self.bench.device
        num_new = EARLIER_NODES + width
        new = torch.arange(num_new, device=device)
        num_context = torch.full((1,), self.context, dtype=torch.int64, device=device)
        own = new[EARLIER_NODES:]
        # Each node sees itself and every eighth earlier node: as many as a path through eight levels would contain.
        visible = (new[None] % 8 == own[:, None] % 8) & ((new[None] < EARLIER_NODES) | (new[None] == own[:, None]))
        words = pack_mask(visible[None])
        positions = (self.context + new // 8)[None]
        mapping = slot_mapping(self.tables, self.context + own[None], BLOCK_SIZE)[0]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store_kv(key[0], value[0], *self.caches, mapping)
            return tree_attention(
                query.contiguous(), *self.caches, self.tables, num_context, positions, words, self.config.head_dim**-0.5
            )

        hidden = self.head(
            inputs.token_ids, self.head.feedback(inputs.hidden), self.head.rotary(positions[:, EARLIER_NODES:]), attend
        )
        found = top_candidates(self.head.logits(hidden), self.head.draft_token_ids, TOP_K)
        scores = (inputs.scores[..., None] + found.log_probs).flatten(1)
        chosen = select_frontier(scores, width)
        parents = (chosen // TOP_K)[..., None].expand(-1, -1, hidden.shape[2])
        tokens = found.token_ids.flatten(1).gather(1, chosen)
        return LevelOutputs(tokens, hidden.gather(1, parents), scores.gather(1, chosen))

    def runner(self) -> GraphRunner[LevelInputs, LevelOutputs]:
        """Stage of the draft level, captured on CUDA, widest levels first."""
        pool = GraphPool(CudaGraphDevice(self.bench.device))
        runner = GraphRunner(Stage.DRAFT_PROPOSAL, self, self.padding_row, [Bucket(1, width) for width in WIDTHS], pool)
        pool.capture(runner)
        if pool.stats.failed:
            raise RuntimeError(f"captures failed: {pool.stats.failed}")
        return runner


def measure(bench: Bench) -> Result:
    """Measures batch 1, by width."""
    context = 40 if bench.quick else CONTEXT
    level = Level(bench, context)
    floor_ms = level.weight_bytes / bench.copy_bytes_per_s() * 1e3
    facts = shape_facts(llama_config(bench), bench.dtype) | {
        "head": f"EAGLE-3, draft vocabulary {level.config.draft_vocab_size}, {level.weight_bytes / 1e6:.0f} MB a level",
        "context": f"{context} tokens and {EARLIER_NODES} earlier nodes, batch 1, top {TOP_K} a node",
    }
    cases = Cases(bench, facts)
    cases.run("floor", lambda: [Figure("floor (weights)", floor_ms, "ms")])
    runner = level.runner() if bench.device.type == "cuda" else None

    def one(width: int) -> list[Figure]:
        inputs = level.padding_row(width)
        inputs.token_ids.random_(0, level.config.vocab_size)
        inputs.hidden.normal_()
        if runner is not None:
            runner.run(Bucket(1, width), inputs)

        def step() -> LevelOutputs:
            return level(inputs) if runner is None else runner.replay(Bucket(1, width), 1)

        ms = bench.median_ms(step)
        target = OVER_FLOOR if width == max(WIDTHS) else None
        return [
            Figure(f"level, {width} wide", ms, "ms"),
            Figure(f"level over floor, {width} wide", ms / floor_ms, "x", at_most=target),
        ]

    for width in WIDTHS:
        cases.run(f"{width} wide", partial(one, width))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
