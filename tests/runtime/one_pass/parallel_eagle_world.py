"""Random P-EAGLE heads: their files, and their mathematics: pairs and masked slots in one causal pass."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runtime.one_pass.one_pass_world import (
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MASK,
    MLP,
    THETA,
    VOCAB,
    norm,
    turn,
)


def parallel_config(taps: tuple[int, ...], num_layers: int, **fields) -> dict[str, Any]:
    """config.json of a head; `taps` are inputs of layers."""
    return {
        **{"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "ptd_token_id": MASK},
        **{"hidden_size": HIDDEN, "num_hidden_layers": num_layers, "num_attention_heads": HEADS, "vocab_size": VOCAB},
        **{"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP, "rms_norm_eps": EPS},
        **{"eagle_aux_hidden_state_layer_ids": list(taps), "rope_theta": THETA},
    } | fields


def parallel_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors by their names in the file."""
    taps_size = len(raw["eagle_aux_hidden_state_layer_ids"]) * HIDDEN
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"fc.weight": (HIDDEN, taps_size), "mask_hidden": (1, 1, taps_size), "norm.weight": (HIDDEN,)}
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for index in range(raw["num_hidden_layers"]):
        layer, width = f"layers.{index}.", HIDDEN * (2 if index == 0 else 1)
        rows = {"q_proj": query, "k_proj": key, "v_proj": key}
        shapes |= {f"{layer}self_attn.{name}.weight": (size, width) for name, size in rows.items()}
        shapes |= {f"{layer}self_attn.o_proj.weight": (HIDDEN, query), f"{layer}mlp.down_proj.weight": (HIDDEN, MLP)}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (MLP, HIDDEN) for name in ("gate", "up")}
        norms = ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if index == 0 else []))
        shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in norms}
    generator = torch.Generator().manual_seed(seed)
    random = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    scales = {name: 1.0 if name == "mask_hidden" else shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {name: values * 0.3 + 1 if values.dim() == 1 else values * scales[name] for name, values in random.items()}


@dataclass
class ParallelReference:
    """The forward in float32 of one sequence."""

    raw: dict[str, Any]
    tensors: dict[str, Tensor]

    def logits(self, taps: Tensor, token_ids: Tensor, num_drafted: int) -> Tensor:
        """[num_drafted, V] behind pairs of taps [P, taps_size] and the tokens int64 [P] after them."""
        w, num_masked = self.tensors, num_drafted - 1
        features = torch.cat([taps, w["mask_hidden"][0].expand(num_masked, -1)]) @ w["fc.weight"].T
        tokens = torch.cat([token_ids, torch.full((num_masked,), self.raw["ptd_token_id"])])
        x, embedded = features, w["embed_tokens.weight"][tokens]
        for index in range(self.raw["num_hidden_layers"]):
            layer = f"layers.{index}."
            inputs = norm(embedded if index == 0 else x, w[f"{layer}input_layernorm.weight"])
            if index == 0:
                inputs = torch.cat([inputs, norm(features, w[f"{layer}hidden_norm.weight"])], dim=1)
            x = x + self.attention(layer, inputs)
            y = norm(x, w[f"{layer}post_attention_layernorm.weight"])
            gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return norm(x[-num_drafted:], w["norm.weight"]) @ w["lm_head.weight"].T

    def attention(self, layer: str, inputs: Tensor) -> Tensor:
        heads = []
        for name in "qkv":
            rows = (inputs @ self.tensors[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM))
            rows = rows if name == "v" else turn(rows, torch.arange(len(inputs)), self.raw)
            heads.append(rows.repeat_interleave(HEADS // rows.shape[1], 1).transpose(0, 1))
        query, key, value = heads
        later = torch.ones(len(inputs), len(inputs), dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(later, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        return mixed @ self.tensors[f"{layer}self_attn.o_proj.weight"].T
