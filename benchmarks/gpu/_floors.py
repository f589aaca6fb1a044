"""Lower bounds for the time of each stage of a round: required bytes and products, at rates measured in the same run.

Counts weights, keys and values, logits and taps, once each; activations, masks and writes are left out.
"""

from typing import NamedTuple

from _model import num_weights, plain_step_bytes
from transformers import LlamaConfig

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.heads.eagle3 import EagleHead


class Rates(NamedTuple):
    """Measured rates of the card."""

    bytes_per_s: float
    """Bytes per second of a copy, counting bytes read and written."""
    flops_per_s: float
    """Operations per second of a large product."""


class Work(NamedTuple):
    """Required work of a stage."""

    num_bytes: float
    flops: float = 0.0

    def floor_ms(self, rates: Rates) -> float:
        """Minimum milliseconds at those rates; reading and computing overlap."""
        return 1e3 * max(self.num_bytes / rates.bytes_per_s, self.flops / rates.flops_per_s)


def verification(config: LlamaConfig, itemsize: int, batch: int, num_nodes: int, context: float) -> Work:
    """Forward pass over trees of `num_nodes` (1 for bare roots), behind `context` tokens each."""
    rows = batch * num_nodes
    attention = 4 * context * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    num_bytes = plain_step_bytes(config, itemsize, round(batch * context))
    return Work(num_bytes, rows * (2 * num_weights(config) + attention))


def drafting(head: EagleHead, itemsize: int, speculation: SpeculationConfig, batch: int, context: float) -> Work:
    """Commit of the last path and every level; each reads the layer, the draft vocabulary and the context's KV."""
    sizes = {name: parameter.numel() for name, parameter in head.named_parameters()}
    fused = sum(size for name, size in sizes.items() if name.startswith("fc."))
    level = sum(size for name, size in sizes.items() if not name.startswith(("fc.", "embed_tokens.")))
    kv = 2 * batch * context * head.config.num_key_value_heads * head.config.head_dim
    num_levels, path = speculation.max_path - 1, speculation.max_path
    rows = batch * (path + (num_levels - 1) * speculation.draft_top_k)
    return Work(itemsize * (fused + num_levels * (level + kv)), 2 * (level * rows + fused * batch * path))


def acceptance(config: LlamaConfig, itemsize: int, batch: int, num_nodes: int) -> Work:
    """Token choice at every node: reads the logits."""
    return Work(itemsize * batch * num_nodes * config.vocab_size)


def publishing(head: EagleHead, itemsize: int, batch: int, max_path: int) -> Work:
    """Taps of the accepted paths, read and written."""
    return Work(2 * itemsize * batch * max_path * head.fc.in_features)
