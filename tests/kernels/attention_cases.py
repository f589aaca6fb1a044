"""Batches of attention over a paged cache, and the softmax formula in double precision as their reference."""

import math
import random
from dataclasses import dataclass

import torch

from tests.kernels.slow_trees import path_to_root

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    contexts: tuple[int, ...]
    num_query: int = 1
    num_new: int | None = None
    """More than num_query where the queries are the last of them."""
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    block_size: int = 4
    mask: str = "tree"
    """tree, chain (a tree whose mask words describe a chain) or causal (no mask words)."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.float32
    in_keys: bool = False
    """Whether the values are the keys' first elements."""
    spare_blocks: int = 0
    """Table entries after the last key, as in a bucket of longer contexts."""

    def __str__(self) -> str:
        new = "" if self.num_new is None else f"of{self.num_new}"
        extras = [f"W{self.window}"] if self.window else []
        extras += [name for name in ("softcap", "sinks", "fp8", "in_keys") if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        heads, dims = ("-".join(map(str, pair)) for pair in (self.heads, self.dims))
        parts = [f"B{len(self.contexts)}", f"T{self.num_query}{new}", f"C{max(self.contexts)}", f"H{heads}", f"D{dims}"]
        return "-".join([*parts, f"S{self.block_size}", self.mask, *extras, dtype])


@dataclass
class Inputs:
    """Arguments of `tree_attention`, and the visibility that the formula uses instead of mask words."""

    arguments: list
    options: dict
    visible: torch.Tensor
    positions: torch.Tensor


def words_of(visible: torch.Tensor) -> torch.Tensor:
    """Mask words by their definition: bit b of word w is column 64 w + b."""
    num_words = math.ceil(visible.shape[-1] / 64)
    words = torch.zeros(*visible.shape[:-1], num_words, dtype=torch.int64)
    for req, row, column in visible.nonzero().tolist():
        bit = 1 << column % 64
        words[req, row, column // 64] |= bit - (1 << 64) if bit >> 63 else bit
    return words


def build(case: Case, poison: float, seed: int = 0, device: str = DEVICE) -> Inputs:
    """Random inputs; `poison` fills every slot of the pool that no query may read."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_reqs, num_query = len(case.contexts), case.num_query
    num_new = case.num_new or num_query
    num_heads, num_kv_heads = case.heads
    visible = torch.zeros(num_reqs, num_new, num_new, dtype=torch.bool)
    positions = torch.zeros(num_reqs, num_new, dtype=torch.int64)
    for req, context in enumerate(case.contexts):
        parents = [-1] + [rng.randrange(node) if case.mask == "tree" else node - 1 for node in range(1, num_new)]
        for node in range(num_new):
            path = path_to_root(parents, node)
            visible[req, node, path] = True
            positions[req, node] = context + len(path) - 1
    visible = visible[:, num_new - num_query :]

    width = math.ceil((max(case.contexts) + num_new) / case.block_size)
    num_blocks = 1 + num_reqs * width
    tables = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(num_reqs, width)
    caches = []
    for dim in case.dims:
        cache = torch.full((num_blocks * case.block_size, num_kv_heads, dim), poison, dtype=torch.float32)
        for req, context in enumerate(case.contexts):
            index = torch.arange(context + num_new)
            slots = tables[req, index // case.block_size] * case.block_size + index % case.block_size
            cache[slots] = torch.randn(len(index), num_kv_heads, dim, generator=generator)
        dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
        caches.append(cache.view(num_blocks, case.block_size, num_kv_heads, dim).to(device).to(dtype))
    if case.in_keys:
        caches[1] = caches[0][..., : case.dims[1]]
    # Block 0 is poisoned as well: that is where the spare entries point.
    tables = torch.nn.functional.pad(tables, (0, case.spare_blocks))
    query = torch.randn(num_reqs, num_query, num_heads, case.dims[0], generator=generator).to(case.dtype)
    options = {
        "sliding_window": case.window,
        "softcap": case.softcap,
        "sinks": torch.randn(num_heads, generator=generator).to(device) if case.sinks else None,
    }
    words = None if case.mask == "causal" else words_of(visible).to(device)
    contexts = torch.tensor(case.contexts)
    arguments = [tensor.to(device) for tensor in (query, *caches, tables, contexts, positions)]
    return Inputs([*arguments, words, 0.37], options, visible.to(device), positions.to(device))


def by_formula(inputs: Inputs) -> torch.Tensor:
    """softmax(logits) @ values of every request in double precision: [num_reqs, num_query, num_heads, value_dim]."""
    query, key_cache, value_cache, tables, contexts, _, _, scaling = inputs.arguments
    options, block_size, num_new = inputs.options, key_cache.shape[1], inputs.positions.shape[1]
    group, num_query = query.shape[2] // key_cache.shape[2], query.shape[1]
    results = []
    for req, context in enumerate(contexts.tolist()):
        index = torch.arange(context + num_new, device=query.device)
        blocks, offsets = tables[req, index // block_size], index % block_size
        key, value = (cache.view(cache.dtype)[blocks, offsets].double() for cache in (key_cache, value_cache))
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query[req].double(), key) * scaling
        if options["softcap"] is not None:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        shown = torch.ones(num_query, context + num_new, dtype=torch.bool, device=query.device)
        shown[:, context:] = inputs.visible[req]
        if options["sliding_window"] is not None:
            key_positions = torch.cat([index[:context], inputs.positions[req]])
            distance = inputs.positions[req, num_new - num_query :, None] - key_positions[None, :]
            shown &= distance < options["sliding_window"]
        weights = logits.masked_fill(~shown, -math.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if options["sinks"] is not None:
            total = total + options["sinks"].double().exp()[:, None, None]
        results.append(torch.einsum("hqk,khd->qhd", weights / total, value))
    return torch.stack(results)


def moved_before_the_beginning(inputs: Inputs, count: int) -> Inputs:
    """`inputs` moved `count` positions back: rows of the shortest contexts then lie before position 0.

    Context becomes new rows that the other rows see. A row before position 0 is seen by itself only and sees no other.
    """
    query, key_cache, value_cache, tables, contexts, positions, words, scaling = inputs.arguments
    contexts = contexts - count
    ahead = contexts[:, None] + torch.arange(count, device=query.device)
    num_new, num_query = count + positions.shape[1], count + query.shape[1]
    visible = torch.zeros(len(query), num_query, num_new, dtype=torch.bool, device=query.device)
    visible[:, count:, count:] = inputs.visible
    visible[..., :count] = (ahead >= 0)[:, None]
    visible[:, :count, :count] &= torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
    visible[:, :count, :count] |= torch.eye(count, dtype=torch.bool, device=query.device)
    words = None if words is None else words_of(visible.cpu()).to(query.device)
    positions = torch.cat([ahead, positions], dim=1)
    query = torch.cat([torch.ones_like(query[:, :1]).expand(-1, count, -1, -1), query], dim=1)
    arguments = [query, key_cache, value_cache, tables, contexts, positions, words, scaling]
    return Inputs(arguments, inputs.options, visible, positions)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Check the relative error of the whole result against the dtype's products and rounding; NaN always fails."""
    limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[out.dtype]
    error = (out.double() - expected).norm() / expected.norm()
    assert error < limit, f"relative error {error:.2e}"


TREES = [
    Case((5,), 7),
    Case((0, 33), 5, heads=(6, 2), dims=(24, 11), block_size=5),
    Case((17, 3, 40), 1, heads=(3, 3)),
    Case((37, 64), 9, heads=(4, 1), dims=(20, 40), block_size=3),
    Case((9,), 70, heads=(1, 1), dims=(16, 8)),
    Case((31, 48), 11, heads=(2, 1), window=5),
    Case((31, 60), 13, window=40, softcap=2.5, sinks=True),
    Case((12, 30), 13, mask="chain", window=1),
    Case((9, 22), 6, sinks=True),
    Case((9, 22), 6, softcap=1.5),
    Case((29, 8), 6, fp8=True, sinks=True),
    Case((29, 70), 7, dtype=torch.float16),
    Case((18, 35), 3, num_new=9, window=24),
    Case((50, 1), 4, num_new=67),
    Case((3, 20), 5, spare_blocks=9),
    Case((37, 8), 6, heads=(5, 1), dims=(40, 32), in_keys=True),
    Case((37, 8), 6, heads=(2, 1), dims=(24, 20), in_keys=True, fp8=True),
]
CAUSAL = [
    Case((0, 19), 37, mask="causal", heads=(2, 2)),
    Case((45, 7), 23, mask="causal", heads=(2, 1), window=9, dims=(24, 11)),
    Case((45, 7), 1, mask="causal", window=16, spare_blocks=7),
    Case((21,), 18, mask="causal", softcap=2.0, sinks=True, heads=(6, 2), block_size=16),
    Case((33, 2), 5, mask="causal", fp8=True),
    Case((33, 2), 9, mask="causal", heads=(4, 1), dims=(44, 32), in_keys=True),
]
SHORT = [
    Case((0, 1, 9), 5, mask="causal", heads=(2, 1), sinks=True),
    Case((0, 1, 9), 5, mask="causal", window=3),
    Case((0, 2, 40), 7, heads=(2, 1)),
    Case((0, 2, 40), 7, window=4, softcap=2.0),
]
"""Cases in which some contexts end before position 0 after `moved_before_the_beginning`; queries are all new rows."""
