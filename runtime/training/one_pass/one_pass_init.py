"""Initial weights of a one-pass head. Weights are copied from the verifier where shapes match."""

import torch
from torch import Tensor

from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.one_pass.config import LatticeConfig, OnePassConfig
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.training.head_init import copy_layer, copy_outside_layers, copy_tensors, start_eagle3
from wingbeat.runtime.training.verifier_weights import VerifierWeights

_GROUPS = 16
"""Maximum number of channels that share one kernel in DFlash2's convolutions."""


def mask_token(token_weights: Tensor) -> int:
    """Id of the mask token: the highest id that does not occur in the corpus. If all ids occur, the highest among the
    rarest tokens' ids.
    """
    return int((token_weights == token_weights.min()).nonzero().max())


def lattice_shape(hidden_size: int, draft_vocab_size: int, rank: int) -> LatticeConfig:
    """DFlash2's part of the config, for a head with this hidden size."""
    group_size = next(size for size in range(_GROUPS, 0, -1) if hidden_size % size == 0)
    return LatticeConfig(group_size=group_size, rank=rank, top_k=min(16, draft_vocab_size))


def initial_one_pass_head(
    weights: VerifierWeights, config: OnePassConfig, token_weights: Tensor, seed: int
) -> OnePassHead:
    """A DFlash-based head. Its weights are initialised so that its context vectors equal the verifier's highest tap and
    its corrections are zero.

    The embedding is not trained; the output matrix is not trained either if the head drafts the whole vocabulary.
    """
    torch.manual_seed(seed)
    head = OnePassHead(config)
    with torch.no_grad():
        copy_outside_layers(head, weights, token_weights)
        if config.target_hidden_size == config.hidden_size:
            head.fc.weight.zero_()[:, -config.hidden_size :].fill_diagonal_(1.0)
        if head.key_norms is not None:
            head.key_norms.fill_(1.0)
            for norm in head.key_norms:
                copy_tensors(norm, weights, ["self_attn.k_norm.weight"])
        for index, layer in enumerate(head.layers):
            rows = slice(index * head.kv_size, (index + 1) * head.kv_size)
            copy_tensors(head.kv_proj.weight[rows], weights, [f"self_attn.{name}_proj.weight" for name in "kv"])
            copy_tensors(layer.q_proj.weight, weights, ["self_attn.q_proj.weight"])
            copy_tensors(layer.input_layernorm.weight, weights, ["input_layernorm.weight"])
            if layer.q_norm is not None:
                copy_tensors(layer.q_norm.weight, weights, ["self_attn.q_norm.weight"])
            copy_layer(layer, weights)
        _start_corrections(head)
    return for_training(head)


def for_training(head: OnePassHead) -> OnePassHead:
    """Make a head's weights trainable, except those borrowed from the verifier."""
    head.requires_grad_(True).embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.requires_grad_(head.config.draft_vocab_size < head.config.vocab_size)
    return head.train()


def _start_corrections(head: OnePassHead) -> None:
    """Initialise DSpark's and DFlash2's modules so that convolutions return their input, and a token does not change
    the scores of later tokens.
    """
    for layer in head.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            if conv is not None:
                conv.base_kernel.zero_()[:, 0].fill_(1.0)
                conv.kernel_projection.weight.zero_()
    if head.markov is not None and head.markov.markov_w2 is not None:
        head.markov.markov_w2.weight.zero_()
    if head.selector is not None:
        torch.nn.init.normal_(head.selector.predecessor_codebook)
        head.selector.successor_codebook.zero_()


def initial_parallel_head(
    weights: VerifierWeights,
    config: EagleHeadConfig,
    token_weights: Tensor,
    *,
    mask_token_id: int,
    seed: int,
) -> ParallelEagleHead:
    """A P-EAGLE head. Its first layer is initialised as in EAGLE-3, its later layers with the weights of the verifier's
    last layer.
    """
    torch.manual_seed(seed)
    head = ParallelEagleHead(config, mask_token_id)
    start_eagle3(head, weights, token_weights)
    with torch.no_grad():
        torch.nn.init.normal_(head.mask_hidden)
        for layer in head.behind:
            copy_tensors(layer.qkv_proj.weight, weights, [f"self_attn.{name}_proj.weight" for name in "qkv"])
            copy_tensors(layer.input_layernorm.weight, weights, ["input_layernorm.weight"])
            copy_layer(layer, weights)
    return head.train()
