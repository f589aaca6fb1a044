"""Tree attention alone, as a share of copy bandwidth: bytes that it must read, divided by its time."""

from functools import partial
from typing import NamedTuple

import torch
from _harness import Bench, Cases, Figure, Result, run
from _model import BLOCK_SIZE, llama_config

from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice


class Case(NamedTuple):
    """Parameters of one launch."""

    batch: int
    context: int
    nodes: int
    at_least: float | None = None
    """Target: minimum share of the copy bandwidth."""
    shape: str = ""
    """Name in SHAPES that replaces the model's shape."""

    @property
    def name(self) -> str:
        """Name in figures."""
        shape = f", {self.shape}" if self.shape else ""
        return f"batch {self.batch}, context {self.context}, {self.nodes} nodes{shape}"


class Shape(NamedTuple):
    """Sizes of one layer's attention."""

    heads: int
    kv_heads: int
    dim: int
    kv_dtype: torch.dtype | None = None
    """Dtype of cached keys and values; None for the queries' dtype."""


SHAPES = {
    "fp8 KV": Shape(32, 8, 128, torch.float8_e4m3fn),
    "GQA 16": Shape(64, 4, 128),
    "dim 64": Shape(32, 8, 64),
    "dim 256": Shape(16, 4, 256),
}
CASES = (
    Case(8, 8192, 60, at_least=0.75),
    Case(1, 1024, 60),
    # Plain decoding, chains and trees.
    *(Case(batch, context, nodes) for context in (1000, 8000) for batch in (1, 4, 16, 64) for nodes in (1, 8, 16)),
    Case(1, 128_000, 1),
    Case(1, 128_000, 16),
    *(
        Case(batch, context, nodes, shape=shape)
        for shape in SHAPES
        for batch, context in ((1, 1000), (16, 1000), (16, 8000))
        for nodes in (1, 16)
    ),
)
MAX_MODEL_LEN = 8192
"""Tokens that a captured launch's tables cover, unless its contexts are longer."""


def measure_case(bench: Bench, case: Case) -> tuple[float, int]:
    """Milliseconds of one captured launch, and the bytes it must move."""
    config, device = llama_config(bench), bench.device
    own = Shape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    heads, kv_heads, dim, kv_dtype = SHAPES.get(case.shape, own)
    used = -(-(case.context + case.nodes) // BLOCK_SIZE)
    shape = (1 + case.batch * used, BLOCK_SIZE, kv_heads, dim)
    kv_dtype = kv_dtype or bench.dtype
    key_cache, value_cache = (torch.randn(shape, dtype=bench.dtype, device=device).to(kv_dtype) for _ in range(2))
    tables = torch.zeros(case.batch, max(used, MAX_MODEL_LEN // BLOCK_SIZE), dtype=torch.int64, device=device)
    tables[:, :used] = 1 + torch.randperm(case.batch * used, device=device).view(case.batch, used)
    query = torch.randn(case.batch, case.nodes, heads, dim, dtype=bench.dtype, device=device)
    num_context = torch.full((case.batch,), case.context, dtype=torch.int64, device=device)
    nodes = torch.arange(case.nodes, device=device)
    positions = (num_context[:, None] + nodes).contiguous()
    # A binary tree: the parent of node j is (j - 1) // 2.
    ancestor, visible = nodes, torch.eye(case.nodes, dtype=torch.bool, device=device)
    while bool((ancestor > 0).any()):
        ancestor = (ancestor - 1).clamp_min(0) // 2
        visible = visible.scatter(1, ancestor[:, None], True)
    words = pack_mask(visible.expand(case.batch, -1, -1).contiguous())

    def launch() -> torch.Tensor:
        return tree_attention(query, key_cache, value_cache, tables, num_context, positions, words, dim**-0.5)

    keys = case.batch * (case.context + case.nodes)
    moved = kv_dtype.itemsize * keys * kv_heads * dim * 2 + bench.dtype.itemsize * 2 * query.numel()
    if device.type != "cuda":
        return bench.median_ms(launch), moved
    graphs = CudaGraphDevice(device)
    graphs.warm_up(launch)
    graph, _ = graphs.capture(launch, graphs.new_pool())
    return bench.median_ms(lambda: graphs.replay(graph)), moved


def measure(bench: Bench) -> Result:
    """Measures the batches and contexts of CASES; keys and values are in scattered blocks."""
    bandwidth, config = bench.copy_bytes_per_s(), llama_config(bench)
    facts = {
        "attention": f"{config.num_attention_heads}/{config.num_key_value_heads} heads of {config.head_dim}, "
        f"{str(bench.dtype).removeprefix('torch.')}, blocks of {BLOCK_SIZE} tokens",
    }
    cases = Cases(bench, facts, {"copy_bytes_per_s": bandwidth})

    def one(case: Case, name: str) -> list[Figure]:
        ms, moved = measure_case(bench, case)
        share = moved / (ms / 1e3) / bandwidth
        return [Figure(name, ms, "ms"), Figure(f"{name}: of copy bandwidth", share, "x", at_least=case.at_least)]

    for full in CASES:
        case = full._replace(context=full.context // 64) if bench.quick else full
        cases.run(case.name, partial(one, case, case.name))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
