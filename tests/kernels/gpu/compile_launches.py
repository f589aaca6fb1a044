"""Compile every launch of the layer, sampling, tree and state kernels for a capability; prints one JSON object each.

A program of its own, `compile_launches.py CAPABILITY`, without a GPU: the wrappers run on CPU tensors with a driver
that only names the target, and each launch stops after compilation. This reveals code
that the interpreter accepts and the compiler refuses, and arguments that a kernel does not take.
"""

import sys
from importlib import import_module
from pathlib import Path

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.resources import report
from tests.ptx.launch import NamedDriver
from wingbeat.kernels.gpu import embedded as triton_embedded
from wingbeat.kernels.gpu import kv as triton_kv
from wingbeat.kernels.gpu import layer as triton_layer
from wingbeat.kernels.gpu import products as triton_products
from wingbeat.kernels.gpu import round as triton_round
from wingbeat.kernels.gpu.sampling import history as triton_history
from wingbeat.kernels.gpu.sampling import launch as triton_sampling
from wingbeat.kernels.gpu.sampling import noise as triton_noise
from wingbeat.kernels.gpu.tree import candidates as triton_candidates
from wingbeat.kernels.gpu.tree import table as triton_tree_growth
from wingbeat.kernels.gpu.tree import walk as triton_tree
from wingbeat.kernels.layer.draft_rows import Pairs, Projection, Stored
from wingbeat.kernels.layer.reference import Turn
from wingbeat.kernels.round.reference import DraftedFor, PathShape, SlotColumns, TreeRules, WalkedTrees
from wingbeat.kernels.sampling.processors import Histories, LogitBias, LogitProcessors, Penalties
from wingbeat.kernels.tree.results import Coupling, GrownTree
from wingbeat.kernels.tree.table import TreeTable


def compile_only(launch, *, has_fp8: bool):
    """`JITFunction.run` without the run; launches on FP8 are left out if the capability has no such numbers."""

    def run(self, *args, grid, warmup, **options):
        if not has_fp8 and any(getattr(arg, "dtype", None) == torch.float8_e4m3fn for arg in args):
            return None
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        report("", compiled)
        return compiled

    return run


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def launch_sampling(num_rows: int, vocab_size: int) -> None:
    logits, ones, zeros = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16), torch.ones(num_rows), ints(num_rows)
    rows = (ones, zeros, ones, ones, zeros, zeros)
    counts = torch.zeros(2, vocab_size, dtype=torch.int32)
    processors = LogitProcessors(
        Penalties(ones, ones, ones, zeros, counts.bool(), counts, ints(num_rows, 5)),
        LogitBias(torch.zeros(1, vocab_size), zeros),
        torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32),
    )
    for bits in (True, False):
        triton_noise.noise(zeros, zeros, ints(vocab_size), bits=bits)
        triton_noise.noise(zeros, zeros, ints(len(zeros), 16), bits=bits)
    triton_sampling.best_tokens(logits, None)
    triton_sampling.choose_tokens(logits, *rows, any_filtered=False, processors=None, workspace=None)
    triton_sampling.choose_tokens(logits, *rows, any_filtered=True, processors=processors, workspace=None, slots=zeros)
    for listed_only in (False, True):
        triton_sampling.process_logits(logits, *rows[:4], any_filtered=True, processors=None, listed_only=listed_only)


def launch_histories(num_rows: int, width: int, num_columns: int) -> None:
    histories = Histories(ints(num_rows, width), ints(num_rows), torch.ones(num_rows, 8)[:, 6], ints(num_rows))
    in_output = torch.zeros(num_rows, num_columns, dtype=torch.int32)
    triton_history.count_tokens(histories, ints(num_columns), ints(num_columns), in_output.bool(), in_output)


def launch_trees(num_reqs: int, top_k: int, steps: int, num_nodes: int, vocab_size: int) -> None:
    table = TreeTable(num_reqs, top_k, steps, "cpu")
    entries = (table._token_ids, table._parents, table._scores)
    coupling = Coupling(torch.ones(num_reqs), ints(num_reqs), ints(num_reqs))
    logits = torch.zeros(num_reqs, top_k, vocab_size, dtype=torch.bfloat16)
    for noise in (None, coupling):
        triton_candidates.top_candidates(logits, ints(vocab_size), top_k, noise)
    root, children = ints(num_reqs, 1, top_k), ints(num_reqs, top_k, top_k)
    for itself in (None, ints(top_k, 2)):
        level = triton_tree_growth.Level(None, entries, 1, itself)
        frontier = triton_tree_growth.add_level(root, root.float(), level)
        triton_candidates.grown_candidates(logits[:, :1], ints(vocab_size), top_k, coupling, None, level)
        level = triton_tree_growth.Level(frontier, entries, table.level_start(1), itself)
        triton_tree_growth.add_level(children, children.float(), level)
        triton_candidates.grown_candidates(logits, ints(vocab_size), top_k, None, None, level)
    triton_tree_growth.finalize(entries, table._depths, ints(num_reqs), num_nodes)
    nodes = ints(num_reqs, num_nodes)
    triton_tree.walk_tree(nodes, nodes, ints(num_reqs), nodes, steps + 1)
    for pack in (False, True):
        triton_tree.ancestors(nodes, steps, pack=pack)
    triton_tree.path_token_ids(nodes, nodes, steps)
    slots, state = ints(num_reqs), SlotColumns(*(ints(num_reqs) for _ in range(3)), ints(num_reqs, 4096))
    trees = GrownTree(nodes, nodes, nodes, nodes.float(), slots)
    for chains in (False, True):
        grown, rules = DraftedFor(slots, slots), TreeRules(vocab_size, chains)
        triton_round.check_trees(trees, grown, slots, slots.bool(), state, rules)
        for tree, evidence in ((trees, nodes), (None, None)):
            walked = WalkedTrees(slots, slots, tree, nodes if tree else slots, evidence)
            triton_round.settle_paths(walked, state, PathShape(steps + 1, 4096, 16, moves=not chains))
    for tree in (trees, None):
        triton_round.place_nodes(slots, state, tree, 4096, 16)


def launch_layers(num_tokens: int, hidden_size: int, heads: tuple[int, int], dim: int, intermediate_size: int) -> None:
    bf16 = torch.bfloat16
    hidden, weight = torch.zeros(num_tokens, hidden_size, dtype=bf16), torch.zeros(hidden_size, dtype=bf16)
    for residual in (None, hidden):
        triton_layer.add_rms_norm(hidden, residual, weight, 1e-5)
    for then in (None, weight):
        triton_layer.add_norm(hidden, hidden, weight, 1e-5, then)
    triton_layer.norm_parts(hidden, (weight[:64], weight[:128]), 1e-5)
    qkv = hidden.new_zeros(num_tokens, heads[0] + 2 * heads[1], dim)
    turned, cache = hidden.new_zeros(num_tokens, dim), hidden.new_zeros(4, 16, heads[1], dim)
    # Before capability 8.9 Triton compiles nothing that has float8.
    caches = (cache, cache.to(torch.float8_e4m3fn))
    for norm in (None, hidden.new_zeros(dim)):
        for stored in caches:
            for turn in (Turn(), Turn(in_pairs=True), Turn(norm_last=True)):
                given = (qkv, turned, turned, stored, stored, ints(num_tokens), norm, norm, 1e-6, turn)
                triton_layer.rotate_and_store(*given)
    triton_layer.embed_beside(ints(num_tokens), hidden, hidden, (weight, weight), 1e-5)
    triton_layer.embed_beside(
        ints(num_tokens), hidden, hidden[None], (weight, weight), 1e-5, ints(1, num_tokens), normed=False
    )
    for halves in (1, 2):
        triton_layer.rotations(ints(num_tokens), weight.float()[: dim // halves], 1.0, bf16, halves)
    for counted in (None, ints(num_tokens, 8).bool()):
        triton_kv.slot_mapping(ints(num_tokens, 4096), ints(num_tokens, 8), 16, counted)
    wide = hidden.new_zeros(2 * intermediate_size, hidden_size)
    for total, gated in ((None, False), (hidden.new_zeros(num_tokens, 2 * intermediate_size), False), (None, True)):
        for norm in (None, (weight, 1e-5)):
            triton_products.few_rows_product(hidden, wide, None, total, ints(len(wide)).int(), gated, norm)
    narrow = hidden.new_zeros(hidden_size, intermediate_size)
    active = hidden.new_zeros(num_tokens, intermediate_size)
    triton_products.few_rows_product(active, narrow, None, hidden, ints(hidden_size).int(), False)
    num_all, ids = heads[0] + 2 * heads[1], ints(num_tokens)
    projected = hidden.new_zeros(num_all * dim, 2 * hidden_size)
    for features, parents in ((hidden, None), (hidden[None], ids[None])):
        pairs = Pairs(ids, hidden, features, parents)
        norms = () if parents is None else (hidden.new_zeros(dim), hidden.new_zeros(dim), 1e-6)
        projection = Projection(projected, None, (weight, weight), 1e-5, ints(num_all).int(), norms)
        for stored in caches:
            triton_embedded.embed_to_heads(pairs, projection, Stored(turned, turned, stored, stored, ids), bool(norms))
    gate_up = hidden.new_zeros(num_tokens, 2 * intermediate_size)
    triton_layer.silu_mul(gate_up)
    values, gate = (part[None] for part in gate_up.chunk(2, dim=-1))
    for weight, first in ((None, True), (gate[0, 0], True), (gate[0, 0], False)):
        triton_layer.gated_norm(values.float(), gate, weight, 1e-5, intermediate_size, first, 1.0)


def launch_all() -> None:
    """Launch every kernel but attention, in the shapes of several models."""
    launch_layers(60, 4096, (32, 8), 128, 14336)
    launch_layers(1, 2880, (40, 8), 80, 9728)
    launch_sampling(1, 151936)
    launch_sampling(300, 32000)
    launch_histories(4, 8193, 32000)
    launch_histories(1, 32769, 151936)
    launch_trees(4, 10, 7, 60, 32000)
    launch_trees(1, 4, 5, 130, 151936)
    for launches in sorted(Path(__file__).parents[1].glob("*/launches.py")):
        import_module(f"tests.kernels.{launches.parent.name}.launches").launch_all()


if __name__ == "__main__":
    capability = int(sys.argv[1])
    driver.set_active(NamedDriver(capability))
    JITFunction.run = compile_only(JITFunction.run, has_fp8=capability >= 89)
    launch_all()
