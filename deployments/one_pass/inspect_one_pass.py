"""Findings of `wingbeat inspect` about a head that drafts in one pass."""

import math
from pathlib import Path
from typing import Any

from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.load import OnePassCheckpoint, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import read_parallel_config
from wingbeat.runtime.one_pass.read_config import mask_token_id

_TOKEN_MAPS = ("d2t", "t2d")
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES += ("target_hidden_size", "vocab_size", "draft_vocab_size", "max_position_embeddings")


def one_pass_findings(folder: Path, target: TargetDescription | None) -> tuple[dict[str, Any], int, int] | None:
    """Return findings about a one-pass head, its number of parameters, and how many numbers a token takes in its KV
    cache.

    Only names and shapes of tensors are read. The result is None for folders without a one-pass head.

    Args:
        target: the verifier; with None, the verifier's sizes are taken from the head's config.

    Raises:
        CheckpointError: the head cannot be read, or does not fit the verifier.
    """
    if kind_of(folder.resolve()) != "one_pass":
        return None
    checkpoint = read_one_pass_checkpoint(folder)
    hidden, num_layers = _sizes(checkpoint) if target is None else (target.hidden_size, target.num_layers)
    if checkpoint.family is OnePassFamily.PEAGLE:
        parallel = read_parallel_config(checkpoint, hidden, num_layers)[0]
        own, layers = {"mask_token_id": mask_token_id(checkpoint.raw)}, parallel.num_layers
        sizes, taps, slots = {name: getattr(parallel, name) for name in _SIZES}, parallel.tap_layers, "masked"
    else:
        config = checkpoint.config(hidden, num_layers)
        own, layers = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}, config.num_layers
        sizes, taps, slots = {name: getattr(config, name) for name in _SIZES}, config.tap_layers, config.slots
    shapes = {"num_hidden_layers": layers, **sizes, **own, "taps enter layers": list(taps)}
    found = {"kind": "one_pass", "format": f"{checkpoint.family} with {slots} slots", "shapes": shapes}
    numbers = [math.prod(shape) for name, shape in checkpoint.shapes.items() if name not in _TOKEN_MAPS]
    return found, sum(numbers), layers * 2 * sizes["num_key_value_heads"] * sizes["head_dim"]


def _sizes(checkpoint: OnePassCheckpoint) -> tuple[int, int]:
    """Return the hidden size and the number of layers of the verifier, according to the head's config.

    Raises:
        CheckpointError: the config does not state the hidden size.
    """
    raw = checkpoint.raw
    body = raw.get("transformer_layer_config") or raw
    hidden = raw.get("target_hidden_size") or body.get("hidden_size")
    if not isinstance(hidden, int):
        raise CheckpointError("config.json does not state the verifier's hidden_size: give the verifier")
    layers = raw.get("num_target_layers")
    return hidden, layers if isinstance(layers, int) else 1024
