"""The measured model: Llama-3.1-8B's shape with random weights, and its plain and verification steps as stages."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from _harness import Bench
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from wingbeat.kernels.kv.reference import move_kv, slot_mapping
from wingbeat.kernels.tree.reference import ancestor_words, walk_tree
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphPool, GraphRunner, Stage
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.rows import ModelOutput, Rows, Segment
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model
from wingbeat.runtime.verifier.model import VerifierModel

MAX_DEPTH = 6
"""Maximum depth of the measured trees."""
BLOCK_SIZE = 16

_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_TOY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def llama_config(bench: Bench, **overrides) -> LlamaConfig:
    """The 8B shape; a toy shape in a quick run."""
    shape = {**_LLAMA_8B, **_TOY} if bench.quick else _LLAMA_8B
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return LlamaConfig(**{**shape, **ids, "tie_word_embeddings": False, **overrides})


def random_model(bench: Bench, config: LlamaConfig, dtype: torch.dtype | None = None) -> LoadedModel:
    """Creates a verifier with random weights, drawn on the device."""
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or bench.dtype)
    draw_weights(model)
    return prepare_model(model, "random")


def draw_weights(model: nn.Module) -> None:
    """Draws the weights of norms: weights of 1 would hide where a norm rounds, and no checkpoint has them."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.1)


def layer_sizes(target: LlamaConfig) -> dict[str, int]:
    """Sizes of a head whose layers are as wide as its target's."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "target_hidden_size": target.hidden_size,
    }


def eagle_config(bench: Bench, num_layers: int = 1, **overrides) -> EagleHeadConfig:
    """Configuration of an EAGLE-3 head for that model."""
    target = llama_config(bench, **overrides)
    return EagleHeadConfig(
        **layer_sizes(target),
        tap_layers=(1, 2, 3) if bench.quick else (2, 16, 29),
        vocab_size=target.vocab_size,
        draft_vocab_size=64 if bench.quick else 32000,
        num_layers=num_layers,
    )


def random_head(bench: Bench, **overrides) -> EagleHead:
    """Creates an EAGLE-3 head for that model with random weights, drawn on the device."""
    with torch.device(bench.device):
        head = EagleHead(eagle_config(bench, **overrides))
    return head.to(bench.dtype).eval().requires_grad_(False)


def shape_facts(config: LlamaConfig, dtype: torch.dtype) -> dict[str, str]:
    """Facts about the model, as text."""
    return {
        "model": f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, intermediate "
        f"{config.intermediate_size}, {config.num_attention_heads}/{config.num_key_value_heads} heads of "
        f"{config.head_dim}, vocabulary {config.vocab_size}, random {str(dtype).removeprefix('torch.')} weights"
    }


def num_weights(config: LlamaConfig) -> int:
    """Number of weights that a step reads: all except the embedding table."""
    hidden, dim = config.hidden_size, config.head_dim
    attention = hidden * dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return config.num_hidden_layers * layer + hidden + hidden * config.vocab_size


def plain_step_bytes(config: LlamaConfig, itemsize: int, context: int) -> int:
    """Bytes a plain step must read: all weights except the embedding table, and KV of `context` tokens in total."""
    kv = config.num_hidden_layers * context * config.num_key_value_heads * config.head_dim * 2
    return itemsize * (num_weights(config) + kv)


class StepInputs(NamedTuple):
    """Trees to verify, or bare roots if one node wide."""

    token_ids: Tensor
    """int64 [num_reqs, num_nodes]."""
    parents: Tensor
    """int64 [num_reqs, num_nodes]."""
    depths: Tensor
    """int64 [num_reqs, num_nodes]."""
    num_context: Tensor
    """int64 [num_reqs]."""
    block_tables: Tensor
    """int64 [num_reqs, width]."""


class PlainOutputs(NamedTuple):
    """Result of a plain step."""

    token_ids: Tensor
    """int64 [num_reqs]."""


class VerifyOutputs(NamedTuple):
    """Result of a verification."""

    token_ids: Tensor
    """int64 [num_reqs, max_path]: emitted tokens, then zeros."""
    num_tokens: Tensor
    """int64 [num_reqs]."""
    taps: Tensor
    """[num_reqs, max_path, taps_size] along the accepted path."""


class Steps:
    """A verifier with sequences in its KV cache, and its two stages.

    Args:
        context: tokens in each sequence's cache, of random content.
        max_nodes: tokens of room behind the context.
        tap_layers: layers tapped for a drafter; empty for plain decoding.
    """

    def __init__(
        self, bench: Bench, loaded: LoadedModel, num_reqs: int, context: int, max_nodes: int, tap_layers: Sequence[int]
    ) -> None:
        self.bench, self.loaded, self.context = bench, loaded, context
        self.model = VerifierModel(loaded, tuple(tap_layers))
        self.width = -(-(context + max_nodes) // BLOCK_SIZE)
        config = EngineConfig(
            max_num_seqs=num_reqs,
            max_model_len=context + max_nodes,
            block_size=BLOCK_SIZE,
            num_kv_blocks=2 + num_reqs * (self.width + 2),
        )
        self.cache = KVCache(loaded.layers, config, loaded.dtype, bench.device)
        for part in (part for layer in self.cache.layers for part in layer):
            part.normal_()
        blocks = 1 + torch.randperm(num_reqs * self.width, device=bench.device)
        self.block_tables = blocks.view(num_reqs, self.width)
        self.pool = GraphPool(CudaGraphDevice(bench.device)) if bench.device.type == "cuda" else None

    def plain_runner(self, batches: Sequence[int]) -> GraphRunner[StepInputs, PlainOutputs]:
        """Stage of plain decoding, captured."""
        return self._runner(Stage.BASE_DECODING, self.decode, [Bucket(n) for n in batches])

    def verify_runner(self, buckets: Sequence[Bucket]) -> GraphRunner[StepInputs, VerifyOutputs]:
        """Stage of verification, captured."""
        return self._runner(Stage.BASE_VERIFICATION, self.verify, buckets)

    def _runner(self, stage: Stage, function, buckets: Sequence[Bucket]) -> GraphRunner:
        pool = self.pool or GraphPool(_Uncaptured())
        runner = GraphRunner(stage, function, self.padding_row, buckets, pool)
        if self.pool is not None:
            pool.capture(runner)
            if pool.stats.failed:
                raise RuntimeError(f"captures failed: {pool.stats.failed}")
        return runner

    def padding_row(self, num_nodes: int) -> StepInputs:
        """Padding: a bare root of token 0 without context, stored in block 0."""
        zeros = torch.zeros(1, num_nodes, dtype=torch.int64, device=self.bench.device)
        parents = torch.zeros_like(zeros).index_fill_(1, zeros[0, :1], -1)
        return StepInputs(zeros, parents, zeros, zeros[:, 0], zeros.new_zeros(1, self.width))

    def random_inputs(self, num_reqs: int, num_nodes: int) -> StepInputs:
        """Random tokens in trees of at most MAX_DEPTH levels, or bare roots."""
        device = self.bench.device
        tokens = torch.randint(0, self.loaded.vocab_size, (num_reqs, num_nodes), device=device)
        context = torch.full((num_reqs,), self.context, dtype=torch.int64, device=device)
        # The root has the fewest branches for which no branch is deeper than MAX_DEPTH.
        index = torch.arange(num_nodes, device=device)
        branches = max(-(-(num_nodes - 1) // MAX_DEPTH), 1)
        parents = torch.where(index > 0, (index - branches).clamp_min(0), -1).expand(num_reqs, -1)
        depths = ((index + branches - 1) // branches).expand(num_reqs, -1)
        return StepInputs(tokens, parents, depths, context, self.block_tables[:num_reqs])

    def decode(self, inputs: StepInputs) -> PlainOutputs:
        """Forward pass and greedy choice for bare roots."""
        output = self._forward(inputs, inputs.num_context[:, None])
        return PlainOutputs(output.logits.argmax(dim=-1))

    def verify(self, inputs: StepInputs) -> VerifyOutputs:
        """Forward pass over trees, greedy choice at every node, walk, compaction, and taps of the path."""
        num_reqs, num_nodes = inputs.token_ids.shape
        output = self._forward(inputs, inputs.num_context[:, None] + inputs.depths)
        targets = output.logits.argmax(dim=-1).view(num_reqs, num_nodes)
        num_valid = torch.full_like(inputs.num_context, num_nodes)
        walk = walk_tree(inputs.token_ids, inputs.parents, num_valid, targets, min(MAX_DEPTH + 1, num_nodes))
        steps = torch.arange(walk.nodes.shape[1], device=self.bench.device)
        moved = (steps < walk.num_tokens[:, None]) & (walk.nodes != steps)
        source, target = (
            slot_mapping(inputs.block_tables, inputs.num_context[:, None] + index, BLOCK_SIZE, moved)
            for index in (walk.nodes, steps.expand_as(walk.nodes))
        )
        move_kv(self.cache.layers, source.flatten(), target.flatten(), self.cache.table)
        rows = walk.nodes + torch.arange(num_reqs, device=self.bench.device)[:, None] * num_nodes
        return VerifyOutputs(walk.token_ids, walk.num_tokens, output.taps[rows])

    def _forward(self, inputs: StepInputs, positions: Tensor) -> ModelOutput:
        num_reqs, num_nodes = inputs.token_ids.shape
        words = ancestor_words(inputs.parents, MAX_DEPTH) if num_nodes > 1 else None
        storage = inputs.num_context[:, None] + torch.arange(num_nodes, device=self.bench.device)
        segment = Segment(0, num_reqs, num_nodes, inputs.block_tables, inputs.num_context, positions, words)
        mapping = slot_mapping(inputs.block_tables, storage, BLOCK_SIZE)
        token_ids, positions, mapping = (part.flatten() for part in (inputs.token_ids, positions, mapping))
        return self.model(Rows(token_ids[None], positions[None], mapping, [segment], self.cache.layers))


class _Uncaptured:
    """Stub of a graph device that captures nothing."""

    def new_pool(self) -> None:
        return None
