"""Initial weights of a head. Weights are copied from the verifier where shapes match, because copied weights need not
be learnt.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.training.verifier_weights import VerifierWeights


def initial_eagle3_head(
    weights: VerifierWeights,
    tap_layers: tuple[int, ...],
    token_weights: Tensor,
    *,
    draft_vocab_size: int,
    intermediate_size: int | None,
    seed: int,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> EagleHead:
    """An EAGLE-3 head in the verifier's shape that drafts the most frequent tokens.

    Embedding and output matrix are initialised with the verifier's rows, and `fc` so that features equal the verifier's
    highest tap. The decoder layer is initialised with the weights of the verifier's last layer, if that layer's tensors
    have Llama's names and the same shapes.

    Args:
        weights: weights of the verifier.
        tap_layers: layers of the verifier that are tapped.
        token_weights: [vocab_size], weight of each token in the choice of the draft vocabulary.
        draft_vocab_size: size of the draft vocabulary.
        intermediate_size: width of the head's MLP; None means the verifier's.
        seed: seed of the weights that are not copied.
        fc_norm, norm_output: conventions of EAGLE-3.1.
    """
    torch.manual_seed(seed)
    size = min(draft_vocab_size, weights.vocab_size)
    shapes = head_shapes(weights, tap_layers, intermediate_size)
    head = EagleHead(EagleHeadConfig(**shapes, draft_vocab_size=size, fc_norm=fc_norm, norm_output=norm_output))
    start_eagle3(head, weights, token_weights)
    return head.train()


def start_eagle3(head: EagleHead, weights: VerifierWeights, token_weights: Tensor) -> None:
    """Fill an EAGLE-3 head's weights as described in `initial_eagle3_head`."""
    hidden = head.hidden_size
    with torch.no_grad():
        copy_outside_layers(head, weights, token_weights)
        head.fc.weight.zero_()[:, -hidden:].fill_diagonal_(1.0)
        # The input of attention is cat[embedding, features], so the verifier's projections are copied to the columns of
        # the features.
        _copy_decoder(head, weights, head.qkv_proj.weight[:, hidden:])
    head.embed_tokens.weight.requires_grad_(False)


def copy_outside_layers(head: Any, weights: VerifierWeights, token_weights: Tensor) -> None:
    """Copy embedding, output matrix and norms of the verifier; drafts are the most frequent tokens."""
    head.draft_token_ids.copy_(frequent_tokens(token_weights, head.config.draft_vocab_size))
    head.embed_tokens.weight.copy_(weights.embedding)
    head.lm_head.weight.copy_(weights.lm_head.cpu()[head.draft_token_ids])
    copy_tensors(head.hidden_norm.weight, weights, ["input_layernorm.weight"])
    copy_tensors(head.norm.weight, weights, ["final_norm.weight"])


def frequent_tokens(token_weights: Tensor, size: int) -> Tensor:
    """The most frequent tokens, ascending -> int64 [size]."""
    return token_weights.argsort(descending=True, stable=True)[:size].sort().values


def initial_eagle1_head(weights: VerifierWeights, *, intermediate_size: int | None, seed: int) -> Eagle1Head:
    """An EAGLE-1 head in the verifier's shape over its whole vocabulary; embedding and output matrix are not trained.

    `fc` is initialised so that its output is the feature alone; the decoder layer is initialised as in
    `initial_eagle3_head`.
    """
    torch.manual_seed(seed)
    shapes = head_shapes(weights, (weights.config.num_hidden_layers,), intermediate_size)
    head = Eagle1Head(Eagle1HeadConfig(**shapes, draft_vocab_size=weights.vocab_size))
    with torch.no_grad():
        head.embed_tokens.weight.copy_(weights.embedding)
        head.lm_head.weight.copy_(weights.lm_head)
        head.fc.weight.zero_()[:, head.hidden_size :].fill_diagonal_(1.0)
        _copy_decoder(head, weights, head.qkv_proj.weight)
    head.embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.requires_grad_(False)
    return head.train()


def head_shapes(weights: VerifierWeights, tap_layers: tuple[int, ...], intermediate_size: int | None) -> dict[str, Any]:
    """Config fields of a head in the verifier's shape."""
    target = weights.config
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "target_hidden_size": target.hidden_size,
        "tap_layers": tap_layers,
        "vocab_size": weights.vocab_size,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        "max_position_embeddings": target.max_position_embeddings,
    }


def _copy_decoder(head: DecoderHead, weights: VerifierWeights, qkv: Tensor) -> None:
    copy_tensors(qkv, weights, [f"self_attn.{name}_proj.weight" for name in "qkv"])
    copy_layer(head, weights)


def copy_layer(layer: nn.Module, weights: VerifierWeights) -> None:
    """Copy the verifier's last layer to a head's layer, except the q, k and v projections. Tensors whose shapes differ
    are not copied.
    """
    copy_tensors(layer.o_proj.weight, weights, ["self_attn.o_proj.weight"])
    copy_tensors(layer.gate_up_proj.weight, weights, ["mlp.gate_proj.weight", "mlp.up_proj.weight"])
    copy_tensors(layer.down_proj.weight, weights, ["mlp.down_proj.weight"])
    copy_tensors(layer.post_attention_layernorm.weight, weights, ["post_attention_layernorm.weight"])


def copy_tensors(part: Tensor, weights: VerifierWeights, names: list[str]) -> None:
    """Fill `part` with the concatenation of the verifier's tensors `names`; does nothing if a tensor is missing or the
    shape differs.
    """
    layer = weights.last_layer
    if all(name in layer and layer[name].is_floating_point() for name in names):
        source = torch.cat([layer[name] for name in names])
        if source.shape == part.shape:
            part.copy_(source)
