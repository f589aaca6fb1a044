"""A drafter's whole pass for the 8B model: commit of the last round's path and every level of a chain or a tree."""

from functools import partial
from typing import NamedTuple

import torch
from _harness import Bench, Cases, Figure, Result, run
from _model import BLOCK_SIZE, llama_config, random_head, shape_facts

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.protocol.messages import ChannelSpec

CONTEXT = 1024
BATCH_SIZES = (1, 8, 32)
OVER_FLOOR = 1.3
"""Target for a level at batch 1: maximum ratio to the time in which this card copies the weights that a level reads."""


class Shape(NamedTuple):
    """Shape of the draft."""

    name: str
    speculation: SpeculationConfig


SHAPES = (
    Shape("chain 7", SpeculationConfig(draft_steps=7, draft_top_k=1, verify_tree_size=8)),
    Shape("tree 7x8", SpeculationConfig(draft_steps=7, draft_top_k=8, verify_tree_size=64)),
)


class Pass:
    """A drafter with the batch of one round.

    Args:
        context: committed tokens of every sequence, of random content.
        captured: replays CUDA graphs; otherwise each operation is launched by itself.
    """

    def __init__(
        self, bench: Bench, head: EagleHead, speculation: SpeculationConfig, num_reqs: int, context: int, captured: bool
    ) -> None:
        graph_device = CudaGraphDevice(bench.device) if captured else None
        self.drafter = EagleDrafter(head, speculation, graph_device)
        self.drafter.fixed_shapes = True
        width = -(-(context + speculation.num_nodes) // BLOCK_SIZE)
        spec = ChannelSpec(
            num_slots=num_reqs,
            num_nodes=speculation.num_nodes,
            max_path=speculation.max_path,
            max_prefill_tokens=1,
            taps_size=head.fc.in_features,
            max_model_len=context,
            max_blocks_per_seq=width,
            block_size=BLOCK_SIZE,
            num_blocks=1 + num_reqs * width,
            taps_dtype=bench.dtype,
        )
        self.drafter.resize(spec, spec.num_slots, spec.num_blocks)
        stats = self.drafter.graph_stats
        if stats is not None and stats.failed:
            raise RuntimeError(f"captures failed: {stats.failed}")
        slots, device, num_tokens = torch.arange(num_reqs), bench.device, min(3, spec.max_path)
        tables = 1 + torch.randperm(num_reqs * width, device=device).view(num_reqs, width)
        vocab_size = head.config.vocab_size
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.batch = DraftBatch(
            decode_slots=slots,
            decode_positions=torch.full((num_reqs,), context - 1 - num_tokens, device=device),
            decode_num_tokens=torch.full((num_reqs,), num_tokens, device=device),
            decode_token_ids=torch.randint(vocab_size, (num_reqs, spec.max_path), device=device),
            decode_taps=torch.randn(num_reqs, spec.max_path, spec.taps_size, dtype=bench.dtype, device=device),
            chunk_slots=[],
            chunk_positions=[],
            chunk_lens=[],
            chunk_next_token_ids=none,
            chunk_taps=torch.zeros(0, spec.taps_size, dtype=bench.dtype, device=device),
            proposal_slots=slots,
            epochs=torch.zeros(num_reqs, dtype=torch.int64, device=device),
            committed_lens=torch.full((num_reqs,), context, device=device),
            block_tables=tables,
            temperatures=torch.zeros(num_reqs, device=device),
            seeds=torch.zeros(num_reqs, dtype=torch.int64, device=device),
            token_ids=torch.randint(vocab_size, (num_reqs, context + 1), device=device),
            max_committed_len=context,
        )

    @torch.inference_mode()
    def __call__(self, depth: int) -> None:
        """Runs one pass of `depth` levels."""
        self.drafter.draft(self.batch._replace(max_levels=depth))


def measure(bench: Bench) -> Result:
    """Measures by shape and batch size, with graphs on and off; the time of a level is the slope over depths."""
    on_gpu, context = bench.device.type == "cuda", 40 if bench.quick else CONTEXT
    head = random_head(bench)
    facts = shape_facts(llama_config(bench), bench.dtype) | {
        "head": f"EAGLE-3, draft vocabulary {head.config.draft_vocab_size}",
        "workload": f"{context} committed tokens a sequence, 3 of them new, greedy",
    }
    skipped = ("embed_tokens.", "fc.")
    read = sum(p.numel() * p.element_size() for n, p in head.named_parameters() if not n.startswith(skipped))
    floor_ms = read / bench.copy_bytes_per_s() * 1e3
    cases = Cases(bench, facts)

    def one(shape: Shape, num_reqs: int, captured: bool, label: str) -> list[Figure]:
        deepest = shape.speculation.max_path - 1
        each = Pass(bench, head, shape.speculation, num_reqs, context, captured)
        shallow, deep = (bench.median_ms(partial(each, depth)) for depth in (1, deepest))
        level = max(deep - shallow, 0.0) / (deepest - 1)
        target = OVER_FLOOR if captured and num_reqs == 1 else None
        return [
            Figure(f"{label}: round", deep, "ms"),
            Figure(f"{label}: level", level, "ms"),
            Figure(f"{label}: level over floor", level / floor_ms, "x", at_most=target),
        ]

    for shape in SHAPES:
        for num_reqs in (1, 2) if bench.quick else BATCH_SIZES:
            for captured in (True, False) if on_gpu else (False,):
                label = f"{shape.name}, batch {num_reqs}, {'graphs' if captured else 'eager'}"
                cases.run(label, partial(one, shape, num_reqs, captured, label))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
