"""The attention half of a decoder layer as fused steps, for fused layers and for fused attention in unfused layers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.layer import reference
from wingbeat.kernels.layer.reference import Turn
from wingbeat.runtime.fused.products import Product
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows
from wingbeat.runtime.verifier.layers import attention as paged
from wingbeat.runtime.verifier.layers.linears import PackableLinear, product
from wingbeat.runtime.verifier.layers.query_scales import SCALES, scaled

HALVES, ONE_HALF, IN_PAIRS = Turn(), Turn(one_half=True), Turn(in_pairs=True)
_HALVES = {
    "apertus": "Apertus",
    "bamba": "Bamba",
    "exaone4": "Exaone4",
    "falcon_h1": "FalconH1",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "glm4_moe": "Glm4Moe",
    "granite": "Granite",
    "granitemoe": "GraniteMoe",
    "granitemoehybrid": "GraniteMoeHybrid",
    "jamba": "Jamba",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "llama": "Llama",
    "minimax_m2": "MiniMaxM2",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron_h": "NemotronH",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "phi": "Phi",
    "phi3": "Phi3",
    "phimoe": "Phimoe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "starcoder2": "Starcoder2",
}
KNOWN_ATTENTIONS = {
    f"transformers.models.{family}.modeling_{family}.{name}Attention": turn
    for turn, families in {
        HALVES: _HALVES,
        ONE_HALF: {"gpt_oss": "GptOss"},
        Turn(norm_last=True): {"hunyuan_v1_dense": "HunYuanDenseV1"},
        Turn(one_half=True, in_pairs=True, norm_last=True): {"llama4": "Llama4Text"},
        Turn(in_pairs=True, repeated=True): {"cohere": "Cohere", "cohere2": "Cohere2"},
        IN_PAIRS: {
            "ernie4_5": "Ernie4_5",
            "ernie4_5_moe": "Ernie4_5_Moe",
            "glm": "Glm",
            "glm4": "Glm4",
            "helium": "Helium",
        },
    }.items()
    for family, name in families.items()
}
"""Class names of attention modules that consist of projections of queries, keys and values, optional norms of queries
and keys, optional RoPE, attention, an optional gate, and an output projection; with what RoPE rotates together.
"""
_OUTPUTS = ("o_proj", "out_proj", "dense")
_GATED = ("Qwen3Next", "Qwen3_5")
"""Beginnings of the names of classes in which each query head is followed by a gate of the head's output."""
ONE_MORE = ("Gemma", "Qwen3Next", "Qwen3_5")
"""Beginnings of the names of norms that multiply by 1 + weight."""
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))

Add = Callable[[Tensor, Tensor, int, Rows], Tensor]
"""Function (product, input, index, rows) that adds a term to a matrix product in place. The index names the projection:
0 is q, k and v together; 1 is the output projection; 2 is gate and up together; 3 is down.
"""


class LayerOps(NamedTuple):
    """Functions for the steps of a decoder layer on one type of device.

    Their signatures are those of `wingbeat.kernels.layer.reference`.
    """

    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] = reference.add_rms_norm
    rotations: Callable[..., tuple[Tensor, Tensor]] = reference.rotations
    rotate_and_store: Callable[..., Tensor] = reference.rotate_and_store
    silu_mul: Callable[[Tensor], Tensor] = reference.silu_mul
    add_norm: Callable[..., tuple[Tensor, Tensor]] = reference.add_norm
    norm_parts: Callable[[Tensor, tuple[Tensor, Tensor], float], None] = reference.norm_parts


class AttentionHalf:
    """Computes a layer's attention from the output of the layer's input norm, without the output projection."""

    add: "Add | None" = None
    factor = 1.0
    """Factor of the layer's input, which the joined projections get without it."""

    def __init__(self, attn: nn.Module, ops: LayerOps, attention: LayerAttention, turn: Turn = HALVES) -> None:
        self.attn, self.ops, self.window, self.turn = attn, ops, attention.sliding_window or 0, turn
        self.projections = ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        self.output = next(name for name in _OUTPUTS if hasattr(attn, name))
        self._norm_names: tuple[str, ...] = next((names for names in _NORMS if hasattr(attn, names[0])), ())
        self._num_kv_heads = attention.num_kv_heads
        self._is_gated = type(attn).__name__.startswith(_GATED)
        self._rotates = _rotates(attn)

    @staticmethod
    def fits(attn: Any, attention: LayerAttention) -> bool:
        """Whether heads of these sizes, and what the module does to them, are supported."""
        clips = getattr(getattr(attn, "config", None), "clip_qkv", None) is not None
        is_even = attention.key_dim == attention.value_dim == attn.head_dim and attn.head_dim % 2 == 0
        return is_even and not clips and not getattr(attn, "use_qk_norm", False)

    @staticmethod
    def position_embeddings(angles: Tensor, turn: Turn, dtype: torch.dtype) -> Any:
        """Returns what the model's rotary embedding returns for angles [num_tokens, num_pairs]."""
        waves = [angles.cos(), angles.sin()]
        if not turn.one_half:
            waves = [wave.repeat_interleave(2, 1) if turn.repeated else wave.repeat(1, 2) for wave in waves]
        return tuple(wave.to(dtype)[None] for wave in waves)

    def join(self) -> None:
        """Joins the projections and reads the norms from their current weights."""
        attn: Any = self.attn
        self.qkv, self.norms = joined([getattr(attn, name) for name in self.projections]), (None, None, 0.0)
        if self._norm_names:
            query_norm, key_norm = (getattr(attn, name) for name in self._norm_names)
            self.norms = (norm_of(query_norm)[0], *norm_of(key_norm))

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        for held, name in zip(self.norms, self._norm_names, strict=False):
            held.copy_(norm_of(getattr(self.attn, name))[0])

    def scaled(self, query: Tensor, rows: Rows) -> Tensor:
        """Scales rotated queries [num_tokens, num_heads, size] by their rows' positions; does nothing in this class."""
        return query

    def __call__(self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, rows: Rows) -> Tensor:
        """Computes [num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim], and stores keys and values.

        Without position embeddings nothing is rotated.
        """
        attn: Any = self.attn
        qkv = self.qkv(normed)
        if self.add is not None:
            qkv = self.add(qkv, normed, 0, rows)
        norms = self.norms
        if norms[0] is not None and len(norms[0]) != attn.head_dim:  # one norm over all heads
            self.ops.norm_parts(qkv, norms[:2], norms[2])
            norms = (None, None, 0.0)
        heads, gate = qkv.unflatten(-1, (-1, attn.head_dim)), None
        if self._is_gated:
            first = heads.shape[1] - 2 * self._num_kv_heads
            queries, gate = heads[:, :first].unflatten(1, (-1, 2)).unbind(2)
            heads = torch.cat([queries, heads[:, first:]], dim=1)
        keys = self.factor * getattr(attn, "key_multiplier", 1.0)
        factors = None if self.factor == keys == 1.0 else (self.factor, keys)
        if not self._rotates:
            position_embeddings = None
        cos, sin = (part[0] for part in position_embeddings or [heads.new_empty(1, len(heads), 0)] * 2)
        cache, own = rows.caches[attn.layer_idx], rows.of_layer(attn.layer_idx)
        query = self.ops.rotate_and_store(heads, cos, sin, *cache, own.slot_mapping, *norms, self.turn, factors)
        mixed = paged.attend_segments(
            self.scaled(query, rows),
            *cache,
            own.segments,
            attn.scaling,
            sliding_window=self.window,
            softcap=getattr(attn, "attn_logit_softcapping", None),
            sinks=getattr(attn, "sinks", None),
            packed=own.packed,
        )
        return mixed.flatten(1) if gate is None else (mixed * gate.sigmoid()).flatten(1)


class ComplexHalf(AttentionHalf):
    """Llama 4's: positions are given as complex numbers, and norms without weights follow the rotation."""

    def join(self) -> None:
        """See `AttentionHalf.join`."""
        super().join()
        if (norm := getattr(self.attn, "qk_norm", None)) is not None:
            ones = self.attn.q_proj.weight.data.new_ones(self.attn.head_dim)
            self.norms = ones, ones, norm.eps

    @staticmethod
    def position_embeddings(angles: Tensor, turn: Turn, dtype: torch.dtype) -> Any:
        """See `AttentionHalf.position_embeddings`."""
        return torch.polar(torch.ones_like(angles), angles)[None]

    def scaled(self, query: Tensor, rows: Rows) -> Tensor:
        """See `AttentionHalf.scaled`."""
        scales = self.attn._buffers.get(SCALES)
        return query if scales is None else scaled(query, scales, rows.positions[0])

    def __call__(self, normed: Tensor, position_embeddings: Any, rows: Rows) -> Tensor:
        """See `AttentionHalf.__call__`."""
        if self._rotates:
            waves = torch.view_as_real(position_embeddings).unbind(-1)
            position_embeddings = tuple(wave.to(normed.dtype).contiguous() for wave in waves)
        return super().__call__(normed, position_embeddings, rows)


class ScaledHalf(AttentionHalf):
    """Ministral 3's: queries are scaled by their positions.

    The attention is not in `KNOWN_ATTENTIONS`, because a trial has too few positions to show the scales, and other
    steps for layers of `KNOWN_LAYERS` lack them.
    """

    def join(self) -> None:
        """See `AttentionHalf.join`."""
        super().join()
        config, weight = self.attn.config, self.attn.o_proj.weight
        positions = torch.arange(config.max_position_embeddings, device=weight.device)
        steps = (positions / config.rope_parameters["original_max_position_embeddings"]).floor()
        self._scales = (1 + config.rope_parameters["llama_4_scaling_beta"] * (1 + steps).log()).to(weight.dtype)

    def scaled(self, query: Tensor, rows: Rows) -> Tensor:
        """See `AttentionHalf.scaled`."""
        return scaled(query, self._scales, rows.positions[0])


def _rotates(attn: Any) -> bool:
    """Whether an attention module rotates queries and keys; some do not in layers without a window."""
    if type(attn).__name__.startswith("Exaone"):
        return attn.sliding_window is None or attn.is_sliding
    if type(attn).__name__.startswith("Cohere2"):
        return attn.sliding_window is not None
    return getattr(attn, "use_rope", True)


class Joined(nn.Module):
    """A module with tensors that are derived from its weights and rebuilt when the weights are moved or copied."""

    @abstractmethod
    def join(self) -> None:
        """Rebuilds the derived tensors from the current weights."""
        ...

    def take_written(self) -> None:
        """Copies overwritten weights into the derived tensors.

        The copies go into the tensors' existing memory, because captured graphs read that memory.
        """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Joined":
        super()._apply(fn, recurse)
        self.join()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.join()  # after a copy, the model's tensors are no longer views of the joined weight


class FusedAttention(Joined):
    """First base class of a swapped attention module: replaces `forward` of the module's original class.

    Weights, parameter names and submodules stay.
    """

    _half: AttentionHalf

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Runs the fused steps.

        Calls without the runtime's `Rows`, and batches that capture this layer's KV, run transformers' code.
        """
        rows: Rows | None = kwargs.get(ROWS_KEYWORD)
        if rows is None or self.layer_idx in (rows.captured or ()) or torch.compiler.is_compiling():
            return super().forward(hidden_states, position_embeddings=position_embeddings, **kwargs)
        attended = self._half(hidden_states[0], position_embeddings, rows)
        out, add = product(getattr(self, self._half.output), attended), self._half.add
        return (out if add is None else add(out, attended, 1, rows))[None], None

    def add_by(self, add: Add) -> None:
        """Sets the function with which a runtime part adds terms (such as LoRA) to the matrix products."""
        self._half.add = add

    @property
    def joined_paths(self) -> tuple[tuple[str, ...], ...]:
        """Names within the module of the linear layers that are computed as one matrix product."""
        return self._half.projections, (self._half.output,)

    def join(self) -> None:
        """See `Joined.join`."""
        self._half.join()

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        self._half.take_written()


def joined(linears: list[nn.Linear], gated: bool = False) -> Callable[[Tensor], Tensor]:
    """Joins projections of the same input into one matrix product: [num_rows, in] -> [num_rows, out].

    The joined weight has the first weight's layout. The linear layers keep their shapes and values, but their weights
    become views of the joined weight.

    Args:
        gated: whether the linear layers are the gate and up projections of an MLP, so that the result is silu(gate) *
            up.
    """
    packed = first_result("join_packed", linears)
    if packed is not None:
        return packed
    return Product(*join_weights(linears), gated=gated)


def join_weights(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenates weights and biases; the linear layers' own tensors become views of the result."""
    weights = [linear.weight.data for linear in linears]
    by_input = not weights[0].is_contiguous()
    weight = torch.cat([part.t() for part in weights], dim=1).t() if by_input else torch.cat(weights)
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    begin = 0
    for linear in linears:
        rows = slice(begin, begin + len(linear.weight))
        linear.weight.data = weight[rows]
        if bias is not None:
            linear.bias.data = bias[rows]
        if isinstance(linear, PackableLinear):
            linear.repack()
        begin = rows.stop
    return weight, bias


def norm_of(module: nn.Module) -> tuple[Tensor, float]:
    """Returns a norm's weight and epsilon; some norms multiply by 1 + weight, in float32."""
    if hasattr(module, "variance_epsilon"):
        return module.weight, module.variance_epsilon
    if type(module).__name__.startswith(ONE_MORE):
        return module.weight.data.float() + 1.0, module.eps
    return module.weight, module.eps


ATTENTIONS = {
    "transformers.models.llama4.modeling_llama4.Llama4TextAttention": ComplexHalf,
    "transformers.models.ministral3.modeling_ministral3.Ministral3Attention": ScaledHalf,
}
"""Classes that compute attention modules otherwise than `AttentionHalf`, by the modules' class names."""
