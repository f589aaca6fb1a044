"""Random heads of the families that draft in one pass: their files, and the mathematics of each, written plainly.

The reference knows neither caches nor batches: one sequence, its taps, its last token, and the slots' logits.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, EPS, THETA = 97, 64, 4, 2, 16, 96, 1e-6, 1e6
MASK = VOCAB - 2
RANK, TOP_K = 8, 6
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": TOP_K}
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "jetspec": {"architectures": ["DFlashDraftModel"], "dflash_config": {"causal_head": True}},
    "dspark-none": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0},
    "dspark-vanilla": {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK},
    "dspark-gated": {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "markov_head_type": "gated"},
    "dspark-rnn": {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "markov_head_type": "rnn"},
    "dspark-fill-in": {"speculators_model_type": "dspark", "markov_rank": RANK},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH2},
}
"""By name, what tells a family and its variant."""


def raw_config(family: str, taps: tuple[int, ...], num_layers: int, block_size: int = 6, **fields) -> dict[str, Any]:
    """config.json of a head; `taps` are outputs of layers."""
    raw = {
        **{"hidden_size": HIDDEN, "num_hidden_layers": num_layers, "num_attention_heads": HEADS, "vocab_size": VOCAB},
        **{"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP, "rms_norm_eps": EPS},
        **{"block_size": block_size, "mask_token_id": MASK, "target_layer_ids": list(taps), "rope_theta": THETA},
    }
    return raw | FAMILIES[family] | fields


def random_tensors(raw: dict[str, Any], target_hidden: int = HIDDEN, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors by their names in the file."""
    hidden, rank = raw["hidden_size"], raw.get("markov_rank")
    kind, own = raw.get("markov_head_type"), raw.get("dflash_config", {})
    shapes = {"fc": (hidden, len(raw["target_layer_ids"]) * target_hidden), "lm_head": (VOCAB, hidden)}
    shapes |= {"embed_tokens": (VOCAB, hidden), "norm": (hidden,), "hidden_norm": (hidden,)}
    for layer in (f"layers.{i}." for i in range(raw["num_hidden_layers"])):
        query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        rows = {"q_proj": query, "k_proj": key, "v_proj": key}
        shapes |= {f"{layer}self_attn.{name}": (size, hidden) for name, size in rows.items()}
        shapes |= {f"{layer}self_attn.o_proj": (hidden, query), f"{layer}mlp.down_proj": (hidden, MLP)}
        shapes |= {f"{layer}mlp.{name}_proj": (MLP, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"{layer}{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if "conv_kernel_size" in own:
            taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}{conv}.base_kernel"] = (2, taps, hidden)
                shapes[f"{layer}{conv}.kernel_projection"] = (2 * taps * groups, hidden)
    if rank:
        shapes |= {"markov_head.markov_w1": (VOCAB, rank), "markov_head.markov_w2": (VOCAB, rank)}
    if rank and kind == "gated":
        shapes |= {"markov_head.gate_proj": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and kind == "rnn":
        shapes |= {"markov_head.joint_proj": (3 * rank, hidden + 2 * rank), "markov_head.joint_proj.bias": (3 * rank,)}
    if raw.get("enable_confidence_head"):
        shapes |= {"confidence_head.proj": (1, hidden + (rank or 0)), "confidence_head.proj.bias": (1,)}
    if "selector_rank" in own:
        books = ("predecessor_codebook", "successor_codebook")
        shapes |= {f"candidate_selector.{name}": (VOCAB, own["selector_rank"]) for name in books}
        shapes["candidate_selector.hidden_projection"] = (own["selector_rank"], hidden)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        bare = name.endswith((".bias", "base_kernel", "codebook"))
        scale = values.shape[-1] ** -0.5 if values.dim() > 1 and not bare else 0.3
        tensors[name if bare else f"{name}.weight"] = values * scale + (values.dim() == 1)
    return tensors


def save_head(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Reference:
    """Forward pass of a family in float32, for one sequence."""

    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    fill_in: bool
    masks: list[tuple[bool, int | None]]
    """Causality and window by layer."""

    def hidden(self, taps: Tensor, anchor: int) -> Tensor:
        """The slots' states [num_drafted, H] behind taps [P, taps_size] of the context."""
        w, size = self.tensors, self.raw["block_size"]
        context = norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = w["embed_tokens.weight"][torch.tensor([anchor, *[self.raw["mask_token_id"]] * (size - 1)])]
        here = torch.arange(len(taps) + size)
        for index, (causal, window) in enumerate(self.masks):
            layer = f"layers.{index}."
            ahead = here[None] - here[len(taps) :, None]
            hidden = (ahead > 0) & (here >= len(taps)) & causal | (ahead <= -(window or 1 << 30))
            attention = partial(self.attention, layer, context, here, hidden)
            normed = norm(x, w[f"{layer}input_layernorm.weight"])
            x = x + self.around(f"{layer}attention_conv", normed, attention)
            normed = norm(x, w[f"{layer}post_attention_layernorm.weight"])
            x = x + self.around(f"{layer}mlp_conv", normed, partial(self.mlp, layer))
        return norm(x, w["norm.weight"])[1 if self.fill_in else 0 :]

    def attention(self, layer: str, context: Tensor, positions: Tensor, hidden: Tensor, x: Tensor) -> Tensor:
        w, both = {n: self.tensors[f"{layer}self_attn.{n}.weight"] for n in ("q_norm", "k_norm")}, []
        for name in "qkv":
            inputs = x if name == "q" else torch.cat([context, x])
            heads = (inputs @ self.tensors[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM))
            if name != "v":
                heads = turn(norm(heads, w[f"{name}_norm"]), positions[-len(inputs) :], self.raw)
            both.append(heads.repeat_interleave(HEADS // heads.shape[1], 1).transpose(0, 1))
        query, key, value = both
        scores = (query @ key.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(hidden, float("-inf"))
        out = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        return out @ self.tensors[f"{layer}self_attn.o_proj.weight"].T

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        gate, up, down = (self.tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def around(self, conv: str, x: Tensor, sublayer) -> Tensor:
        if f"{conv}.base_kernel" not in self.tensors:
            return sublayer(x)
        base = self.tensors[f"{conv}.base_kernel"]
        taps, groups = base.shape[1], HIDDEN // DFLASH2["conv_group_size"]
        dynamic = (x @ self.tensors[f"{conv}.kernel_projection.weight"].T).view(len(x), 2, taps, groups)

        def over(rows: Tensor, side: int) -> Tensor:
            out = torch.zeros_like(rows)
            for i in range(len(rows)):
                for c in range(HIDDEN):
                    for t in range(min(taps, i + 1)):
                        kernel = base[side, t, c] + dynamic[i, side, t, c // DFLASH2["conv_group_size"]]
                        out[i, c] += kernel * rows[i - t, c]
            return out

        return over(sublayer(over(x, 0)), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_drafted, V] of the slots, without what corrects them."""
        return hidden @ self.tensors["lm_head.weight"].T

    def next_logits(self, hidden: Tensor, path: list[int], noise: Tensor | None = None) -> Tensor:
        """[V] of the token behind a path: the anchor and the tokens drafted so far.

        Args:
            noise: [V]: what the target's choice adds to logits, by which candidates are chosen too; None is greedy.
        """
        w, slot = self.tensors, len(path) - 1
        logits = self.logits(hidden)[slot]
        if self.raw.get("markov_rank"):
            return logits + w["markov_head.markov_w2.weight"] @ self.markov_factor(hidden, path)
        if "candidate_selector.hidden_projection.weight" in w:
            best = (logits if noise is None else logits + noise).topk(TOP_K).indices
            given = w["candidate_selector.predecessor_codebook"][path[-1]]
            given = given * (w["candidate_selector.hidden_projection.weight"] @ hidden[slot])
            scores = torch.full_like(logits, float("-inf"))
            scores[best] = logits[best] + w["candidate_selector.successor_codebook"][best] @ given
            return scores
        return logits

    def markov_factor(self, hidden: Tensor, path: list[int]) -> Tensor:
        w, kind = self.tensors, self.raw.get("markov_head_type", "vanilla")
        state = torch.zeros(self.raw["markov_rank"])
        for slot, token in enumerate(path):
            embedded = w["markov_head.markov_w1.weight"][token]
            if kind == "vanilla":
                factor = embedded
            elif kind == "gated":
                inputs = torch.cat([hidden[slot], embedded])
                gate = torch.sigmoid(w["markov_head.gate_proj.weight"] @ inputs + w["markov_head.gate_proj.bias"])
                factor = gate * embedded
            else:
                inputs = torch.cat([state, embedded, hidden[slot]])
                joint = w["markov_head.joint_proj.weight"] @ inputs + w["markov_head.joint_proj.bias"]
                gate, candidate, out = joint.chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                factor = torch.tanh(out)
        return factor

    def confidence(self, hidden: Tensor, path: list[int]) -> float:
        """Confidence in the best token after a path."""
        inputs = torch.cat([hidden[len(path) - 1], self.tensors["markov_head.markov_w1.weight"][path[-1]]])
        w = self.tensors
        return torch.sigmoid(w["confidence_head.proj.weight"] @ inputs + w["confidence_head.proj.bias"]).item()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def turn(heads: Tensor, positions: Tensor, raw: dict[str, Any]) -> Tensor:
    """RoPE of heads [T, n, HEAD_DIM], over the part of them and in the order that a config says."""
    size = int(HEAD_DIM * raw.get("partial_rotary_factor", 1.0))
    angles = positions[:, None, None] * THETA ** (-torch.arange(0, size, 2) / size)
    part, rest = heads.split([size, HEAD_DIM - size], dim=-1)
    neighbours = raw.get("is_neox_style") is False
    low, high = (part[..., ::2], part[..., 1::2]) if neighbours else part.chunk(2, dim=-1)
    turned = (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin())
    part = torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)
    return torch.cat([part, rest], dim=-1)
