"""Compares each kernel with its torch reference on the device that will run it, in small cases.

An untested compiler, driver or device can miscompile a kernel in ways that the test suite never saw. The reference runs
on the CPU with the same inputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.kv.reference import move_kv, slot_mapping, store_kv
from wingbeat.kernels.layer.reference import (
    add_norm,
    add_rms_norm,
    embed_beside,
    gated_norm,
    norm_parts,
    rotate_and_store,
    rotations,
    silu_mul,
)
from wingbeat.kernels.parts import hooks, merged_of
from wingbeat.kernels.round.reference import (
    DraftedFor,
    PathShape,
    SlotColumns,
    TreeRules,
    WalkedTrees,
    check_trees,
    place_nodes,
    settle_paths,
)
from wingbeat.kernels.sampling.history import count_tokens
from wingbeat.kernels.sampling.noise import gumbel_noise, noise_bits
from wingbeat.kernels.sampling.processors import Histories
from wingbeat.kernels.sampling.reference import best_tokens, choose_tokens, process_logits
from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.kernels.tree.forced import Draws
from wingbeat.kernels.tree.reference import ancestor_words, pack_mask, path_token_ids, walk_tree
from wingbeat.kernels.tree.results import GrownTree
from wingbeat.kernels.tree.table import TreeTable

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability on which kernels may use float8."""
_ROUNDING = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Maximum deviation from the reference, relative to its largest magnitude."""
_MOST_OTHER = 0.1
"""Maximum share of chosen tokens that may differ, because two tokens can be equally likely up to rounding."""


class Difference(NamedTuple):
    """A kernel whose result differs from its reference's."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"kernel {self.name}: {self.reason}"


def differences(device: torch.device, shape: Shape) -> list[Difference]:
    """Returns the kernels that fail to compile, raise an exception, or differ from their references, in the order of
    `CASES`.

    float8 is not tested on devices without float8.
    """
    found = []
    without_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY
    shape = shape._replace(fp8_cache=shape.fp8_cache and not without_fp8)
    for name, run in CASES.items():
        try:
            ours, expected = ([part.cpu() for part in run(torch.device(where), shape)] for where in (device, "cpu"))
        except Exception as error:  # compilers, linkers and drivers may raise any exception
            found.append(Difference(name, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"))
            continue
        found += [Difference(name, reason) for reason in _wrong(ours, expected, shape.dtype, name)[:1]]
    return found


def replace_wrong(device: torch.device, shape: Shape) -> list[Difference]:
    """Replaces kernels that differ from their references by those references, and returns the differences."""
    found = differences(device, shape)
    choice.replace(*(difference.name for difference in found))
    return found


def _wrong(ours: list[Tensor], expected: list[Tensor], dtype: torch.dtype, name: str) -> list[str]:
    reasons = []
    for mine, its in zip(ours, expected, strict=True):
        if its.is_floating_point():
            mine, its = mine.float(), its.float()  # noqa: PLW2901
            finite = its.isfinite()
            same = torch.equal(finite, mine.isfinite())
            off = (mine - its)[finite].abs().max().item() if same and finite.any() else 0.0
            if not same or off > _ROUNDING[dtype] * max(its[finite].abs().max().item(), 1e-6):
                reasons.append("infinities differ" if not same else f"differs from its reference by {off:.3g}")
        else:
            other = (mine != its).float().mean().item()
            if other > (_MOST_OTHER if name == "choose_tokens" else 0.0):
                reasons.append(f"{other:.0%} of its values differ from those of its reference")
    return reasons


def _caches(shape: Shape, device: torch.device, num_blocks: int) -> tuple[Tensor, Tensor]:
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    kept = torch.float8_e4m3fn if shape.fp8_cache else shape.dtype
    return tuple(random_numbers(seed, *size, dtype=shape.dtype).to(kept).to(device) for seed in (1, 2))


_NUM_REQS, _NUM_NODES, _CONTEXT = 2, 16, 300
_PARENTS = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 8, 8, 9, 11, 14]] * _NUM_REQS)
_TOKENS = torch.arange(_NUM_NODES).expand(_NUM_REQS, -1).contiguous() % 5 + 3


def _attention(device: torch.device, shape: Shape) -> list[Tensor]:
    """Attention of single roots, trees and a prompt chunk, for every tile height, with one split and with several."""
    width = -(-(_CONTEXT + 128) // shape.block_size)
    keys, values = _caches(shape, device, 1 + _NUM_REQS * width)
    tables = (1 + torch.arange(_NUM_REQS * width)).view(_NUM_REQS, width).to(device)
    context = torch.tensor([_CONTEXT, 17], device=device)
    words = ancestor_words(_PARENTS).to(device)
    outs = []
    for num_query, mask in ((1, None), (_NUM_NODES, words), (100, None)):
        size = (_NUM_REQS, num_query, shape.num_heads, shape.head_dim)
        query = random_numbers(3 + num_query, *size, dtype=shape.dtype).to(device)
        positions = context[:, None] + torch.arange(num_query, device=device)
        scaling = shape.head_dim**-0.5
        outs.append(tree_attention(query, keys, values, tables, context, positions, mask, scaling))
    return outs


def _slots(device: torch.device, count: int) -> Tensor:
    return (20 + 3 * torch.arange(count)).to(device)


def _store(device: torch.device, shape: Shape) -> list[Tensor]:
    keys, values = _caches(shape, device, 8)
    size = (_NUM_NODES, shape.num_kv_heads, shape.head_dim)
    key, value = (random_numbers(seed, *size, dtype=shape.dtype).to(device) for seed in (4, 5))
    store_kv(key, value, keys, values, _slots(device, _NUM_NODES))
    return [keys.float(), values.float()]


def _move(device: torch.device, shape: Shape) -> list[Tensor]:
    layers = [_caches(shape, device, 8) for _ in range(2)]
    move_kv(layers, _slots(device, 5) + 1, _slots(device, 5))
    return [part.float() for layer in layers for part in layer]


def _norm(device: torch.device, shape: Shape) -> list[Tensor]:
    width = shape.num_heads * shape.head_dim
    hidden, residual = (random_numbers(seed, 5, width, dtype=shape.dtype).to(device) for seed in (6, 7))
    weight = random_numbers(8, width, dtype=shape.dtype).to(device)
    wide, _ = add_rms_norm(hidden.clone(), None, weight.float(), 1e-6)
    beside = embed_beside(torch.tensor([3, 0, 2, 2, 1], device=device), residual, hidden, (weight, weight * 2), 1e-6)
    alone = add_rms_norm(hidden.clone(), None, weight, 1e-6)
    changed = hidden.clone()
    norm_parts(changed, (weight[:7].contiguous(), weight[: width // 2].contiguous()), 1e-6)
    behind = [*add_norm(hidden, residual, weight, 1e-6), *add_norm(hidden, residual, weight, 1e-6, weight * 2)]
    return [wide, *beside, *alone, *add_rms_norm(hidden, residual, weight, 1e-6), changed, *behind]


def _rotate(device: torch.device, shape: Shape) -> list[Tensor]:
    keys, values = _caches(shape, device, 8)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = random_numbers(9, _NUM_NODES, heads, shape.head_dim, dtype=shape.dtype).to(device)
    angles = torch.arange(_NUM_NODES)[:, None] * 0.9 ** torch.arange(shape.head_dim // 2)
    cos, sin = (wave.repeat(1, 2).to(shape.dtype).to(device) for wave in (angles.cos(), angles.sin()))
    query = rotate_and_store(qkv, cos, sin, keys, values, _slots(device, _NUM_NODES))
    return [query, keys.float(), values.float()]


def _rotations(device: torch.device, shape: Shape) -> list[Tensor]:
    positions, frequencies = torch.tensor([[0, 9, 131_071]], device=device), 0.9 ** torch.arange(32.0, device=device)
    return [part for n in (1, 2) for part in rotations(positions, frequencies, 1.2, shape.dtype, halves=n)]


def _silu(device: torch.device, shape: Shape) -> list[Tensor]:
    return [silu_mul(random_numbers(10, 5, 2 * 384, dtype=shape.dtype).to(device))]


def _ancestors(device: torch.device, shape: Shape) -> list[Tensor]:
    return [ancestor_words(_PARENTS.to(device), 7)]


def _paths(device: torch.device, shape: Shape) -> list[Tensor]:
    return [path_token_ids(_TOKENS.to(device), _PARENTS.to(device), 7)]


def _walk(device: torch.device, shape: Shape) -> list[Tensor]:
    valid = torch.tensor([_NUM_NODES, 9], device=device)
    chosen = (_TOKENS + 1).to(device)
    return list(walk_tree(_TOKENS.to(device), _PARENTS.to(device), valid, chosen, 6))


_SLOTS = (1, 0)


def _state(device: torch.device) -> SlotColumns:
    tables = torch.arange(1, 1 + 3 * _NUM_NODES).view(3, _NUM_NODES)
    columns = (torch.tensor([40, 17, 1]), torch.tensor([3, 3, 3]), torch.tensor([5, 6, 0]), tables)
    return SlotColumns(*(part.to(device) for part in columns))


def _trees(device: torch.device) -> GrownTree:
    depths = torch.tensor([[0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5]] * _NUM_REQS)
    parts = (_TOKENS, _PARENTS, depths, -depths.float(), torch.tensor([_NUM_NODES, 9]))
    return GrownTree(*(part.clone().to(device) for part in parts))


def _gated(device: torch.device, shape: Shape) -> list[Tensor]:
    values, gate = (random_numbers(seed, 2, 5, 3 * 128, dtype=shape.dtype).to(device) for seed in (24, 25))
    weight = random_numbers(26, 3 * 128, dtype=shape.dtype).to(device)
    return [gated_norm(values, gate), *(gated_norm(values, gate, weight, 1e-5, 128, first) for first in (True, False))]


def _check(device: torch.device, shape: Shape) -> list[Tensor]:
    state, trees = _state(device), _trees(device)
    trees.depths[0, 3] = 2
    grown = DraftedFor(*(part[:2] for part in (state.epochs, state.committed_lens)))
    slots, wanted = torch.tensor(_SLOTS, device=device), torch.ones(2, dtype=torch.bool, device=device)
    return list(check_trees(trees, grown, slots, wanted, state, TreeRules(99, chains=False)))


def _place(device: torch.device, shape: Shape) -> list[Tensor]:
    given = torch.tensor(_SLOTS, device=device), _state(device)
    return [part for tree in (None, _trees(device)) for part in place_nodes(*given, tree, 41, shape.block_size)[:4]]


def _settle(device: torch.device, shape: Shape) -> list[Tensor]:
    limits = torch.tensor([1 << 23, 1 << 22, 0], device=device).to(torch.int32)
    found: list[Tensor] = []
    for is_drawn in (False, True):
        state, trees, slots = _state(device), _trees(device), torch.tensor(_SLOTS, device=device)
        roots = state.committed_lens[slots] - 1
        draws = Draws(limits, state.epochs, slots, roots) if is_drawn else None
        walked = WalkedTrees(slots, roots, trees, (_TOKENS + 1).flatten().to(device), trees.depths, draws)
        found += [*settle_paths(walked, state, PathShape(6, 99, shape.block_size, moves=True)), *state]
    return found


def _addresses(device: torch.device, shape: Shape) -> list[Tensor]:
    positions = torch.tensor([[-1, 0, 99], [17, 1000, 16]], device=device)
    counted = positions % 2 == 1
    return [
        slot_mapping(_state(device).block_tables[:2], positions, shape.block_size, each) for each in (None, counted)
    ]


def _grow(device: torch.device, shape: Shape) -> list[Tensor]:
    table, outs = TreeTable(_NUM_REQS, 4, 3, device), []
    masks = pack_mask(torch.eye(12, dtype=torch.bool, device=device).view(3, 4, 12))
    for level in range(3):
        width = 1 if level == 0 else 4
        scores = -torch.rand(_NUM_REQS, width, 4, generator=torch.Generator().manual_seed(level)) - 0.1
        tokens = torch.arange(_NUM_REQS * width * 4).view(_NUM_REQS, width, 4)
        outs += table.add_level(level, tokens.to(device), scores.to(device), masks[level])
    return [*outs, *table.finalize(torch.tensor([7, 8], device=device), 12)]


def _spread(seed: int, num_rows: int, vocab_size: int) -> Tensor:
    """Logits [num_rows, vocab_size] whose differences exceed rounding errors."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(vocab_size, generator=generator) * (8.0 / vocab_size) for _ in range(num_rows)])


def _candidates(device: torch.device, shape: Shape) -> list[Tensor]:
    logits = _spread(14, _NUM_REQS * 3, 1000).view(_NUM_REQS, 3, 1000)
    return list(top_candidates(logits.to(device), torch.arange(1000, device=device) + 5, 4))


def _noise(device: torch.device, shape: Shape) -> list[Tensor]:
    rows = (torch.tensor([3, -(2**40), 2**62], device=device), torch.tensor([0, 9, 131_071], device=device))
    tokens = torch.arange(0, 128_256, 97, device=device)
    return [noise_bits(*rows, tokens), gumbel_noise(*rows, tokens)]


def _choose(device: torch.device, shape: Shape) -> list[Tensor]:
    num_rows = 32
    each = torch.arange(num_rows)
    rows = (
        torch.where(each % 4 == 0, 0.0, 0.7),
        torch.where(each % 4 == 1, 20, 0),
        torch.where(each % 4 == 2, 0.8, 1.0),
        torch.where(each % 4 == 3, 0.05, 0.0),
        each * 1_000_003,
        each + 5,
    )
    logits = _spread(15, num_rows, 5000).to(device)
    rows = [row.to(device) for row in rows]
    drafted = process_logits(16 * logits, *rows[:4], listed_only=True)
    slots = each.flip(0).to(device)
    chosen = choose_tokens(logits, *rows, any_sampled=True, any_filtered=True, slots=slots)
    return [chosen, best_tokens(logits), drafted]


def _count(device: torch.device, shape: Shape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(16)
    token_ids = torch.randint(0, 2000, (3, 1500), generator=generator)
    told = Histories(token_ids, torch.tensor([1500, 40, 900]), torch.tensor([700.0, 2.0, 0.0]), torch.tensor([2, 0]))
    ids, columns = torch.randperm(2000, generator=generator)[:999].sort()
    in_prompt = torch.ones(2, 999, dtype=torch.bool, device=device)
    in_output = torch.ones(2, 999, dtype=torch.int32, device=device)
    count_tokens(
        Histories(*(part.to(device) for part in told)), ids.to(device), columns.to(device), in_prompt, in_output
    )
    return [in_prompt.to(torch.int32), in_output]


CASES: dict[str, Callable[[torch.device, Shape], list[Tensor]]] = {
    "attention": _attention,
    "store_kv": _store,
    "move_kv": _move,
    "slot_mapping": _addresses,
    "add_rms_norm": _norm,
    "rotations": _rotations,
    "rotate_and_store": _rotate,
    "silu_mul": _silu,
    "gated_norm": _gated,
    "ancestors": _ancestors,
    "path_token_ids": _paths,
    "walk_tree": _walk,
    "check_trees": _check,
    "place_nodes": _place,
    "settle_paths": _settle,
    "grow_tree": _grow,
    "top_candidates": _candidates,
    "noise": _noise,
    "choose_tokens": _choose,
    "count_tokens": _count,
    **merged_of(hooks("cases")),
}
"""Comparison cases by kernel name, as in `choice.KERNELS`. A case runs the kernel's operation on a device, and returns
the results.
"""
