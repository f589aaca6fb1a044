"""The demo pair widened to another model's shape: the narrow pair's function, text and acceptance, at the wide cost.

A pre-norm Llama keeps its function when its hidden units are padded with zeros: norm weights are multiplied by
sqrt(narrow / wide), epsilons by narrow / wide; element j of a rotated head moves to the element that the wide head
rotates at the same frequency; queries are rescaled for the other attention scale; further layers add nothing.
Vocabulary rows that the narrow model lacks repeat its rarest token's, and are never chosen. Weights that meet only
zeros stay random.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

import torch
from _harness import Bench
from _model import layer_sizes
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from wingbeat.runtime.demo import DemoPair
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model

Weights = Mapping[str, Tensor]


class Sizes(NamedTuple):
    """Sizes of a layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: LlamaConfig | EagleHeadConfig) -> "Sizes":
        """Sizes from a verifier's or a head's configuration."""
        return cls(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)


class WidePair(NamedTuple):
    """A verifier and its head."""

    loaded: LoadedModel
    head: EagleHead


def widened(bench: Bench, pair: DemoPair, config: LlamaConfig, draft_vocab_size: int, text: list[int]) -> WidePair:
    """Widens the pair to a shape, in place on the device, layer by layer.

    Args:
        config: wide configuration, in every size, with at least as many layers; its norms and rotation become the
            narrow model's.
        text: token ids in which the rarest token is looked up.
    """
    narrow = _narrow_verifier(pair)
    rarest = narrow(torch.tensor([text])).logits[0].log_softmax(-1).amax(0)
    config.rms_norm_eps = narrow.config.rms_norm_eps * narrow.config.hidden_size / config.hidden_size
    config.rope_parameters = dict(narrow.config.rope_parameters)
    head = wide_head(bench, _narrow_head(pair, narrow), config, draft_vocab_size, rarest)
    return WidePair(prepare_model(wide_verifier(bench, narrow, config, int(rarest.argmin())), "wide demo"), head)


def _narrow_verifier(pair: DemoPair) -> LlamaForCausalLM:
    config = LlamaConfig(**json.loads((pair.verifier / "config.json").read_text()))
    if config.num_key_value_heads != 1:
        raise ValueError("wide heads share keys otherwise than narrow ones: the narrow verifier must have one of them")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(load_file(pair.verifier / "model.safetensors"), strict=False)
    model.tie_weights()
    return model


def _narrow_head(pair: DemoPair, narrow: LlamaForCausalLM) -> EagleHead:
    return load_eagle_head(pair.drafter, TargetDescription.from_checkpoint(pair.verifier))


@torch.no_grad()
def wide_verifier(bench: Bench, narrow: LlamaForCausalLM, config: LlamaConfig, rarest: int) -> LlamaForCausalLM:
    """Model of a wide configuration that computes the narrow model's function."""
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype)
    small, wide = Sizes.of(narrow.config), Sizes.of(config)
    weights = dict(narrow.named_parameters())
    _put(model.model.embed_tokens.weight, weights["model.embed_tokens.weight"], zero_columns=True)
    _put_vocabulary(model.lm_head.weight, narrow.lm_head.weight, rarest)
    _put_norm(model.model.norm.weight, weights["model.norm.weight"])
    for index, layer in enumerate(model.model.layers):
        own = {name: weights.get(f"model.layers.{index}.{name}.weight") for name in _LAYER}
        attention, mlp = layer.self_attn, layer.mlp
        attention.o_proj.weight.zero_()
        mlp.down_proj.weight.zero_()
        if own["self_attn.q_proj"] is None:
            continue  # layers that the narrow model lacks add nothing
        qkv = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        _put_attention(qkv, attention.o_proj.weight, own, small, wide, torch.arange(small.hidden))
        _put(mlp.gate_proj.weight, own["mlp.gate_proj"])
        _put(mlp.up_proj.weight, own["mlp.up_proj"])
        _put(mlp.down_proj.weight, own["mlp.down_proj"])
        _put_norm(layer.input_layernorm.weight, own["input_layernorm"])
        _put_norm(layer.post_attention_layernorm.weight, own["post_attention_layernorm"])
    return model


_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
_LAYER = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")


@torch.no_grad()
def wide_head(bench: Bench, narrow: EagleHead, target: LlamaConfig, draft_vocab_size: int, rarest: Tensor) -> EagleHead:
    """Head for a wide verifier that computes the narrow head's function.

    Args:
        target: the wide verifier's configuration.
        rarest: highest log-probability of each token of the narrow vocabulary in some text.
    """
    old = narrow.config
    config = EagleHeadConfig(
        **layer_sizes(target),
        tap_layers=old.tap_layers,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=old.rms_norm_eps * old.hidden_size / target.hidden_size,
        rope_parameters=dict(old.rope_parameters),
    )
    with torch.device(bench.device):
        head = EagleHead(config)
    head = head.to(bench.dtype).eval().requires_grad_(False)
    small, wide = Sizes.of(old), Sizes.of(config)
    of_hidden = torch.arange(small.hidden)
    head.fc.weight.zero_()
    of_taps = torch.cat(
        [tap * config.target_hidden_size + torch.arange(old.target_hidden_size) for tap in range(old.num_taps)]
    )
    _put(head.fc.weight, narrow.fc.weight, of_hidden, of_taps)
    parts = narrow.qkv_proj.weight.split([small.heads * small.head_dim, *[small.kv_heads * small.head_dim] * 2])
    own = dict(zip(_ATTENTION, (*parts, narrow.o_proj.weight), strict=True))
    qkv = head.qkv_proj.weight.split([wide.heads * wide.head_dim, *[wide.kv_heads * wide.head_dim] * 2])
    head.o_proj.weight.zero_()
    # The layer's input is the concatenation of the token's embedding and the features.
    _put_attention(qkv, head.o_proj.weight, own, small, wide, torch.cat([of_hidden, wide.hidden + of_hidden]))
    for half, narrow_half in zip(head.gate_up_proj.weight.chunk(2), narrow.gate_up_proj.weight.chunk(2), strict=True):
        _put(half, narrow_half)
    head.down_proj.weight.zero_()
    _put(head.down_proj.weight, narrow.down_proj.weight)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm", "norm"):
        _put_norm(getattr(head, name).weight, getattr(narrow, name).weight)
    _put(head.embed_tokens.weight, narrow.embed_tokens.weight, zero_columns=True)
    _put_vocabulary(head.lm_head.weight, narrow.lm_head.weight, int(rarest[narrow.draft_token_ids].argmin()))
    added = old.vocab_size + torch.arange(draft_vocab_size - old.draft_vocab_size)
    head.draft_token_ids.copy_(torch.cat([narrow.draft_token_ids, added]))
    return head


def _put(
    wide: Tensor,
    narrow: Tensor,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    zero_columns: bool = False,
) -> None:
    """Writes a narrow matrix to rows and columns of a wide one, by default the first ones.

    Args:
        zero_columns: sets the rows' other columns to zero.
    """
    rows = torch.arange(narrow.shape[0]) if rows is None else rows
    columns = torch.arange(narrow.shape[1]) if columns is None else columns
    rows, columns = rows.to(wide.device), columns.to(wide.device)
    if zero_columns:
        wide[rows] = 0
    wide[rows[:, None], columns] = narrow.to(wide)


def _put_norm(wide: Tensor, narrow: Tensor) -> None:
    """Writes a norm's weight, rescaled because the mean of squares covers more elements, all further ones zero."""
    wide[: len(narrow)] = (narrow * (len(narrow) / len(wide)) ** 0.5).to(wide)


def _put_vocabulary(wide: Tensor, narrow: Tensor, rarest: int) -> None:
    """Writes rows of an output matrix; further rows repeat the rarest token's."""
    _put(wide, narrow)
    wide[len(narrow) :, : narrow.shape[1]] = narrow[rarest].to(wide)


def _put_attention(
    qkv: tuple[Tensor, ...], output: Tensor, own: Weights, small: Sizes, wide: Sizes, columns: Tensor
) -> None:
    """Writes the projections of a layer's attention; the wide `output` must be zero before.

    Args:
        qkv: the wide projections; all narrow heads share one head of keys and values.
        own: the narrow weights by the names of `_ATTENTION`.
        columns: columns of the wide projections' input that hold the narrow input's elements.
    """
    query, key, value, narrow_output = (own[name] for name in _ATTENTION)
    half, step = small.head_dim // 2, wide.head_dim // small.head_dim
    turned = torch.cat([torch.arange(half) * step, wide.head_dim // 2 + torch.arange(half) * step])
    plain = torch.arange(small.head_dim)
    for head in range(small.heads):
        at, group_at = head * wide.head_dim, head // (wide.heads // wide.kv_heads) * wide.head_dim
        of_head = slice(head * small.head_dim, (head + 1) * small.head_dim)
        # Elements of a query that the narrow head lacks are zero, because they meet nonzero elements of a key.
        qkv[0][at : at + wide.head_dim] = 0
        _put(qkv[0], query[of_head] * step**0.5, at + turned, columns)
        _put(qkv[1], key, group_at + turned, columns)
        _put(qkv[2], value, group_at + plain, columns)
        _put(output, narrow_output[:, of_head], None, at + plain)
