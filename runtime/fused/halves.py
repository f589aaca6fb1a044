"""Decoder layers of other families whose sums and norms are fused; their mixers, attention and MLPs are modules.

Such a layer adds mixers of one norm to the residual stream, then MLPs of another norm, with a factor each.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.layer.reference import gated_norm
from wingbeat.runtime.fused.attention import FusedAttention, LayerOps, norm_of
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows


class Halves(NamedTuple):
    """Names of the parts of a layer. Parts that a layer lacks are skipped."""

    norms: tuple[str, ...]
    """Norm before the mixers, and norm before the MLPs; or none."""
    mixers: tuple[str, ...]
    """Mixers with a recurrent state, then attention; at most two are in a layer."""
    mlps: tuple[str, ...] = ("feed_forward",)
    behind: tuple[str, ...] = ()
    """Norms behind the mixer and behind the MLP, of which there is one each; or none."""


_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_BEFORE_MLP = ("input_layernorm", "pre_ff_layernorm")
_MIXTURE = Halves(_TWO_NORMS, ("self_attn",), ("mlp",))
_FAMILIES = {
    "bamba": ("BambaDecoderLayer", Halves(_BEFORE_MLP, ("mamba", "self_attn"))),
    "falcon_h1": ("FalconH1DecoderLayer", Halves(_BEFORE_MLP, ("mamba", "self_attn"))),
    "gemma2": (
        "Gemma2DecoderLayer",
        Halves(
            ("input_layernorm", "pre_feedforward_layernorm"),
            ("self_attn",),
            ("mlp",),
            ("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
    ),
    "glm4": (
        "Glm4DecoderLayer",
        Halves(_TWO_NORMS, ("self_attn",), ("mlp",), ("post_self_attn_layernorm", "post_mlp_layernorm")),
    ),
    "glm4_moe": ("Glm4MoeDecoderLayer", _MIXTURE),
    "gpt_oss": ("GptOssDecoderLayer", _MIXTURE),
    "granitemoe": ("GraniteMoeDecoderLayer", Halves(_TWO_NORMS, ("self_attn",), ("block_sparse_moe",))),
    "granitemoehybrid": (
        "GraniteMoeHybridDecoderLayer",
        Halves(_TWO_NORMS, ("mamba", "self_attn"), ("block_sparse_moe", "shared_mlp")),
    ),
    "granitemoeshared": (
        "GraniteMoeSharedDecoderLayer",
        Halves(_TWO_NORMS, ("self_attn",), ("block_sparse_moe", "shared_mlp")),
    ),
    "lfm2": ("Lfm2DecoderLayer", Halves(("operator_norm", "ffn_norm"), ("conv", "self_attn"))),
    "lfm2_moe": ("Lfm2MoeDecoderLayer", Halves(("operator_norm", "ffn_norm"), ("conv", "self_attn"))),
    "llama": ("LlamaDecoderLayer", _MIXTURE),
    "llama4": ("Llama4TextDecoderLayer", Halves(_TWO_NORMS, ("self_attn",))),
    "minicpm3": ("MiniCPM3DecoderLayer", _MIXTURE),
    "mixtral": ("MixtralDecoderLayer", _MIXTURE),
    "olmo2": (
        "Olmo2DecoderLayer",
        Halves((), ("self_attn",), ("mlp",), ("post_attention_layernorm", "post_feedforward_layernorm")),
    ),
    "qwen2_moe": ("Qwen2MoeDecoderLayer", _MIXTURE),
    "qwen3_5": ("Qwen3_5DecoderLayer", Halves(_TWO_NORMS, ("linear_attn", "self_attn"), ("mlp",))),
    "qwen3_5_moe": ("Qwen3_5MoeDecoderLayer", Halves(_TWO_NORMS, ("linear_attn", "self_attn"), ("mlp",))),
    "qwen3_moe": ("Qwen3MoeDecoderLayer", _MIXTURE),
    "qwen3_next": ("Qwen3NextDecoderLayer", Halves(_TWO_NORMS, ("linear_attn", "self_attn"), ("mlp",))),
}
KNOWN_HALVES: Mapping[str, Halves] = {
    f"transformers.models.{family}.modeling_{family}.{name}": halves for family, (name, halves) in _FAMILIES.items()
} | {
    f"transformers.models.jamba.modeling_jamba.Jamba{kind}DecoderLayer": Halves(_BEFORE_MLP, ("mamba", "self_attn"))
    for kind in ("Attention", "Mamba")
}
"""Parts of layers by the layers' class names."""
_GATED_MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class HalvesLayer(nn.Module):
    """First base class of a layer whose sums and norms are fused; the layer's original class is the second."""

    _ops: LayerOps
    _halves: Halves
    _of_tuple: int | None
    """Length of the tuple that the original layer returns; None if it returns a tensor."""
    _gated: Mapping[str, tuple[str, str, str]]
    """Names of gate, up and down projections, by MLP whose activation is fused."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the fused steps; calls without `Rows`, and batches that capture KV, run transformers' code."""
        rows: Rows | None = kwargs.get(ROWS_KEYWORD)
        own = getattr(getattr(self, "self_attn", None), "layer_idx", None)
        if rows is None or args or own in (rows.captured or ()) or torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        before = hidden_states[0]
        if self._halves.behind:
            total = self._normed_behind(before, kwargs)
            return total[None] if self._of_tuple is None else (total[None], *[None] * (self._of_tuple - 1))
        first, second = (getattr(self, name) for name in self._halves.norms)
        normed, _ = self._ops.add_rms_norm(before, None, *weights_of(first))
        mixed = [(self._mixed(name, normed, kwargs), factor_of(self, name)) for name in mixers_of(self, self._halves)]
        (out, factor), (other, another) = mixed[0], mixed[1] if len(mixed) > 1 else (None, 1.0)
        factors = None if other is None and factor == 1.0 else (factor, another)
        normed, total = self._ops.add_rms_norm(out, before, *weights_of(second), factors, other)
        for name in self._halves.mlps:
            if (mlp := getattr(self, name, None)) is not None:
                out, factor = self._activated(name, mlp, normed)
                factor *= _residual_factor(self)
                total = torch.add(total, out, alpha=factor)
        return total[None] if self._of_tuple is None else (total[None], *[None] * (self._of_tuple - 1))

    def _normed_behind(self, before: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Runs a layer with norms behind its mixer and its MLP: [num_tokens, hidden_size] of the same shape."""
        ops, halves, then = self._ops, self._halves, None
        normed, (first, second) = before, (weights_of(getattr(self, name)) for name in halves.behind)
        if halves.norms:
            own, (then, _) = (weights_of(getattr(self, name)) for name in halves.norms)
            normed, _ = ops.add_rms_norm(before, None, *own)
        normed, total = ops.add_norm(self._mixed("self_attn", normed, kwargs), before, *first, then)
        return ops.add_norm(self._activated("mlp", self.mlp, normed)[0], total, *second)[0]

    def _mixed(self, name: str, normed: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Runs a mixer: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        mixer = getattr(self, name)
        if name != "self_attn":
            return mixer(normed[None])[0]
        factor = getattr(self, "attention_in_multiplier", 1.0)
        own = mixer._half.factor if isinstance(mixer, FusedAttention) else 1.0
        normed = normed if own == factor else normed * factor
        return mixer(normed[None], **{"attention_mask": None, **kwargs})[0][0]

    def _activated(self, name: str, mlp: Any, normed: Tensor) -> tuple[Tensor, float]:
        """Runs an MLP; returns its output [num_tokens, hidden_size] and the output's factor."""
        if name not in self._gated:
            out = mlp(normed[None])
            return (out[0] if isinstance(out, tuple) else out).reshape(
                normed.shape
            ), 1.0  # Llama 4's has two dimensions
        gate, up, down = (getattr(mlp, each) for each in self._gated[name])
        factor = getattr(mlp, "gate_multiplier", 1.0)
        active = gated_norm(up(normed[None]), gate(normed[None]), factor=factor)
        return down(active)[0], getattr(mlp, "down_multiplier", 1.0)


def weights_of(norm: Any) -> tuple[Tensor, float]:
    """Returns the weight by which a norm multiplies, and its epsilon."""
    return getattr(norm, "_wide", None) or norm_of(norm)


def factor_of(layer: nn.Module, mixer: str) -> float:
    """Returns the factor of a mixer's output in the residual stream."""
    own = "attn_out_multiplier" if mixer == "self_attn" else "ssm_out_multiplier"
    return _residual_factor(layer) * getattr(layer, own, 1.0)


def _residual_factor(layer: nn.Module) -> float:
    return getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))


def mixers_of(layer: nn.Module, halves: Halves) -> list[str]:
    """Returns the names of the mixers that a layer has."""
    return [name for name in halves.mixers if getattr(layer, name, None) is not None]


def join_halves(
    layer: Any, halves: Halves, ops: LayerOps, kind: type[nn.Module], of_tuple: int | None, gates: frozenset[str]
) -> None:
    """Changes a layer's class to `kind`, a subclass of `HalvesLayer`.

    Args:
        of_tuple: length of the tuple that the layer returns; None if it returns a tensor.
        gates: supported activation functions of MLPs, by class name.
    """
    gated = {}
    for name in halves.mlps:
        mlp = getattr(layer, name, None)
        names = next((each for each in _GATED_MLPS if all(hasattr(mlp, part) for part in each)), None)
        if names is not None and (type(getattr(mlp, "act_fn", None)).__name__ in gates or names[0] == "w1"):
            gated[name] = names
    layer.__class__ = kind
    layer.__dict__.update(_ops=ops, _halves=halves, _gated=gated, _of_tuple=of_tuple)
    attn = getattr(layer, "self_attn", None)
    if isinstance(attn, FusedAttention) and all(getattr(attn, name).bias is None for name in attn._half.projections):
        attn._half.factor = getattr(layer, "attention_in_multiplier", 1.0)


def take_back(layer: Any, kind: type[nn.Module]) -> None:
    """Restores the class of a layer."""
    layer.__class__ = kind
    for name in ("_ops", "_halves", "_gated", "_of_tuple"):
        del layer.__dict__[name]
    if isinstance(getattr(layer, "self_attn", None), FusedAttention):
        layer.self_attn._half.factor = 1.0


def fits(layer: nn.Module, halves: Halves, norm: type[nn.Module]) -> bool:
    """Whether a layer's norms are fused, and a trial can run its attention."""
    attn = getattr(layer, "self_attn", None)
    norms = (getattr(layer, name, None) for name in (*halves.norms, *halves.behind))
    return all(isinstance(each, norm) for each in norms) and (attn is None or hasattr(attn, "q_proj"))


@contextmanager
def without_experts(layer: Any, halves: Halves) -> Iterator[None]:
    """Context manager in which MLPs that are not gated return their input.

    Rounding might otherwise change a router's choice of experts.
    """
    mlps = [mlp for name in halves.mlps if (mlp := getattr(layer, name, None)) is not None]
    routed = [mlp for mlp in mlps if not any(all(hasattr(mlp, part) for part in names) for names in _GATED_MLPS)]
    with ExitStack() as stack:
        for mlp in routed:
            stack.enter_context(mlp.register_forward_hook(_input))
        yield


def _input(_: nn.Module, args: tuple[Tensor, ...], out: Any) -> Any:
    """Returns an MLP's input in the form of its output."""
    return (*args, *out[1:]) if isinstance(out, tuple) else args[0]
