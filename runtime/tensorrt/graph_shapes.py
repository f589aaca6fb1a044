"""Shapes of the graphs: tensors with named free dimensions, and the sizes of these dimensions for each stage.

This file neither exports nor runs graphs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.tensorrt.engine_config import DraftMedia, EngineEncoder, Limits
from wingbeat.runtime.tensorrt.more_inputs import MoreInputs
from wingbeat.runtime.tensorrt.session import BASE_STAGES, DRAFT_STAGES, EngineStage, TensorSpec

BATCH, ROWS, SELECTED, TOKENS = "batch", "rows", "selected", "tokens"
"""Names of the free dimensions."""
START, MASK = "kvcache_start_index", "attention_mask"
SHOWN = "multimodal_rows"
"""Name of the input that marks rows with media embeddings."""
EMBEDDINGS = "multimodal_embeddings"
"""Name of the input that holds the embeddings of the rows that `SHOWN` marks."""
_TYPICAL_BATCH = 8


class GraphShapes(NamedTuple):
    """Inputs and outputs of a graph, in order."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]


class SizeRange(NamedTuple):
    """Minimum, typical and maximum size of a free dimension."""

    least: int
    typical: int
    largest: int


_ONE = SizeRange(1, 1, 1)
Profile = dict[str, SizeRange]
"""Maps the name of each free dimension to the dimension's size range."""


def base_shapes(
    layers: Sequence[LayerAttention],
    windows: tuple[int, ...],
    vocab_size: int,
    taps_size: int,
    capacity: int,
    dtype: torch.dtype,
    more: MoreInputs | None = None,
    encoder: EngineEncoder | None = None,
    hidden_size: int = 0,
) -> GraphShapes:
    """Shapes of the verifier's graph.

    Args:
        layers: attention shapes of the layers.
        windows: distinct sliding windows of the layers in tokens, each with its own mask; 0 means none.
        vocab_size: width of the logits.
        taps_size: width of the output `hidden_states`; 0 for no such output.
        capacity: positions of a KV row.
        dtype: dtype of weights and KV.
        more: optional inputs of a runtime part.
        encoder: vision or audio encoder of the model; None if the model takes no media.
        hidden_size: width of media embeddings.
    """
    positions = (BATCH, encoder.num_axes, ROWS) if encoder is not None and encoder.num_axes else (BATCH, ROWS)
    masks = {mask_name(window): _mask(capacity) for window in windows}
    inputs = {
        "input_ids": _rows(),
        "attention_pos_id": TensorSpec(torch.int64, positions),
        START: TensorSpec(torch.int64, (BATCH,)),
        "last_token_ids": TensorSpec(torch.int64, (BATCH, SELECTED)),
        **masks,
    }
    if encoder is not None:
        inputs[SHOWN] = TensorSpec(torch.bool, (BATCH, ROWS))
        inputs |= dict.fromkeys(shown_names(encoder), TensorSpec(dtype, (BATCH, ROWS, hidden_size)))
    if more is not None:
        inputs |= more.specs(dtype)
    outputs = {"logits": TensorSpec(dtype, (BATCH, SELECTED, vocab_size))}
    if taps_size:
        outputs["hidden_states"] = TensorSpec(dtype, (BATCH, ROWS, taps_size))
    return _with_caches(inputs, outputs, layers, capacity, dtype)


def draft_shapes(
    layers: Sequence[LayerAttention],
    vocab_size: int,
    taps_size: int,
    hidden_size: int,
    capacity: int,
    dtype: torch.dtype,
    block_masks: Sequence[str] = (),
    media: DraftMedia = DraftMedia(),
) -> GraphShapes:
    """Shapes of a draft head's graph.

    Args:
        layers: attention shapes of the layers.
        vocab_size: size of the draft vocabulary.
        taps_size: width of the verifier's taps.
        hidden_size: width of the head's hidden states.
        capacity: positions of a KV row.
        dtype: dtype of weights and KV.
        block_masks: mask names of a one-pass head; empty for other heads.
        media: media inputs.
    """
    own = {} if block_masks else {"hidden_states_from_draft": TensorSpec(dtype, (BATCH, ROWS, hidden_size))}
    inputs = {
        "input_ids": _rows(),
        "hidden_states_input": TensorSpec(dtype, (BATCH, ROWS, taps_size)),
        **own,
        "attention_pos_id": TensorSpec(torch.int64, (BATCH, media.num_axes, ROWS)) if media.num_axes else _rows(),
        START: TensorSpec(torch.int64, (BATCH,)),
        "last_token_ids": TensorSpec(torch.int64, (BATCH, SELECTED)),
        **{name: _mask(capacity) for name in block_masks or (MASK,)},
    }
    if media.width:
        inputs[SHOWN] = TensorSpec(torch.bool, (BATCH, ROWS))
        inputs[EMBEDDINGS] = TensorSpec(dtype, (BATCH, ROWS, media.width))
    outputs = {
        "logits": TensorSpec(dtype, (BATCH, SELECTED, vocab_size)),
        "hidden_states": TensorSpec(dtype, (BATCH, SELECTED, hidden_size)),
    }
    return _with_caches(inputs, outputs, layers, capacity, dtype)


def shown_names(encoder: EngineEncoder) -> list[str]:
    """Names of the media inputs: the embeddings, and the features that are added to the outputs of the first layers."""
    return [EMBEDDINGS, *(f"deepstack_embeddings_{layer}" for layer in range(encoder.num_deep))]


def mask_name(window: int) -> str:
    """Name of the mask of layers with a sliding window in tokens; 0 means none."""
    return f"{MASK}_{window}" if window else MASK


def block_mask_name(causal: bool, window: int | None) -> str:
    """Name of the mask of a one-pass head's layers with this causality and window."""
    return mask_name(window or 0) + ("_causal" if causal else "")


def cache_names(num_layers: int, prefix: str = "") -> list[str]:
    """Names of the key and value cache of each layer in turn. The prefix `present_` gives the names of the outputs."""
    return [f"{prefix}{kind}_cache_{layer}" for layer in range(num_layers) for kind in ("k", "v")]


def base_profiles(limits: Limits) -> dict[EngineStage, Profile]:
    """Size ranges of the verifier's stages."""
    tree = limits.max_verify_tree_size
    largest = max(limits.max_input_len, tree)
    rows = {
        EngineStage.PREFILL: (_up_to(largest), SizeRange(1, 1, largest)),
        EngineStage.VERIFY: (_up_to(tree), _up_to(tree)),
        EngineStage.PLAIN: (_ONE, _ONE),
    }
    return _profiles(BASE_STAGES, rows, limits)


def draft_profiles(limits: Limits) -> dict[EngineStage, Profile]:
    """Size ranges of the drafter's stages."""
    tree, path = limits.max_draft_tree_size, limits.max_verify_tree_size
    rows = {
        EngineStage.PREFILL: (_up_to(limits.max_input_len), _ONE),
        EngineStage.PROPOSAL: (_up_to(tree), _up_to(tree)),
        EngineStage.ACCEPT: (_up_to(path), _ONE),
    }
    return _profiles(DRAFT_STAGES, rows, limits)


def input_shapes(
    profile: Profile, shapes: Mapping[str, tuple[int | str, ...]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Minimum, typical and maximum shape of each input.

    Args:
        profile: size ranges of the free dimensions.
        shapes: shapes of the graph's inputs; free dimensions are names.
    """
    return {
        name: tuple(tuple(profile[dim][which] if isinstance(dim, str) else dim for dim in shape) for which in range(3))
        for name, shape in shapes.items()
    }


def _rows() -> TensorSpec:
    return TensorSpec(torch.int64, (BATCH, ROWS))


def _mask(capacity: int) -> TensorSpec:
    return TensorSpec(torch.bool, (BATCH, 1, ROWS, capacity))


def _with_caches(
    inputs: dict[str, TensorSpec],
    outputs: dict[str, TensorSpec],
    layers: Sequence[LayerAttention],
    capacity: int,
    dtype: torch.dtype,
) -> GraphShapes:
    widths = [(layer.num_kv_heads, width) for layer in layers for width in (layer.key_dim, layer.value_dim)]
    specs = [TensorSpec(dtype, (BATCH, heads, capacity, width)) for heads, width in widths]
    caches, present = (dict(zip(cache_names(len(layers), prefix), specs, strict=True)) for prefix in ("", "present_"))
    return GraphShapes(inputs | caches, outputs | present)


def _profiles(
    stages: tuple[EngineStage, ...], rows: dict[EngineStage, tuple[SizeRange, SizeRange]], limits: Limits
) -> dict[EngineStage, Profile]:
    most = limits.max_batch_size
    batch = SizeRange(1, min(_TYPICAL_BATCH, most), most)
    return {stage: {BATCH: batch, ROWS: rows[stage][0], SELECTED: rows[stage][1]} for stage in stages}


def _up_to(largest: int) -> SizeRange:
    return SizeRange(1, largest, largest)
