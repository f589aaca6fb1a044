"""What a draft takes on a CPU by kind of head and size: EAGLE's pass for each level beside one pass for all of them.

    .venv/bin/python benchmarks/draft_times.py [--hidden 160 1024 2048] [--levels 7]

Random heads, whose weights bfloat16 holds as it holds those of checkpoints, draft for one sequence: four decided tokens
are taken in, then a chain is drafted. In process, one thread; before each pass memory is read as a verifier's pass
would read it. The heads take turns, and figures are medians.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from local_engine import quiet
from report import Report, Table, machine_facts, middle
from torch import nn

from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.kernel_drafter import KernelDrafter
from wingbeat.runtime.drafters.one_pass import OnePassDrafter
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.families import OnePassFamily
from wingbeat.runtime.heads.one_pass.config import LatticeConfig, LayerMask, MarkovConfig, OnePassConfig, Slots
from wingbeat.runtime.heads.one_pass.head import OnePassHead
from wingbeat.runtime.protocol.messages import ChannelSpec

HEAD_DIM, CONTEXT, DECIDED = 32, 256, 4
TAPS = (2, 8, 16)
VOCABULARIES = {160: 4096}
"""By hidden size; others have `VOCABULARY`."""
VOCABULARY = 32000
EVICTED_BYTES = 1 << 26


class Timed(NamedTuple):
    """Milliseconds of one head's passes, one by one."""

    commit_ms: list[float]
    tree_ms: list[float]
    num_weights: int
    """Of its products."""


def shape_of(hidden: int, num_kv_heads: int) -> dict:
    """What heads of one size have in common."""
    vocab = VOCABULARIES.get(hidden, VOCABULARY)
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "target_hidden_size": hidden,
        "tap_layers": TAPS,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
    }


def heads_of(hidden: int, levels: int) -> dict[str, nn.Module]:
    """Random heads by name."""
    shape = shape_of(hidden, 1 if hidden < 1024 else 4)

    def block(family: OnePassFamily, num_layers: int, slots: Slots, **fields: object) -> OnePassHead:
        size = levels + (slots is Slots.FILL_IN)
        masks = (LayerMask(),) * num_layers
        own = {"family": family, "slots": slots, "block_size": size, "masks": masks, "mask_token_id": 1}
        return OnePassHead(OnePassConfig(**own, **shape, **fields))

    rank = min(256, hidden // 10)
    pairs = {"lattice": LatticeConfig(group_size=16, rank=rank)}, {"markov": MarkovConfig(rank)}
    return {
        "EAGLE-3, 1 layer": EagleHead(EagleHeadConfig(**shape)),
        "DFlash, 1 layer": block(OnePassFamily.DFLASH, 1, Slots.FILL_IN),
        "DFlash, 5 layers": block(OnePassFamily.DFLASH, 5, Slots.FILL_IN),
        "DFlash2, 2 layers": block(OnePassFamily.DFLASH2, 2, Slots.FILL_IN, **pairs[0]),
        "DSpark, 2 layers": block(OnePassFamily.DSPARK, 2, Slots.SHIFT, **pairs[1]),
    }


@torch.inference_mode()
def drafter_of(head: nn.Module, speculation: SpeculationConfig) -> KernelDrafter:
    """A drafter of one sequence."""
    for parameter in head.parameters():
        values = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
        parameter.copy_((values + 1 if parameter.dim() == 1 else values).bfloat16())
    kind = EagleDrafter if isinstance(head, EagleHead) else OnePassDrafter
    drafter = kind(head, speculation)
    config = EngineConfig(max_num_seqs=1, max_model_len=2 * CONTEXT, speculation=speculation)
    spec = ChannelSpec.of(config, taps_size=head.taps_size, num_blocks=1 + config.max_blocks_per_seq)
    drafter.resize(spec, 1, spec.num_blocks)
    return drafter


def batch_of(drafter: KernelDrafter) -> DraftBatch:
    """Decided tokens at the end of a context, behind which a chain is wanted."""
    none, slots = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    taps_size, length = drafter.head.taps_size, torch.tensor([CONTEXT])
    return DraftBatch(
        decode_slots=slots,
        decode_positions=length - 1 - DECIDED,
        decode_num_tokens=torch.tensor([DECIDED]),
        decode_token_ids=torch.full((1, DECIDED), 5),
        decode_taps=torch.randn(1, DECIDED, taps_size),
        chunk_slots=[],
        chunk_positions=[],
        chunk_lens=[],
        chunk_next_token_ids=none,
        chunk_taps=torch.zeros(0, taps_size),
        proposal_slots=slots,
        epochs=slots,
        committed_lens=length,
        block_tables=1 + torch.arange(CONTEXT // drafter.pool.block_size)[None],
        temperatures=torch.zeros(1),
        seeds=slots,
        token_ids=torch.full((1, CONTEXT), 5),
        max_committed_len=CONTEXT,
    )


@torch.inference_mode()
def measure(hidden: int, levels: int, turns: int) -> dict[str, Timed]:
    """Passes of every head of one size, in turns; the first turn is not counted."""
    speculation, evicted = SpeculationConfig(levels, 1, levels + 1), torch.zeros(EVICTED_BYTES, dtype=torch.uint8)
    drafters = {name: drafter_of(head, speculation) for name, head in heads_of(hidden, levels).items()}
    batches, found = {name: batch_of(drafter) for name, drafter in drafters.items()}, {}
    for name, drafter in drafters.items():
        linears = [module for module in drafter.head.modules() if isinstance(module, nn.Linear)]
        found[name] = Timed([], [], sum(linear.in_features * linear.out_features for linear in linears))
    for turn in range(turns + 1):
        for name, drafter in drafters.items():
            parts = (partial(drafter.commit, batches[name]), partial(drafter.propose, batches[name]))
            for run, into in zip(parts, found[name][:2], strict=True):
                evicted.add_(1)
                started = time.perf_counter()
                run()
                if turn:
                    into.append(1e3 * (time.perf_counter() - started))
    return found


def table(hidden: int, levels: int, timed: dict[str, Timed]) -> Table:
    """One row per head; the first is EAGLE's."""
    totals = {name: middle(one.commit_ms) + middle(one.tree_ms) for name, one in timed.items()}
    eagle = next(iter(totals.values()))
    rows = [
        (
            name,
            f"{one.num_weights / 1e6:.2f}",
            f"{middle(one.commit_ms):.3f}",
            f"{middle(one.tree_ms):.3f}",
            f"{totals[name]:.3f}",
            f"{totals[name] / eagle:.2f}",
        )
        for name, one in timed.items()
    ]
    columns = ("head", "weights, M", "take in, ms", "draft, ms", "both, ms", "of EAGLE-3's")
    return Table(f"Hidden size {hidden}, chains of {levels}", columns, rows, "Medians.")


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[160, 1024, 2048], help="sizes, multiples of 32")
    parser.add_argument("--levels", type=int, default=7, help="of the chains, and what blocks predict")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="one turn of the smallest size: measures nothing")
    parser.add_argument("--output", type=Path, help="file for the figures")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.turns = args.hidden[:1], 1
    quiet()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timed = {hidden: measure(hidden, args.levels, args.turns) for hidden in args.hidden}
    tables = [table(hidden, args.levels, of_size) for hidden, of_size in timed.items()]
    facts = machine_facts() | {"workload": f"one sequence of {CONTEXT} tokens, {DECIDED} decided, {args.turns} turns"}
    figures = {str(hidden): {name: one._asdict() for name, one in of_size.items()} for hidden, of_size in timed.items()}
    report = Report("Draft times", facts, tables, figures)
    report.finish(args, "draft_times")


if __name__ == "__main__":
    main()
