"""Computes the limits, such as max_num_seqs, that the settings leave to be derived from the available memory.

On a GPU the memory of rounds and graphs is measured first; the remaining memory holds KV.
"""

import gc
import logging
from contextlib import ExitStack
from dataclasses import replace

import torch

from wingbeat.kernels import choice
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.drafters.prompt_stage import SIZES as PROMPT_SIZES
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.buckets import draft_batches
from wingbeat.runtime.kv.capacity import LEAST_SEQS, fit, is_automatic, num_seqs_held
from wingbeat.runtime.kv.pool import memory_budget
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS
from wingbeat.runtime.round.shapes import MOST_ROWS, num_graphs, pieces_at_most, round_shapes
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import taps_size

logger = logging.getLogger(__name__)
GRAPH_BYTES = 8 << 20
"""Bytes of a captured graph's nodes and their arguments; the memory that graphs compute on is shared by all graphs and
not included."""
RULE_BYTES = 9
"""Bytes of biases and token counts, for each sequence and each vocabulary token, that drafting under sampling rules
reads."""
MIB = 1 << 20
NODE_BYTES = 23
"""Approximate bytes that a round needs for each node and each vocabulary token: float32 logits and scores, token choice
including its graphs, and the logits passed between two graphs."""
ROUNDS_OF_PROMPT, LEAST_PROMPT_TOKENS = 16, 512
"""Memory counts as short if the KV cache holds fewer tokens than ROUNDS_OF_PROMPT x max_num_batched_tokens.
max_num_batched_tokens is then halved until memory suffices, but not below LEAST_PROMPT_TOKENS."""
SHORT = 10
"""A warning is logged if memory holds fewer tokens than 1/SHORT of the model's positions."""
_SAMPLED = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, seed=0, ignore_eos=True, speculation=False)
_CHOICES = (
    _SAMPLED,
    replace(_SAMPLED, top_p=1.0),
    replace(_SAMPLED, frequency_penalty=0.5),
    replace(_SAMPLED, top_p=1.0, frequency_penalty=0.5),
)
"""Sampling parameters with which all GPU kernels that choose first tokens are run."""


def fit_to_memory(loaded: LoadedModel, config: EngineConfig, needs: DrafterNeeds) -> EngineConfig:
    """Returns the configuration with a value for every limit that is derived from memory; logs the limits in one line.

    On a CPU, runtime parts reserve the memory for this engine before another engine measures free memory.

    Args:
        loaded: the verifier, on its device.
        needs: memory and inputs that the drafter needs; the drafter is loaded already.

    Raises:
        ValueError: the memory does not hold one sequence; the message names the setting.
    """
    if loaded.device.type != "cpu":
        return _settled(loaded, config, needs)
    with ExitStack() as stack:
        promises = [stack.enter_context(settling()) for settling in hooks("settling")]
        settled = _settled(loaded, config, needs)
        for promise in promises:
            promise(loaded.kv_bytes(settled))
    return settled


def _settled(loaded: LoadedModel, config: EngineConfig, needs: DrafterNeeds) -> EngineConfig:
    config = _with_num_seqs(loaded, loaded.limits(config), needs)
    while True:
        shorter = _with_shorter_prompts(loaded, config)
        try:
            settled, held = _fit(loaded, config, needs)
        except ValueError:
            if config.lower_max_num_seqs and config.max_num_seqs > LEAST_SEQS:
                # `_with_num_seqs` underestimated the memory that a round with this many sequences needs.
                config = replace(config, max_num_seqs=max(config.max_num_seqs // 2, LEAST_SEQS))
            elif shorter is not None:
                config = shorter
            else:
                raise
            continue
        if shorter is None or held >= ROUNDS_OF_PROMPT * config.max_num_batched_tokens:
            _report(loaded, config, settled)
            return settled
        config = shorter


def _with_shorter_prompts(loaded: LoadedModel, config: EngineConfig) -> EngineConfig | None:
    """Returns the configuration with half the max_num_batched_tokens; None if that limit is fixed or at its minimum."""
    tokens = config.max_num_batched_tokens
    # A media span that must not be split has to fit into one round, so the limit is fixed.
    whole = loaded.reader is not None and loaded.reader.whole_spans
    fixed = whole or not config.lower_max_num_batched_tokens or not is_automatic(config)
    if fixed or tokens <= LEAST_PROMPT_TOKENS:
        return None
    return replace(config, max_num_batched_tokens=max(tokens // 2, LEAST_PROMPT_TOKENS))


def _fit(loaded: LoadedModel, config: EngineConfig, needs: DrafterNeeds) -> tuple[EngineConfig, int]:
    """Returns the configuration with a value for every limit, and the number of KV tokens that memory holds.

    Raises like `fit_to_memory`.
    """
    automatic, on_gpu = is_automatic(config), loaded.device.type == "cuda"
    reserved = reserved_bytes(loaded, config, needs) if automatic and on_gpu else 0
    held_beside = needs.held_bytes if config.drafter_beside else 0
    budget = memory_budget(config, loaded.device, reserved, held_beside, loaded.mapped_bytes)
    budget, config = loaded.budget(config, budget)
    size = loaded.block_bytes(config)
    drafters = needs.token_bytes * config.block_size if automatic and config.drafter_beside else 0
    settled = fit(config, budget, size + drafters, loaded.max_position_embeddings)
    settled = replace(settled, lower_max_num_seqs=False, lower_max_num_batched_tokens=False)
    return settled, budget // (size + drafters) * config.block_size


def _report(loaded: LoadedModel, config: EngineConfig, settled: EngineConfig) -> None:
    """Logs the limits that `fit_to_memory` settled."""
    notes = "".join(f"; {note}" for part in loaded.parts.values() if (note := part.memory_note(settled)))
    num_tokens = (settled.num_kv_blocks - 1) * settled.block_size
    lowered = settled.max_model_len < min(config.max_model_len, loaded.max_position_embeddings)
    if lowered:
        why = f"all that the memory holds of the model's {loaded.max_position_embeddings} positions"
    else:
        why = f"the model has {loaded.max_position_embeddings} positions"
    logger.info(
        "KV memory: %.0f MiB for %d tokens; max_num_seqs is %d; max_num_batched_tokens is %d; max_model_len is %d "
        "(%s)%s",
        loaded.kv_bytes(settled) / MIB,
        num_tokens,
        settled.max_num_seqs,
        settled.max_num_batched_tokens,
        settled.max_model_len,
        why,
        notes,
    )
    if SHORT * settled.max_model_len < loaded.max_position_embeddings and lowered:
        logger.warning(
            "max_model_len is %d, less than a tenth of the model's %d positions: the memory beside the weights "
            "holds no more; kv_cache_dtype fp8, a lower max_num_batched_tokens or max_num_seqs, or a smaller drafter "
            "make it longer",
            settled.max_model_len,
            loaded.max_position_embeddings,
        )


def _with_num_seqs(loaded: LoadedModel, config: EngineConfig, needs: DrafterNeeds) -> EngineConfig:
    """Returns the configuration, with max_num_seqs set to the number of sequences that memory holds, if not fixed."""
    if not config.lower_max_num_seqs:
        return config
    held_beside = needs.held_bytes if config.drafter_beside else 0
    budget = memory_budget(config, loaded.device, 0, held_beside, loaded.mapped_bytes)
    token_bytes = loaded.block_bytes(config) // config.block_size
    token_bytes += needs.token_bytes if config.drafter_beside else 0
    seq_bytes = NODE_BYTES * config.speculation.num_nodes * loaded.vocab_size
    seq_bytes += loaded.seq_bytes()
    held = num_seqs_held(config, budget, token_bytes, seq_bytes)
    return replace(config, max_num_seqs=held)


def reserved_bytes(loaded: LoadedModel, config: EngineConfig, needs: DrafterNeeds) -> int:
    """Bytes that a GPU needs in addition to weights and KV: the largest round, the graphs and the drafter's passes.

    Raises:
        ValueError: the GPU's memory does not hold the weights and the largest round; the message names its limits.
    """
    try:
        chunks, trees = activation_bytes(loaded, config, needs)
    except torch.OutOfMemoryError:
        raise ValueError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens} and max_num_seqs is {config.max_num_seqs}: "
            "the GPU has no memory for such a round beside the weights; lower them"
        ) from None
    captured = config.may_capture
    # Rounds that mix prompts and trees are captured as well, but have fewer rows than the largest prompt or tree round.
    graphs = _graph_bytes(loaded, config, needs, max(chunks, trees)) if captured else 0
    chunks += splits_bytes(
        loaded, config, (pieces_at_most(config.max_num_batched_tokens, config.max_num_seqs), PIECE_ROWS)
    )
    drafter = 0
    if config.drafter_beside and (needs.held_bytes or needs.in_engine):
        shape = config.speculation
        levels = config.max_num_seqs * shape.draft_top_k * loaded.vocab_size * 4
        drafter = 2 * levels
        if captured:
            batches = draft_batches(config.max_num_seqs, shape.max_path, shape.draft_top_k)
            # Each depth is captured a second time for requests with sampling rules, which keep both tempered and plain
            # logits.
            stages = (2 * shape.max_path - 1) * len(batches) + len(PROMPT_SIZES)
            if needs.in_engine:
                stages += sum(num_whole(config) for num_whole in hooks("num_whole_rounds"))
            drafter += levels + config.max_num_seqs * RULE_BYTES * loaded.vocab_size + stages * GRAPH_BYTES
    logger.info(
        "measured the memory of the largest round: %.0f MiB, of its graphs %.0f MiB, of the drafter's passes %.0f MiB",
        (chunks + trees) / MIB,
        graphs / MIB,
        drafter / MIB,
    )
    return chunks + trees + graphs + drafter


def _graph_bytes(loaded: LoadedModel, config: EngineConfig, needs: DrafterNeeds, largest: int) -> int:
    """Bytes that captured rounds hold.

    Args:
        largest: upper bound of the bytes of the largest captured round; graphs share the memory that they compute on.
    """
    taps = taps_size(loaded, needs.tap_layers, needs.kv_layers) * loaded.dtype.itemsize
    row = loaded.vocab_size * loaded.logits_dtype.itemsize + taps
    # Rounds of bare roots and rounds of trees have separate buffers.
    between = sum(
        min(MOST_ROWS, config.max_num_seqs * num_nodes) * row for num_nodes in (1, config.speculation.num_nodes)
    )
    prompts = round_shapes(config).prompts
    pieces = 0 if prompts is None else prompts.most_pieces
    between += pieces * (row + (PIECE_ROWS - 1) * taps)
    launches = [
        (min(config.max_num_seqs, max(MOST_ROWS // num_nodes, 1)), num_nodes)
        for num_nodes in (1, config.speculation.num_nodes)
    ]
    splits = max(splits_bytes(loaded, config, rows) for rows in (*launches, (pieces, PIECE_ROWS)))
    return largest + between + num_graphs(config) * GRAPH_BYTES + splits


@torch.inference_mode()
def activation_bytes(loaded: LoadedModel, config: EngineConfig, needs: DrafterNeeds) -> tuple[int, int]:
    """Measures the peak bytes of the largest round of prompt chunks, and of the largest round of trees.

    The first peak includes all of the engine's buffers except KV.

    Both rounds run on a small KV pool. Further prompts cover every tile height of attention and every way to choose a
    token, so that no later request waits for kernels to be compiled.
    """
    device, prompt_len = loaded.device, min(config.max_num_batched_tokens, loaded.max_position_embeddings - 2)
    small = replace(
        config,
        max_model_len=prompt_len + 2,
        lower_max_model_len=False,
        num_kv_blocks=None,
        kv_cache_memory_bytes=None,
        cuda_graphs=False,
        overlap=False,
    )
    per_seq = 2 + small.speculation.num_nodes // small.block_size
    small = replace(small, num_kv_blocks=1 + small.max_blocks_per_seq + config.max_num_seqs * per_seq)
    held = torch.cuda.memory_allocated(device)
    # the pool is in torch's memory, because the measurement subtracts the pool from the memory that torch holds
    engine = Engine(replace(loaded, pool_memory=None), small, needs)
    engine.runner.builder.may_be_lean = False
    # allocated now so that the tables are included in the measurement; otherwise the first request with a penalty
    # would allocate the tables
    engine.slots.processors.allocate()
    held += engine.cache.num_bytes
    held += sum(feature.held_bytes for feature in engine.features)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    engine.add_request(Request("longest", (0,) * prompt_len, _SAMPLED))
    for number in range(config.max_num_seqs - 1):
        engine.add_request(Request(str(number), (0,), _SAMPLED))
    while engine.has_unfinished_requests():
        engine.step()
    chunks = torch.cuda.max_memory_allocated(device) - held
    _run_short_prompts(engine, prompt_len)
    torch.cuda.reset_peak_memory_stats(device)
    engine.runner.widest_round()
    trees = torch.cuda.max_memory_allocated(device) - before
    del engine
    gc.collect()  # the engine's parts hold reference cycles
    torch.cuda.empty_cache()
    return chunks, trees


def _run_short_prompts(engine: Engine, longest: int) -> None:
    """Runs prompts of 1, 2, 4, ... tokens in turn, so that attention is compiled for every tile height."""
    lengths = [1 << at for at in range(longest.bit_length())]
    for at in range(max(len(lengths), len(_CHOICES))):
        # Prompts begin with different tokens, so that the prefix cache has no hit.
        prompt = (at % engine.loaded.vocab_size,) + (0,) * (lengths[at % len(lengths)] - 1)
        engine.add_request(Request(f"short-{at}", prompt, _CHOICES[at % len(_CHOICES)]))
        while engine.has_unfinished_requests():
            engine.step()


def splits_bytes(loaded: LoadedModel, config: EngineConfig, rows: tuple[int, int]) -> int:
    """Bytes of attention's split-KV partial results in one launch; 0 if torch computes attention.

    The result is for the layer with the largest partial results, and for contexts of the greatest allowed length.

    Args:
        rows: number of requests of the launch, and rows per request.
    """
    kernels = choice.module_of("attention") if loaded.device.type == "cuda" else None
    if kernels is None:
        return 0
    limits, alike = kernels.device_limits(loaded.device.index or 0), loaded.deterministic
    longest = min(config.max_model_len, loaded.max_position_embeddings)
    return max(
        (
            kernels.partial_bytes(
                loaded.dtype,
                rows,
                (layer.num_heads, layer.num_kv_heads),
                (layer.key_dim, layer.value_dim),
                min(longest, 2 * layer.sliding_window) if layer.sliding_window and not alike else longest,
                limits,
                alike,
            )
            for layer in {layer for layer in loaded.layers if layer.num_heads}
        ),
        default=0,
    )
