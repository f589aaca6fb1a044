"""Weights that stay packed, at the 8B shape: products compared with bfloat16's, and an engine plainly and with chains.

Formats are FP8 in blocks of 128 (`fp8`), four bits in groups of 128 (`int4`, as AWQ), and GGUF's Q4_0 (`q4_0`). Weights
are random, so acceptance is forced.
"""

from functools import partial

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, facts, speed, too_large
from _harness import Bench, Cases, Figure, Result, run
from _model import draw_weights, llama_config, shape_facts
from engine_speed import engine_of
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from wingbeat.kernels.grouped_weight import E4M3, UINT4, GroupedWeight, Scales
from wingbeat.kernels.packed.matrix import PackedMatrix, packed_product, to_step_layout
from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.packed.modules import keep_packed
from wingbeat.runtime.verifier.layers.linears import held_bytes
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model

FORMS = ("bf16", "fp8", "int4", "q4_0")
ROWS = (1, 4, 16, 64, 256)
BATCHES = (1, 16, 64)


def random_matrix(form: str, columns: int, inputs: int, device: torch.device) -> PackedMatrix:
    """A weight of small random numbers around zero."""
    group = min(32 if form == "q4_0" else 128, inputs)
    size, groups = (columns, inputs), (columns, inputs // group)
    scales = torch.rand(groups, device=device) / 64
    if form == "fp8":
        values = torch.randint(0, 120, size, dtype=torch.uint8, device=device)  # the sign is a byte's highest bit
        values |= torch.randint(0, 2, size, dtype=torch.uint8, device=device) << 7
        return to_step_layout(GroupedWeight(E4M3, values, Scales(scales / 16)))
    values = torch.randint(0, 16, size, dtype=torch.uint8, device=device)
    if form == "q4_0":
        return to_step_layout(GroupedWeight(UINT4, values, Scales(scales.half()), offset=-8.0))
    zeros = torch.full(groups, 8, dtype=torch.uint8, device=device)
    return to_step_layout(GroupedWeight(UINT4, values, Scales(scales.half()), zeros=zeros))


def model_of(bench: Bench, config: LlamaConfig, form: str) -> LoadedModel:
    """Verifier whose layer products and output matrix are in one format."""
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype)
    draw_weights(model)
    if form != "bf16":
        nothing = torch.full((), torch.nan, dtype=bench.dtype, device=bench.device)
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                shape = module.weight.shape
                module.weight = nn.Parameter(nothing.expand(shape), requires_grad=False)
                keep_packed(module, random_matrix(form, *shape, bench.device))
    return prepare_model(model, form)


def products(bench: Bench, config: LlamaConfig, form: str) -> list[Figure]:
    """Microseconds of each product of a layer, by rows."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * dim
    figures = []
    for name, columns, inputs in (
        ("qkv", qkv, hidden),
        ("output", hidden, config.num_attention_heads * dim),
        ("gate and up", 2 * inner, hidden),
        ("down", hidden, inner),
    ):
        weight = torch.randn(columns, inputs, device=bench.device).to(bench.dtype)
        matrix = None if form == "bf16" else random_matrix(form, columns, inputs, bench.device)
        for num_rows in ROWS:
            rows = torch.randn(num_rows, inputs, device=bench.device).to(bench.dtype)
            made = partial(functional.linear, rows, weight) if matrix is None else partial(packed_product, rows, matrix)
            figures.append(Figure(f"{form}: {name}, {num_rows} rows", bench.median_ms(made) * 1e3, "us"))
    return figures


def engine(bench: Bench, config: LlamaConfig, form: str) -> list[Figure]:
    """Measures plain decoding and chains of one model."""
    loaded = model_of(bench, config, form)
    figures = [Figure(f"{form}: weights", held_bytes(loaded.model) / 1e9, "GB")]
    for batch in BATCHES[: 1 if bench.quick else None]:
        case = Case("chain of 7", batch, CHAIN, ForcedAcceptance.length(CHAIN_LENGTH))
        if too_large(bench, loaded, case) is not None:
            continue
        running = engine_of(bench, loaded, case)
        plain, chain = (speed(bench, running, speculation=on) for on in (False, True))
        running.model.remove_taps()
        figures += [
            Figure(f"{form}, batch {batch}: plain round", plain.round_ms, "ms"),
            Figure(f"{form}, batch {batch}: chain's round", chain.round_ms, "ms"),
            Figure(f"{form}, batch {batch}: chain over plain", chain.tokens_per_s / plain.tokens_per_s, "x"),
        ]
    return figures


@torch.no_grad()
def measure(bench: Bench) -> Result:
    """Measures every format; figures are reported as they are measured."""
    config = llama_config(bench)
    measured = Cases(bench, shape_facts(config, bench.dtype) | facts(bench), {"forced_acceptance": True})
    for form in FORMS:
        measured.run(f"{form} engine", partial(engine, bench, config, form))
        measured.run(f"{form} products", partial(products, bench, config, form))
    return measured.result


if __name__ == "__main__":
    run(__doc__, measure)
