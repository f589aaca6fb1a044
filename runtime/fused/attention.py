"""The attention half of a decoder layer as fused steps, for fused layers and for fused attention in unfused layers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.layer import reference
from wingbeat.runtime.fused.products import Product
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows
from wingbeat.runtime.verifier.layers import attention as paged
from wingbeat.runtime.verifier.layers.linears import PackableLinear, product

KNOWN_ATTENTIONS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}Attention"
    for family, name in {
        "gemma2": "Gemma2",
        "gemma3": "Gemma3",
        "granite": "Granite",
        "granitemoe": "GraniteMoe",
        "mixtral": "Mixtral",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
    }.items()
)
"""Class names of attention modules that consist of q, k and v projections, optional query and key norms, rotate-half
RoPE, attention, and an output projection.
"""

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


class AttentionHalf:
    """Computes a layer's attention from the output of the layer's input norm, without the output projection."""

    add: "Add | None" = None

    def __init__(self, attn: nn.Module, ops: LayerOps, attention: LayerAttention) -> None:
        self.attn, self.ops, self.window = attn, ops, attention.sliding_window or 0

    def join(self) -> None:
        """Joins the projections and reads the norms from their current weights."""
        attn: Any = self.attn
        self.qkv, self.norms = joined([attn.q_proj, attn.k_proj, attn.v_proj]), ()
        if hasattr(attn, "q_norm"):
            self.norms = (norm_of(attn.q_norm)[0], *norm_of(attn.k_norm))

    def take_written(self) -> None:
        """See `Joined.take_written`."""
        if self.norms:
            for held, norm in zip(self.norms[:2], (self.attn.q_norm, self.attn.k_norm), strict=True):
                held.copy_(norm_of(norm)[0])

    def __call__(self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        """Computes [num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim], and stores keys and values."""
        attn: Any = self.attn
        qkv = self.qkv(normed)
        if self.add is not None:
            qkv = self.add(qkv, normed, 0, rows)
        cos, sin = (part[0] for part in position_embeddings)
        cache, own = rows.caches[attn.layer_idx], rows.of_layer(attn.layer_idx)
        query = self.ops.rotate_and_store(
            qkv.unflatten(-1, (-1, attn.head_dim)), cos, sin, *cache, own.slot_mapping, *self.norms
        )
        mixed = paged.attend_segments(
            query,
            *cache,
            own.segments,
            attn.scaling,
            sliding_window=self.window,
            softcap=getattr(attn, "attn_logit_softcapping", None),
            packed=own.packed,
        )
        return mixed.flatten(1)


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

    num_joined = 2
    """Number of matrix products with adapters of their own: q, k and v together; output."""
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
        out, add = product(self.o_proj, attended), self._half.add
        return (out if add is None else add(out, attended, 1, rows))[None], None

    def add_by(self, add: Add) -> None:
        """Sets the function with which a runtime part adds terms (such as LoRA) to the matrix products."""
        self._half.add = add

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
    """Returns a norm's weight and epsilon; Gemma's norms multiply by 1 + weight, in float32."""
    if hasattr(module, "variance_epsilon"):
        return module.weight, module.variance_epsilon
    return module.weight.data.float() + 1.0, module.eps
