"""The head training starts from: as much of the verifier as fits, because what is copied need not be learned."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from wingbeat.runtime.drafters.eagle_head import EagleHead, EagleHeadConfig
from wingbeat.runtime.training.verifier import FrozenVerifier


def initial_head(
    verifier: FrozenVerifier, token_counts: Tensor, *, draft_vocab_size: int, intermediate_size: int | None, seed: int
) -> EagleHead:
    """A head in the verifier's shape that drafts the most frequent tokens.

    The embedding and the rows of the output matrix are the verifier's, features start as its highest tap, and the layer
    starts as its last one where the tensors have Llama's names and the same shapes.

    Args:
        token_counts: int64 [vocab_size], how often each token occurs in the training text.
        intermediate_size: width of the head's MLP; None takes the verifier's.
    """
    target = verifier.model.config.get_text_config()
    vocab_size = verifier.embedding.shape[0]
    torch.manual_seed(seed)
    head = EagleHead(_head_config(verifier, target, min(draft_vocab_size, vocab_size), intermediate_size))
    frequent = token_counts.argsort(descending=True, stable=True)[: head.config.draft_vocab_size]
    with torch.no_grad():
        head.draft_token_ids.copy_(frequent.sort().values)
        head.embed_tokens.weight.copy_(verifier.embedding)
        head.lm_head.weight.copy_(verifier.lm_head.cpu()[head.draft_token_ids])
        head.fc.weight.zero_()[:, -verifier.hidden_size :].fill_diagonal_(1.0)
        _copy_last_layer(head, verifier)
    head.embed_tokens.weight.requires_grad_(False)
    return head.train()


def _head_config(
    verifier: FrozenVerifier, target: PretrainedConfig, draft_vocab_size: int, intermediate_size: int | None
) -> EagleHeadConfig:
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    return EagleHeadConfig(
        hidden_size=verifier.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or verifier.hidden_size // heads,
        target_hidden_size=verifier.hidden_size,
        tap_layers=verifier.tap_layers,
        vocab_size=verifier.embedding.shape[0],
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        max_position_embeddings=target.max_position_embeddings,
    )


def _copy_last_layer(head: EagleHead, verifier: FrozenVerifier) -> None:
    layer = dict(verifier.layers[-1].named_parameters())
    final_norm = getattr(getattr(verifier.model, "model", None), "norm", None)
    if isinstance(final_norm, nn.Module):
        layer["final_norm.weight"] = final_norm.weight
    hidden = head.config.hidden_size
    # Attention reads cat[embedding, features]: the verifier's projections belong to the second half.
    qkv = head.qkv_proj.weight[:, hidden:]
    for part, names in (
        (qkv, [f"self_attn.{name}_proj.weight" for name in "qkv"]),
        (head.o_proj.weight, ["self_attn.o_proj.weight"]),
        (head.gate_up_proj.weight, ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        (head.down_proj.weight, ["mlp.down_proj.weight"]),
        (head.hidden_norm.weight, ["input_layernorm.weight"]),
        (head.post_attention_layernorm.weight, ["post_attention_layernorm.weight"]),
        (head.norm.weight, ["final_norm.weight"]),
    ):
        if all(name in layer for name in names):
            source = torch.cat([layer[name] for name in names])
            if source.shape == part.shape:
                part.copy_(source)
